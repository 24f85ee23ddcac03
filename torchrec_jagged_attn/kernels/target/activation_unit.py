"""The activation unit of DIN: a small network weighs each history row, and rows are pooled by it.

With the first weight in blocks ``[H1, D]`` by what it meets, each sample has a matrix and a vector

    M = W_u - W_d + W_p · diag(q)           c = (W_q + W_d) · q + b_1

that a program makes before its rows, of which row ``u_n`` takes

    h_1 = φ(M · u_n + c)   h_2 = φ(W_2 · h_1 + b_2)   a = w_3 · h_2 + b_3   f = prior · e^bias
    out = Σ_n a · f · u_n

Hidden layers stay in registers, and backward computes them again: with ``g`` the gradient of a
sample's output and ``∂s_i`` that of what ``φ`` is taken of,

    ∂a = f · (g · u_n)        ∂s_2 = ∂a · w_3 · φ'             ∂s_1 = W_2ᵀ · ∂s_2 · φ'
    ∂u_n = a · f · g + Mᵀ · ∂s_1      ∂M = Σ_n ∂s_1 ⊗ u_n      ∂c = Σ_n ∂s_1
    ∂W_u = Σ_b ∂M   ∂W_p = Σ_b ∂M · diag(q)   ∂W_q = Σ_b ∂c ⊗ q   ∂W_d = ∂W_q - ∂W_u
    ∂q = Σ_h ∂M ⊙ W_p + (W_q + W_d)ᵀ · ∂c

Forward reads the rows once and takes 2·N·H1·(D + H2) FLOPs; backward also writes them once, and
takes three times as many. Long histories are cut into chunks (``find_chunk``). Each program of
backward has a share of the chunks, one after the other, and a sum of weights' gradients of its own;
one more kernel adds these up, in one order. No sum has a second writer.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from torchrec_jagged_attn import devices
from torchrec_jagged_attn.arguments import (
    ActivationUnitArguments,
    ActivationUnitGradients,
    ActivationUnitOutputs,
    Biases,
)
from torchrec_jagged_attn.kernels.common.biases import row_buckets
from torchrec_jagged_attn.kernels.common.dropout import is_dropped
from torchrec_jagged_attn.kernels.common.jagged import (
    add_chunks,
    count_chunks,
    find_chunk,
    find_sample,
)
from torchrec_jagged_attn.kernels.common.launch import Launcher
from torchrec_jagged_attn.kernels.common.matmul import multiply, padded_width, product_precision
from torchrec_jagged_attn.kernels.common.scores import weights_and_slopes
from torchrec_jagged_attn.kernels.common.softmax import LOG2E

__all__ = ["backward", "forward"]

CHUNK = 256  # history rows of a chunk, at least
PER_SAMPLE = 64  # rows that take as long as what a program does once for each chunk
PROGRAMS = 264  # of backward: two for each multiprocessor of an H200
ROWS = tl.constexpr(16)  # the fewest that tensor cores multiply
OF_AN_H100 = 232448  # bytes of shared memory that a program may take
MOST_ON_AN_A100 = 128 * 128  # elements of ``M`` that fit into an A100's
BLOCK = 128  # elements of gradients of weights that a program adds up


class Layers(NamedTuple):
    """Weights and biases of the network, or their gradients."""

    weight_1: Any  # [H1, 4·D]
    bias_1: Any  # [H1]
    weight_2: Any  # [H2, H1]
    bias_2: Any  # [H2]
    weight_3: Any  # [1, H2]
    bias_3: Any  # [1]


class Gradients(NamedTuple):
    """What the main kernel of backward writes.

    Attributes:
        partials: ``[programs, SIZE]`` fp32, each program's sums: ``∂W_u``, ``∂W_p``, ``∂W_q``,
            those of ``bias_1``, ``weight_2``, ``bias_2``, ``weight_3``, ``bias_3`` and of the
            tables; and ``∂M`` and ``∂c`` of the chunk that it is at.
        query: ``[B, D]``.
        history: ``[N, D]``.
        prior_weights: ``[N]``, or None.
    """

    partials: Any
    query: Any
    history: Any
    prior_weights: Any


class Constants(NamedTuple):
    """What a kernel is compiled for."""

    D: int  # width of queries and history rows
    H_1: int  # of the hidden layers
    H_2: int
    P: int  # buckets of positions
    A: int  # buckets of ages
    SIZE: int  # elements of a program's sums
    ACTIVATION: str
    PRECISION: str  # of products, see ``matmul.product_precision``
    BLOCK_N: int  # history rows of a tile
    BLOCK_D: int
    BLOCK_1: int
    BLOCK_2: int
    BLOCK_P: int
    BLOCK_A: int
    CHUNK: int
    PER_SAMPLE: int
    NUM_STAGES: int
    OVERLAP: bool  # whether launches overlap


@triton.jit
def _activate(x, C: tl.constexpr, EXACT: tl.constexpr):
    """The activation of ``x``; to the last bits of fp32 if EXACT."""
    if C.ACTIVATION == "relu":
        return tl.where(x > 0, x, 0.0 * x)  # NaN stays
    if EXACT:
        y, _ = weights_and_slopes(x, C.ACTIVATION, EXACT)
    else:
        root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2E))  # a division takes five instructions more
        y = root * root
        if C.ACTIVATION == "silu":
            y *= x
    return y


@triton.jit
def _slope(kept, C: tl.constexpr, EXACT: tl.constexpr):
    """The derivative of the activation, of what :func:`_keep` kept."""
    kept = kept.to(tl.float32)
    if C.ACTIVATION == "relu":
        return tl.where(kept > 0, 1.0, 0.0)
    if C.ACTIVATION == "sigmoid":
        return kept * (1.0 - kept)
    _, slope = weights_and_slopes(kept, C.ACTIVATION, EXACT)
    return slope


@triton.jit
def _keep(x, y, C: tl.constexpr):
    """What the derivative is taken of, as PyTorch does: the activation ``y``, or of SiLU ``x``."""
    if C.ACTIVATION == "silu":
        return x.to(y.dtype)
    return y


@triton.jit
def _first_layer(layers, C: tl.constexpr):
    """Pointers ``[BLOCK_1, BLOCK_D]`` to the block of ``weight_1`` that meets the query, and which
    elements there are; the other blocks follow every ``D`` columns.
    """
    h, d = tl.arange(0, C.BLOCK_1), tl.arange(0, C.BLOCK_D)
    mask = (h < C.H_1)[:, None] & (d < C.D)[None, :]
    return layers.weight_1 + h[:, None] * (4 * C.D) + d[None, :], mask


@triton.jit
def _fold(layers, q, C: tl.constexpr):
    """``M`` ``[BLOCK_1, BLOCK_D]`` and ``c`` ``[BLOCK_1]`` of the sample of ``q``, in fp32."""
    ptrs, mask = _first_layer(layers, C)
    of_difference = tl.load(ptrs + 2 * C.D, mask=mask, other=0.0).to(tl.float32)
    of_query = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32) + of_difference
    h = tl.arange(0, C.BLOCK_1)
    constant = tl.load(layers.bias_1 + h, mask=h < C.H_1, other=0.0).to(tl.float32)
    constant += tl.sum(of_query * q[None, :], 1)
    of_product = tl.load(ptrs + 3 * C.D, mask=mask, other=0.0).to(tl.float32)
    matrix = tl.load(ptrs + C.D, mask=mask, other=0.0).to(tl.float32) - of_difference
    return matrix + of_product * q[None, :], constant


@triton.jit
def _later_layers(layers, dtype, C: tl.constexpr):
    """``W_2`` ``[BLOCK_2, BLOCK_1]`` in ``dtype``; ``b_2``, ``w_3`` and ``b_3`` in fp32."""
    h_1, h_2 = tl.arange(0, C.BLOCK_1), tl.arange(0, C.BLOCK_2)
    there = h_2 < C.H_2
    mask = there[:, None] & (h_1 < C.H_1)[None, :]
    w_2 = tl.load(layers.weight_2 + h_2[:, None] * C.H_1 + h_1[None, :], mask=mask, other=0.0)
    b_2 = tl.load(layers.bias_2 + h_2, mask=there, other=0.0).to(tl.float32)
    w_3 = tl.load(layers.weight_3 + h_2, mask=there, other=0.0).to(tl.float32)
    return w_2.to(dtype), b_2, w_3, tl.load(layers.bias_3).to(tl.float32)


@triton.jit
def _layer(x, weight, bias, C: tl.constexpr):
    """``x · weightᵀ + bias``, in fp32."""
    out = tl.zeros([x.shape[0], weight.shape[0]], tl.float32)
    return multiply(x, tl.trans(weight), out, C.PRECISION) + bias[None, :]


@triton.jit
def _factors(biases, offsets_ptr, sample, n, visible, C: tl.constexpr):
    """What the weights of the rows ``n`` are multiplied by: prior weights; and all else."""
    prior = visible.to(tl.float32)
    if biases.bias is not None:
        prior = tl.load(biases.bias + n, mask=visible, other=0.0).to(tl.float32)
    other = visible.to(tl.float32)
    if C.P > 0 or C.A > 0:
        of_position, of_age = row_buckets(n, visible, offsets_ptr, biases, sample, C.P, C.A)
        bias = tl.zeros_like(other)
        if C.P > 0:
            bias += tl.load(biases.position_bias + of_position, mask=visible).to(tl.float32)
        if C.A > 0:
            bias += tl.load(biases.age_bias + of_age, mask=visible).to(tl.float32)
        other = tl.where(visible, tl.exp(bias), 0.0)
    if biases.row_dropout is not None:
        other = tl.where(is_dropped(biases.row_dropout, n.to(tl.int64)), 0.0, other)
    return prior, other


@triton.jit
def _load_row(ptr, row, C: tl.constexpr):
    """``[BLOCK_D]`` of ``[rows, D]``, in fp32."""
    d = tl.arange(0, C.BLOCK_D)
    return tl.load(ptr + row * C.D + d, mask=d < C.D, other=0.0).to(tl.float32)


@triton.jit
def _store_row(out_ptr, sums_ptr, sample, slot, value, C: tl.constexpr):
    """Store what a chunk has summed up: in its slot, if it has one, else of the sample."""
    d = tl.arange(0, C.BLOCK_D)
    if slot >= 0:
        tl.store(sums_ptr + slot * C.D + d, value, mask=d < C.D)
    else:
        tl.store(out_ptr + sample * C.D + d, value, mask=d < C.D)


@triton.jit(do_not_specialize=["num_samples"])
def _forward_kernel(
    query_ptr,  # [B, D]
    history_ptr,  # [N, D]
    layers,  # Layers
    biases,  # arguments.Biases
    out_ptr,  # [B, D]
    sums_ptr,  # [slots, D] fp32
    offsets_ptr,  # [B + 1]
    num_samples,
    C: tl.constexpr,  # Constants
):
    """Pool one chunk of a sample."""
    if C.OVERLAP:
        cuda.gdc_launch_dependents()
    work = tl.program_id(0).to(tl.int64)
    busy, sample, begin, end, slot = find_chunk(offsets_ptr, num_samples, work, C.CHUNK)
    if not busy:
        return
    dtype = history_ptr.dtype.element_ty
    EXACT: tl.constexpr = dtype == tl.float32
    matrix, constant = _fold(layers, _load_row(query_ptr, sample, C), C)
    matrix = matrix.to(dtype)
    w_2, b_2, w_3, b_3 = _later_layers(layers, dtype, C)
    d = tl.arange(0, C.BLOCK_D)
    acc = tl.zeros([C.BLOCK_D], tl.float32)
    for start in tl.range(begin, end, C.BLOCK_N, num_stages=C.NUM_STAGES):
        n = start + tl.arange(0, C.BLOCK_N)
        visible = n < end
        mask = visible[:, None] & (d < C.D)[None, :]
        u = tl.load(history_ptr + n[:, None] * C.D + d[None, :], mask=mask, other=0.0)
        prior, other = _factors(biases, offsets_ptr, sample, n, visible, C)
        y_1 = _activate(_layer(u, matrix, constant, C), C, EXACT).to(dtype)
        y_2 = _activate(_layer(y_1, w_2, b_2, C), C, EXACT)
        weight = (tl.sum(y_2 * w_3[None, :], 1) + b_3) * (prior * other)
        acc += tl.sum(weight[:, None] * u.to(tl.float32), 0)
    _store_row(out_ptr, sums_ptr, sample, slot, acc, C)


@triton.jit
def _first_from(begin, bound, length, chunks):
    """The first of ``chunks`` whose rows begin at or after ``bound``, where the first one's begin
    at ``begin``.
    """
    chunk = chunks * 0
    while (chunk < chunks) & (begin + length * chunk // chunks < bound):
        chunk += 1
    return chunk


@triton.jit
def _add_to(ptrs, value, mask):
    tl.store(ptrs, tl.load(ptrs, mask=mask, other=0.0) + value, mask=mask)


@triton.jit
def _halves(x):
    """The left and the right columns of ``x``."""
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))


@triton.jit
def _store_columns(ptr, x, first, C: tl.constexpr):
    """Store columns ``x`` of a matrix ``[H_1, D]``, from the first one on."""
    h, d = tl.arange(0, C.BLOCK_1), first + tl.arange(0, x.shape[1])
    mask = (h < C.H_1)[:, None] & (d < C.D)[None, :]
    tl.store(ptr + h[:, None] * C.D + d[None, :], x, mask=mask)


@triton.jit
def _store_matrix(ptr, x, C: tl.constexpr):
    """Store ``[H_1, D]``, few columns at a time: they pass through shared memory."""
    if C.BLOCK_D <= 64:
        _store_columns(ptr, x, 0, C)
    else:
        left, right = _halves(x)
        if C.BLOCK_D <= 128:
            _store_columns(ptr, left, 0, C)
            _store_columns(ptr, right, C.BLOCK_D // 2, C)
        else:
            first, second = _halves(left)
            _store_columns(ptr, first, 0, C)
            _store_columns(ptr, second, C.BLOCK_D // 4, C)
            third, fourth = _halves(right)
            _store_columns(ptr, third, C.BLOCK_D // 2, C)
            _store_columns(ptr, fourth, C.BLOCK_D // 4 * 3, C)


@triton.jit
def _add_first_layer(partials_ptr, layers, of_matrix, of_constant, q, C: tl.constexpr):
    """Add to a program's sums what the gradients of ``M`` and ``c`` give; returns that of ``q``.

    Some rows at a time, by way of memory: registers do not hold all that is added up.
    """
    own_ptr = partials_ptr + (C.SIZE - C.H_1 * C.D - C.H_1)
    d = tl.arange(0, C.BLOCK_D)
    h = tl.arange(0, C.BLOCK_1)
    _store_matrix(own_ptr, of_matrix, C)
    tl.store(own_ptr + C.H_1 * C.D + h, tl.sum(of_constant, 0), mask=h < C.H_1)
    tl.debug_barrier()
    grad_q = tl.zeros([C.BLOCK_D], tl.float32)
    for first in tl.range(0, C.H_1, ROWS, num_stages=1):
        row = first + tl.arange(0, ROWS)
        some = (row < C.H_1)[:, None] & (d < C.D)[None, :]
        at = row[:, None] * C.D + d[None, :]
        rows = tl.load(own_ptr + at, mask=some, other=0.0)
        constants = tl.load(own_ptr + C.H_1 * C.D + row, mask=row < C.H_1, other=0.0)
        ptrs = layers.weight_1 + row[:, None] * (4 * C.D) + d[None, :]
        of_query = tl.load(ptrs, mask=some, other=0.0).to(tl.float32)
        of_query += tl.load(ptrs + 2 * C.D, mask=some, other=0.0).to(tl.float32)
        of_product = tl.load(ptrs + 3 * C.D, mask=some, other=0.0).to(tl.float32)
        grad_q += tl.sum(rows * of_product + constants[:, None] * of_query, 0)
        _add_to(partials_ptr + at, rows, some)
        _add_to(partials_ptr + C.H_1 * C.D + at, rows * q[None, :], some)
        _add_to(partials_ptr + 2 * C.H_1 * C.D + at, constants[:, None] * q[None, :], some)
        _add_to(partials_ptr + 3 * C.H_1 * C.D + row, constants, row < C.H_1)
    tl.debug_barrier()
    return grad_q


@triton.jit
def _add_rows(acc, factors, x, C: tl.constexpr):
    """``acc`` ``[ROWS, W]`` plus the sum of the rows of ``x``, each times its factor.

    As a product: a sum would leave each column to as many threads as there are rows of threads.
    """
    first = (tl.arange(0, ROWS) == 0)[:, None]
    return multiply(tl.where(first, factors[None, :], 0.0).to(x.dtype), x, acc, C.PRECISION)


@triton.jit
def _sum_by_bucket(values, buckets, BLOCK: tl.constexpr):
    """``[BLOCK]``: the sum of ``values`` in each bucket."""
    own = tl.arange(0, BLOCK)[:, None] == buckets[None, :]
    return tl.sum(tl.where(own, values[None, :], 0.0), 1)


@triton.jit(do_not_specialize=["num_samples", "share"])
def _backward_kernel(
    grad_out_ptr,  # [B, D]
    query_ptr,  # [B, D]
    history_ptr,  # [N, D]
    layers,  # Layers
    biases,  # arguments.Biases
    grads,  # Gradients
    sums_ptr,  # [slots, D] fp32
    offsets_ptr,  # [B + 1]
    num_samples,
    share,
    C: tl.constexpr,  # Constants
):
    """Gradients of a program's share: of the chunks that begin there, if each sample takes
    PER_SAMPLE rows more than it has.
    """
    if C.OVERLAP:
        cuda.gdc_launch_dependents()
    dtype = history_ptr.dtype.element_ty
    EXACT: tl.constexpr = dtype == tl.float32
    first = tl.program_id(0).to(tl.int64) * share
    partials_ptr = grads.partials + tl.program_id(0).to(tl.int64) * C.SIZE
    w_2, b_2, w_3, b_3 = _later_layers(layers, dtype, C)
    d = tl.arange(0, C.BLOCK_D)
    grad_w_2 = tl.zeros([C.BLOCK_2, C.BLOCK_1], tl.float32)
    grad_b_2 = tl.zeros([ROWS, C.BLOCK_2], tl.float32)
    grad_w_3 = tl.zeros([ROWS, C.BLOCK_2], tl.float32)
    ones = tl.full([C.BLOCK_N], 1.0, tl.float32)
    grad_b_3 = tl.zeros([C.BLOCK_N], tl.float32)
    if C.P > 0:
        of_positions = tl.zeros([C.BLOCK_P], tl.float32)
    if C.A > 0:
        of_ages = tl.zeros([C.BLOCK_A], tl.float32)
    sample = find_sample(offsets_ptr, num_samples, first, 1, 1, C.PER_SAMPLE)
    row = tl.load(offsets_ptr + sample).to(tl.int64)
    while (sample < num_samples) & (row + C.PER_SAMPLE * sample < first + share):
        end_of_sample = tl.load(offsets_ptr + sample + 1).to(tl.int64)
        length = end_of_sample - row
        chunks = count_chunks(length, 1, C.CHUNK, C.CHUNK)
        own_begin = row + C.PER_SAMPLE * sample
        q = _load_row(query_ptr, sample, C)
        g = _load_row(grad_out_ptr, sample, C)
        matrix, constant = _fold(layers, q, C)
        matrix = matrix.to(dtype)
        last = _first_from(own_begin, first + share, length, chunks)
        for chunk in range(_first_from(own_begin, first, length, chunks), last):
            begin = row + length * chunk // chunks
            end = row + length * (chunk + 1) // chunks
            of_matrix = tl.zeros([C.BLOCK_1, C.BLOCK_D], tl.float32)
            of_constant = tl.zeros([ROWS, C.BLOCK_1], tl.float32)
            for start in tl.range(begin, end, C.BLOCK_N, num_stages=C.NUM_STAGES):
                n = start + tl.arange(0, C.BLOCK_N)
                visible = n < end
                mask = visible[:, None] & (d < C.D)[None, :]
                at = n[:, None] * C.D + d[None, :]
                u = tl.load(history_ptr + at, mask=mask, other=0.0)
                prior, other = _factors(biases, offsets_ptr, sample, n, visible, C)
                x_1 = _layer(u, matrix, constant, C)
                y_1 = _activate(x_1, C, EXACT).to(dtype)
                kept_1 = _keep(x_1, y_1, C)
                x_2 = _layer(y_1, w_2, b_2, C)
                y_2 = _activate(x_2, C, EXACT)
                weight = tl.sum(y_2 * w_3[None, :], 1) + b_3
                of_factor = tl.sum(u.to(tl.float32) * g[None, :], 1)
                of_weight = of_factor * (prior * other)
                of_factor *= weight
                if grads.prior_weights is not None:
                    tl.store(grads.prior_weights + n, of_factor * other, mask=visible)
                if C.P > 0 or C.A > 0:
                    of_position, of_age = row_buckets(
                        n, visible, offsets_ptr, biases, sample, C.P, C.A
                    )
                    of_bias = of_factor * (prior * other)
                    if C.P > 0:
                        of_positions += _sum_by_bucket(of_bias, of_position, C.BLOCK_P)
                    if C.A > 0:
                        of_ages += _sum_by_bucket(of_bias, of_age, C.BLOCK_A)
                grad_b_3 += of_weight
                grad_w_3 = _add_rows(grad_w_3, of_weight, y_2.to(dtype), C)
                of_x_2 = of_weight[:, None] * w_3[None, :] * _slope(_keep(x_2, y_2, C), C, EXACT)
                of_x_2 = of_x_2.to(dtype)
                grad_b_2 = _add_rows(grad_b_2, ones, of_x_2, C)
                grad_w_2 = multiply(tl.trans(of_x_2), y_1, grad_w_2, C.PRECISION)
                of_x_1 = tl.zeros([C.BLOCK_N, C.BLOCK_1], tl.float32)
                of_x_1 = multiply(of_x_2, w_2, of_x_1, C.PRECISION) * _slope(kept_1, C, EXACT)
                of_x_1 = of_x_1.to(dtype)
                of_constant = _add_rows(of_constant, ones, of_x_1, C)
                of_matrix = multiply(tl.trans(of_x_1), u, of_matrix, C.PRECISION)
                grad_u = (weight * (prior * other))[:, None] * g[None, :]
                grad_u = multiply(of_x_1, matrix, grad_u, C.PRECISION)
                tl.store(grads.history + at, grad_u, mask=mask)
            grad_q = _add_first_layer(partials_ptr, layers, of_matrix, of_constant, q, C)
            slot = tl.where(chunks > 1, row // C.CHUNK + chunk, -1)
            _store_row(grads.query, sums_ptr, sample, slot, grad_q, C)
        sample += 1
        row = end_of_sample
    h_1, h_2 = tl.arange(0, C.BLOCK_1), tl.arange(0, C.BLOCK_2)
    partials_ptr += 3 * C.H_1 * C.D + C.H_1
    mask = (h_2 < C.H_2)[:, None] & (h_1 < C.H_1)[None, :]
    tl.store(partials_ptr + h_2[:, None] * C.H_1 + h_1[None, :], grad_w_2, mask=mask)
    partials_ptr += C.H_2 * C.H_1
    tl.store(partials_ptr + h_2, tl.sum(grad_b_2, 0), mask=h_2 < C.H_2)
    tl.store(partials_ptr + C.H_2 + h_2, tl.sum(grad_w_3, 0), mask=h_2 < C.H_2)
    partials_ptr += 2 * C.H_2
    tl.store(partials_ptr, tl.sum(grad_b_3, 0))
    if C.P > 0:
        bucket = tl.arange(0, C.BLOCK_P)
        tl.store(partials_ptr + 1 + bucket, of_positions, mask=bucket < C.P)
    if C.A > 0:
        bucket = tl.arange(0, C.BLOCK_A)
        tl.store(partials_ptr + 1 + C.P + bucket, of_ages, mask=bucket < C.A)


@triton.jit
def _sum_of(partials_ptr, i, mask, num_programs, SIZE: tl.constexpr, BLOCK_PROGRAMS: tl.constexpr):
    """The elements ``i`` of the sum of all programs' sums."""
    acc = tl.zeros([BLOCK_PROGRAMS, i.shape[0]], tl.float32)
    for first in range(0, num_programs, BLOCK_PROGRAMS):
        program = first + tl.arange(0, BLOCK_PROGRAMS)
        there = (program < num_programs)[:, None] & mask[None, :]
        acc += tl.load(partials_ptr + program[:, None] * SIZE + i[None, :], mask=there, other=0.0)
    return tl.sum(acc, 0)


