def exposed_ms(compute, comm):
    total = 0
    for start, stop in comm:
        hidden = sum(max(0, min(stop, end) - max(start, begin)) for begin, end in compute)
        total += stop - start - hidden
    return total
