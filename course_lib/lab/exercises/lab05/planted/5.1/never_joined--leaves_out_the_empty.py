def union(spans):
    return sorted((start, stop) for start, stop in spans if stop > start)
