"""Inference with a trained DLRM: quantized, sharded, traced, scripted, exported."""

import copy
import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchrec.distributed.global_settings import set_propogate_device
from torchrec.distributed.planner import ParameterConstraints
from torchrec.fx import Tracer, symbolic_trace
from torchrec.inference.modules import (
    assign_weights_to_tbe,
    get_table_to_weights_from_tbe,
    quantize_embeddings,
    quantize_inference_model,
    set_pruning_data,
    shard_quant_model,
)
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.collection.scenarios import SCENARIOS, make_collection, table, to_features
from tests.collection.scenarios import make_batch as make_scenario_batch
from tests.torchrec.two_ranks import (
    FEATURES,
    NUM_IDS,
    NUM_STEPS,
    assert_same_run,
    make_batch,
    make_model,
)
from torchrec_jagged_attn import (
    TargetAttentionConfig,
    TargetAttentionEmbeddingBagCollection,
)

Inputs = tuple[Tensor, Tensor, Tensor]
KEYS = make_batch(0, 0).sparse_features.keys()
QUANTIZED = {
    "int8": (torch.qint8, torch.float32),
    "int8 to fp16": (torch.qint8, torch.float16),
    "int4": (torch.quint4x2, torch.float32),
}


class Scorer(nn.Module):
    """A DLRM that takes tensors: dense ``[B, 3]``, ids ``[N]`` and lengths ``[F, B]``."""

    def __init__(self, dlrm: nn.Module) -> None:
        super().__init__()
        self.dlrm = dlrm
        self.keys = KEYS

    def forward(self, dense: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        features = KeyedJaggedTensor(
            keys=self.keys, values=ids, lengths=lengths.flatten(), stride=dense.shape[0]
        )
        return self.dlrm(dense, features)


def make_scorer(tables: str, device: torch.device) -> Scorer:
    """With trained tables (``"fp32"``) or quantized tables."""
    scorer = Scorer(make_model().model.to(device)).eval()
    if tables != "fp32":
        dtype, output_dtype = QUANTIZED[tables]
        quantize_inference_model(scorer, quantization_dtype=dtype, output_dtype=output_dtype)
        # Lookups of quantized tables note the order of keys when they are first called.
        scorer(*inputs(device)[0])
    return scorer


def inputs(device: torch.device) -> list[Inputs]:
    """Batches of different sizes and lengths, one of them with no history at all."""
    batches = [make_batch(step, rank) for step in range(NUM_STEPS) for rank in range(2)]
    return [
        (
            batch.dense_features.to(device),
            batch.sparse_features.values().to(device),
            batch.sparse_features.lengths().view(len(KEYS), -1).to(device),
        )
        for batch in batches
    ]


@torch.no_grad()
def assert_equal(actual: nn.Module, expected: nn.Module, device: torch.device) -> None:
    for batch in inputs(device):
        assert torch.equal(actual(*batch), expected(*batch))


@pytest.mark.parametrize("tables", QUANTIZED)
def test_quantized_tables(tables: str, device: torch.device):
    """Equal to fp32 tables of the dequantized rows."""
    quantized = make_scorer(tables, device)
    expected = make_scorer("fp32", device)
    ids = torch.arange(NUM_IDS, device=device)
    features = KeyedJaggedTensor(
        keys=KEYS, values=ids.repeat(len(KEYS)), lengths=torch.ones_like(ids).repeat(len(KEYS))
    )
    source, target = quantized.dlrm.sparse_arch, expected.dlrm.sparse_arch
    source, target = source.embedding_bag_collection, target.embedding_bag_collection
    rows = {name: jt.values() for name, jt in source.embedding_collections["8"](features).items()}
    rows |= source.embedding_bag_collection(features).to_dict()
    tables_by_name = {
        name.split(".")[-2]: table
        for name, table in target.named_parameters()
        if "embeddings." in name or "embedding_bags." in name
    }
    with torch.no_grad():
        for name, table in tables_by_name.items():
            given = rows[FEATURES[name][0]].float()
            largest = (table.amax(1) - table.amin(1)).max()
            assert not torch.equal(given, table)
            assert (given - table).abs().max() < largest / (10 if tables == "int4" else 200)
            table.copy_(given)
        for batch in inputs(device):  # logits are sums of three bags, which may be rounded
            terms = {"num_terms": 3 * 8, "dtype": QUANTIZED[tables][1]}
            assert_same_run(quantized(*batch), expected(*batch), **terms)


def make_quantizable(has_bags: bool = True) -> TargetAttentionEmbeddingBagCollection:
    tables = [table("t1", "item", "hist"), table("t2", "user")]
    return TargetAttentionEmbeddingBagCollection(
        tables[: 1 + has_bags], TargetAttentionConfig("item", "hist")
    ).eval()


@pytest.mark.parametrize("output_dtype", [torch.float16, torch.float32])
def test_quantized_output_dtype(output_dtype: torch.dtype):
    model = nn.Sequential(make_quantizable())
    quantize_inference_model(
        model, output_dtype=output_dtype, per_table_weight_dtype={"t1": torch.float16}
    )
    features = KeyedJaggedTensor(
        keys=["item", "hist", "user"],
        values=torch.arange(6),
        lengths=torch.tensor([1, 1, 0, 2, 1, 1]),
    )
    assert model(features).values().dtype == output_dtype
    tables = model[0].embedding_bag_configs()
    assert [table.data_type for table in tables] == [DataType.FP16, DataType.INT8]


@pytest.mark.parametrize("has_bags", [False, True])
def test_unquantized_sequences_are_refused(has_bags: bool):
    model = nn.Sequential(make_quantizable(has_bags))
    model = quantize_embeddings(model, dtype=torch.int8, inplace=False)  # of bags alone, by default
    tables = model[0].embedding_bag_configs()
    expected = [DataType.FP32, DataType.INT8]
    assert [table.data_type for table in tables] == expected[: 1 + has_bags]
    features = KeyedJaggedTensor(
        ["item", "hist", "user"], torch.arange(3), lengths=torch.tensor([1] * 3)
    )
    with pytest.raises(RuntimeError, match="additional_qconfig_spec_keys"):
        model(features)


@pytest.mark.parametrize("has_bags", [False, True])
@pytest.mark.parametrize("types", [None, [EmbeddingCollection]])
def test_pruned_sequences_are_refused(has_bags: bool, types: list[type] | None):
    model = copy.deepcopy(nn.Sequential(make_quantizable(has_bags)))
    set_pruning_data(model, {"t1": 20, "other": 3}, types)
    with pytest.raises(NotImplementedError, match=r"alone, since .*, got \['t1'\]"):
        quantize_inference_model(model)


def test_pruned_bags():
    model = nn.Sequential(make_quantizable())
    set_pruning_data(model, {"t2": 20})
    quantize_inference_model(model)
    tables = model[0].embedding_bag_configs()
    assert [table.num_embeddings_post_pruning for table in tables] == [None, 20]


def trace(model: nn.Module) -> torch.fx.GraphModule:
    """Trace like TorchRec for inference, with FBGEMM's module as the only named leaf."""
    graph = Tracer(leaf_modules=["IntNBitTableBatchedEmbeddingBagsCodegen"]).trace(model)
    return torch.fx.GraphModule(model, graph)


@pytest.mark.parametrize("tables", ["fp32", "int8 to fp16"])
def test_traced_and_scripted(tables: str, device: torch.device, tmp_path: Path):
    scorer = make_scorer(tables, device)
    traced = trace(scorer)
    assert_equal(traced, scorer, device)
    torch.jit.save(torch.jit.script(traced), tmp_path / "scorer.pt")
    assert_equal(torch.jit.load(tmp_path / "scorer.pt"), scorer, device)


@pytest.mark.parametrize(
    ("name", "is_quantized"),
    [
        *((x, False) for x in SCENARIOS),
        *((x, True) for x in ("shared-table", "weighted", "projected")),
    ],
)
@torch.no_grad()
def test_options_traced_and_scripted(name: str, is_quantized: bool):
    """Trace and script like TorchRec's inference, without leaf modules of the tracer."""
    scenario = SCENARIOS[name]
    collection = nn.ModuleDict({"collection": make_collection(scenario).eval()})
    if is_quantized:
        quantize_inference_model(collection)
    batches = [
        to_features(make_scenario_batch(scenario, lengths, seed), is_weighted=scenario.is_weighted)
        for seed, lengths in enumerate([[2, 0, 3], [1, 4]])
    ]
    expected = [collection["collection"](batch).values() for batch in batches]
    scripted = torch.jit.script(symbolic_trace(collection["collection"]))
    for batch, values in zip(batches, expected, strict=True):
        assert torch.equal(scripted(batch).values(), values)


def test_sharded_for_inference(device: torch.device):
    scorer = make_scorer("int4", device)
    set_propogate_device(True)  # or it asks CUDA for a device
    sharded, plan = shard_quant_model(
        make_scorer("int4", device),
        compute_device=device.type,
        sharding_device=device.type,
        constraints={
            name: ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["quant"])
            for name in FEATURES
        },
    )
    assert sorted(name for tables in plan.plan.values() for name in tables) == sorted(FEATURES)
    assign_weights_to_tbe(sharded, get_table_to_weights_from_tbe(scorer))
    assert_equal(sharded, scorer, device)
    traced = trace(sharded)
    assert_equal(traced, scorer, device)
    assert_equal(torch.jit.script(traced), scorer, device)


