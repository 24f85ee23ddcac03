"""Jagged flash attention: as many queries as keys, self and cross."""
