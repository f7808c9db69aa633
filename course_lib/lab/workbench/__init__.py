"""What the labs run on ranks: the learner's pieces beside the library's and PyTorch's, in alternation."""
