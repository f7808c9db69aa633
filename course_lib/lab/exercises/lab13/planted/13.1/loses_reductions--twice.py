def reduce_early(words):
    def stage(word):
        return word.split("@")[1]

    last = {stage(word): k for k, word in enumerate(words) if word[0] in "WB"}
    out = []
    for k, word in enumerate(words):
        out.append(word)
        if last.get(stage(word)) == k:
            out += [r for r in words if r.startswith("reduce") and stage(r) == stage(word)]
    return out
