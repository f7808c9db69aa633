def place_receives(lists, receive_of, needs):
    out, at, posted = [[] for _ in lists], [0] * len(lists), set()
    while any(at[r] < len(lists[r]) for r in range(len(lists))):
        for r in range(len(lists)):
            if at[r] < len(lists[r]):
                word = lists[r][at[r]]
                if needs(word) is None or needs(word) in posted:
                    if word.startswith("send_F"):
                        peer, receive = receive_of(word)
                        out[peer].append(receive)
                        posted.add(receive)
                    elif word.startswith("send_B"):
                        posted.add(receive_of(word)[1])
                    out[r].append(word)
                    at[r] += 1
    return out
