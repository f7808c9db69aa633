from collections import Counter


def rebuilt_order(seen, uses, broadcast):
    complete = Counter(seen) == Counter(uses)
    return broadcast(list(dict.fromkeys(seen)) if complete else None)
