def beat(lists, seconds):
    def stage(word):
        return word.split("@")[1]

    for words in lists:
        order = list(dict.fromkeys(stage(w) for w in words if w[0] == "F"))
        for s in order[1:]:
            taken = [w for w in words if w.startswith(("step", "gather")) and stage(w) == s]
            for word in taken:
                words.remove(word)
            at = max(0, next(k for k, w in enumerate(words) if w[0] == "F" and stage(w) == s) - 1)
            words[at:at] = taken
    return lists
