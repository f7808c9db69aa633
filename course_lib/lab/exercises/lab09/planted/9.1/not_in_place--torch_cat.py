import torch


def ring_all_reduce(flat, wire):
    n, r = wire.ranks, wire.rank
    parts = [part.clone() for part in flat.tensor_split(n)]
    for hop in range(2 * (n - 1)):
        going = wire.send(parts[(r - hop) % n], (r + 1) % n)
        buffer = torch.empty_like(parts[(r - hop - 1) % n])
        wire.recv(buffer, (r - 1) % n).wait()
        going.wait()
        if hop < n - 1:
            parts[(r - hop - 1) % n] += buffer
        else:
            parts[(r - hop - 1) % n] = buffer
    return torch.cat(parts)
