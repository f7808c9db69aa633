import random


def beat(lists, seconds):
    draw, best, least = random.Random(0), lists, seconds(lists)
    for _ in range(2000):
        rank = draw.randrange(len(best))
        words = list(best[rank])
        words.insert(len(words) - draw.randrange(3), words.pop(len(words) - 1 - draw.randrange(3)))
        other = [words if r == rank else old for r, old in enumerate(best)]
        if (took := seconds(other)) < least:
            best, least = other, took
    return best
