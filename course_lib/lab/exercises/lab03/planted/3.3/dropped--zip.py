def train_epoch(batches, N, micro_step, update):
    for window in zip(*[iter(batches)] * N):
        for batch in window:
            micro_step(batch, 1 / N)
        update()
