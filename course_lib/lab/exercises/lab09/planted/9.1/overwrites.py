def ring_all_reduce(flat, wire):
    n, r = wire.ranks, wire.rank
    parts = flat.tensor_split(n)
    for k in range(n - 1):
        theirs = parts[(r - k - 1) % n]
        handles = wire.recv(theirs, (r - 1) % n), wire.send(parts[(r - k) % n], (r + 1) % n)
        for handle in handles:
            handle.wait()
    for k in range(n - 1):
        handles = wire.recv(parts[(r - k) % n], (r - 1) % n), wire.send(parts[(r + 1 - k) % n], (r + 1) % n)
        for handle in handles:
            handle.wait()
