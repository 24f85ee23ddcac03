"""What a server keeps between requests; needs torch alone."""

from torchrec_jagged_attn.serving.history_cache import CachedHistories, HistoryCache

__all__ = ["CachedHistories", "HistoryCache"]
