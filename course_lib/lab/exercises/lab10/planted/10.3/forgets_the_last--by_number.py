def split_backward(words, delay):
    out = []
    for word in words:
        if word.startswith("B"):
            out.append("I" + word[1:])
        else:
            out.append(word)
        if word.startswith("B") and int(word[1:]) >= delay and f"send_{word}" not in words:
            out.append(f"W{int(word[1:]) - delay}")
        if word.startswith("send_B") and int(word[6:]) >= delay:
            out.append(f"W{int(word[6:]) - delay}")
    return out
