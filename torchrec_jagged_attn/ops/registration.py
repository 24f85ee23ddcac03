"""How an op is registered: its implementation, fake and gradient.

As by ``torch.library.custom_op``, but that transforms of ``torch.func`` take gradients, too, and
that what has no derivative says so. Where the host must not be late, ``replay/`` calls an op.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any, NamedTuple, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction

from torchrec_jagged_attn.replay.calls import ReplayedOp

__all__ = [
    "Caller",
    "register_op",
    "register_op_of_ops",
    "register_op_without_grad",
    "replayed_without_grad",
]

_below_autograd = torch._C._AutoDispatchBelowAutograd

# Calls an op, given that and its arguments.
Caller = Callable[..., Any]

Arguments = TypeVar("Arguments", bound=Any)
Outputs = TypeVar("Outputs", bound=Any)

NAMESPACE = "torchrec_jagged_attn"
DEVICES = ("CPU", "CUDA")

# Kept alive as long as their op; dropped where a reload registers the op again.
_libraries: dict[str, torch.library.Library] = {}
# What runs on a device, of each op.
_runs: dict[torch._ops.OpOverload, Callable[..., Any]] = {}


def register_op(
    name: str,
    *,
    arguments: type[Arguments],
    outputs: type[Outputs],
    forward: Callable[[Arguments], Outputs],
    fake: Callable[[Arguments], Outputs],
    backward: Callable[[Tensor, Arguments, Outputs, Arguments], NamedTuple],
    non_differentiable: tuple[str, ...] = (),
    axes: dict[str, int],
    saves_outputs: bool = True,
) -> tuple[torch._ops.OpOverload, ReplayedOp]:
    """Register ``torchrec_jagged_attn::name`` for CPU and CUDA, and ``name_backward``.

    Both run with autocast off, and return new tensors that share no memory with any other.
    ``torch.func.grad`` and ``vjp`` work, and ``vmap`` takes one element after the other. Second
    derivatives are refused, and gradients of a batch, as ``vmap`` of a gradient takes.

    Args:
        name: of the op.
        arguments: the record of the op's arguments, whose fields are the schema. Tensors come
            before all others.
        outputs: the record of what the op returns, tensors alone. Only the first has a gradient. A
            single one is returned as it is: what traces shapes takes a tuple of one for constant.
        forward: from arguments to outputs.
        fake: ``forward`` on tensors without data.
        backward: ``(grad_out, arguments, outputs, needs)`` to a record of gradients by the names of
            the arguments, in their shapes and dtypes. ``needs`` has a bool for each argument:
            whether its gradient is asked for.
        non_differentiable: names of tensors among the arguments that may be floating-point, and of
            which the output is piecewise constant: they have no gradient, even if they require one.
        axes: of arguments and outputs, along which axis their length differs from call to call.
        saves_outputs: whether ``backward`` reads the outputs; if not, they are ``None`` there.

    Returns:
        The op, a function of the arguments one by one; and what calls it at little cost to the
        host, for its first output alone.
    """
    num_arguments, is_single = len(arguments._fields), len(outputs._fields) == 1

    def returned(made: Outputs) -> Any:
        return made[0] if is_single else made

    def run_forward(*fields: Any) -> Any:
        return returned(forward(arguments(*fields)))

    def fake_forward(*fields: Any) -> Any:
        return returned(fake(arguments(*fields)))

    def gradients(grad_out: Tensor, needs_grad: Sequence[bool], *fields: Any) -> list[Tensor]:
        grads = backward(
            grad_out,
            arguments(*fields[:num_arguments]),
            outputs(*fields[num_arguments:]),
            arguments(*needs_grad),
        )
        asked = zip(arguments._fields, needs_grad, strict=True)
        found = [getattr(grads, name) for name, need in asked if need]
        return [grad for grad in found if grad is not None]

    def fake_gradients(grad_out: Tensor, needs_grad: Sequence[bool], *fields: Any) -> list[Tensor]:
        asked = zip(fields, needs_grad, strict=False)
        return [x.new_empty(x.shape) for x, need in asked if need]

    of_arguments, of_outputs = get_type_hints(arguments), get_type_hints(outputs)
    returns: Any = Tensor if is_single else tuple[tuple(of_outputs.values())]
    op, run, library = _define(name, run_forward, fake_forward, _schema(of_arguments, returns))
    of_saved = of_outputs if saves_outputs else dict.fromkeys(of_outputs, Tensor | None)
    of_backward = {"grad_out": Tensor, "needs_grad": Sequence[bool], **of_arguments, **of_saved}
    backward_op, run_backward, backward_library = _define(
        f"{name}_backward", gradients, fake_gradients, _schema(of_backward, list[Tensor])
    )
    num_tensors = len(_tensors(op))

    def node_forward(ctx: Any, *inputs: Any) -> Any:
        made = _call_below_autograd(op, inputs)
        outputs = (made,) if is_single else made
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outputs[1:])
        saved = outputs if saves_outputs else (None,) * len(outputs)
        ctx.save_for_backward(*inputs[:num_tensors], *saved)
        ctx.constants = inputs[num_tensors:]
        ctx.is_transformed = torch._C._are_functorch_transforms_active()
        return made

    def call_backward(*arguments: Any) -> list[Tensor]:
        with _below_autograd():
            return backward_op(*arguments)

    def node_backward(ctx: Any, grad_out: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        needs_grad = ctx.needs_input_grad
        grads: list[Tensor | None] = [None] * len(needs_grad)
        if grad_out is None:
            return tuple(grads)
        # Transforms always ask for a graph: there the op of backward refuses its own gradient.
        if torch.is_grad_enabled() and not ctx.is_transformed:
            raise NotImplementedError(f"{name} has no second derivative, got create_graph=True")
        tensors = ctx.saved_tensors
        inputs, outputs = tensors[:num_tensors], tensors[num_tensors:]
        arguments = (grad_out, needs_grad, *inputs, *ctx.constants, *outputs)
        if torch.compiler.is_compiling() or ctx.is_transformed:
            needed = backward_op(*arguments)
        else:
            needed = call_backward(*arguments)
        needed_at = (at for at, need in enumerate(needs_grad) if need)
        for at, grad in zip(needed_at, needed, strict=True):
            grads[at] = grad
        return tuple(grads)

    def once_forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        return tuple(_call_below_autograd(backward_op, inputs))

    def refuse(ctx: Any, *_: Any) -> None:
        raise NotImplementedError(f"{name} has no second derivative")

    def refuse_batch(*_: Any) -> None:
        raise NotImplementedError(
            f"{name} has no gradient of a batch, got one of torch.func.vmap or of "
            "is_grads_batched=True: join its samples by offsets, or take one after the other"
        )

    _differentiate(op, library, node_forward, node_backward, non_differentiable)
    _differentiate(backward_op, backward_library, once_forward, refuse)
    for key in ("FuncTorchBatched", "Batched"):
        backward_library.impl(f"{name}_backward", refuse_batch, key)

    tensors = _tensors(op)
    floats = [x not in non_differentiable and not x.endswith("offsets") for x in tensors]
    all_axes = [axes.get(x, -1) for x in (*tensors, *outputs._fields)]
    return op, ReplayedOp(
        op,
        differentiable=floats,
        axes=[0, *all_axes],
        saved=[True] * len(tensors) + [saves_outputs] * len(outputs._fields),
        run=run,
        run_backward=run_backward,
        call_backward=call_backward,
    )


def register_op_of_ops(
    name: str,
    *,
    forward: Callable[..., Tensor],
    fake: Callable[..., Tensor],
    saves: tuple[str, ...],
    gradients: dict[str, Callable[..., Tensor]],
    in_one_pass: torch._ops.OpOverload | None = None,
    check: Callable[..., object] | None = None,
    lengths: tuple[str, ...] = (),
) -> tuple[torch._ops.OpOverload, ReplayedOp]:
    """Register ``torchrec_jagged_attn::name`` for CPU and CUDA, with a gradient made of other ops.

    It has as many derivatives as those. The schema is that of the annotated ``forward``, which runs
    with autocast off, and returns a new tensor that shares no memory with any other.

    Args:
        name: of the op.
        forward: ``(*inputs) -> out``. Tensors come before all others; along its first axis, the
            length of each differs from call to call.
        fake: ``forward`` on tensors without data.
        saves: names of the tensors that ``gradients`` take, of which ``"out"`` may be one.
        gradients: by the name of an input, ``(call, grad_out, *inputs, out)`` to its gradient.
            ``call`` calls an op; tensors that are not saved are ``None``.
        in_one_pass: an op, ``(grad_out, *inputs)`` to all gradients in the order of ``gradients``.
            It is called where all are asked for, and no gradient is taken of them.
        check: of the inputs, raises if they do not fit; made by the caller that is returned, not by
            the op itself.
        lengths: names of the integers that differ from call to call, which follow the tensors.

    Returns:
        The op, a function of ``forward``'s inputs; and what calls it at little cost to the host.

    Raises:
        ValueError: ``gradients`` has a name that is not an input's.
    """
    op, run, library = _define(name, forward, fake)
    names, tensors = [x.name for x in op._schema.arguments], _tensors(op)
    makers = [(names.index(x), make) for x, make in gradients.items()]
    num_tensors = len(tensors)
    saved = [x in saves for x in (*tensors, "out")]

    def node_forward(ctx: Any, *inputs: Any) -> Tensor:
        out = _call_below_autograd(op, inputs)
        kept = zip((*inputs[:num_tensors], out), saved, strict=True)
        ctx.save_for_backward(*(x if is_saved else None for x, is_saved in kept))
        ctx.others = inputs[num_tensors:]
        return out

    def backward(
        call: Caller, grad_out: Tensor, needs_grad: Sequence[bool], rest: tuple[Any, ...]
    ) -> tuple[Tensor | None, ...]:
        grads: list[Tensor | None] = [None] * len(needs_grad)
        all_asked = all(needs_grad[at] for at, _ in makers)
        if in_one_pass and all_asked and not torch.is_grad_enabled():
            made = call(in_one_pass, grad_out, *rest[:-1])
            for (at, _), grad in zip(makers, made, strict=True):
                grads[at] = grad
            return tuple(grads)
        for at, make in makers:
            if needs_grad[at]:
                grads[at] = make(call, grad_out, *rest)
        return tuple(grads)

    def node_backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, out = ctx.saved_tensors
        return backward(_call, grad_out, ctx.needs_input_grad, (*inputs, *ctx.others, out))

    def asked_for(call: Caller, grad_out: Tensor, needs_grad: list[bool], *rest: Any) -> list:
        grads = backward(call, grad_out, needs_grad, rest)
        return [grad for grad, need in zip(grads, needs_grad, strict=True) if need]

    _differentiate(op, library, node_forward, node_backward)
    return op, ReplayedOp(
        op,
        differentiable=[not x.endswith("offsets") for x in tensors],
        check=check,
        num_lengths=len(lengths),
        axes=[0] * (num_tensors + 2),
        saved=saved,
        run=run,
        run_backward=functools.partial(asked_for, _run),
        call_backward=functools.partial(asked_for, _call),
        has_second_derivatives=True,
    )


def register_op_without_grad(
    name: str, *, forward: Callable[..., Any], fake: Callable[..., Any]
) -> torch._ops.OpOverload:
    """Register ``torchrec_jagged_attn::name`` for CPU and CUDA, to be called where no gradient is
    taken, as in another op's backward.

    The schema is that of the annotated ``forward``, which runs with autocast off, and returns new
    tensors that share no memory with any other.
    """
    return _define(name, forward, fake)[0]


def replayed_without_grad(op: torch._ops.OpOverload, lengths: tuple[str, ...]) -> ReplayedOp:
    """What calls an op of :func:`register_op_without_grad` at little cost to the host.

    It has several outputs, which are given as a tuple. Its tensors come before all other inputs;
    along its first axis, the length of each differs from call to call. Integers that do so, too,
    follow, of which ``lengths`` has the names.
    """
    num_tensors, num_outputs = len(_tensors(op)), len(op._schema.returns)
    return ReplayedOp(
        op,
        differentiable=[False] * num_tensors,
        num_lengths=len(lengths),
        axes=[0] * (1 + num_tensors + num_outputs),
        saved=[False] * (num_tensors + num_outputs),
        run=_runs[op],
        returns_all=True,
    )


def _call(op: torch._ops.OpOverload, *arguments: Any) -> Any:
    return op(*arguments)


def _run(op: torch._ops.OpOverload, *arguments: Any) -> Any:
    with _below_autograd():
        return _runs[op](*arguments)


def _tensors(op: torch._ops.OpOverload) -> list[str]:
    """Names of the tensors among its arguments."""
    return [x.name for x in op._schema.arguments if "Tensor" in str(x.type)]


def _differentiate(
    op: torch._ops.OpOverload,
    library: torch.library.Library,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    non_differentiable: tuple[str, ...] = (),
) -> None:
    """Where an input of ``op`` needs a gradient, other than one that is ``non_differentiable``, it
    runs as the node of ``forward``, which calls ``op`` again, below autograd.
    """
    name = op._schema.name.split("::")[1]
    functions = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    node = type(name, (torch.autograd.Function,), functions)
    node_of_level = type(name, (_SingleLevelFunction,), functions)
    detached = [at for at, x in enumerate(op._schema.arguments) if x.name in non_differentiable]

    def autograd(*inputs: Any) -> Any:
        if forward_ad._current_level >= 0:
            _refuse_tangents(name, inputs)
        needs_grad = torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs)
        if needs_grad:
            for at in detached:
                if inputs[at] is not None and inputs[at].requires_grad:
                    inputs = (*inputs[:at], inputs[at].detach(), *inputs[at + 1 :])
                    needs_grad = torch._C._any_requires_grad(*inputs)
        if not needs_grad:
            with _below_autograd():
                return op(*inputs)
        if not torch._C._are_functorch_transforms_active():
            return node.apply(*inputs)
        with enable_single_level_autograd_function():  # the dispatcher calls this at each level
            return node_of_level.apply(*inputs)  # pyright: ignore[reportAttributeAccessIssue]

    library.impl(name, autograd, "Autograd")


def _call_below_autograd(op: torch._ops.OpOverload, inputs: tuple[Any, ...]) -> Any:
    """``op(*inputs)``, in the forward of a node, which runs with gradients off: those that are
    taken outside of a transform's level are not.
    """
    if torch._C._are_functorch_transforms_active():
        with torch.enable_grad(), _set_fwd_grad_enabled(True), _below_autograd():
            return op(*inputs)
    with _below_autograd():
        return op(*inputs)


def _refuse_tangents(name: str, inputs: tuple[Any, ...]) -> None:
    """Forward-mode derivatives are not made: without an error they would be zero."""
    for x in inputs:
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(f"{name} has no forward-mode derivative, got a dual tensor")


def _schema(arguments: dict[str, Any], returns: Any) -> str:
    """The schema of an op that takes ``arguments``, from names to types."""

    def prototype() -> None: ...

    kind = Parameter.POSITIONAL_OR_KEYWORD
    prototype.__signature__ = Signature(  # pyright: ignore[reportFunctionMemberAccess]
        [Parameter(name, kind, annotation=of_type) for name, of_type in arguments.items()],
        return_annotation=returns,
    )
    return torch.library.infer_schema(prototype, mutates_args=())


def _define(
    name: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    schema: str | None = None,
) -> tuple[torch._ops.OpOverload, Callable[..., Any], torch.library.Library]:
    """The op of an implementation and its fake, without a gradient; what runs on a device; and the
    op's library.

    The first input is a tensor, whose device becomes the current one. The schema is by default that
    of the annotated implementation.
    """
    if schema is None:
        schema = torch.library.infer_schema(implementation, mutates_args=())

    def run(*arguments: Any) -> Any:
        if forward_ad._current_level >= 0:  # gradients, too, may have a tangent
            _refuse_tangents(name, arguments)
        with torch._C._DisableAutocast(), torch.cuda.device_of(arguments[0]):
            return implementation(*arguments)

    if name in _libraries:
        _libraries.pop(name)._destroy()
    library = _libraries[name] = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(name + schema)
    for key in DEVICES:
        library.impl(name, run, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    _runs[op] = run
    return op, run, library
