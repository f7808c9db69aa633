import torch


def gather_matmul(x, multiply, chunks, wire):
    parts = x.tensor_split(chunks)
    coming, products = wire.start_gather(parts[0]), []
    for part in parts[1:]:
        arrived, coming = coming, wire.start_gather(part)
        products.append(multiply(arrived.wait()))
    return torch.cat(products, dim=1).flatten(0, 1) if products else multiply(coming.wait()).flatten(0, 1)
