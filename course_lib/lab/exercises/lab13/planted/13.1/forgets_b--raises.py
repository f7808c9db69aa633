def reduce_early(words):
    """There is no W to look for where the backward is not split."""
    def stage(word):
        return word.split("@")[1]

    out = [word for word in words if not word.startswith("reduce")]
    for reduce in reversed([word for word in words if word.startswith("reduce")]):
        last = max(k for k, word in enumerate(out) if word[0] == "W" and stage(word) == stage(reduce))
        out.insert(last + 1, reduce)
    return out
