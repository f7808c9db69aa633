def exposed_ms(compute, comm):
    total = sum(stop - start for start, stop in comm) - sum(stop - start for start, stop in compute)
    return max(0, total)
