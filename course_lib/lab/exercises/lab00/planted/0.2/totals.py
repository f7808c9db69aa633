def exposed_ms(compute, comm):
    return sum(stop - start for start, stop in comm) - sum(stop - start for start, stop in compute)
