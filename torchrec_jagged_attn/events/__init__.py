"""Experimental: events of users, which of them matter, and one row from all attributes of each.

It needs torchrec.
"""

from torchrec_jagged_attn.events.boosting import EventBoosting, boost_weights
from torchrec_jagged_attn.events.features import EventBasedFeature, TimeEncoding
from torchrec_jagged_attn.events.layout import Events
from torchrec_jagged_attn.events.relevance import Relevance, rank_attributes
from torchrec_jagged_attn.events.selection import EventSelection, select_events
from torchrec_jagged_attn.events.sessions import segment_sessions

__all__ = [
    "EventBasedFeature",
    "EventBoosting",
    "EventSelection",
    "Events",
    "Relevance",
    "TimeEncoding",
    "boost_weights",
    "rank_attributes",
    "segment_sessions",
    "select_events",
]
