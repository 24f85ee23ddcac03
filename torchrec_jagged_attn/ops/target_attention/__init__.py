"""Target attention: a few queries per sample over the raw rows of its history."""
