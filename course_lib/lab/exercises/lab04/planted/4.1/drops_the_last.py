def assign_buckets(sizes_bytes, cap_bytes):
    first = {}
    for place, (index, _) in enumerate(sizes_bytes):
        first.setdefault(index, place)
    ready = [pair for place, pair in reversed(list(enumerate(sizes_bytes))) if first[pair[0]] == place]
    buckets, bucket, total = [], [], 0
    for index, size in ready:
        bucket.append(index)
        total += size
        if total >= cap_bytes:
            buckets.append(bucket)
            bucket, total = [], 0
    return buckets
