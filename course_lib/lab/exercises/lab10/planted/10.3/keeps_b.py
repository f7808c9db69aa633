def split_backward(words, delay):
    waiting, out = [], []
    for word in words:
        if len(waiting) > delay and not word.startswith("send_B"):
            out.append(waiting.pop(0))
        if word.startswith("reduce"):
            out += waiting
            waiting = []
        if word.startswith("B"):
            waiting.append("W" + word[1:])
        out.append(word)
    return out + waiting
