"""Attention over variable-length user histories in TorchRec models, with no padding anywhere."""

from typing import TYPE_CHECKING

from torchrec_jagged_attn.data import BalancedBatchSampler
from torchrec_jagged_attn.layout import JaggedLayout
from torchrec_jagged_attn.ops import (
    array_jagged_bmm_jagged_out,
    jagged2_softmax,
    jagged_dense_add,
    jagged_dense_bmm,
    jagged_dense_mul,
    jagged_flash_attention,
    jagged_jagged_bmm,
    jagged_jagged_bmm_jagged_out,
    jagged_softmax,
    jagged_target_attention,
    select_rows,
    take_rows,
)
from torchrec_jagged_attn.semantic_ids import (
    DiscretePCA,
    PackedCodes,
    VQFusion,
    jagged_target_attention_over_codes,
)

if TYPE_CHECKING:
    from torchrec_jagged_attn.events import (
        EventBasedFeature,
        EventBoosting,
        Events,
        EventSelection,
        Relevance,
        TimeEncoding,
        boost_weights,
        rank_attributes,
        segment_sessions,
        select_events,
    )
    from torchrec_jagged_attn.modules import (
        EncoderConfig,
        HistoryEmbeddingCollectionSharder,
        HistoryEmbeddingShardingPlanner,
        HistoryEncoderLayer,
        JaggedFeatureInteraction,
        JaggedSelfAttention,
        JaggedTargetAttention,
        TargetAttentionConfig,
        TargetAttentionEmbeddingBagCollection,
        embedding_bag_keys,
        embedding_parameters,
        rename_keys,
        repeat_per_candidate,
    )

__version__ = "0.1.0"

__all__ = [
    "BalancedBatchSampler",
    "DiscretePCA",
    "EncoderConfig",
    "EventBasedFeature",
    "EventBoosting",
    "EventSelection",
    "Events",
    "HistoryEmbeddingCollectionSharder",
    "HistoryEmbeddingShardingPlanner",
    "HistoryEncoderLayer",
    "JaggedFeatureInteraction",
    "JaggedLayout",
    "JaggedSelfAttention",
    "JaggedTargetAttention",
    "PackedCodes",
    "Relevance",
    "TargetAttentionConfig",
    "TargetAttentionEmbeddingBagCollection",
    "TimeEncoding",
    "VQFusion",
    "array_jagged_bmm_jagged_out",
    "boost_weights",
    "embedding_bag_keys",
    "embedding_parameters",
    "jagged2_softmax",
    "jagged_dense_add",
    "jagged_dense_bmm",
    "jagged_dense_mul",
    "jagged_flash_attention",
    "jagged_jagged_bmm",
    "jagged_jagged_bmm_jagged_out",
    "jagged_softmax",
    "jagged_target_attention",
    "jagged_target_attention_over_codes",
    "rank_attributes",
    "rename_keys",
    "repeat_per_candidate",
    "segment_sessions",
    "select_events",
    "select_rows",
    "take_rows",
]


def __getattr__(name: str) -> object:
    """Modules and events need torchrec, the ops do not: import them when one is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from torchrec_jagged_attn import events, modules
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{name} needs TorchRec: pip install 'torchrec_jagged_attn[torchrec]' ({error})"
        ) from error
    except OSError as error:  # a library of FBGEMM's that meets no torch as it was built for
        raise ImportError(
            f"{name} needs TorchRec, whose FBGEMM does not load: it was built for another version "
            "of torch, or for CUDA where torch has none. With a CPU torch, install fbgemm-gpu-cpu "
            "in place of fbgemm-gpu, in the version for this torch: see the section on "
            "installing in README. With a CUDA torch: pip install 'torchrec_jagged_attn[torchrec]' "
            f"({error.__cause__ or error})"
        ) from error
    return getattr(events if name in events.__all__ else modules, name)
