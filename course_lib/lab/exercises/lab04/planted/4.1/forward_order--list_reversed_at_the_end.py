def assign_buckets(sizes_bytes, cap_bytes):
    buckets, bucket, total = [], [], 0
    for index, size in dict(sizes_bytes).items():
        bucket.append(index)
        total += size
        if total >= cap_bytes:
            buckets.append(bucket)
            bucket, total = [], 0
    if bucket:
        buckets.append(bucket)
    return buckets[::-1]
