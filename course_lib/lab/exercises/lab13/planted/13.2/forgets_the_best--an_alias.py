def beat(lists, seconds):
    """Keeps the best, but not a copy of it."""
    def stage(word):
        return word.split("@")[1]

    now = [list(words) for words in lists]
    best, least = now, seconds(now)
    for ahead in (1, 2, 0):
        for words in now:
            order = list(dict.fromkeys(stage(w) for w in words if w[0] == "F"))
            for s in order[1:]:
                taken = [w for w in words if w.startswith(("step", "gather")) and stage(w) == s]
                for w in taken:
                    words.remove(w)
                at = max(0, next(k for k, w in enumerate(words) if w[0] == "F" and stage(w) == s) - ahead)
                words[at:at] = taken
        if seconds(now) < least:
            best, least = now, seconds(now)
        for words, given in zip(now, lists):  # and start again from what was given
            words[:] = given
    return best
