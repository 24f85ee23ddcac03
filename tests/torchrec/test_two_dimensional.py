"""2D parallelism: ``DMPCollection``, which needs CUDA; parts of it on a CPU."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.types import ShardingEnv2D

from tests.torchrec.two_ranks import collection_of, make_model
from torchrec_jagged_attn import HistoryEmbeddingCollectionSharder


def test_models_are_searched_for_lookups():
    """TorchRec iterates over attributes named ``_lookups``."""
    context = SimpleNamespace(modules_to_sync=None)
    parallel = cast("DMPCollection", SimpleNamespace(_dmp_wrapped_module=make_model()))
    DMPCollection._group_sharded_modules(parallel, [cast("Any", context)])
    assert not context.modules_to_sync


def test_owner_side_attention_is_refused():
    env = ShardingEnv2D.__new__(ShardingEnv2D)
    env.world_size = 2
    lookup = collection_of(make_model()).embedding_collections["8"]
    params = {x.name: SimpleNamespace(sharding_type="row_wise") for x in lookup.embedding_configs()}
    with pytest.raises(NotImplementedError, match=r"got a DMPCollection .* EmbeddingCollectionSh"):
        HistoryEmbeddingCollectionSharder().shard(lookup, cast("Any", params), env)
