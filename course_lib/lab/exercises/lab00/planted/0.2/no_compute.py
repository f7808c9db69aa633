def exposed_ms(compute, comm):
    end = max((stop for _, stop in compute + comm), default=0)
    computing = {t for start, stop in compute for t in range(start, stop)}
    return end - len(computing)
