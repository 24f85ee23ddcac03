"""Attention over variable-length user histories in TorchRec models, without padding.

Further ops are in :mod:`torchrec_jagged_attn.ops`, a sampler in :mod:`torchrec_jagged_attn.data`.
:mod:`torchrec_jagged_attn.semantic_ids` and :mod:`torchrec_jagged_attn.events` are experimental.
"""

from typing import TYPE_CHECKING

from torchrec_jagged_attn.ops import (
    jagged_dense_bmm,
    jagged_flash_attention,
    jagged_jagged_bmm,
    jagged_softmax,
    jagged_target_attention,
)

if TYPE_CHECKING:
    from torchrec_jagged_attn.collection import (
        EncoderConfig,
        HistoryEmbeddingCollectionSharder,
        HistoryEmbeddingShardingPlanner,
        TargetAttentionConfig,
        TargetAttentionEmbeddingBagCollection,
        embedding_bag_keys,
        embedding_parameters,
        rename_keys,
        repeat_per_candidate,
    )
    from torchrec_jagged_attn.modules import (
        HistoryEncoderLayer,
        JaggedFeatureInteraction,
        JaggedSelfAttention,
        JaggedTargetAttention,
    )
    from torchrec_jagged_attn.pipeline import TrainPipelineCudaGraph

__version__ = "0.1.0"

__all__ = [
    "EncoderConfig",
    "HistoryEmbeddingCollectionSharder",
    "HistoryEmbeddingShardingPlanner",
    "HistoryEncoderLayer",
    "JaggedFeatureInteraction",
    "JaggedSelfAttention",
    "JaggedTargetAttention",
    "TargetAttentionConfig",
    "TargetAttentionEmbeddingBagCollection",
    "TrainPipelineCudaGraph",
    "embedding_bag_keys",
    "embedding_parameters",
    "jagged_dense_bmm",
    "jagged_flash_attention",
    "jagged_jagged_bmm",
    "jagged_softmax",
    "jagged_target_attention",
    "rename_keys",
    "repeat_per_candidate",
]


def __getattr__(name: str) -> object:
    """Import the modules on first use: they need torchrec, which the ops do not."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from torchrec_jagged_attn import collection, modules, pipeline
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{name} needs TorchRec: pip install 'torchrec_jagged_attn[torchrec]' ({error})"
        ) from error
    except OSError as error:  # a library of FBGEMM's that meets no torch as it was built for
        raise ImportError(
            f"{name} needs TorchRec, whose FBGEMM does not load: it was built for another version "
            "of torch, or for CUDA where torch has none. With a CPU torch, install fbgemm-gpu-cpu "
            "in place of fbgemm-gpu, in the version for this torch: see docs/install.md. "
            "With a CUDA torch: pip install 'torchrec_jagged_attn[torchrec]' "
            f"({error.__cause__ or error})"
        ) from error
    return next(getattr(x, name) for x in (collection, modules, pipeline) if hasattr(x, name))
