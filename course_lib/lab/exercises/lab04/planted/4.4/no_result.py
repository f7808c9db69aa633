from collections import Counter


def rebuilt_order(seen, uses, broadcast):
    calls, order = Counter(), []
    for index in seen:
        calls[index] += 1
        if calls[index] == uses[index]:
            order.append(index)
    broadcast(order if len(order) == len(uses) else None)
