def split_backward(words, delay):
    waiting, out = [], []
    for word in words:
        if word.startswith("B"):
            out.append("I" + word[1:])
            waiting.append("W" + word[1:])
            if len(waiting) > delay:
                out.append(waiting.pop(0))
        elif word.startswith("reduce"):
            out += waiting
            waiting = []
            out.append(word)
        else:
            out.append(word)
    return out + waiting
