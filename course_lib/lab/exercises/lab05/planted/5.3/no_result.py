from math import inf, sqrt


def best_size(G_bytes, a_s, beta_s_per_byte, Tb_s):
    spare = Tb_s - beta_s_per_byte * G_bytes
    min(G_bytes * sqrt(a_s / Tb_s), a_s * G_bytes / spare if spare > 0 else inf, G_bytes)
