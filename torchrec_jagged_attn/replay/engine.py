"""Builds ``replay.cpp`` and connects ops with it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from torchrec_jagged_attn.replay.recording import record

__all__ = ["make_call"]

_SOURCE = Path(__file__).with_name("replay.cpp")
_lock = threading.Lock()


@functools.cache
def _module() -> Any:
    import triton
    from torch.utils import cpp_extension

    include = Path(triton.__file__).parent / "backends/nvidia/include"
    return cpp_extension.load(
        "torchrec_jagged_attn_replay",
        [str(_SOURCE)],
        extra_cflags=["-O2"],
        extra_include_paths=[str(include)],
        extra_ldflags=["-ltorch_python"],
    )


def make_call(
    name: str,
    num_tensors: int,
    differentiable: Sequence[bool],
    axes: Sequence[int],
    run_forward: Callable[..., Sequence[Tensor]],
    run_backward: Callable[..., Sequence[Tensor]],
) -> Any:
    """What replays calls of an op: a function of its arguments, to its first output or None.

    Args:
        name: of the op.
        num_tensors: how many of its arguments are tensors, which come first.
        differentiable: whether each of these may have a gradient.
        axes: of the output's gradient, of each of these, and of each output: along which its
            length differs from call to call, -1 for none.
        run_forward: from the arguments to all outputs.
        run_backward: ``(grad_out, needs_grad, *arguments, *outputs)`` to the gradients asked for.
    """
    make_program = _module().Program

    def forward_of(constants: tuple) -> Callable[..., Sequence[Tensor]]:
        return lambda *tensors: run_forward(*tensors, *constants)

    def backward_of(asked: tuple[bool, ...], constants: tuple) -> Callable[..., list]:
        needs_grad = [*asked, *(False for _ in constants)]

        def backward(grad_out: Tensor, *tensors: Tensor) -> list[Tensor | None]:
            inputs, outputs = tensors[:num_tensors], tensors[num_tensors:]
            found = iter(run_backward(grad_out, needs_grad, *inputs, *constants, *outputs))
            return [next(found) if need else None for need in asked]

        return backward

    def record_forward(tensors: tuple, constants: tuple) -> Any | None:
        with _lock:
            return record(forward_of(constants), tensors, axes[1 : 1 + num_tensors], make_program)

    def record_backward(tensors: tuple, asked: tuple, constants: tuple) -> Any | None:
        with _lock:
            return record(backward_of(asked, constants), tensors, axes, make_program)

    def plain_backward(tensors: tuple, asked: tuple, constants: tuple) -> list[Tensor | None]:
        return backward_of(asked, constants)(*tensors)

    return _module().Call(
        name, list(differentiable), list(axes), record_forward, record_backward, plain_backward
    )
