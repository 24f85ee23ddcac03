"""``select_events``: the events of each user with the highest scores, or the newest.

``padded`` pads the scores, takes PyTorch's top-k and sorts its indices; the output is padded, too.
``sorted`` sorts the scores of all users at once, as 64-bit keys with the user's number. Both
compute all that depends only on lengths beforehand, and use the row number as score of the newest
events. ``padded-newest`` computes the rows of the newest events from the offsets. No provider waits
for the device, because the number of kept events is given.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from suites import Cost, Inputs, PreparedCall, Suite, UnavailableError
from tests.cases import Case, jagged_lengths, offsets_of
from torchrec_jagged_attn.events import select_events
from torchrec_jagged_attn.ops import JaggedLayout

BF16 = torch.bfloat16


@dataclass(frozen=True)
class SelectionCase(Case):
    """A shape, the maximum number of events to keep of each user, and whether by score."""

    keep: int = 64
    by_score: bool = True


SHAPES = (
    # The mean of a log-normal is an eighth of the longest.
    SelectionCase("events-200", 4096, 1600, 1, 128, 1, "log-normal", BF16, large=True),
    SelectionCase("events-200-narrow", 4096, 1600, 1, 8, 1, "log-normal", BF16, large=True),
    SelectionCase("cpu-events-200", 512, 1600, 1, 32, 1, "log-normal"),
)
CASES = {
    case.name: case
    for shape in SHAPES
    for case in (shape, replace(shape, name=f"{shape.name}-newest", by_score=False))
}


@dataclass(frozen=True)
class Scored(Inputs):
    """Different scores ``[N]`` of the events; ``None`` to keep the newest."""

    scores: Tensor | None

    @property
    def num_kept(self) -> int:
        """Number of kept events of all users."""
        return int(self.offsets.diff().clamp(max=self.case.keep).sum())


def make_inputs(case: Case, device: str) -> Scored:
    """History ``[N, D]``."""
    generator = torch.Generator().manual_seed(0)
    lengths = jagged_lengths(case.batch_size, case.max_length, case.lengths, generator)
    num_rows = int(lengths.sum())
    history = torch.randn(num_rows, case.width, generator=generator)
    history = history.to(device, case.dtype).requires_grad_()
    scores = torch.randperm(num_rows, generator=generator).to(device, torch.float32)
    offsets = offsets_of(lengths, torch.int64, device)
    even = Inputs.even(case, {"history": history}, offsets)
    return Scored(**vars(even), scores=scores if case.by_score else None)


def scores_or_numbers(x: Scored) -> Tensor:
    """Return the scores, or without scores the row numbers."""
    if x.scores is not None:
        return x.scores
    return torch.arange(int(x.offsets[-1]), device=x.offsets.device, dtype=torch.float32)


def oracle(x: Scored) -> Tensor:
    """Return PyTorch's top-k of each user separately."""
    history = x.leaves["history"]
    kept = []
    lengths = x.offsets.diff().tolist()
    for begin, scores in zip(x.offsets.tolist(), scores_or_numbers(x).split(lengths), strict=False):
        best = scores.topk(min(x.case.keep, len(scores))).indices
        kept.append(best.sort().values + begin)
    return history[torch.cat(kept)]


def ours(x: Scored) -> Callable[[], Tensor]:
    """The op ``select_events``."""
    history, capacity = JaggedTensor(x.leaves["history"], offsets=x.offsets), x.num_kept
    return lambda: select_events(history, x.scores, keep=x.case.keep, capacity=capacity).values()


def padded(x: Scored) -> PreparedCall:
    """PyTorch's top-k of padded scores; rows ``[B, K, D]``."""
    history, length = x.leaves["history"], x.max_length
    layout = JaggedLayout(x.offsets, len(history))
    begins = x.offsets[:-1].unsqueeze(1)
    at = layout.sample_ids() * length + torch.arange(len(history), device=x.offsets.device)
    at -= x.offsets[layout.sample_ids()]
    keep, scores = min(x.case.keep, length), scores_or_numbers(x)

    def call() -> Tensor:
        padded_scores = scores.new_full((x.case.batch_size * length,), -torch.inf)
        padded_scores[at] = scores
        values, indices = padded_scores.view(-1, length).topk(keep, sorted=False)
        indices = indices.masked_fill(values == -torch.inf, length).sort(1).values
        rows = (indices.clamp(max=length - 1) + begins).clamp(max=len(history) - 1)
        return history[rows]

    return padded_provider(x, call, keep)


def padded_newest(x: Scored) -> PreparedCall:
    """The newest rows by row number; rows ``[B, K, D]``."""
    if x.scores is not None:
        raise UnavailableError("it keeps the newest rows only")
    history, keep = x.leaves["history"], min(x.case.keep, x.max_length)

    def call() -> Tensor:
        begins = torch.maximum(x.offsets[1:] - keep, x.offsets[:-1]).unsqueeze(1)
        rows = begins + torch.arange(keep, device=begins.device)
        return history[rows.clamp(max=len(history) - 1)]

    return padded_provider(x, call, keep)


def padded_provider(x: Scored, call: Callable[[], Tensor], keep: int) -> PreparedCall:
    """Return a call whose output is ``[B, keep, D]``, each user's rows first."""
    is_kept = torch.arange(keep, device=x.offsets.device) < x.offsets.diff().unsqueeze(1)

    def pad(name: str, tensor: Tensor) -> Tensor:
        if name != "out":
            return tensor
        padded = tensor.new_zeros(*is_kept.shape, tensor.shape[1])
        padded[is_kept] = tensor
        return padded

    def restore(name: str, tensor: Tensor) -> Tensor:
        return tensor[is_kept] if name == "out" else tensor

    return PreparedCall(call, x.leaves, pad, restore)


def sorted_together(x: Scored) -> Callable[[], Tensor]:
    """One sort of 64-bit keys, and another of the kept rows."""
    history = x.leaves["history"]
    users = JaggedLayout(x.offsets, len(history)).sample_ids()
    kept = x.offsets.diff().clamp(max=x.case.keep)
    ends = kept.cumsum(0)
    shift = torch.repeat_interleave(x.offsets[:-1] - (ends - kept), kept)
    at = torch.arange(len(shift), device=shift.device) + shift
    scores = scores_or_numbers(x)

    def call() -> Tensor:
        bits = scores.view(torch.int32).long()  # ordered like the scores, which are >= 0
        order = ((users << 32) - bits).argsort()
        return history[order[at].sort().values]

    return call


def cost(x: Scored) -> dict[str, Cost]:
    """Reads the scores and the kept rows, and writes these rows; backward writes all gradients."""
    row_bytes = x.leaves["history"][0].nbytes
    score_bytes = 0 if x.scores is None else x.scores.nbytes
    return {
        "forward": Cost(score_bytes + 2 * x.num_kept * row_bytes, 0),
        "backward": Cost((x.num_kept + int(x.offsets[-1])) * row_bytes, 0),
    }


SUITE = Suite(
    name="select_events",
    measures="rows with the highest scores of each user, or the newest",
    cases=CASES,
    inputs=make_inputs,
    oracle=oracle,
    cost=cost,
    providers={
        "ours": ours,
        "padded": padded,
        "padded-newest": padded_newest,
        "sorted": sorted_together,
    },
)
