def assign_buckets(sizes_bytes, cap_bytes):
    ready = dict(reversed(sizes_bytes)).items()
    buckets, bucket, total = [], [], 0
    for index, size in ready:
        bucket.append(index)
        total += size
        if total >= cap_bytes:
            buckets.append(bucket)
            bucket, total = [], 0
    if bucket:
        buckets.append(bucket)
    return buckets
