import torch


def ring_all_reduce(flat, wire):
    n, r = wire.ranks, wire.rank
    left, right = (r - 1) % n, (r + 1) % n
    parts = flat.tensor_split(n)
    for k in range(n - 1):
        mine, theirs = parts[(r - k) % n], parts[(r - k - 1) % n]
        buffer = torch.empty_like(theirs)
        coming = wire.recv(buffer, left)
        going = wire.send(mine, right)
        coming.wait()
        going.wait()
        theirs += buffer
    for k in range(n - 1):
        coming = wire.recv(parts[(r - k - 1) % n], left)
        going = wire.send(parts[(r + 1 - k) % n], right)
        coming.wait()
        going.wait()
