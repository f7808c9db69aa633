"""What the labs run on ranks, the learner's pieces beside the library's and PyTorch's, and what they and the checks
share for it."""
