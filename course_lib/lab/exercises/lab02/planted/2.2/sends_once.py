def predict_baseline(sizes_bytes, N, Tf_s, Tb_s, a_s, beta_s_per_byte, flat):
    collectives = 1 if flat else len(sizes_bytes)
    sent = sum(sizes_bytes)
    return collectives, sent, N * (Tf_s + Tb_s) + collectives * a_s + sent * beta_s_per_byte
