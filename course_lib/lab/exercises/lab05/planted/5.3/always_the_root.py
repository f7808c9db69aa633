from math import sqrt


def best_size(G_bytes, a_s, beta_s_per_byte, Tb_s):
    return min(G_bytes * sqrt(a_s / Tb_s), G_bytes)
