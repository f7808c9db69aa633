def reduce_early(words):
    last = max(k for k, word in enumerate(words) if word[0] in "WB")
    moving = [word for word in words if word.startswith("reduce")]
    rest = [word for word in words[last + 1:] if not word.startswith("reduce")]
    return [*words[:last + 1], *moving, *rest]
