def best_size(G_bytes, a_s, beta_s_per_byte, Tb_s):
    return min(25 * 2**20, G_bytes)
