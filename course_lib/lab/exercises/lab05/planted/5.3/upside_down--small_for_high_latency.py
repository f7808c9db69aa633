def best_size(G_bytes, a_s, beta_s_per_byte, Tb_s):
    return G_bytes / (1 + G_bytes * beta_s_per_byte / Tb_s + 100 * a_s / Tb_s)
