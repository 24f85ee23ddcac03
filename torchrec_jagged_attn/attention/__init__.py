"""What target and flash attention share: biases, dropout, scores, and the CPU."""
