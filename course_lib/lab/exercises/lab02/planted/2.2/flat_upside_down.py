def predict_baseline(sizes_bytes, N, Tf_s, Tb_s, a_s, beta_s_per_byte, flat):
    collectives = N * len(sizes_bytes) if flat else N
    bytes_sent = N * sum(sizes_bytes)
    return collectives, bytes_sent, N * (Tf_s + Tb_s) + collectives * a_s + bytes_sent * beta_s_per_byte
