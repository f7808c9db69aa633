def split_backward(words, delay):
    waiting, out = [], []
    for word in words:
        if waiting and len(waiting) >= delay and not word.startswith("send_B"):
            out.append(waiting.pop(0))
        if word.startswith("B"):
            out.append("I" + word[1:])
            waiting.append("W" + word[1:])
        elif word.startswith("reduce"):
            out += [*waiting, word]
            waiting = []
        else:
            out.append(word)
    return out + waiting
