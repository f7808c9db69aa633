def split_backward(words, delay):
    waiting, k = [], 0
    while k < len(words):
        if len(waiting) > delay and not words[k].startswith("send_B"):
            words.insert(k, waiting.pop(0))
        elif words[k].startswith("B"):
            waiting.append("W" + words[k][1:])
            words[k] = "I" + words[k][1:]
        elif words[k].startswith("reduce"):
            words[k:k] = waiting
            k += len(waiting)
            waiting = []
        k += 1
    return words + waiting
