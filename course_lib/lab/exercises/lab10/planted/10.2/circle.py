def place_receives(lists, receive_of, needs):
    out = []
    for words in lists:
        mine = []
        for word in words:
            if needs(word) is not None:
                mine.append(needs(word))
            mine.append(word)
        out.append(mine)
    return out
