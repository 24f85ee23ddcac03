"""Where the GPU's time goes in a training step, from a profile in which attentions are marked."""

from __future__ import annotations

import collections
import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_jagged_attn.modules.pooling import TargetAttentionPooling

__all__ = ["MARK", "PARTS", "Trace", "attentions_of", "marked_attentions"]

MARK = "attention of end_to_end"
PARTS = ("lookups", "attention", "dense", "communication", "copies")
LOOKUP = re.compile(
    "embedding|rowwise_adagrad|radix|jagged|cumsum|lengths|bounds_check|linearize|permute|unique|"
    "long_segments|expand_into|block_bucketize|keyed|scan",
    re.IGNORECASE,
)
"""Names of kernels that look up rows, or update them."""


class Trace:
    """What ran on a GPU.

    Args:
        events: trace events, as ``torch.profiler`` exports them.

    Attributes:
        busy_us: microseconds in which anything ran.
        parts_us: of each of ``PARTS``, those of its kernels. Two that ran at once count twice.
    """

    def __init__(self, events: list[dict[str, Any]]) -> None:
        ran = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
        marks: dict[Any, list[tuple[float, float]]] = collections.defaultdict(list)
        launches = {}
        for event in events:
            category = event.get("cat")
            if category == "user_annotation" and event["name"] == MARK:
                marks[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
            elif category in ("cuda_runtime", "cuda_driver"):
                launches[event.get("args", {}).get("correlation")] = event
        self.busy_us = end = 0.0
        for event in sorted(ran, key=lambda event: event["ts"]):
            last = event["ts"] + event["dur"]
            self.busy_us += max(0.0, last - max(event["ts"], end))
            end = max(end, last)
        self.parts_us = dict.fromkeys(PARTS, 0.0)
        for event in ran:
            launch = launches.get(event.get("args", {}).get("correlation"))
            spans = marks[launch["tid"]] if launch else ()
            inside = any(first <= launch["ts"] <= last for first, last in spans)
            self.parts_us[part_of(event["name"], event["cat"], inside)] += event["dur"]

    @classmethod
    def read(cls, file: Path) -> Trace:
        """From a file that ``torch.profiler`` has written."""
        return cls(json.loads(file.read_text())["traceEvents"])


def part_of(name: str, category: str, in_attention: bool) -> str:
    """One of ``PARTS``: what a kernel, or a copy, of that name is for."""
    if "nccl" in name.lower():
        return "communication"
    if in_attention:
        return "attention"
    if category != "kernel":
        return "copies"
    return "lookups" if LOOKUP.search(name) else "dense"


def attentions_of(model: nn.Module) -> list[nn.ModuleList]:
    """The attentions of each collection in ``model``."""
    return [m.attentions for m in model.modules() if isinstance(m, TargetAttentionPooling)]


@contextlib.contextmanager
def marked_attentions(model: nn.Module) -> Iterator[None]:
    """While it is open, forward and backward of all attentions of ``model`` are marked."""
    lists = attentions_of(model)
    for attentions in lists:
        for i, attention in enumerate(attentions):
            attentions[i] = Marked(attention)
    yield
    for attentions in lists:
        for i, marked in enumerate(attentions):
            attentions[i] = marked.attention


class Marked(nn.Module):
    """An attention whose forward and backward are marked in a profile."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(
        self, target: Tensor | JaggedTensor, history: JaggedTensor, *rest: Any, **by_index: Tensor
    ) -> Tensor:
        with record_function(MARK):
            queries = target.values() if isinstance(target, JaggedTensor) else target
            queries, rows = _Ends.apply(self, queries, history.values())
            history = JaggedTensor(rows, lengths=history.lengths(), offsets=history.offsets())
            if isinstance(target, JaggedTensor):
                queries = JaggedTensor(queries, lengths=target.lengths(), offsets=target.offsets())
            return _Begins.apply(self, self.attention(queries, history, *rest, **by_index))


class _Begins(torch.autograd.Function):
    """The output of an attention: its backward begins with the gradient of it."""

    @staticmethod
    def forward(ctx, marked: Marked, out: Tensor):
        ctx.marked = marked
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.marked.backward_mark = record_function(MARK)
        ctx.marked.backward_mark.__enter__()
        return None, grad


class _Ends(torch.autograd.Function):
    """The inputs of an attention: their gradients are the last that its backward makes."""

    @staticmethod
    def forward(ctx, marked: Marked, *inputs: Tensor):
        ctx.marked = marked
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        ctx.marked.backward_mark.__exit__(None, None, None)
        return None, *grads
