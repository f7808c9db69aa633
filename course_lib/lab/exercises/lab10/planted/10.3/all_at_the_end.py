def split_backward(words, delay):
    out = ["I" + word[1:] if word.startswith("B") else word for word in words if not word.startswith("reduce")]
    out += ["W" + word[1:] for word in words if word.startswith("B")]
    return out + [word for word in words if word.startswith("reduce")]
