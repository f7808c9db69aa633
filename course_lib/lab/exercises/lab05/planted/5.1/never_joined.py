def union(spans):
    return sorted(spans, key=lambda span: span[0])
