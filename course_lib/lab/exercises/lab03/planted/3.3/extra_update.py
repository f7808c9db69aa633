def train_epoch(batches, N, micro_step, update):
    whole = len(batches) // N * N
    for i, batch in enumerate(batches):
        micro_step(batch, 1 / N if i < whole else 1 / (len(batches) - whole))
        if (i + 1) % N == 0:
            update()
    update()
