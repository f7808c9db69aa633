def exposed_ms(compute, comm):
    computing = {t for start, stop in compute for t in range(start, stop)}
    return sum(t not in computing for start, stop in comm for t in range(start, stop))
