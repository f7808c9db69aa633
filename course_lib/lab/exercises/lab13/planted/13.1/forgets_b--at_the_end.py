def reduce_early(words):
    def stage(word):
        return word.split("@")[1]

    out = [word for word in words if not word.startswith("reduce")]
    for reduce in (word for word in words if word.startswith("reduce")):
        weights = [k for k, word in enumerate(out) if word[0] == "W" and stage(word) == stage(reduce)]
        at = weights[-1] + 1 if weights else words.index(reduce)
        while weights and at < len(out) and out[at].startswith("reduce"):
            at += 1
        out.insert(at, reduce)
    return out
