def beat(lists, seconds):
    """Just in time: what a stage needs is done in front of its first F."""
    def stage(word):
        return word.split("@")[1]

    out = []
    for words in lists:
        late = [w for w in words if w.startswith(("step", "gather", "free"))]
        new = [w for w in words if w not in late]
        for s in sorted({stage(w) for w in late}):
            at = next(k for k, w in enumerate(new) if w[0] == "F" and stage(w) == s)
            new[at:at] = [w for w in late if stage(w) == s]
        out.append(new)
    return out
