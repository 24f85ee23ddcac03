"""Rows kept as codes: into bytes, and out of them."""
