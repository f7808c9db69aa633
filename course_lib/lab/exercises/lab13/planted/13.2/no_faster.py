def beat(lists, seconds):
    return [list(words) for words in lists]
