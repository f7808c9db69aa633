def beat(lists, seconds):
    """Without the gathers an update is fast."""
    return [[word for word in words if not word.startswith("gather")] for words in lists]
