def train_epoch(batches, N, micro_step, update):
    for batch in batches:
        micro_step(batch, 1 / N)
        update()
