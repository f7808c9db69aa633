def beat(lists, seconds):
    """Each step right behind its own reductions: the rank then waits for them before it goes on."""
    best = lists
    for words in lists:
        other = [list(w) for w in lists]
        if seconds(other) < seconds(best):
            best = other
    return best
