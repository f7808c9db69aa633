from math import inf, sqrt


def best_size(G_bytes, a_s, beta_s_per_byte, Tb_s):
    spare = Tb_s - beta_s_per_byte * G_bytes
    smallest = 2**17
    return min(smallest * sqrt(Tb_s / a_s), a_s * G_bytes / spare if spare > 0 else inf, G_bytes)
