"""Rows of each sample with the highest scores: which these are, and copies of rows."""