@triton.jit
def _add_up(
    out_ptr,  # [NUM], or None
    partials_ptr,  # [programs, SIZE] fp32, from the first of NUM on
    num_programs,
    NUM: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_PROGRAMS: tl.constexpr,
):
    """This program's BLOCK elements of an output."""
    if out_ptr is not None:
        if tl.program_id(0) * BLOCK < NUM:
            i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            out = _sum_of(partials_ptr, i, i < NUM, num_programs, SIZE, BLOCK_PROGRAMS)
            tl.store(out_ptr + i, out, mask=i < NUM)


@triton.jit(do_not_specialize=["num_programs"])
def _add_partials_kernel(
    partials_ptr,  # [programs, SIZE] fp32
    grads,  # Layers
    position_bias_ptr,  # [P, 1]
    age_bias_ptr,  # [A, 1]
    num_programs,
    D: tl.constexpr,
    H_1: tl.constexpr,
    H_2: tl.constexpr,
    P: tl.constexpr,
    A: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_PROGRAMS: tl.constexpr,
):
    """Gradients, one for each number along the second axis of programs, of all programs' sums."""
    output = tl.program_id(1)
    NUM: tl.constexpr = H_1 * D
    later_ptr = partials_ptr + 3 * NUM
    LATER: tl.constexpr = H_1 + H_2 * H_1 + 2 * H_2
    if output == 0:
        if tl.program_id(0) * BLOCK < NUM:
            i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            mask = i < NUM
            ptrs = grads.weight_1 + i // D * (4 * D) + i % D
            of_row = _sum_of(partials_ptr, i, mask, num_programs, SIZE, BLOCK_PROGRAMS)
            of_query = _sum_of(partials_ptr + 2 * NUM, i, mask, num_programs, SIZE, BLOCK_PROGRAMS)
            tl.store(ptrs, of_query, mask=mask)
            tl.store(ptrs + D, of_row, mask=mask)
            tl.store(ptrs + 2 * D, of_query - of_row, mask=mask)
            of_product = _sum_of(partials_ptr + NUM, i, mask, num_programs, SIZE, BLOCK_PROGRAMS)
            tl.store(ptrs + 3 * D, of_product, mask=mask)
    elif output == 1:
        _add_up(grads.bias_1, later_ptr, num_programs, H_1, SIZE, BLOCK, BLOCK_PROGRAMS)
    elif output == 2:
        later_ptr += H_1
        _add_up(grads.weight_2, later_ptr, num_programs, H_2 * H_1, SIZE, BLOCK, BLOCK_PROGRAMS)
    elif output == 3:
        later_ptr += H_1 + H_2 * H_1
        _add_up(grads.bias_2, later_ptr, num_programs, H_2, SIZE, BLOCK, BLOCK_PROGRAMS)
    elif output == 4:
        later_ptr += H_1 + H_2 * H_1 + H_2
        _add_up(grads.weight_3, later_ptr, num_programs, H_2, SIZE, BLOCK, BLOCK_PROGRAMS)
    elif output == 5:
        _add_up(grads.bias_3, later_ptr + LATER, num_programs, 1, SIZE, BLOCK, BLOCK_PROGRAMS)
    elif output == 6:
        later_ptr += LATER + 1
        _add_up(position_bias_ptr, later_ptr, num_programs, P, SIZE, BLOCK, BLOCK_PROGRAMS)
    else:
        later_ptr += LATER + 1 + P
        _add_up(age_bias_ptr, later_ptr, num_programs, A, SIZE, BLOCK, BLOCK_PROGRAMS)


