"""Multi-head attention within each sample, self or cross."""
