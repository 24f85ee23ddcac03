"""Calls of an op at little cost to the host: recorded once for each kind, then replayed by C++."""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.knobs import runtime

from torchrec_jagged_attn import paths
from torchrec_jagged_attn.checks import should_validate
from torchrec_jagged_attn.extension import Extension
from torchrec_jagged_attn.replay.recording import record

__all__ = ["ReplayedOp", "replay_extension"]

replay_extension = Extension(
    Path(__file__).with_name("replay.cpp"),
    flags=["-O2"],
    include=[Path(triton.__file__).parent / "backends/nvidia/include"],  # cuda.h
    is_module=True,
    without="calls take the host longer, in Python",
)
ENABLED = os.environ.get("TORCHREC_JAGGED_ATTN_REPLAY") == "1" and not paths.LOG
# Devices whose calls are replayed: where kernels are launched, and the host must not be late.
DEVICES = {"cuda"} if torch.version.cuda is not None else set()
_building, _recording = threading.Lock(), threading.Lock()


class ReplayedOp:
    """Calls an op, by a program of its own if there is one; gives the first output alone.

    A program is for plain tensors in eager mode: under a mode or a transform, for subclasses, with
    hooks on saved tensors or of a profiler of Triton's, and for what cannot be recorded, the op is
    called itself, with the same bits.

    Args:
        op: from the arguments to all outputs. Only the first has a gradient.
        num_tensors: how many of the arguments are tensors, which come first; the very first is no
            ``None``.
        differentiable: whether each of these may have a gradient.
        axes: of the output's gradient, of each of these tensors, and of each output: along which
            its length differs from call to call, -1 for none.
        run: as the op, but below autograd and on a device.
        run_backward: ``(grad_out, needs_grad, *arguments, *outputs)`` to the gradients asked for,
            likewise.
        call_backward: the same, for any tensors, under any mode.
    """

    def __init__(
        self,
        op: torch._ops.OpOverload,
        num_tensors: int,
        differentiable: Sequence[bool],
        axes: Sequence[int],
        run: Callable[..., Sequence[Tensor]],
        run_backward: Callable[..., Sequence[Tensor]],
        call_backward: Callable[..., Sequence[Tensor]],
    ) -> None:
        self.op, self.num_tensors = op, num_tensors
        self.differentiable, self.axes = list(differentiable), list(axes)
        self.run, self.run_backward, self.call_backward = run, run_backward, call_backward

    def __call__(self, *arguments: Any) -> Tensor:
        if ENABLED and not torch.compiler.is_compiling() and self._may_replay(arguments[0]):
            with _building:  # else two threads that come first make two
                replay = self.replay()
            out = None if replay is None else replay(*arguments)
            if out is not None:
                return out
        return self.plainly(*arguments)

    def _may_replay(self, first: Tensor) -> bool:
        hooks = runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls
        return first.device.type in DEVICES and not hooks and not should_validate(first)

    def plainly(self, *arguments: Any) -> Tensor:
        """The op's first output, by the op."""
        return self.op(*arguments)[0]

    @functools.cache  # noqa: B019  an op lives as long as the process
    def replay(self) -> Any | None:
        """``Call`` of ``replay.cpp``, where that can be built, and finds what it needs."""
        library = replay_extension.library()
        if library is None:
            return None
        if "cuda" in DEVICES:
            try:
                library.check_driver()
            except RuntimeError as error:
                warnings.warn(f"{replay_extension.without}: {error}", stacklevel=3)
                return None
        return library.Call(
            self.op._schema.name,
            self.differentiable,
            self.axes,
            self._record,
            self._record_backward,
            functools.partial(self._gradients, self.call_backward),
        )

    def _record(self, tensors: tuple, constants: tuple) -> Any | None:
        axes = self.axes[1 : 1 + self.num_tensors]
        return _record(lambda *traced: self.run(*traced, *constants), tensors, axes)

    def _record_backward(self, tensors: tuple, needs: tuple, constants: tuple) -> Any | None:
        def gradients(*traced: Tensor) -> list[Tensor | None]:
            return self._gradients(self.run_backward, traced, needs, constants)

        return _record(gradients, tensors, self.axes)

    def _gradients(
        self,
        backward: Callable[..., Sequence[Tensor]],
        tensors: tuple,
        needs: tuple[bool, ...],
        constants: tuple,
    ) -> list[Tensor | None]:
        """One for each tensor that needs one, of the output's gradient, the tensors and outputs."""
        grad_out, *rest = tensors
        inputs, outputs = rest[: self.num_tensors], rest[self.num_tensors :]
        needs_grad = [*needs, *(False for _ in constants)]
        found = iter(backward(grad_out, needs_grad, *inputs, *constants, *outputs))
        return [next(found) if need else None for need in needs]


def _record(
    function: Callable[..., Sequence[Tensor | None]], tensors: tuple, axes: Sequence[int]
) -> Any | None:
    library = replay_extension.library()
    assert library is not None
    with _recording:
        return record(function, tensors, axes, library.Program)
