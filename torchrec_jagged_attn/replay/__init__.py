"""Calls of ops that are recorded once, and then run by C++."""
