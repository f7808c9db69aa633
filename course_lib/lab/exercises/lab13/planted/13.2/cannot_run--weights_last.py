def beat(lists, seconds):
    """Nobody waits for W: so all of them to the end."""
    return [[*(w for w in words if w[0] != "W"), *(w for w in words if w[0] == "W")] for words in lists]
