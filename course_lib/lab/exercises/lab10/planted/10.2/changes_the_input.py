def place_receives(lists, receive_of, needs):
    out, posted = [[] for _ in lists], set()
    while any(lists):
        for r, words in enumerate(lists):
            if words and (needs(words[0]) is None or needs(words[0]) in posted):
                word = words.pop(0)
                if word.startswith("send"):
                    peer, receive = receive_of(word)
                    out[peer].append(receive)
                    posted.add(receive)
                out[r].append(word)
    return out
