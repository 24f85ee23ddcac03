"""Generates a synthetic log of users with several interests."""

from __future__ import annotations

import numpy as np
from events import InteractionLog

SWITCH, DROP, STRAY = 0.15, 0.1, 0.05
"""Probabilities per event: follow another interest; replace an interest; take a random kind."""
CONVERTING, NOISE_CONVERTING = 0.8, 0.02
"""Probabilities that an event of interest and a noise event convert."""
DWELL, NOISE_DWELL = 40, 4
"""Their median dwell times, in seconds."""
JOINING_DAYS = 60
"""Users join on one of these days, so that training and test have histories of all lengths."""


def planted_log(
    *,
    num_users: int = 1000,
    num_steps: int = 100,
    num_kinds: int = 30,
    items_per_kind: int = 50,
    num_interests: int = 4,
    noise: float = 0.0,
    seed: int = 0,
) -> InteractionLog:
    """Return a log of users who follow one of several interests for a few events, then another.

    Interests are sometimes replaced, and users take items of their *current* interests. A sum or
    mean over the history counts replaced interests, and weights by recency forget interests that
    only pause. Attention can weigh events by the candidate's kind and its last occurrence.

    Args:
        num_users: number of users.
        num_steps: events per user, before repeated items are removed.
        num_kinds: number of kinds of items, the categories of the log.
        items_per_kind: number of items per kind, with decreasing popularity.
        num_interests: number of kinds that interest a user at a time.
        noise: share of the events with a random kind, short dwell times and few conversions.
            Without noise, all events convert.
        seed: random seed.
    """
    rng = np.random.default_rng(seed)
    users = np.arange(num_users)
    interests = rng.integers(num_kinds, size=(num_users, num_interests))
    current = rng.integers(num_interests, size=num_users)
    kind = np.empty((num_users, num_steps), dtype=np.int64)
    pause = np.empty((num_users, num_steps))
    for step in range(num_steps):
        switching = rng.random(num_users) < SWITCH
        current = np.where(switching, rng.integers(num_interests, size=num_users), current)
        dropping = np.flatnonzero(rng.random(num_users) < DROP)
        dropped = rng.integers(num_interests, size=len(dropping))
        interests[dropping, dropped] = rng.integers(num_kinds, size=len(dropping))
        straying = rng.random(num_users) < STRAY
        kind[:, step] = np.where(
            straying, rng.integers(num_kinds, size=num_users), interests[users, current]
        )
        pause[:, step] = rng.exponential(np.where(switching, 86400, 20))

    dwell = converted = None
    if noise > 0:
        is_noise = rng.random(kind.shape) < noise
        kind = np.where(is_noise, rng.integers(num_kinds, size=kind.shape), kind)
        typical = np.where(is_noise, NOISE_DWELL, DWELL)
        dwell = (typical * rng.lognormal(sigma=0.8, size=kind.shape)).astype(np.int64)
        chance = np.where(is_noise, NOISE_CONVERTING, CONVERTING)
        converted = rng.random(kind.shape) < chance
    popularity = np.cumsum(1 / np.arange(1, items_per_kind + 1))
    rank = np.searchsorted(popularity, rng.random(kind.shape) * popularity[-1])
    item = kind * items_per_kind + rank
    joined = rng.random((num_users, 1)) * JOINING_DAYS * 86400
    time = (joined + pause.cumsum(axis=1)).astype(np.int64)
    user = np.broadcast_to(users[:, None], item.shape)
    _, first = np.unique(user * num_kinds * items_per_kind + item, return_index=True)
    return InteractionLog(
        user=user.ravel()[first],
        item=item.ravel()[first],
        time=time.ravel()[first],
        category=np.repeat(np.arange(num_kinds), items_per_kind),
        user_features={
            "cohort": rng.integers(8, size=num_users),
            "device": rng.integers(3, size=num_users),
        },
        dwell=None if dwell is None else dwell.ravel()[first],
        converted=None if converted is None else converted.ravel()[first],
    )
