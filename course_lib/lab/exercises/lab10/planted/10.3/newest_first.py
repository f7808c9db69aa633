def split_backward(words, delay):
    waiting, out = [], []
    for word in words:
        if len(waiting) > delay and not word.startswith("send_B"):
            out.append(waiting.pop())
        if word.startswith("B"):
            out.append("I" + word[1:])
            waiting.append("W" + word[1:])
        elif word.startswith("reduce"):
            out += waiting
            waiting = []
            out.append(word)
        else:
            out.append(word)
    return out + waiting
