from collections import Counter


def rebuilt_order(seen, uses, broadcast):
    calls, order = Counter(), []
    for index in seen:
        calls[index] += 1
        if calls[index] == uses[index]:
            order.append(index)
    agreed = broadcast(order)
    return agreed if len(order) == len(uses) else None
