def train_epoch(batches, N, micro_step, update):
    windows = max(1, len(batches) // N) if batches else 0
    for k in range(windows):
        window = batches[k * N:] if k == windows - 1 else batches[k * N:(k + 1) * N]
        for batch in window:
            micro_step(batch, 1 / len(window))
        update()
