def best_size(G_bytes, a_s, beta_s_per_byte, Tb_s):
    sizes = [G_bytes / count for count in range(1, 1000)]
    return min(sizes, key=lambda S: max(Tb_s * S / G_bytes + beta_s_per_byte * G_bytes, Tb_s + beta_s_per_byte * S))
