"""The events of each user with the highest scores, or the newest, out of a history of rows.

``padded`` pads the scores, takes PyTorch's top-k and sorts what it finds by place; its output is
padded, too. ``sorted`` sorts the scores of all users at once, as one 64-bit key with the user's
number. Both have what follows from lengths alone beforehand; all know how many events are kept, so
that nothing waits for the device. Where the newest are kept, without scores, the number of a row
is its score for both. These need no scores: ``padded-newest`` finds their places in the padded
output from the offsets.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from suites import Cost, Inputs, Relaid, Suite, UnavailableError
from tests.cases import Case, jagged_lengths, offsets_of
from torchrec_jagged_attn.events import select_events
from torchrec_jagged_attn.ops import JaggedLayout

BF16 = torch.bfloat16


@dataclass(frozen=True)
class SelectionCase(Case):
    """A shape, how many events of a user are kept at most, and whether by score."""

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
    """Scores ``[N]`` of the events, no two alike; ``None`` to keep the newest."""

    scores: Tensor | None

    @property
    def num_kept(self) -> int:
        """Events of all users that are kept."""
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


def own_scores(x: Scored) -> Tensor:
    """Without scores, the number of a row is its score."""
    if x.scores is not None:
        return x.scores
    return torch.arange(int(x.offsets[-1]), device=x.offsets.device, dtype=torch.float32)


def oracle(x: Scored) -> Tensor:
    """PyTorch's top-k of each user alone."""
    history = x.leaves["history"]
    kept = []
    lengths = x.offsets.diff().tolist()
    for begin, scores in zip(x.offsets.tolist(), own_scores(x).split(lengths), strict=False):
        best = scores.topk(min(x.case.keep, len(scores))).indices
        kept.append(best.sort().values + begin)
    return history[torch.cat(kept)]


def ours(x: Scored) -> Callable[[], Tensor]:
    """``select_events``."""
    history, capacity = JaggedTensor(x.leaves["history"], offsets=x.offsets), x.num_kept
    return lambda: select_events(history, x.scores, keep=x.case.keep, capacity=capacity).values()


def padded(x: Scored) -> Relaid:
    """PyTorch's top-k of padded scores; rows ``[B, K, D]``."""
    history, length = x.leaves["history"], x.max_length
    layout = JaggedLayout(x.offsets, len(history))
    begins = x.offsets[:-1].unsqueeze(1)
    at = layout.sample_ids() * length + torch.arange(len(history), device=x.offsets.device)
    at -= x.offsets[layout.sample_ids()]
    keep, scores = min(x.case.keep, length), own_scores(x)

    def call() -> Tensor:
        of_users = scores.new_full((x.case.batch_size * length,), -torch.inf)
        of_users[at] = scores
        values, places = of_users.view(-1, length).topk(keep, sorted=False)
        places = places.masked_fill(values == -torch.inf, length).sort(1).values
        rows = (places.clamp(max=length - 1) + begins).clamp(max=len(history) - 1)
        return history[rows]

    return of_padded(x, call, keep)


def padded_newest(x: Scored) -> Relaid:
    """The newest rows by their numbers; rows ``[B, K, D]``."""
    if x.scores is not None:
        raise UnavailableError("it keeps the newest alone")
    history, keep = x.leaves["history"], min(x.case.keep, x.max_length)

    def call() -> Tensor:
        begins = torch.maximum(x.offsets[1:] - keep, x.offsets[:-1]).unsqueeze(1)
        rows = begins + torch.arange(keep, device=begins.device)
        return history[rows.clamp(max=len(history) - 1)]

    return of_padded(x, call, keep)


def of_padded(x: Scored, call: Callable[[], Tensor], keep: int) -> Relaid:
    """A call whose output is ``[B, keep, D]``, a user's rows at the begin."""
    is_kept = torch.arange(keep, device=x.offsets.device) < x.offsets.diff().unsqueeze(1)

    def lay(name: str, tensor: Tensor) -> Tensor:
        if name != "out":
            return tensor
        laid = tensor.new_zeros(*is_kept.shape, tensor.shape[1])
        laid[is_kept] = tensor
        return laid

    def restore(name: str, tensor: Tensor) -> Tensor:
        return tensor[is_kept] if name == "out" else tensor

    return Relaid(call, x.leaves, lay, restore)


def sorted_together(x: Scored) -> Callable[[], Tensor]:
    """One sort of 64-bit keys, and another of the rows that are kept."""
    history = x.leaves["history"]
    users = JaggedLayout(x.offsets, len(history)).sample_ids()
    kept = x.offsets.diff().clamp(max=x.case.keep)
    ends = kept.cumsum(0)
    shift = torch.repeat_interleave(x.offsets[:-1] - (ends - kept), kept)
    at = torch.arange(len(shift), device=shift.device) + shift
    scores = own_scores(x)

    def call() -> Tensor:
        bits = scores.view(torch.int32).long()  # of numbers that are not negative
        order = ((users << 32) - bits).argsort()
        return history[order[at].sort().values]

    return call


def cost(x: Scored) -> dict[str, Cost]:
    """Read scores and the rows that are kept, and write these; in backward, all gradients."""
    of_rows = x.leaves["history"][0].nbytes
    of_scores = 0 if x.scores is None else x.scores.nbytes
    return {
        "forward": Cost(of_scores + 2 * x.num_kept * of_rows, 0),
        "backward": Cost((x.num_kept + int(x.offsets[-1])) * of_rows, 0),
    }


SUITE = Suite(
    name="select_events",
    measures="rows of highest scores of a user, or the newest",
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
