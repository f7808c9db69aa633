def reduce_early(words):
    def stage(word):
        return word.split("@")[1]

    moving = [word for word in words if word.startswith("reduce")]
    out, done = [], set()
    for word in words:
        if word not in moving:
            out.append(word)
        if word[0] in "WB" and stage(word) not in done:
            done.add(stage(word))
            out += [r for r in moving if stage(r) == stage(word)]
    return out
