"""Replays the dense layers of a DLRM as CUDA graphs while it trains."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torchrec.models.dlrm import DLRM


def replay_dense_layers(
    model: DLRM, batch_size: int, device: torch.device, row_dtype: torch.dtype = torch.float32
) -> None:
    """Captures the layers around the lookups, forward and backward.

    Their shapes are the same in each full batch. Lookups and attention, whose numbers of rows vary,
    are not captured, and neither is evaluation. Call it once the model has its weights, before
    DistributedModelParallel; for training under autocast, call it under autocast without its cache.

    Args:
        model: its dense layers move to `device`.
        batch_size: of each rank in training.
        device: a GPU.
        row_dtype: of what the lookups return.
    """
    layers = [model.dense_arch, model.inter_arch, model.over_arch]
    for layer in layers:
        layer.to(device)
    tables = model.sparse_arch.embedding_bag_collection.embedding_bag_configs()
    shape = batch_size, model.inter_arch.F, tables[0].embedding_dim
    num_dense = next(model.dense_arch.parameters()).shape[1]
    with torch.no_grad():
        features = torch.zeros(batch_size, num_dense, device=device)
        dense, sparse = (
            model.dense_arch(features),
            torch.zeros(shape, dtype=row_dtype, device=device),
        )
        interactions = model.inter_arch(dense, sparse)
    for embedded in (dense, sparse, interactions):
        embedded.requires_grad_()
    inputs = [(features,), (dense, sparse), (interactions,)]

    # Graphs are of functions that also take the weights. Those of modules would hold on to
    # autograd's nodes of the weights, which belong to the stream of the capture.
    samples = tuple(
        (*(x.detach().requires_grad_() for x in layer.parameters()), *args)
        for layer, args in zip(layers, inputs, strict=True)
    )
    warn_of_streams = torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch
    warn_of_streams(False)  # PyTorch warms up on one stream and captures on another
    graphs = torch.cuda.make_graphed_callables(tuple(map(_function, layers)), samples)
    warn_of_streams(True)
    for layer, graph in zip(layers, graphs, strict=True):
        layer.forward = _forward(layer, graph)


def _function(layer: nn.Module) -> Callable[..., Tensor]:
    """``layer`` as a function of its weights and inputs."""
    names = [name for name, _ in layer.named_parameters()]

    def call(*tensors: Tensor) -> Tensor:
        weights = dict(zip(names, tensors, strict=False))
        return functional_call(layer, weights, tensors[len(names) :])

    return call


def _forward(layer: nn.Module, graph: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The graph while ``layer`` trains, and else what its class says."""
    launch, weights = layer.forward, tuple(layer.parameters())

    def forward(*inputs: Tensor, **named: Tensor) -> Tensor:
        if not layer.training:
            return launch(*inputs, **named)
        return graph(*weights, *inputs, *named.values())

    return forward
