def gather_matmul(x, multiply, chunks, wire):
    return multiply(wire.start_gather(x).wait()).flatten(0, 1)
