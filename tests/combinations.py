"""Fewer cases than all combinations of parameters."""

import itertools
from collections.abc import Iterable


def each_pair(*axes: Iterable) -> list[tuple]:
    """Combinations of one value of each axis, such that each two values of two axes meet.

    Example:
        >>> each_pair("ab", "cd", "ef")
        [('a', 'c', 'e'), ('a', 'd', 'f'), ('b', 'c', 'f'), ('b', 'd', 'e')]
    """
    axes = [list(axis) for axis in axes]
    left = {
        combination: set(itertools.combinations(enumerate(combination), 2))
        for combination in itertools.product(*(range(len(axis)) for axis in axes))
    }
    missing, chosen = set().union(*left.values()), []
    while missing:
        chosen.append(max(left, key=lambda combination: len(left[combination] & missing)))
        missing -= left[chosen[-1]]
    return [tuple(axis[i] for axis, i in zip(axes, c, strict=True)) for c in chosen]
