def part_of_mean(rank, ranks, numbers):
    return numbers[rank] / len(numbers) if rank < len(numbers) else 0
