def beat(lists, seconds):
    """Memory is not asked for, so a stage is freed in the next pass."""
    return [[*(w for w in words if w.startswith("free")), *(w for w in words if not w.startswith("free"))]
            for words in lists]
