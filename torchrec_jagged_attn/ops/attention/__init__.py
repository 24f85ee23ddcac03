"""Biases, dropout and scores, shared by target and flash attention."""
