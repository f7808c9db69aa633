def place_receives(lists, receive_of, needs):
    return [[needs(word) for word in words if needs(word)] + list(words) for words in lists]
