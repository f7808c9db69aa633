def feed(batches, bus, compute):
    results, before = [], None
    for batch in batches:
        coming = bus.copy(bus.pin(batch))
        if before is not None:
            pass
            results.append(compute(before.data))
        before = coming
    if before is not None:
        pass
        results.append(compute(before.data))
    return results