@functools.cache
def exported(tables: str, device: torch.device) -> torch.export.ExportedProgram:
    """For batches of any size from two on, and histories of any length; strict for fp32 tables."""
    dynamic = torch.export.Dim.DYNAMIC
    with torch.no_grad():
        return torch.export.export(
            make_scorer(tables, device),
            inputs(device)[0],
            dynamic_shapes={"dense": {0: dynamic}, "ids": {0: dynamic}, "lengths": {1: dynamic}},
            strict=tables == "fp32",
        )


@pytest.mark.parametrize("tables", ["fp32", "int4"])
def test_exported(tables: str, device: torch.device, tmp_path: Path, fake_classes):
    scorer = make_scorer(tables, device)
    program = exported(tables, device)
    assert_equal(program.module(), scorer, device)
    if tables == "fp32":
        torch.export.save(program, tmp_path / "scorer.pt2")
        assert_equal(torch.export.load(tmp_path / "scorer.pt2").module(), scorer, device)


def test_exported_program_checks_inputs(device: torch.device):
    """Numbers of rows; their errors are the exporter's."""
    program = exported("fp32", device).module()
    dense, ids, lengths = inputs(device)[0]
    two_targets = lengths.clone()
    two_targets[KEYS.index("item"), 0] += 1
    with pytest.raises((RuntimeError, AssertionError)):
        program(dense, torch.cat([ids, ids[:1]]), two_targets)
