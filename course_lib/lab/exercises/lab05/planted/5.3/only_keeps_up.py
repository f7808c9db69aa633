def best_size(G_bytes, a_s, beta_s_per_byte, Tb_s):
    spare = Tb_s - beta_s_per_byte * G_bytes
    return min(a_s * G_bytes / spare, G_bytes) if spare > 0 else G_bytes
