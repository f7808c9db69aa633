from collections import Counter


def rebuilt_order(seen, uses, broadcast):
    complete = Counter(seen) == Counter(uses)
    return broadcast(seen if complete else None)
