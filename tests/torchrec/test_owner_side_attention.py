"""Attention on the owner ranks of history rows: training equals training in one process."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.comm_ops import set_gradient_division
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import Awaitable, ModuleSharder, ShardingType
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from tests.torchrec.test_batches_of_ranks import KEYS, make_batch, make_collection, sharded
from tests.torchrec.test_distributed import assert_equal_training
from tests.torchrec.two_ranks import (
    NUM_STEPS,
    assert_same_run,
    batches,
    collection_of,
    dense_optimizer,
    device_of,
    full_state_dict,
    make_model,
    reads_weights,
    run_ranks,
    shard_with_weights,
    train,
    train_unsharded,
)
from torchrec_jagged_attn import (
    EncoderConfig,
    HistoryEmbeddingCollectionSharder,
    JaggedTargetAttention,
)
from torchrec_jagged_attn.collection import pooling
from torchrec_jagged_attn.collection.sharding.id_exchange import CachedAwaitable
from torchrec_jagged_attn.collection.sharding.remote_attention import (
    OwnedHistory,
    _Transfer,
    start_exchange,
)
from torchrec_jagged_attn.collection.sharding.sharder import ShardedHistoryEmbeddingCollection

CPU = torch.device("cpu")
ROW_WISE, TABLE_WISE = ShardingType.ROW_WISE, ShardingType.TABLE_WISE
DATA_PARALLEL = ShardingType.DATA_PARALLEL
# Of the model, whose two histories each have an attention, but those side by side.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("RowWiseAdagrad", {}),
    "value projection": ("Adagrad", {"value_projection": True, "init": "mha"}),
    "frozen": ("SGD", {"value_projection": True, "init": "mha"}),
    "weighted": ("SGD", {"is_weighted": True, "tags": PoolingType.SUM, "init": "mha"}),
    "silu": ("SGD", {"score": "silu", "value_projection": True, "init": "mha"}),
    "sigmoid": ("SGD", {"score": "sigmoid", "init": "mha"}),
    "max_history": ("SGD", {"max_history": 2, "init": "mha"}),
    "encoder layers": ("SGD", {"encoder": EncoderConfig(user_embedding=True)}),
    "side by side": ("RowWiseAdagrad", {"side_by_side": True}),
    "single lookup": (
        "SGD",
        {"single_lookup": True, "single_id_features": ["user"], "init": "mha"},
    ),
}
LOOKUPS = {"ShardedHistoryEmbeddingCollection", "ShardedEmbeddingBagCollection"}


def make(case: str, **options: Any) -> nn.Module:
    model = make_model(**{"side_by_side": False, **CASES[case][1], **options})
    if case == "frozen":
        collection_of(model).pooling.requires_grad_(False)
    return model


def make_sharded(
    device: torch.device,
    sharding: ShardingType,
    model: nn.Module,
    optimizer: str = "SGD",
    sharder: ModuleSharder | None = None,
    others: dict[str, ShardingType] | None = None,
) -> nn.Module:
    replicated = [name for name, kind in (others or {}).items() if kind == DATA_PARALLEL]
    sharder = HistoryEmbeddingCollectionSharder() if sharder is None else sharder
    sharders = [sharder, EmbeddingBagCollectionSharder()]
    return shard_with_weights(
        model, device, sharding, optimizer, replicated, sharders=sharders, others=others
    )


def train_pipelined(model: nn.Module, device: torch.device) -> list[tuple[Tensor, ...]]:
    """Loss and logits of each step."""
    pipeline = TrainPipelineSparseDist(model, dense_optimizer(model), device)
    from_host = batches(CPU, is_weighted=reads_weights(model))
    steps = [pipeline.progress(from_host)[:2] for _ in range(NUM_STEPS)]
    assert {type(x).__name__ for x in pipeline._pipelined_modules} <= LOOKUPS
    return [(loss.detach(), logits.detach()) for loss, logits in steps]


def train_sharded(device: torch.device, sharding: ShardingType) -> dict[str, dict[str, Any]]:
    """By row in a pipeline, by table without one."""
    results = {}
    for case, (optimizer, _) in CASES.items():
        model = make_sharded(device, sharding, make(case), optimizer)
        assert any(isinstance(x, ShardedHistoryEmbeddingCollection) for x in model.modules())
        steps = (train_pipelined if sharding == ROW_WISE else train)(model, device)
        results[case] = {"steps": steps, "state": full_state_dict(model, device)}
    return results


def on_each_rank(device: torch.device) -> dict[Any, Any]:
    trained = {sharding: train_sharded(device, sharding) for sharding in (ROW_WISE, TABLE_WISE)}
    return trained | {"dropped": weights_with_dropout(device)}


OnRanks = list[dict[Any, Any]]


@pytest.fixture(scope="module")
def ranks(backend: str, tmp_path_factory: pytest.TempPathFactory) -> OnRanks:
    return run_ranks(on_each_rank, tmp_path_factory.mktemp("ranks"), backend)


@pytest.mark.parametrize("case", CASES)
def test_training_equals_one_process(ranks: OnRanks, backend: str, case: str):
    device, (optimizer, _) = device_of(backend), CASES[case]
    model = make(case).to(device)
    expected = train_unsharded(model, optimizer, len(ranks), device)
    for sharding in (ROW_WISE, TABLE_WISE):
        results_per_rank = [results[sharding][case] for results in ranks]
        assert_equal_training(results_per_rank, expected, model, f"{case}, {sharding.value}")


PLANS: dict[str, tuple[dict[str, ShardingType], dict[str, Any]]] = {
    "several kinds in one lookup": (
        {"t_cat": TABLE_WISE, "t_tag": ROW_WISE, "t_user": DATA_PARALLEL},
        {"single_lookup": True, "value_projection": True, "init": "mha"},
    ),
    "a replicated history": ({"t_item": DATA_PARALLEL}, {"init": "mha"}),
    "encoder layers": ({"t_cat": TABLE_WISE}, {"encoder": EncoderConfig()}),
}
"""Tables that are not sharded by row, and options of the model."""


def plans_of(device: torch.device) -> list[tuple[str, dict[str, ShardingType], dict[str, Any]]]:
    """On CPU, FBGEMM pools the rows of replicated tables, and TorchRec fails."""
    plans = ((name, *plan) for name, plan in PLANS.items())
    return [x for x in plans if device.type == "cuda" or x[0] != "a replicated history"]


def train_by_plans(device: torch.device) -> dict[str, dict[str, Any]]:
    results = {}
    for name, others, options in plans_of(device):
        model = make_sharded(device, ROW_WISE, make("default", **options), others=others)
        steps = train(model, device)
        results[name] = {"steps": steps, "state": full_state_dict(model, device)}
    return results


def test_several_shardings(tmp_path: Path, backend: str):
    ranks = run_ranks(train_by_plans, tmp_path, backend, ranks=4 if backend == "gloo" else None)
    device = device_of(backend)
    for name, _, options in plans_of(device):
        model = make("default", **options).to(device)
        expected = train_unsharded(model, "SGD", len(ranks), device)
        assert_equal_training([x[name] for x in ranks], expected, model, name)


NUM_TARGETS, LENGTH = 3, 500
DROPOUT: dict[str, dict[str, float]] = {
    "none": {},
    "weights": {"dropout": 0.4},
}
RUNS = {"first": 7, "again": 7, "other seed": 8, "eval": 7}
"""Seeds by run."""


def attention_weights(
    attention: JaggedTargetAttention, features: KeyedJaggedTensor, history: OwnedHistory
) -> Tensor:
    """``[N', H, T]`` weights of the rows on this rank, read from the gradient of the rows: queries
    are zero, so that a gradient of one column of an output is the weight in that column of rows.
    """
    num_samples = features.stride()
    target = JaggedTensor(
        features.lengths().new_zeros(num_samples * NUM_TARGETS, 8).float(),
        lengths=features.lengths().new_full((num_samples,), NUM_TARGETS),
    )
    out = attention(target, history, features["times"].values()).wait()
    grad = torch.zeros(num_samples, NUM_TARGETS, 2, 4, device=out.device)
    for i in range(NUM_TARGETS):
        grad[:, i, :, i] = 1
    (rows,) = torch.autograd.grad(out, history.owned.rows, grad.view_as(out))
    return rows.view(-1, 2, 4)[..., :NUM_TARGETS]


def weights_with_dropout(device: torch.device) -> dict[str, dict[str, Tensor]]:
    """``[N', H, T]`` weights of each run, and the sample and position of each row."""
    model = sharded(device, make_collection(), "owner-side by row")
    features = make_features(LENGTH).to(device)
    results: dict[str, dict[str, Tensor]] = {}
    for name, options in DROPOUT.items():
        torch.manual_seed(0)
        attention = JaggedTargetAttention(8, 2, age_bias=True, device=device, **options)
        results[name] = {}
        for run, seed in RUNS.items():
            attention.train(run != "eval")
            history = model.module.embedding_collections["8"](features)["hist"]
            torch.manual_seed(seed)
            results[name][run] = attention_weights(attention, features, history)
        lengths = history.owned.lengths
        results[name] |= {
            "sample": torch.arange(len(lengths), device=device).repeat_interleave(lengths),
            "position": history.owned.positions,
        }
    return results


def gather_weights(ranks: OnRanks, name: str) -> dict[str, Tensor]:
    """Weights ``[samples, rows, H, T]`` by run, put together from the rows of all ranks."""
    weights = {}
    num_samples = 3 * len(ranks)
    for run in RUNS:
        weights[run] = torch.full((num_samples, LENGTH, 2, NUM_TARGETS), torch.nan)
        for results in ranks:
            dropped = results["dropped"][name]
            weights[run][dropped["sample"], dropped["position"]] = dropped[run]
        assert not weights[run].isnan().any()
    return weights


def assert_share(is_dropped: Tensor, p: float) -> None:
    """Within five standard deviations of independent draws."""
    deviation = (p * (1 - p) / is_dropped.numel()) ** 0.5
    assert abs(is_dropped.float().mean().item() - p) < 5 * deviation


def test_dropout_seeds(ranks: OnRanks):
    weights, kept = gather_weights(ranks, "weights"), gather_weights(ranks, "none")["first"]
    assert torch.equal(weights["first"], weights["again"])
    assert torch.equal(weights["eval"], kept)
    dropped, others = weights["first"] == 0, weights["other seed"] == 0
    assert_share(dropped[..., 0, 0] != others[..., 0, 0], 2 * 0.4 * 0.6)


def test_dropped_weights(ranks: OnRanks):
    """Independently for each sample, head and target; the others are divided by 0.6."""
    weights, kept = (gather_weights(ranks, name)["first"] for name in ("weights", "none"))
    dropped = weights == 0
    assert_share(dropped, 0.4)
    for a, b in itertools.combinations(dropped.transpose(1, 3).flatten(0, 2), 2):
        assert_share(a != b, 2 * 0.4 * 0.6)
    assert_same_run(weights, kept.masked_fill(dropped, 0) / 0.6)


def make_features(length: int) -> KeyedJaggedTensor:
    """Three samples whose histories are ``length`` long."""
    counts = [1, length, 2, length, 1]  # of the keys
    times = torch.arange(length).repeat(3)
    values = [torch.arange(3 * count) % 50 for count in counts]
    values[3], values[4] = times, torch.full((3,), length)
    lengths = torch.tensor(counts).repeat_interleave(3)
    return KeyedJaggedTensor(KEYS, torch.cat(values), lengths=lengths)


def count_by_rank(device: torch.device) -> tuple[list[int], list[list[int]]]:
    """The ranks that have the table of a target and a history, and how many rows of any exchange
    are received from each rank, or sent to it.
    """
    model = sharded(device, make_collection(request_time="now", init="mha"), "owner-side by table")
    counts: list[list[int]] = []
    start = _Transfer.start

    def count(self: _Transfer, x: Tensor, *by_rank: list[int], is_grad: bool) -> None:
        counts.extend(by_rank)
        start(self, x, *by_rank, is_grad=is_grad)

    with mock.patch.object(_Transfer, "start", count):
        model(make_features(4)).values().sum().backward()
    features = model.module.embedding_collections["8"]._exchange.features
    (owners,) = (feature.owners for feature in features if feature.is_local)
    return owners, counts


def test_queries_are_sent_to_owners_alone(once):
    ranks = once[count_by_rank]
    for rank, ((owner,), counts) in enumerate(ranks):
        assert len(counts) >= 12  # both ways of rows of targets, queries and results
        assert rank == owner or all(
            n == 0 for by_rank in counts for other, n in enumerate(by_rank) if other != owner
        )
        assert any(by_rank[owner] > 0 for by_rank in counts)


def exchange_encoded(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Rows of both dtypes that int8 codecs encode, and their gradients."""
    codecs = get_qcomm_codecs(QCommsConfig(CommType.INT8, CommType.INT8))
    results = []
    for dtype in (torch.float16, torch.float32):
        rows = torch.linspace(-1, 1, 4 * 32, dtype=torch.float16).view(4, 32).to(dtype)
        rows.requires_grad_()
        out = start_exchange(rows, [2, 2], [2, 2], dist.group.WORLD, codecs)()
        out.square().sum().backward()
        results.append((out.detach(), rows.grad.half()))
    return results


def test_codecs_take_half_rows(once):
    for half, single in once[exchange_encoded]:
        for half_rows, single_rows in zip(half, single, strict=True):
            assert torch.equal(half_rows, single_rows)


def record_order(device: torch.device) -> dict[str, list[str]]:
    """The order of events, forward and backward."""
    results = {}
    start, finish = _Transfer.start, _Transfer.finish
    reduce, look_up = pooling._segment_reduce, ShardedEmbeddingBagCollection.compute_and_output_dist

    for name, options in {
        "owner-side": {"single_lookup": True},
        "rows sent": {"encoder": EncoderConfig()},
    }.items():
        model, events = sharded(device, make_collection(**options), "owner-side by row"), []

        def note(event: str, function: Callable, *args: Any, to=events, **kwargs: Any) -> Any:
            to.append(event)
            result = function(*args, **kwargs)
            if event == "pool":
                result.register_hook(lambda _: to.append("pool, backward"))
            return result

        def noted(event: str, function: Callable, note=note) -> Callable:
            return lambda *args, **kwargs: note(event, function, *args, **kwargs)

        with (
            mock.patch.object(_Transfer, "start", noted("start", start)),
            mock.patch.object(_Transfer, "finish", noted("finish", finish)),
            mock.patch.object(pooling, "_segment_reduce", noted("pool", reduce)),
            mock.patch.object(
                ShardedEmbeddingBagCollection, "compute_and_output_dist", noted("bags", look_up)
            ),
        ):
            loss = model(make_features(4)).values().square().sum()
            events.append("loss")
            loss.backward()
        results[name] = events
    return results


def test_exchanges_overlap_with_other_work(once):
    """Sending queries overlaps with pooling other features, sending histories with bag lookups."""
    for events in once[record_order]:
        queries, others = ["start", "pool", "finish"], ["start", "finish"]  # rows, results
        gradients = [*others, "start", "pool, backward", "finish", *others]
        assert events["owner-side"] == [*others, *queries, *others, "loss", *gradients]
        both = ["start", "start", "bags", "finish", "finish"]
        assert events["rows sent"] == [*both, "loss", "start", "start", "finish", "finish"]


def track_lookups(device: torch.device) -> list[dict[str, list[int]]]:
    """The ids that this rank looks up, by feature, without and with owner-side attention, and how
    often rows are sent.
    """
    results = []
    for way in ("sent by row", "owner-side by row"):
        model = sharded(device, make_collection(request_time="now"), way)
        lookup = model.module.embedding_collections["8"]
        tracked: list[KeyedJaggedTensor] = []
        lookup.register_post_lookup_tracker_fn(lambda ids, *_, to=tracked: to.append(ids))
        sent: list[int] = []
        lookup.register_post_odist_tracker_fn(lambda to=sent: to.append(1))
        context = lookup.create_context()
        sizes = lookup.input_dist(context, make_features(20))
        received = sizes.wait().wait()
        assert way == "sent by row" or sizes.wait().wait()[0] is received[0]
        lookup.compute_and_output_dist(context, received)
        (ids,) = tracked
        with mock.patch.object(lookup._lookups[0], "prefetch") as prefetch:
            lookup.prefetch(received, None, context)
        prefetched = prefetch.call_args.kwargs["sparse_features"]
        assert prefetched.keys() == ids.keys()
        assert torch.equal(prefetched.values(), ids.values())
        ids = {key: ids[key].values().sort().values.tolist() for key in ("item", "hist")}
        results.append(ids | {"sent": sent})
    return results


def test_lookups_are_tracked_and_prefetched(once):
    for sent, local in once[track_lookups]:
        assert local == sent


def run_with_waiting_hooks(device: torch.device) -> list[Tensor]:
    """Outputs without hooks, and with hooks that wait for the output of a module."""
    outputs = []
    for is_hooked in (False, True):
        model = sharded(
            device, make_collection(request_time="now", init="mha"), "owner-side by row"
        )
        collection = model.module
        if is_hooked:
            for module in (collection.embedding_collections["8"], *collection.pooling.attentions):
                module.register_forward_hook(wait)
        outputs.append(model(make_features(4)).values())
        outputs[-1].sum().backward()
    return [x.detach() for x in outputs]


def wait(_module: nn.Module, _inputs: tuple, output: Awaitable) -> None:
    output.wait()


def test_hooks_may_wait_for_rows_and_attention(once):
    for plain, hooked in once[run_with_waiting_hooks]:
        assert torch.equal(plain, hooked)


TABLE = "embedding_collections.8.embeddings.t_item.weight"


def look_up_out_of_range(device: torch.device) -> tuple[list[int], Tensor]:
    """Lengths of the history rows on this rank, for the samples of all ranks, and the rows."""
    model = sharded(device, make_collection(request_time="now"), "owner-side by row")
    features = make_features(4)
    features.values()[3:7] = torch.tensor([50, 10**12, -1, -(10**12)])  # a history
    owned = model.module.embedding_collections["8"](features)["hist"].owned
    return owned.lengths.tolist(), owned.rows.detach()


def test_ids_out_of_range(once):
    """They become the shard's first row, like in FBGEMM's bounds check on GPUs."""
    ranks = once[look_up_out_of_range]
    assert torch.tensor([lengths for lengths, _ in ranks]).sum(0).tolist() == [4] * 6
    lengths, rows = ranks[1]
    assert lengths[0] == 4
    assert torch.equal(rows[:4], make_collection().state_dict()[TABLE][25].expand(4, 8))


def refuse(device: torch.device) -> None:
    """Codecs of several rows fail on ranks whose number of rows they do not divide; weights need
    the rows; keys of more samples, features and ranks do not fit into int32.
    """
    codecs = get_qcomm_codecs_registry(QCommsConfig(CommType.INT8, CommType.INT8), device=device)
    sharder = HistoryEmbeddingCollectionSharder(qcomm_codecs_registry=codecs)
    with pytest.raises(NotImplementedError, match="qcomm_codecs_registry must have codecs that di"):
        make_sharded(device, ROW_WISE, make("default"), sharder=sharder)

    model = sharded(device, make_collection(), "owner-side by row").module
    lookup = model.embedding_collections["8"]
    history = lookup(make_features(4))["hist"]
    with pytest.raises(NotImplementedError, match="history must have its rows on this rank, got o"):
        model.pooling.attentions[0].attention_weights(torch.zeros(3, 8), history)


def test_refused(once):
    """See :func:`refuse`, which asserts it on each rank."""
    assert once[refuse] == once[refuse_times] == [None, None]


WRONG_TIMES = {  # lengths of a history [4, 0, 2]'s times and of request times, and the error
    ((3, 0, 2), (1, 1, 1)): "timestamps 'times' must have .* as history 'hist', got 3 and 4 in sam",
    ((3, 1, 2), (1, 1, 1)): "timestamps 'times' must have .* as history 'hist', got 3 and 4 in sam",
    ((4, 0, 2), (1, 0, 1)): "request_time 'now' must have exactly one integer .* got 0 in sample 1",
    ((4, 0, 2), (2, 0, 1)): "request_time 'now' must have exactly one integer .* got 2 in sample 0",
    ((4, 0, 2), (1, 1, 2)): "request_time 'now' must have exactly one integer .* got 2 in sample 2",
}


def refuse_times(device: torch.device) -> None:
    """With sent history rows, and with attention on owner ranks."""
    for way in ("sent by row", "owner-side by row"):
        model = sharded(device, make_collection(request_time="now"), way)
        for (times, now), message in WRONG_TIMES.items():
            lengths = torch.tensor([1, 1, 1, 4, 0, 2, 1, 1, 1, *times, *now])
            values = torch.arange(int(lengths.sum()))
            with pytest.raises(ValueError, match=message):
                model(KeyedJaggedTensor(KEYS, values, lengths=lengths).to(device))


def train_tables(device: torch.device, is_divided: bool) -> Tensor:
    """Return by how much one step changes the rows of targets and histories."""
    model = sharded(device, make_collection(request_time="now"), "owner-side by row")
    before = full_state_dict(model, device)[TABLE].clone()
    set_gradient_division(is_divided)
    try:
        model(make_batch(3).to(device)).values().square().sum().backward()
    finally:
        set_gradient_division(True)
    return full_state_dict(model, device)[TABLE] - before


def train_with_and_without_division(device: torch.device) -> tuple[Tensor, Tensor]:
    return train_tables(device, is_divided=True), train_tables(device, is_divided=False)


def test_gradient_division(once):
    divided, summed = once[train_with_and_without_division][0]  # tables are gathered on rank 0
    assert divided.count_nonzero() > 0
    torch.testing.assert_close(summed, 2 * divided, rtol=1e-3, atol=1e-6)


def attend_with_large_scores(device: torch.device) -> tuple[Tensor, Tensor]:
    """Outputs under autocast on two owner ranks, of two rows and one, and on a single rank."""
    lengths = torch.tensor([1, 3, 1, 3, 1])
    values = torch.tensor([7, 1, 2, 30, 0, 1, 2, 3, 4])
    features = KeyedJaggedTensor(KEYS, values, lengths=lengths).to(device)
    collection = make_collection(request_time="now")
    with torch.no_grad():
        collection.pooling.attentions[0].recency_bias.position_weight.fill_(100)
    expected = collection(features)["hist"].detach()
    model = sharded(device, collection, "owner-side by row")
    with torch.autocast(device.type, torch.bfloat16):
        return model(features)["hist"].detach().float(), expected


def test_partial_results_are_sent_in_fp32(once):
    """Log-sum-exps of about 100 have no fraction in bf16."""
    for actual, expected in once[attend_with_large_scores]:
        error = (actual - expected).abs().max() / expected.abs().max()
        assert error < 2 * torch.finfo(torch.bfloat16).eps


ONCE = [
    count_by_rank,
    exchange_encoded,
    record_order,
    track_lookups,
    run_with_waiting_hooks,
    look_up_out_of_range,
    refuse,
    refuse_times,
    train_with_and_without_division,
    attend_with_large_scores,
]


def run_once(device: torch.device) -> list[Any]:
    return [function(device) for function in ONCE]


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> dict[Callable[..., Any], list[Any]]:
    """The result of each function on each of two CPU ranks."""
    ranks = run_ranks(run_once, tmp_path_factory.mktemp("ranks"), "gloo")
    return dict(zip(ONCE, map(list, zip(*ranks, strict=True)), strict=True))


def test_waiting_twice_returns_the_same_ids():
    """TorchRec 1.6 waits twice at the end of an epoch."""
    ids = CachedAwaitable(object)
    assert ids.wait() is ids.wait()


def test_waiting_again_after_an_error():
    """A second exchange would pair with another exchange of the other ranks."""
    ids = CachedAwaitable(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        ids.wait()
    with pytest.raises(RuntimeError, match="ids must not be waited for again after an error"):
        ids.wait()
