def reduce_early(words):
    def stage(word):
        return word.split("@")[1]

    micro = max(int(word.split("@")[0][1:]) for word in words if word[0] == "F")
    moving = [word for word in words if word.startswith("reduce")]
    out = []
    for word in words:
        if word not in moving:
            out.append(word)
        if word.split("@")[0] in (f"W{micro}", f"B{micro}"):
            out += [r for r in moving if stage(r) == stage(word)]
    return out
