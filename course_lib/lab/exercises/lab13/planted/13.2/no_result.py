def beat(lists, seconds):
    best = lists
    for ahead in range(3):
        other = [list(words) for words in lists]
        if seconds(other) < seconds(best):
            best = other
