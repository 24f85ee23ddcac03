"""How an op is registered: its implementation, fake and gradient.

Unlike ops of ``torch.library.custom_op``, they support gradients by transforms of ``torch.func``,
and raise an error for derivatives that they do not have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction

from torchrec_jagged_attn.runtime.flops import count_flops

_below_autograd = torch._C._AutoDispatchBelowAutograd

Arguments = TypeVar("Arguments", bound=Any)
Outputs = TypeVar("Outputs", bound=Any)

NAMESPACE = "torchrec_jagged_attn"
DEVICES = ("CPU", "CUDA")
SCHEMA_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    torch.dtype: "ScalarType",
    bool: "bool",
    float: "float",
    int: "SymInt",
    str: "str",
}
"""What a field of a record is in a schema."""

# Kept alive as long as their op; dropped where a reload registers the op again.
_libraries: dict[str, torch.library.Library] = {}


def register_op(
    name: str,
    *,
    arguments: type[Arguments],
    outputs: type[Outputs],
    forward: Callable[[Arguments], Outputs],
    fake: Callable[[Arguments], Outputs],
    backward: Callable[..., NamedTuple],
    non_differentiable: tuple[str, ...] = (),
    unsaved: tuple[str, ...] = (),
    fake_backward: Callable[..., NamedTuple] | None = None,
    passes_gradient: bool = False,
    num_differentiable: int = 1,
    check: Callable[..., object] = lambda *_: None,
    flops: Callable[[Arguments, Arguments | None], int] | None = None,
) -> tuple[torch._ops.OpOverload, Callable[..., Any]]:
    """Register ``torchrec_jagged_attn::name`` for CPU and CUDA, and ``name_backward``.

    Both run with autocast off, and return new tensors that share no memory with any other.
    ``torch.func.grad`` and ``vjp`` work, and ``vmap`` takes one element after the other. Second
    derivatives are refused, and gradients of a batch, as ``vmap`` of a gradient takes.

    Args:
        name: of the op.
        arguments: the record of the op's arguments. Its fields are the schema, and in the place of
            one that is a record, the fields of that. Tensors come before all others.
        outputs: the record of what the op returns, tensors alone. A single one is returned as it
            is: what traces shapes takes a tuple of one for constant.
        forward: from arguments to outputs.
        fake: ``forward`` on tensors without data.
        backward: ``(*grads, arguments, outputs, needs)`` to a record of gradients by the names of
            the arguments, in their shapes and dtypes. ``grads`` are those of the outputs that have
            one, and ``needs`` has a bool for each argument: whether its gradient is needed.
        non_differentiable: names of tensors among the arguments that may be floating-point, and of
            which the output is piecewise constant: they have no gradient, even if they require one.
        unsaved: names of arguments and outputs that ``backward`` does not read, and gets ``None``
            for.
        fake_backward: ``(*grads, arguments, outputs)`` to a record of all gradients without data,
            where they are not those of the arguments that are saved.
        passes_gradient: whether the gradient of the first argument is that of the output, and not
            made by ``backward``.
        num_differentiable: how many of the outputs have a gradient, the first ones. Where there are
            several, the gradient of an output that is not used is zeros.
        check: raises an error for arguments that do not fit. The returned function calls it, the op
            itself does not.
        flops: of products, for PyTorch's counter: those of forward, or, with ``needs``, of
            backward. An op without products has none.

    Returns:
        The op, and a function that checks the arguments, calls the op, and returns the outputs that
        have a gradient.
    """
    of_arguments, of_outputs = _leaves(arguments), _leaves(outputs)
    num_arguments, is_single = len(of_arguments), len(of_outputs) == 1
    build = _builder(arguments)

    def returned(made: Outputs) -> Any:
        return made[0] if is_single else made

    def run_forward(*fields: Any) -> Any:
        return returned(forward(build(fields)))

    def fake_forward(*fields: Any) -> Any:
        return returned(fake(build(fields)))

    def records_of(given: tuple[Any, ...]) -> tuple[Any, ...]:
        """What ``backward`` takes, of what its op is given."""
        grads, (needs_grad, *fields) = given[:num_differentiable], given[num_differentiable:]
        made = outputs(*fields[num_arguments:])
        return *grads, build(fields[:num_arguments]), made, build(needs_grad)

    def gradients(*given: Any) -> list[Tensor]:
        grads = backward(*records_of(given))
        pairs = zip(of_arguments, given[num_differentiable], strict=True)
        found = [getattr(grads, name) for name, need in pairs if need]
        return [grad for grad in found if grad is not None]

    def fake_gradients(*given: Any) -> list[Tensor]:
        needs_grad, *fields = given[num_differentiable:]
        like: list[Any] = fields[:num_arguments]
        if fake_backward is not None:
            *grads, args, made, _ = records_of(given)
            of_names = fake_backward(*grads, args, made)
            like = [getattr(of_names, name, None) for name in of_arguments]
        pairs = zip(like, needs_grad, strict=True)
        return [x.new_empty(x.shape) for x, need in pairs if need]

    def passed(backward: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
        if not passes_gradient:
            return backward

        def gradients(grad_out: Tensor, needs_grad: Sequence[bool], *fields: Any) -> list[Tensor]:
            first, others = needs_grad[0], [False, *needs_grad[1:]]
            made = backward(grad_out, others, *fields) if any(others) else []
            return [grad_out, *made] if first else made

        return gradients

    returns = f"({', '.join(SCHEMA_TYPES[x] for x in of_outputs.values())})"
    op, library = _define(
        name, run_forward, fake_forward, f"({_parameters(of_arguments)}) -> {returns}"
    )
    grads = {f"grad_{x}": Tensor for x in ("out", *outputs._fields[1:num_differentiable])}
    saved_types = of_arguments | of_outputs | dict.fromkeys(unsaved, Tensor | None)
    backward_op, backward_library = _define(
        f"{name}_backward",
        gradients,
        fake_gradients,
        f"({_parameters(grads)}, bool[] needs_grad, {_parameters(saved_types)}) -> Tensor[]",
    )
    tensors = _tensors(op)
    num_tensors = len(tensors)
    if flops is not None:
        count_flops(op, lambda *fields, out_val: flops(build(fields), None))
        count_flops(
            backward_op, lambda *given, out_val: flops(*records_of(given)[num_differentiable::2])
        )
    saved = [x not in unsaved for x in (*tensors, *outputs._fields)]

    def node_forward(ctx: Any, *inputs: Any) -> Any:
        made = _call_below_autograd(op, inputs)
        outputs = (made,) if is_single else made
        ctx.set_materialize_grads(num_differentiable > 1)
        ctx.mark_non_differentiable(*outputs[num_differentiable:])
        kept = zip((*inputs[:num_tensors], *outputs), saved, strict=True)
        ctx.save_for_backward(*(x if is_saved else None for x, is_saved in kept))
        ctx.constants = inputs[num_tensors:]
        ctx.is_transformed = torch._C._are_functorch_transforms_active()
        return made

    def call_backward(*arguments: Any) -> list[Tensor]:
        with _below_autograd():
            return backward_op(*arguments)

    def node_backward(ctx: Any, *grads_out: Tensor | None) -> tuple[Tensor | None, ...]:
        needs_grad = ctx.needs_input_grad
        if grads_out[0] is None:
            return (None,) * len(needs_grad)
        # Transforms always request a graph: there the op of backward refuses its own gradient.
        if torch.is_grad_enabled() and not ctx.is_transformed:
            raise NotImplementedError(f"{name} has no second derivative, got create_graph=True")
        tensors = ctx.saved_tensors
        inputs, outputs = tensors[:num_tensors], tensors[num_tensors:]
        given = (needs_grad, *inputs, *ctx.constants, *outputs)
        arguments = (*grads_out[:num_differentiable], *given)
        in_graph = torch.compiler.is_compiling() or ctx.is_transformed
        grads = iter(passed(backward_op if in_graph else call_backward)(*arguments))
        return tuple(next(grads) if need else None for need in needs_grad)

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

    def call(*arguments: Any) -> Any:
        check(*arguments)
        made = op(*arguments)
        if is_single:
            return made
        return made[0] if num_differentiable == 1 else made[:num_differentiable]

    return op, call


def register_op_without_grad(
    name: str,
    *,
    forward: Callable[..., Any],
    fake: Callable[..., Any],
) -> torch._ops.OpOverload:
    """Register ``torchrec_jagged_attn::name``, which has no gradient, for CPU and CUDA.

    The schema is that of the annotated ``forward``, which runs with autocast off and returns new
    tensors.
    """
    return _define(name, forward, fake)[0]


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


def flatten(record: tuple[Any, ...]) -> list[Any]:
    """The arguments of an op, of the record of them."""
    leaves = []
    for field in record:  # of every call: a loop takes the host less than a generator
        if isinstance(field, tuple):
            leaves += flatten(field)
        else:
            leaves.append(field)
    return leaves


def _leaves(record: type) -> dict[str, Any]:
    """The types of what :func:`flatten` gives, by their names."""
    leaves = {}
    for name, of_type in get_type_hints(record).items():
        leaves |= _leaves(of_type) if hasattr(of_type, "_fields") else {name: of_type}
    return leaves


def _builder(record: type[Arguments]) -> Callable[[Sequence[Any]], Arguments]:
    """What makes the ``record`` of what :func:`flatten` gives."""
    inner = [
        (at, at + len(_leaves(of_type)), _builder(of_type))
        for at, of_type in enumerate(get_type_hints(record).values())
        if hasattr(of_type, "_fields")
    ]

    def build(leaves: Sequence[Any]) -> Arguments:
        fields = list(leaves)
        for begin, end, build_field in inner:  # those before it are one field by now
            fields[begin:end] = (build_field(fields[begin:end]),)
        return record._make(fields)

    return build if inner else record._make


def _parameters(leaves: dict[str, Any]) -> str:
    """Names and types as a schema has them."""
    return ", ".join(f"{SCHEMA_TYPES[of_type]} {name}" for name, of_type in leaves.items())


def _define(
    name: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    schema: str | None = None,
) -> tuple[torch._ops.OpOverload, torch.library.Library]:
    """Define an op without a gradient, and return it with its library.

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
    return op, library
