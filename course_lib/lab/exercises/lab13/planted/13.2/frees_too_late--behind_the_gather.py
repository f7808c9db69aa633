def beat(lists, seconds):
    """All that a stage does in its turn goes into the next pass, and it is freed last."""
    def stage(word):
        return word.split("@")[1]

    out = []
    for words in lists:
        order = list(dict.fromkeys(stage(w) for w in words if w[0] == "F"))
        words = list(words)
        for s in order[1:]:
            taken = [f"step@{s}", f"gather@{s}", f"free@{s}"]
            words = [w for w in words if w not in taken]
            at = max(0, next(k for k, w in enumerate(words) if w[0] == "F" and stage(w) == s) - 1)
            words[at:at] = taken
        out.append(words)
    return out
