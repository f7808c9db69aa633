def predict_baseline(sizes_bytes, N, Tf_s, Tb_s, a_s, beta_s_per_byte, flat):
    collectives = N if flat else N * len(sizes_bytes)
    sent = N * sum(sizes_bytes)
    return collectives, sent, max(N * (Tf_s + Tb_s), collectives * a_s + sent * beta_s_per_byte)
