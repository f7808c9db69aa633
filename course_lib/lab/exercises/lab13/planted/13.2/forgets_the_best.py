def beat(lists, seconds):
    """Takes every lists that can run, and returns the last of them."""
    def stage(word):
        return word.split("@")[1]

    def moved(words, ahead):
        order = list(dict.fromkeys(stage(w) for w in words if w[0] == "F"))
        out = list(words)
        for s in order[1:]:
            taken = [w for w in words if w.startswith(("step", "gather")) and stage(w) == s]
            out = [w for w in out if w not in taken]
            at = max(0, next(k for k, w in enumerate(out) if w[0] == "F" and stage(w) == s) - ahead)
            out[at:at] = taken
        return out

    now = lists
    for other in ([moved(words, 1) for words in lists], [moved(words, 2) for words in lists],
                  [sorted(words, key=lambda w: w.startswith("gather")) for words in lists]):
        if seconds(other) < float("inf"):
            now = other
    return now
