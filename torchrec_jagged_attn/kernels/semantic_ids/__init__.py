"""Rows kept as digits: into bytes, and out of them."""
