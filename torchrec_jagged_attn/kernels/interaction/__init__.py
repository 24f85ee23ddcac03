"""Feature interactions: products within each sample, the softmax, sums over rows."""
