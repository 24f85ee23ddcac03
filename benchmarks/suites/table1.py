"""The feature interactions of the paper's Table 1: native PyTorch with padding, FBGEMM, and ours.

The shape "paper" follows from the FLOPs and memory in the paper's table. Samples of x and y have
the same lengths.

``padded`` takes padded operands and returns a padded result, the best case of a model that pads.
``jagged-padded-jagged`` pads and unpads in every call.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import torchrec_jagged_attn
from suites import Cost, Inputs, PreparedCall, Suite, UnavailableError
from tests.cases import Case, jagged_lengths, offsets_of

SIZES = {  # of each shape: B, L, H, D, T and dtype
    "paper": (1024, 200, 1, 256, 8, torch.float32),
    "large": (4096, 400, 1, 128, 16, torch.bfloat16),  # past the L2 cache
    "cpu": (64, 100, 1, 32, 8, torch.float32),
}


@dataclass(frozen=True)
class Op:
    """A row of the table."""

    # Axes of each operand and of the result: N rows, P pairs of them, B samples, D and T widths
    layout: dict[str, str]
    padded: Callable[..., Tensor]  # the op, from a mask of real rows or pairs and padded operands
    fbgemm: Callable[["Jagged"], Tensor] | None  # FBGEMM's CUDA op, if there is one
    sll: Callable[["Jagged"], Tensor]  # FBGEMM's Triton op
    flops: Callable[[int, int, int, int], int]  # of products, from (N, P, D, T)


class Jagged:
    """A case's operands, and the lengths and offsets of its batch."""

    def __init__(self, x: Inputs) -> None:
        self.op = get_op(x.case)
        self.leaves = x.leaves
        self.offsets = x.offsets
        self.lengths = x.offsets.diff()
        self.pair_lengths = self.lengths**2
        self.pair_offsets = torch.nn.functional.pad(self.pair_lengths.cumsum(0), (1, 0))
        self.num_pairs = int(self.pair_offsets[-1])
        self.max_length = x.max_length
        self.allow_tf32 = torch.get_float32_matmul_precision() != "highest"

    @property
    def operands(self) -> list[Tensor]:
        return list(self.leaves.values())

    def pair_arguments(self) -> list:
        """Arguments of FBGEMM's Triton ops of pairs that follow the operands."""
        rows = [self.lengths, self.offsets]
        by_axis = {"N": rows, "P": [self.pair_lengths, self.pair_offsets]}
        tensors = [t for letters in self.op.layout.values() for t in by_axis[letters[0]]]
        return [*tensors, self.max_length, self.allow_tf32]


def op_name(case: Case) -> str:
    """Return the name of a case's op."""
    return case.name.rpartition("-")[0]


def get_op(case: Case) -> Op:
    return OPS[op_name(case)]


OPS = {
    "jagged_dense_bmm": Op(
        {"x": "ND", "y": "BDT", "out": "NT"},
        lambda real, x, y: x @ y,
        lambda j: torch.ops.fbgemm.jagged_dense_bmm(
            j.leaves["x"], j.offsets, j.leaves["y"], j.max_length
        )[0],
        lambda j: torch.ops.fbgemm.sll_jagged_dense_bmm(
            *j.operands, j.offsets, j.max_length, j.allow_tf32, use_fbgemm_kernel=False
        ),
        lambda n, p, d, t: 2 * n * d * t,
    ),
    "jagged_jagged_bmm": Op(
        {"x": "ND", "y": "NT", "out": "BDT"},
        lambda real, x, y: x.mT @ y,
        lambda j: torch.ops.fbgemm.jagged_jagged_bmm(*j.operands, j.offsets, j.max_length),
        lambda j: torch.ops.fbgemm.sll_jagged_jagged_bmm(
            *j.operands, j.offsets, j.max_length, j.allow_tf32, use_fbgemm_kernel=False
        ),
        lambda n, p, d, t: 2 * n * d * t,
    ),
    "jagged_softmax": Op(
        {"x": "NT", "out": "NT"},
        lambda real, x: x.masked_fill(~real, -torch.inf).softmax(1),
        lambda j: torch.ops.fbgemm.jagged_softmax(*j.operands, j.offsets, j.max_length)[0],
        lambda j: torch.ops.fbgemm.sll_jagged_softmax(
            *j.operands, j.offsets, j.max_length, use_fbgemm_kernel=False
        ),
        lambda n, p, d, t: 5 * n * t,
    ),
    "jagged_jagged_bmm_jagged_out": Op(
        {"x": "ND", "y": "ND", "out": "P"},
        lambda real, x, y: x @ y.mT,
        None,
        lambda j: torch.ops.fbgemm.sll_jagged_jagged_bmm_jagged_out(
            *j.operands, *j.pair_arguments()
        ),
        lambda n, p, d, t: 2 * p * d,
    ),
    "array_jagged_bmm_jagged_out": Op(
        {"p": "P", "y": "ND", "out": "ND"},
        lambda real, p, y: p @ y,
        None,
        lambda j: torch.ops.fbgemm.sll_array_jagged_bmm_jagged_out(
            *j.operands, *j.pair_arguments()
        ),
        lambda n, p, d, t: 2 * p * d,
    ),
    "jagged2_softmax": Op(
        {"p": "P", "out": "P"},
        # Only columns are masked: a row without unmasked columns would be NaN.
        lambda real, p: p.masked_fill(~real[:, :1], -torch.inf).softmax(2),
        None,
        lambda j: torch.ops.fbgemm.sll_jagged2_softmax(
            *j.operands, j.offsets, j.pair_offsets, j.max_length, transpose=False
        ),
        lambda n, p, d, t: 5 * p,
    ),
}


