def place_receives(lists, receive_of, needs):
    return [list(words) for words in lists]
