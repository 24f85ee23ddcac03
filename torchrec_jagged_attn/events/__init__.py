"""Experimental: select and weigh the events of users. Needs torchrec."""

from torchrec_jagged_attn.events.boosting import EventBoosting, boost_weights
from torchrec_jagged_attn.events.relevance import Relevance
from torchrec_jagged_attn.events.selection import EventSelection, select_events
from torchrec_jagged_attn.events.sessions import segment_sessions

__all__ = [
    "EventBoosting",
    "EventSelection",
    "Relevance",
    "boost_weights",
    "segment_sessions",
    "select_events",
]
