"""Rows of the highest scores, and copies of rows."""
