def rebuilt_order(seen, uses, broadcast):
    order = list(dict.fromkeys(reversed(seen)))[::-1]
    return broadcast(order if len(order) == len(uses) else None)
