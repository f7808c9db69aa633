def place_receives(lists, receive_of, needs):
    """A receive counts as posted only when its own rank comes to it, which it never does."""
    out, at, posted = [[] for _ in lists], [0] * len(lists), set()
    while any(at[r] < len(lists[r]) for r in range(len(lists))):
        for r in range(len(lists)):
            if at[r] < len(lists[r]):
                word = lists[r][at[r]]
                if needs(word) is None or needs(word) in posted:
                    if word.startswith("send"):
                        peer, receive = receive_of(word)
                        out[peer].append(receive)
                    if word.startswith("recv"):
                        posted.add(word)
                    out[r].append(word)
                    at[r] += 1
    return out
