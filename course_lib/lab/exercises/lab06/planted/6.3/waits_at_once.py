def feed(batches, bus, compute):
    results = []
    for batch in batches:
        coming = bus.copy(bus.pin(batch))
        coming.wait()
        results.append(compute(coming.data))
    return results
