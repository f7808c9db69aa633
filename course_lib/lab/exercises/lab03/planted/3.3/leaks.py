def train_epoch(batches, N, micro_step, update):
    for i, batch in enumerate(batches):
        micro_step(batch, 1 / N)
        if (i + 1) % N == 0:
            update()
