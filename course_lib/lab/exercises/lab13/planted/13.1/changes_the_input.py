def reduce_early(words):
    def stage(word):
        return word.split("@")[1]

    for reduce in [word for word in words if word.startswith("reduce")]:
        words.remove(reduce)
        last = max(k for k, word in enumerate(words) if word[0] in "WB" and stage(word) == stage(reduce))
        words.insert(last + 1, reduce)
    return words
