"""Jagged flash attention: multi-head attention within each sample, tiled, with an online softmax.

With P = Σ Lq·Lk pairs (about half of them when causal), H heads and widths D and Dv:

    forward    2·H·P·(D + Dv) FLOPs
    backward   H·P·(10·D + 4·Dv) FLOPs: scores once for dq and once for dk, dv

and q, k, v, out and their gradients are moved once per tile of the other side. Backward runs two
kernels, one over tiles of queries and one over tiles of keys, and no atomics. Samples short enough
are whole in one tile, and go through kernels of their own, where nothing is computed twice
(``general_short.py``). On Hopper half precision without biases of keys has kernels of its own for
all of this (``hopper_forward.py``; ``hopper_backward.py``, which computes scores once, and adds up
in turns; ``hopper_short.py``, without any bias).

Biases belong to a head and a key row, or the bucket of its position or age, or the bucket of its
distance to the query (``distance_bias.py``; the kernels of Hopper take this one). Gradients of
tables are summed by tile, then over the tiles; for that of distances scores are computed once more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_jagged_attn import devices
from torchrec_jagged_attn.arguments import FlashArguments, FlashGradients, FlashOutputs
from torchrec_jagged_attn.kernels.common.launch import Launcher, overlap_options
from torchrec_jagged_attn.kernels.common.matmul import dot_precision, padded_width, tile_rows
from torchrec_jagged_attn.kernels.common.softmax import LOG2E
from torchrec_jagged_attn.kernels.common.tile_list import list_tiles, most_tiles
from torchrec_jagged_attn.kernels.flash import hopper_backward, hopper_forward, hopper_short
from torchrec_jagged_attn.kernels.flash.distance_bias import list_by_distance
from torchrec_jagged_attn.kernels.flash.general_backward import (
    grad_kv_kernel,
    grad_q_kernel,
    grad_relative_kernel,
)
from torchrec_jagged_attn.kernels.flash.general_forward import forward_kernel
from torchrec_jagged_attn.kernels.flash.general_short import (
    backward_short_kernel,
    forward_short_kernel,
)

__all__ = ["backward", "forward", "paths"]

SHORT = 32  # rows of a sample that a tile of general_short.py takes whole

_forward = Launcher(forward_kernel)
_forward_short = Launcher(forward_short_kernel)
_grad_q = Launcher(grad_q_kernel)
_grad_kv = Launcher(grad_kv_kernel)
_grad_relative = Launcher(grad_relative_kernel)
_backward_short = Launcher(backward_short_kernel)


def forward(args: FlashArguments) -> FlashOutputs:
    """Attend."""
    q, v = args.q, args.v
    call = _Call(args)
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    stats = q.new_empty([2, *q.shape[:2]], dtype=torch.float32)
    if out.numel() == 0:
        return FlashOutputs(out, stats)
    sizes = (stats[0].numel(), call.reach, call.factor)
    tile = call.forward_tile()
    block = hopper_forward.BLOCK_M if call.on_hopper else tile["BLOCK_M"]
    tiles = call.list_tiles(block, of_keys=False)
    if call.short_on_hopper:
        hopper_short.forward(*call.inputs, out, stats, *call.offsets, call.factor, args.causal)
    elif call.short:
        _forward_short(
            (call.num_samples * q.shape[1],),
            (*call.inputs, out, stats, *call.offsets, stats[0].numel(), call.factor),
            call.shape | call.short_tile(),
        )
    if call.on_hopper:
        hopper_forward.forward(
            *call.inputs, out, stats, call.by_distance, tiles, call.factor, args.causal, call.width
        )
        return FlashOutputs(out, stats)
    _forward(
        ((tiles.shape[0] - 1) * q.shape[1],),
        (*call.inputs, *call.biases, out, stats, call.offsets[1], tiles, *sizes),
        call.shape | call.tables | tile,
    )
    return FlashOutputs(out, stats)


def backward(
    grad_out: Tensor,
    args: FlashArguments,
    outputs: FlashOutputs,
    grad_k: Tensor,
    grad_v: Tensor,
    needs_bias: bool = True,
) -> FlashGradients:
    """Gradients, that of ``bias`` if ``needs_bias``; of prior weights, of their logarithms.

    Those of ``k`` and ``v`` are written into ``grad_k`` and ``grad_v``, whose rows may be apart.
    """
    q, k = args.q, args.k
    bias, position_bias, age_bias, _, relative_bias = args.biases
    causal, scale = args.causal, args.scale
    out, stats = outputs
    grad_out = grad_out.contiguous()
    grads_of_rows = (grad_out, grad_k, grad_v)
    call = _Call(args, grads_of_rows)
    grad_q, delta = q.new_empty(q.shape), torch.empty_like(stats[0])
    grad_bias = None
    if bias is not None and needs_bias:
        grad_bias = bias.new_empty(
            k.shape[0], q.shape[1], dtype=torch.float32 if call.tables["PRIOR"] else bias.dtype
        )
    grad_tables = grad_relative = None
    strides = {"GRAD_K_STRIDE": grad_k.stride(0), "GRAD_V_STRIDE": grad_v.stride(0)}
    sizes = (delta.numel(), call.reach, call.factor, scale)
    tile = call.grad_q_tile()
    prepared = ()
    if call.on_hopper:
        tiles = call.list_tiles(hopper_backward.BLOCK_N, of_keys=True, together=call.together)
        prepared = hopper_backward.prepare(
            grad_out, out, stats, grad_q, None if relative_bias is None else delta, *call.offsets,
            tiles, causal, call.width, call.short, call.is_self,
        )  # fmt: skip
    else:
        tiles = call.list_tiles(tile["BLOCK_M"], of_keys=False)
    if call.short_on_hopper:
        hopper_short.backward(
            grad_out, *call.inputs, grad_q, grad_k, grad_v, *call.offsets, call.factor, scale,
            causal,
        )  # fmt: skip
    elif call.short:
        _backward_short(
            (call.num_samples * k.shape[1],),
            (grad_out, *call.inputs, grad_q, grad_k, grad_v, *call.offsets, call.factor, scale),
            call.shape | strides | call.short_tile(),
        )
    if call.on_hopper:
        hopper_backward.backward(
            *call.inputs, grad_q, *grads_of_rows, *prepared, call.by_distance, call.offsets[1],
            tiles, call.factor, scale, causal, call.width,
        )  # fmt: skip
    elif q.shape[0]:
        _grad_q(
            ((tiles.shape[0] - 1) * q.shape[1],),
            (
                grad_out, *call.inputs, *call.biases, out, stats, grad_q, delta, call.offsets[1],
                tiles, *sizes,
            ),
            call.shape | call.tables | tile,
        )  # fmt: skip
    if relative_bias is not None:
        tile = call.grad_relative_tile()
        tiles = call.list_tiles(tile["BLOCK"], of_keys=False)
        num_programs = (tiles.shape[0] - 1) * q.shape[1]
        grad_relative = delta.new_zeros(num_programs, relative_bias.shape[0])
        if num_programs:
            _grad_relative(
                (num_programs,),
                (
                    grad_out, *call.inputs, *call.biases, stats, delta, grad_relative,
                    *call.offsets, tiles, *sizes[:-1],
                ),
                call.shape | call.tables | tile,
            )  # fmt: skip
    if k.shape[0] and not call.on_hopper:
        tile = call.grad_kv_tile()
        tiles = call.list_tiles(tile["BLOCK_N"], of_keys=True)
        num_tiles = tiles.shape[0] - 1
        num_buckets = call.tables["P"], call.tables["A"]
        if any(num_buckets):
            grad_tables = delta.new_zeros(num_tiles, sum(num_buckets), q.shape[1])
        _grad_kv(
            (num_tiles * k.shape[1],),
            (
                grad_out, *call.inputs, *call.biases, stats, delta, grad_k, grad_v,
                grad_bias, grad_tables, call.offsets[1], tiles, *sizes,
            ),
            call.shape | call.tables | strides | tile,
        )  # fmt: skip
    grads = [None, None, None]
    if grad_tables is not None:
        of_position, of_age = grad_tables.sum(0).split(num_buckets)
        grads[:2] = of_position, of_age.clone()  # which share no memory
    if grad_relative is not None:
        by_tile = grad_relative.view(-1, q.shape[1], grad_relative.shape[1]).mT
        grads[2] = torch.sum(by_tile, 0, out=delta.new_empty(by_tile.shape[1:]))  # contiguous
    tables = (position_bias, age_bias, relative_bias)
    return FlashGradients(grad_q, grad_k, grad_v, grad_bias, *map(_as_table, grads, tables))


class _Call:
    """What both directions of one call have in common; from shapes alone.

    How a sample's work is cut up may depend on nothing of the others. Tiles were found by trying,
    on an H200.
    """

    def __init__(self, args: FlashArguments, grads: tuple[Tensor, ...] = ()) -> None:
        q, k, v, q_offsets, kv_offsets = args[:5]
        bias, position_bias, age_bias, timestamps, relative_bias = args.biases
        causal, scale = args.causal, args.scale
        self.num_samples = q_offsets.numel() - 1
        self.inputs = (_rows(q), _rows(k), _rows(v))
        self.offsets = (q_offsets.contiguous(), kv_offsets.contiguous())
        self.is_self = _is_same(q_offsets, kv_offsets)
        self.lists: dict[tuple[int, int], Tensor] = {}
        self.by_distance, self.reach = None, 0
        if relative_bias is not None:
            self.by_distance = list_by_distance(relative_bias, max(q.shape[0], k.shape[0]))
            self.reach = self.by_distance.shape[1] // 2
        biases = (bias, position_bias, age_bias, timestamps)
        self.biases = tuple(None if x is None else x.contiguous() for x in biases)
        self.biases += (self.by_distance,)
        self.factor = abs(scale) * LOG2E.value
        self.precision = dot_precision(q.dtype)
        # One width for all: values narrower than keys come out wrong of Triton 3.6, on an H200.
        self.width = padded_width(max(q.shape[2], v.shape[2]))
        self.row_bytes = self.width * q.element_size()
        self.shape = {
            "H": q.shape[1],
            "HK": k.shape[1],
            "D": q.shape[2],
            "DV": v.shape[2],
            "Q_STRIDE": self.inputs[0].stride(0),
            "K_STRIDE": self.inputs[1].stride(0),
            "V_STRIDE": self.inputs[2].stride(0),
            "CAUSAL": causal,
            "NEGATIVE": scale < 0,
            "BLOCK_D": self.width,
            "BLOCK_DV": self.width,
        }
        sizes = [0 if x is None else x.shape[0] for x in (position_bias, age_bias, relative_bias)]
        biased_by_keys = bias is not None or any(sizes[:2])
        biased = biased_by_keys or relative_bias is not None
        self.tables = dict(zip("PAR", sizes, strict=True))
        self.tables |= {
            "BIASED": biased,
            "PRIOR": bias is not None and bias.dim() == 1,
            "PRECISION": self.precision,
        }
        self.on_hopper = (
            not biased_by_keys
            and scale >= 0
            and hopper_forward.takes(*self.inputs, self.width)
            and hopper_backward.takes(*grads)
        )
        self.short_on_hopper = (
            self.on_hopper
            and not biased
            and self.width == hopper_short.WIDTH
            and self.num_samples * q.shape[1] < 2**31 - hopper_short.MOST_ROWS
        )
        half = q.element_size() == 2
        self.short = SHORT if half and self.row_bytes <= 256 and not biased else 0
        if self.short_on_hopper:  # in both directions
            self.short = hopper_short.MOST_ROWS
        self.together = 2**16 // (1 << (k.shape[1] - 1).bit_length())

    def short_tile(self) -> dict:
        """Tile of samples taken whole, by the kernel after the one that makes a list of tiles."""
        return {
            "BLOCK": self.short,
            "num_warps": 1 if self.row_bytes <= 128 else 2,
            **overlap_options(devices.launches_overlap(self.inputs[0].device)),
        }

    def forward_tile(self) -> dict:
        """Tile of the forward kernel."""
        if self.row_bytes > 256 or self.precision == "ieee":
            return self._small_tile()
        stages = 2 if self.tables["BIASED"] or self.inputs[0].element_size() == 4 else 3
        return {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": stages}

    def grad_q_tile(self) -> dict:
        """Tile of the gradient of queries."""
        if self.row_bytes > 256 or self.precision == "ieee":
            return self._small_tile()
        stages = 4 if self.row_bytes <= 128 else 3
        return {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": stages}

    def grad_relative_tile(self) -> dict:
        """Tile of the gradient of scores by distance."""
        stages = 2 if self.row_bytes <= 128 else 1
        tile = {"BLOCK": 64, "num_warps": 4, "num_stages": stages}
        if self.row_bytes > 256 or self.precision == "ieee":
            small = self._small_tile()
            tile = {"BLOCK": small["BLOCK_M"], "num_warps": small["num_warps"], "num_stages": 1}
        return tile | {"GROUPS": padded_width(self.tables["R"]) // 16}

    def grad_kv_tile(self) -> dict:
        """Tile of the gradients of keys and values."""
        if self.row_bytes > 256 or self.precision == "ieee":
            return self._small_tile()
        tile = {"BLOCK_M": 32, "BLOCK_N": 64, "num_warps": 4}
        if self.row_bytes <= 128 and not self.tables["BIASED"]:
            return tile | {"num_stages": 2, "maxnreg": 128}
        return tile | {"num_stages": 3}

    def _small_tile(self) -> dict:
        """Tile of exact fp32, or of wide rows, whose operands fill shared memory.

        Most is what the gradient of keys takes: four operands, or five of TF32, and scores.
        """
        block = tile_rows(self.row_bytes, self.precision, registers=8192)
        if self.precision == "ieee":
            block = min(block, 32)  # scores of larger ones spill
        operands = 5 if self.row_bytes == 4 * self.width and self.precision == "tf32" else 4
        room = devices.shared_memory(self.inputs[0].device)
        while block > 16 and block * (operands * self.row_bytes + 4 * block + 16) > room:
            block //= 2
        warps = 4 if self.row_bytes < 512 else 8
        return {"BLOCK_M": block, "BLOCK_N": block, "num_warps": warps, "num_stages": 2}

    def list_tiles(self, block: int, of_keys: bool, together: int = 0) -> Tensor:
        """The tiles of queries, or of keys; each list is made once."""
        own, other = (1, 0) if of_keys and not self.is_self else (0, 1)
        if (block, own) not in self.lists:
            num_own, num_other = self.inputs[own].shape[0], self.inputs[other].shape[0]
            num_other = 0 if self.is_self else num_other
            capacity = most_tiles(num_own, num_other, self.num_samples, self.short, block)
            self.lists[block, own] = list_tiles(
                self.offsets[own], self.offsets[other], capacity, self.short, block, together
            )
        return self.lists[block, own]


def paths(device: torch.device) -> dict[str, str]:
    """What kernels of their own take on ``device``, see :class:`_Call`, by the name of these."""
    whole = "rows on both sides: half precision, no bias, widths <= 128"
    if not devices.hopper_multiprocessors(device):
        return {"triton, whole samples": f"samples of up to {SHORT} {whole}"}
    on_hopper = f"{hopper_forward.TAKEN}, scale >= 0"
    return {
        "gluon, Hopper, whole samples": f"samples of up to {hopper_short.MOST_ROWS} rows on "
        f"both sides: {on_hopper}, no bias, the larger width at most {hopper_short.WIDTH}",
        "triton, whole samples": f"other samples of up to {SHORT} {whole}",
        "gluon, Hopper": f"other samples: {on_hopper}, no bias but by distance",
    }


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two vectors of one size are the same memory, read alike."""
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.stride() == b.stride()


def _rows(x: Tensor) -> Tensor:
    """``[L, H, D]`` as it is, if the elements of a row are next to each other, else a copy."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _as_table(grad: Tensor | None, table: Tensor | None) -> Tensor | None:
    if table is None:
        return None
    return table.new_zeros(table.shape) if grad is None else grad.to(table.dtype)
