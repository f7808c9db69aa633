def place_receives(lists, receive_of, needs):
    """Each receive one computation before the one that needs it."""
    out = []
    for words in lists:
        computes = [word for word in words if not word.startswith("send")]
        ahead = dict(zip(computes, [*computes[1:], None]))
        mine = [needs(computes[0])] if computes and needs(computes[0]) else []
        for word in words:
            if word in ahead and ahead[word] and needs(ahead[word]):
                mine.append(needs(ahead[word]))
            mine.append(word)
        out.append(mine)
    return out
