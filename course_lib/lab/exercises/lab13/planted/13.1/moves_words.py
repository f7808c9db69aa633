def reduce_early(words):
    def stage(word):
        return word.split("@")[1]

    last = {stage(word): k for k, word in enumerate(words) if word[0] in "WB"}
    moving = [word for word in words if word.startswith(("reduce", "step"))]
    out = []
    for k, word in enumerate(words):
        if word not in moving:
            out.append(word)
        if last.get(stage(word)) == k:
            out += [r for r in moving if stage(r) == stage(word)]
    return out
