def beat(lists, seconds):
    """Only on rank 0: the others still wait at the end, and it waits for them."""
    def stage(word):
        return word.split("@")[1]

    words = list(lists[0])
    last = list(dict.fromkeys(stage(w) for w in words if w[0] == "F"))[-1]
    taken = [w for w in words if w.startswith(("step", "gather")) and stage(w) == last]
    words = [w for w in words if w not in taken]
    at = next(k for k, w in enumerate(words) if w[0] == "F" and stage(w) == last) - 1
    other = [[*words[:at], *taken, *words[at:]], *lists[1:]]
    return min(lists, other, key=seconds)
