def place_receives(lists, receive_of, needs):
    posts = [[] for _ in lists]
    for words in lists:
        for word in words:
            if word.startswith("send"):
                peer, receive = receive_of(word)
                posts[peer].append(receive)
    return [sorted(posts[r]) + list(words) for r, words in enumerate(lists)]
