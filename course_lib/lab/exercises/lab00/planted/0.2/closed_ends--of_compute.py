def exposed_ms(compute, comm):
    computing = {t for start, stop in compute for t in range(start, stop + 1)}
    sending = {t for start, stop in comm for t in range(start, stop)}
    return len(sending - computing)