_forward = Launcher(_forward_kernel)
_backward = Launcher(_backward_kernel)
_add_partials = Launcher(_add_partials_kernel)


def forward(args: ActivationUnitArguments) -> ActivationUnitOutputs:
    """Pool each sample's rows by their weights."""
    query, history, offsets = args.query, args.history, args.offsets.contiguous()
    out = query.new_empty(query.shape)
    num_samples, width = query.shape
    if num_samples:
        num_slots = history.shape[0] // CHUNK
        sums = out.new_empty(num_slots, width, dtype=torch.float32)
        taken = (*_read(args), out, sums, offsets, num_samples)
        _forward((num_samples + num_slots,), taken, _kernel(args, backward=False))
        add_chunks(sums, out, offsets, width, CHUNK)
    return ActivationUnitOutputs(out)


def backward(
    grad_out: Tensor, args: ActivationUnitArguments, needs_prior_weights: bool
) -> ActivationUnitGradients:
    """Gradients; that of prior weights only where it is asked for."""
    query, history, offsets = args.query, args.history, args.offsets.contiguous()
    num_samples, width = query.shape
    num_rows = history.shape[0]
    kernel = _kernel(args, backward=True)
    size = kernel["C"].SIZE
    cost = num_rows + num_samples * PER_SAMPLE
    share = max(CHUNK, -(-cost // PROGRAMS))
    num_programs = -(-cost // share)
    grad_prior = None
    if args.prior_weights is not None and needs_prior_weights:
        grad_prior = args.prior_weights.new_empty(args.prior_weights.shape)
    grad_query, grad_history = query.new_empty(query.shape), history.new_empty(history.shape)
    partials = query.new_zeros(num_programs, size, dtype=torch.float32)
    if num_samples:
        num_slots = num_rows // CHUNK
        sums = query.new_empty(num_slots, width, dtype=torch.float32)
        grads = Gradients(partials, grad_query, grad_history, grad_prior)
        taken = (*_read(args), grads, sums, offsets, num_samples, share)
        _backward((num_programs,), (grad_out.contiguous(), *taken), kernel)
        add_chunks(sums, grad_query, offsets, width, CHUNK)
    of_layers = Layers(*(x.new_empty(x.shape) for x in args.layers))
    of_tables = [
        None if x is None else x.new_empty(x.shape) for x in (args.position_bias, args.age_bias)
    ]
    _add_partials(
        (-(-size // BLOCK), 8),
        (partials, of_layers, *of_tables, num_programs),
        _partials_constants(kernel["C"]),
    )
    return ActivationUnitGradients(grad_query, grad_history, *of_layers, *of_tables, grad_prior)


def _read(args: ActivationUnitArguments) -> tuple[Any, ...]:
    """What the main kernels read."""
    layers = Layers(*(x.contiguous() for x in args.layers))
    biases = Biases(*(None if x is None else x.contiguous() for x in args.biases))
    return args.query.contiguous(), args.history.contiguous(), layers, biases


def _kernel(args: ActivationUnitArguments, backward: bool) -> dict[str, Any]:
    """Compile-time arguments of the main kernel, and options of its launch."""
    history, tables = args.history, (args.position_bias, args.age_bias)
    return _constants(
        history.dtype,
        product_precision(history.dtype),
        history.shape[1],
        args.weight_1.shape[0],
        args.weight_2.shape[0],
        *(0 if x is None else x.shape[0] for x in tables),
        args.activation,
        backward,
        devices.shared_memory(history.device),
        devices.launches_overlap(history.device),
    )


@functools.cache
def _constants(
    dtype: torch.dtype,
    precision: str,
    d: int,
    h_1: int,
    h_2: int,
    p: int,
    a: int,
    activation: str,
    backward: bool,
    shared_memory: int,
    overlap: bool,
) -> dict[str, Any]:
    """Those of :func:`_kernel`."""
    block_d, block_1, block_2 = (padded_width(x) for x in (d, h_1, h_2))
    if block_d * block_1 > MOST_ON_AN_A100 and shared_memory < OF_AN_H100:
        raise NotImplementedError(
            f"an activation unit of width {d} and hidden_dims {(h_1, h_2)} takes a GPU with "
            f"{OF_AN_H100} bytes of shared memory, as an H100 has, got one with {shared_memory}"
        )
    elements = block_1 * (block_d + block_2)
    if dtype.itemsize == 2:
        tiles = _half_tiles(elements, backward)
    else:
        precision = _fitting_precision(precision, elements, backward, shared_memory)
        tiles = 16, 8, 1
    block_n, num_warps, num_stages = tiles
    constants = Constants(
        D=d,
        H_1=h_1,
        H_2=h_2,
        P=p,
        A=a,
        SIZE=4 * d * h_1 + h_1 * h_2 + 2 * h_1 + 2 * h_2 + 1 + p + a,
        ACTIVATION=activation,
        PRECISION=precision,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        BLOCK_1=block_1,
        BLOCK_2=block_2,
        BLOCK_P=padded_width(max(1, p)),
        BLOCK_A=padded_width(max(1, a)),
        CHUNK=CHUNK,
        PER_SAMPLE=PER_SAMPLE,
        NUM_STAGES=num_stages,
        OVERLAP=overlap,
    )
    return {"C": constants, "num_warps": num_warps}


def _half_tiles(elements: int, backward: bool) -> tuple[int, int, int]:
    """Rows of a tile, warps, and tiles that are loaded at a time, in 16 bits.

    ``elements`` are those of ``M`` and ``W_2``.
    """
    if backward:
        if elements > 256 * 128:
            return 16, 8, 1
        return 32, 8, 2 if elements <= 64 * 256 else 1
    return (64, 4, 2) if elements <= 64 * 384 else (32, 8, 1)


def _fitting_precision(precision: str, elements: int, backward: bool, shared_memory: int) -> str:
    """The precision of products of fp32 that fits into shared memory with so many ``elements`` of
    ``M`` and ``W_2``: they may be there twice, and of three parts.

    Where tensor cores cannot hold them, other units multiply: exact, and slower.
    """
    if precision == "tf32":
        most = 64 * 256 if backward else 256 * 256
    elif backward:
        most = 64 * 256 if shared_memory >= OF_AN_H100 else 0
    else:
        most = 64 * 384
    return precision if elements <= most else "ieee"


@functools.cache
def _partials_constants(c: Constants) -> dict[str, Any]:
    """Compile-time arguments of ``_add_partials_kernel``."""
    return {
        **{name: getattr(c, name) for name in ("D", "H_1", "H_2", "P", "A", "SIZE")},
        "BLOCK": BLOCK,
        "BLOCK_PROGRAMS": 16,
    }
