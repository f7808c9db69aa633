def place_receives(lists, receive_of, needs):
    out = []
    for words in lists:
        computes = [word for word in words if not word.startswith("send")]
        sends = [word for word in words if word.startswith("send")]
        out.append([needs(word) for word in computes if needs(word)] + computes + sends)
    return out
