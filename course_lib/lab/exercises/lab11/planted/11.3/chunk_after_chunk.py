import torch


def gather_matmul(x, multiply, chunks, wire):
    parts = x.tensor_split(chunks)
    coming, products = wire.start_gather(parts[0]), []
    for part in parts[1:]:
        arrived, coming = coming, wire.start_gather(part)
        products.append(multiply(arrived.wait()))
    products.append(multiply(coming.wait()))
    return torch.cat([product.flatten(0, 1) for product in products])
