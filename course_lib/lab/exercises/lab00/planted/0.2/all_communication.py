def exposed_ms(compute, comm):
    return len({t for start, stop in comm for t in range(start, stop)})