CASES = {
    name: Case(name, *sizes, "uniform", dtype, large=shape != "cpu")
    for shape, (*sizes, dtype) in SIZES.items()
    for op in OPS
    for name in [f"{op}-{shape}"]
}


def axis_sizes(case: Case, lengths: Tensor) -> dict[str, int]:
    """Return the sizes of the axes in layouts."""
    return {
        "N": int(lengths.sum()),
        "P": int((lengths**2).sum()),
        "B": case.batch_size,
        "D": case.width,
        "T": case.num_targets,
    }


def make_inputs(case: Case, device: str) -> Inputs:
    """Return the operands and the offsets of their rows."""
    generator = torch.Generator().manual_seed(0)
    lengths = jagged_lengths(case.batch_size, case.max_length, case.lengths, generator)
    sizes = axis_sizes(case, lengths)
    on_device = torch.Generator(device).manual_seed(0)
    leaves = {
        name: torch.randn([sizes[letter] for letter in letters], generator=on_device, device=device)
        .to(case.dtype)
        .requires_grad_()
        for name, letters in get_op(case).layout.items()
        if name != "out"
    }
    return Inputs.even(case, leaves, offsets_of(lengths, case.index_dtype, device))


class Padding:
    """Pads and unpads tensors by their axes; tensors with one entry per sample are unchanged."""

    def __init__(self, x: Inputs) -> None:
        steps = torch.arange(x.max_length, device=x.offsets.device)
        rows = steps < x.offsets.diff()[:, None]
        self.real = {"N": rows, "P": rows[:, :, None] & rows[:, None]}
        self.indices = {
            letter: real.flatten().nonzero().squeeze(1) for letter, real in self.real.items()
        }

    def pad(self, values: Tensor, letters: str) -> Tensor:
        real = self.real.get(letters[0])
        if real is None:
            return values
        flat = values.new_zeros(real.numel(), *values.shape[1:])
        return flat.index_copy_(0, self.indices[letters[0]], values).unflatten(0, real.shape)

    def unpad(self, padded: Tensor, letters: str) -> Tensor:
        real = self.real.get(letters[0])
        if real is None:
            return padded
        return padded.flatten(0, real.dim() - 1).index_select(0, self.indices[letters[0]])

    def real_mask(self, letters: str) -> Tensor:
        """Return a mask of the real elements of a padded result, broadcastable to it."""
        real = self.real.get(letters[0], self.real["N"])
        return real if letters[0] == "P" else real.unsqueeze(2)


def padded(x: Inputs) -> PreparedCall:
    """Operands are padded before the call, and results remain padded."""
    op, padding = get_op(x.case), Padding(x)
    layout = op.layout
    real = padding.real_mask(layout["out"])
    return PreparedCall.from_inputs(
        x,
        lambda *operands: op.padded(real, *operands),
        prepare=lambda name, values: padding.pad(values, layout[name]),
        restore=lambda name, values: padding.unpad(values, layout[name]),
    )


def through_padding(x: Inputs) -> Callable[[], Tensor]:
    """Operands are padded, and the result is unpadded, in every call."""
    op, padding = get_op(x.case), Padding(x)
    layout = op.layout
    real = padding.real_mask(layout["out"])

    def call() -> Tensor:
        operands = [padding.pad(leaf, layout[name]) for name, leaf in x.leaves.items()]
        return padding.unpad(op.padded(real, *operands), layout["out"])

    return call


def formula(x: Inputs) -> Tensor:
    return through_padding(x)()


def fbgemm_cuda(x: Inputs) -> Callable[[], Tensor]:
    """FBGEMM's ops in C++ and CUDA."""
    jagged = Jagged(x)
    fbgemm = jagged.op.fbgemm
    if fbgemm is None:
        raise UnavailableError("FBGEMM has only a Triton op")
    import fbgemm_gpu  # noqa: F401  (registers the ops)

    return lambda: fbgemm(jagged)


def fbgemm_sll(x: Inputs) -> Callable[[], Tensor]:
    """FBGEMM's ops in Triton."""
    if x.offsets.device.type != "cuda":
        raise UnavailableError("needs CUDA")
    import fbgemm_gpu.sll  # noqa: F401  (registers the ops)

    jagged = Jagged(x)
    return lambda: jagged.op.sll(jagged)


def ours(x: Inputs) -> Callable[[], Tensor]:
    """The op, with the number of pairs as an argument, so that the host does not wait."""
    jagged = Jagged(x)
    name = op_name(x.case)
    size = {"total": jagged.num_pairs} if name == "jagged_jagged_bmm_jagged_out" else {}
    op = getattr(torchrec_jagged_attn.ops, name)
    return lambda: op(*jagged.operands, jagged.offsets, **size)


def cost(x: Inputs) -> dict[str, Cost]:
    """Operands are read once and results written once; backward of a softmax reads its output."""
    op, sizes = get_op(x.case), axis_sizes(x.case, x.offsets.diff())
    out = math.prod(sizes[letter] for letter in op.layout["out"])
    flops = op.flops(*(sizes[letter] for letter in "NPDT"))
    operands = sum(leaf.numel() for leaf in x.leaves.values())
    size = x.case.dtype.itemsize
    kept = out if "softmax" in op_name(x.case) else operands
    return {
        "forward": Cost(size * (operands + out), flops),
        "backward": Cost(size * (kept + out + operands), len(x.leaves) * flops),
    }


SUITE = Suite(
    name="table1",
    measures="the paper's Table 1: jagged products, softmaxes",
    cases=CASES,
    inputs=make_inputs,
    oracle=formula,
    cost=cost,
    providers={
        "ours": ours,
        "padded": padded,
        "jagged-padded-jagged": through_padding,
        "fbgemm-cuda": fbgemm_cuda,
        "fbgemm-sll": fbgemm_sll,
    },
)
