"""Calls of an op at little cost to the host: recorded once for each kind, then replayed by C++."""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd import forward_ad
from triton.knobs import runtime

from torchrec_jagged_attn.runtime import dispatch
from torchrec_jagged_attn.runtime.extension import Extension
from torchrec_jagged_attn.runtime.recording import record

replay_extension = Extension(
    Path(__file__).with_name("replay.cpp"),
    flags=["-O2"],
    include=[Path(triton.__file__).parent / "backends/nvidia/include"],  # cuda.h
    is_module=True,
    without="calls take the host longer, in Python",
)
ENABLED = os.environ.get("TORCHREC_JAGGED_ATTN_REPLAY") != "0" and not dispatch.LOG
# Devices whose calls are replayed: where kernels are launched, and the host must not be late.
DEVICES = {"cuda"} if torch.version.cuda is not None else set()
is_capturing = torch.cuda.is_current_stream_capturing if DEVICES else lambda: False
_building, _recording = threading.Lock(), threading.Lock()


@dataclass(eq=False)
class ReplayedOp:
    """Calls an op, by a program of its own if there is one; gives its first outputs.

    A program is for plain tensors in eager mode. The op is called itself, with the same bits, under
    a mode or a transform, for subclasses, with hooks on saved tensors or of a profiler of Triton's,
    and for what cannot be recorded.

    Args:
        op: from the arguments to all outputs, or to the only one.
        check: of the same arguments, raises if they do not fit. It is recorded, too: where it was
            passed, a program has guards that say so, and it is not called again.
        differentiable: of each tensor among the arguments, whether it may have a gradient. Tensors
            come first; the very first is no ``None``.
        num_lengths: how many of the arguments after these are lengths, which differ from call to
            call.
        axes: of the gradient of each output that is given, of each of these tensors, and of each
            output: along which its length differs from call to call, -1 for none.
        saved: of each of these tensors, and of each output: whether backward takes it, or ``None``.
        run: from the arguments to what the op returns, below autograd and on a device.
        run_backward: ``(*grads, needs_grad, *arguments, *outputs)`` to the gradients needed,
            likewise. An op without any has neither this nor the next.
        call_backward: the same, for any tensors, under any mode.
        num_returned: how many outputs are given, the first ones: as a tuple, if several. Of an op
            with a gradient they have one, and no other has.
    """

    op: torch._ops.OpOverload
    _: KW_ONLY
    check: Callable[..., object] = lambda *_: None
    differentiable: list[bool]
    num_lengths: int = 0
    axes: list[int]
    saved: list[bool]
    run: Callable[..., Tensor | Sequence[Tensor]]
    run_backward: Callable[..., Sequence[Tensor]] | None = None
    call_backward: Callable[..., Sequence[Tensor]] | None = None
    num_returned: int = 1
    replay: Callable[..., Any] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.num_tensors = len(self.differentiable)

    def __call__(self, *arguments: Any) -> Any:
        if ENABLED and not torch.compiler.is_compiling():
            first = arguments[0]
            hooks = runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls
            if isinstance(first, Tensor) and first.device.type in DEVICES and not hooks:
                out = (self.replay or self._make_replay())(*arguments)
                if out is not None:
                    return out
        self.check(*arguments)
        return self.plainly(*arguments)

    def plainly(self, *arguments: Any) -> Any:
        """The op's first outputs, by the op."""
        outputs = self.op(*arguments)
        if isinstance(outputs, Tensor):
            return outputs
        return outputs[0] if self.num_returned == 1 else outputs[: self.num_returned]

    def _make_replay(self) -> Callable[..., Any]:
        """What ``replay.cpp`` calls the op by, where that can be built and finds what it needs."""
        with _building:  # else two threads that come first make two
            if self.replay is None:
                self.replay = self._replay_of_library() or (lambda *_: None)
        return self.replay

    def _replay_of_library(self) -> Callable[..., Any] | None:
        library = replay_extension.library()
        if library is None:
            return None
        if "cuda" in DEVICES:
            try:
                library.check_driver()
            except RuntimeError as error:
                warnings.warn(f"{replay_extension.without}: {error}", stacklevel=4)
                return None
        return library.replay_of(
            self.op._schema.name,
            self.num_lengths,
            self.differentiable,
            self.saved,
            self.axes,
            self.num_returned,
            self._record,
            self._record_backward,
            functools.partial(self._gradients, self.call_backward),
        )

    def _record(self, tensors: tuple, lengths: list, constants: tuple) -> Any | None:
        self.check(*tensors, *lengths, *constants)  # what fails while recording ends replays

        def run(*traced: Any) -> Sequence[Tensor]:
            self.check(*traced, *constants)
            outputs = self.run(*traced, *constants)
            return [outputs] if isinstance(outputs, Tensor) else outputs

        return _record(run, tensors, self.axes[self.num_returned :][: self.num_tensors], lengths)

    def _record_backward(
        self, tensors: tuple, needs: tuple, lengths: list, constants: tuple
    ) -> Any | None:
        def gradients(*traced: Any) -> list[Tensor | None]:
            of_tensors, of_lengths = traced[: len(tensors)], traced[len(tensors) :]
            return self._gradients(self.run_backward, of_tensors, needs, of_lengths, constants)

        return _record(gradients, tensors, self.axes, lengths)

    def _gradients(
        self,
        backward: Callable[..., Sequence[Tensor]] | None,
        tensors: tuple,
        needs: tuple[bool, ...],
        lengths: Sequence[int],
        constants: tuple,
    ) -> list[Tensor | None]:
        """One for each tensor that needs one, of outputs' gradients, the tensors and outputs."""
        grads, kept = tensors[: self.num_returned], tensors[self.num_returned :]
        inputs, outputs = kept[: self.num_tensors], kept[self.num_tensors :]
        others = (*lengths, *constants)
        needs_grad = [*needs, *(False for _ in others)]
        assert backward is not None
        found = iter(backward(*grads, needs_grad, *inputs, *others, *outputs))
        return [next(found) if need else None for need in needs]


def _record(
    function: Callable[..., Sequence[Tensor | None]],
    tensors: tuple,
    axes: Sequence[int],
    lengths: Sequence[int],
) -> Any | None:
    """A program, ``None`` for what cannot be recorded, ``NotImplemented`` for what cannot now."""
    # Not where tangents may come, nor into a CUDA graph, which would keep these launches, too.
    with torch.cuda.device_of(tensors[0]):
        if forward_ad._current_level >= 0 or is_capturing():
            return NotImplemented
    library = replay_extension.library()
    assert library is not None
    with _recording:
        return record(function, tensors, axes, lengths, library.Program)
