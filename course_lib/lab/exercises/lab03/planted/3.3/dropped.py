def train_epoch(batches, N, micro_step, update):
    for start in range(0, len(batches) - N + 1, N):
        for batch in batches[start:start + N]:
            micro_step(batch, 1 / N)
        update()
