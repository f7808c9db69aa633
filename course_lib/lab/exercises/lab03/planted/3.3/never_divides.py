def train_epoch(batches, N, micro_step, update):
    for i, batch in enumerate(batches):
        micro_step(batch, 1.0)
        if (i + 1) % N == 0 or i + 1 == len(batches):
            update()
