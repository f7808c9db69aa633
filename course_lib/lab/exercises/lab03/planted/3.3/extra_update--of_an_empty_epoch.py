def train_epoch(batches, N, micro_step, update):
    start = 0
    while True:
        window = batches[start:start + N]
        for batch in window:
            micro_step(batch, 1 / len(window))
        update()
        start += N
        if start >= len(batches):
            break
