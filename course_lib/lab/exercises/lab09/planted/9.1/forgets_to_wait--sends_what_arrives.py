import torch


def ring_all_reduce(flat, wire):
    n, r = wire.ranks, wire.rank
    parts = flat.tensor_split(n)
    for k in range(n - 1):
        theirs = parts[(r - k - 1) % n]
        buffer = torch.empty_like(theirs)
        handles = wire.recv(buffer, (r - 1) % n), wire.send(parts[(r - k) % n], (r + 1) % n)
        for handle in handles:
            handle.wait()
        theirs += buffer
    for k in range(n - 1):
        handles = wire.recv(parts[(r - k) % n], (r - 1) % n), wire.send(parts[(r - k) % n], (r + 1) % n)
        for handle in handles:
            handle.wait()
