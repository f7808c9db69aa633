def reduce_early(words):
    def stage(word):
        return word.split("@")[1]

    last = {stage(word): k for k, word in enumerate(words) if word[0] in "WB"}
    out = []
    for k, word in enumerate(words):
        if not word.startswith("reduce0"):
            out.append(word)
        if last.get(stage(word)) == k:
            out.append(f"reduce0@{stage(word)}")
    return out
