def beat(lists, seconds):
    """Each step only once in two: what stands twice is dropped."""
    return [[word for word in words if not word.startswith("reduce1")] for words in lists]
