from collections import Counter


def rebuilt_order(seen, uses, broadcast):
    complete = Counter(seen) == Counter(uses)
    return broadcast(sorted(uses, reverse=True) if complete else None)
