"""Registration of ops: schema, implementation, fake implementation and gradient.

Unlike ops of ``torch.library.custom_op``, these ops support ``torch.func.grad`` and ``vjp``, and
raise an error for derivatives that they do not support.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction

from torchrec_jagged_attn.ops.flops import count_flops

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
"""Schema types of the fields of records."""

# A library unregisters its op when it is garbage-collected. Reloading a module replaces it.
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
    not_saved: tuple[str, ...] = (),
    fake_backward: Callable[..., NamedTuple] | None = None,
    grad_is_passthrough: bool = False,
    num_differentiable: int = 1,
    check: Callable[..., object] = lambda *_: None,
    check_values: Callable[[Arguments], object] = lambda _: None,
    flops: Callable[[Arguments, Arguments | None], int] | None = None,
) -> tuple[torch._ops.OpOverload, Callable[..., Any]]:
    """Register ``torchrec_jagged_attn::name`` and ``name_backward`` for CPU and CUDA.

    Both ops run with autocast disabled, and return new tensors that share no memory with others.
    ``torch.func.grad`` and ``vjp`` are supported; ``vmap`` calls the op once per element. Second
    derivatives, forward-mode derivatives and batched gradients (``vmap`` of a gradient) raise
    ``NotImplementedError``.

    Args:
        name: the name of the op.
        arguments: a ``NamedTuple`` of the op's arguments, which defines its schema. The fields of
            nested records become arguments in their place. Tensors precede all other arguments.
        outputs: a ``NamedTuple`` of the op's outputs, all of them tensors. The op returns a single
            output as a tensor, since tracing treats a tuple of one tensor as a constant.
        forward: computes the outputs from the arguments.
        fake: returns empty outputs of the right shapes, for fake tensors.
        backward: ``(*grads, arguments, outputs, needs)`` to a record of gradients, named, shaped
            and typed as the arguments. ``grads`` are the gradients of the differentiable outputs;
            ``needs`` is a record of bools, whether the gradient of each argument is needed.
        non_differentiable: names of floating-point arguments without a gradient, even if they
            require one, because the output is piecewise constant in them.
        not_saved: names of arguments and outputs that ``backward`` does not read. They are
            ``None`` there.
        fake_backward: ``(*grads, arguments, outputs)`` to a record of all gradients, for fake
            tensors; needed if an argument with a gradient is not saved.
        grad_is_passthrough: whether the gradient of the first argument is the output's gradient,
            so that ``backward`` does not compute it.
        num_differentiable: how many of the outputs have a gradient, the first ones. If there are
            several, unused outputs have gradients of zeros.
        check: raises an error for invalid arguments. Only the returned function calls it, not the
            op.
        check_values: likewise for values of tensors. The op calls it, so that scripted and compiled
            programs check them, too.
        flops: FLOPs of matrix products, for PyTorch's ``FlopCounterMode``: of ``(arguments, None)``
            for forward, of ``(arguments, needs)`` for backward.

    Returns:
        The op; and a function that checks the arguments, calls the op, and returns the
        differentiable outputs.
    """
    argument_types, output_types = _leaf_types(arguments), _leaf_types(outputs)
    num_arguments, is_single = len(argument_types), len(output_types) == 1
    build = _builder(arguments)

    # The op:
    def run_forward(*leaves: Any) -> Any:
        args = build(leaves)
        check_values(args)
        results = forward(args)
        return results[0] if is_single else results

    def run_fake_forward(*leaves: Any) -> Any:
        results = fake(build(leaves))
        return results[0] if is_single else results

    returns = ", ".join(SCHEMA_TYPES[x] for x in output_types.values())
    op, library = _define(
        name, run_forward, run_fake_forward, f"({_parameters(argument_types)}) -> ({returns})"
    )

    # The op of its gradient, whose inputs are grads, needs_grad, arguments and outputs:
    def as_records(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the parameters of ``backward``, from the inputs of the op."""
        grads, (needs_grad, *leaves) = inputs[:num_differentiable], inputs[num_differentiable:]
        results = outputs(*leaves[num_arguments:])
        return *grads, build(leaves[:num_arguments]), results, build(needs_grad)

    def run_backward(*inputs: Any) -> list[Tensor]:
        grads = backward(*as_records(inputs))
        needs_grad = inputs[num_differentiable]
        return [
            getattr(grads, x) for x, need in zip(argument_types, needs_grad, strict=True) if need
        ]

    def run_fake_backward(*inputs: Any) -> list[Tensor]:
        needs_grad, *leaves = inputs[num_differentiable:]
        like: list[Any] = leaves[:num_arguments]
        if fake_backward is not None:
            *grads, args, results, _ = as_records(inputs)
            fake_grads = fake_backward(*grads, args, results)
            like = [getattr(fake_grads, x, None) for x in argument_types]
        return [x.new_empty(x.shape) for x, need in zip(like, needs_grad, strict=True) if need]

    grad_types = {f"grad_{x}": Tensor for x in ("out", *outputs._fields[1:num_differentiable])}
    saved_types = argument_types | output_types | dict.fromkeys(not_saved, Tensor | None)
    backward_op, backward_library = _define(
        f"{name}_backward",
        run_backward,
        run_fake_backward,
        f"({_parameters(grad_types)}, bool[] needs_grad, {_parameters(saved_types)}) -> Tensor[]",
    )

    if flops is not None:

        def backward_flops(*inputs: Any, out_val: object) -> int:
            args, _, needs = as_records(inputs)[num_differentiable:]
            return flops(args, needs)

        count_flops(op, lambda *leaves, out_val: flops(build(leaves), None))
        count_flops(backward_op, backward_flops)

    # Autograd of the op:
    num_tensors = sum(x in (Tensor, Tensor | None) for x in argument_types.values())
    tensor_names = (*list(argument_types)[:num_tensors], *output_types)
    is_saved = [x not in not_saved for x in tensor_names]

    def node_forward(ctx: Any, *inputs: Any) -> Any:
        results = _call_below_autograd(op, inputs)
        results_tuple = (results,) if is_single else results
        ctx.set_materialize_grads(num_differentiable > 1)
        ctx.mark_non_differentiable(*results_tuple[num_differentiable:])
        tensors = zip((*inputs[:num_tensors], *results_tuple), is_saved, strict=True)
        ctx.save_for_backward(*(x if save else None for x, save in tensors))
        ctx.constants = inputs[num_tensors:]
        ctx.is_transformed = torch._C._are_functorch_transforms_active()
        return results

    public_name = name if name.startswith("jagged_") else f"jagged_{name}"
    no_second_derivative = f"create_graph must be False, {public_name} has no second derivative"
    way_out = ": detach its output, or use scaled_dot_product_attention of torch.nn.functional"

    def node_backward(ctx: Any, *grads_out: Tensor | None) -> tuple[Tensor | None, ...]:
        needs_grad = ctx.needs_input_grad
        if grads_out[0] is None:
            return (None,) * len(needs_grad)
        # Transforms always enable gradients here; their second derivatives are refused below.
        if torch.is_grad_enabled() and not ctx.is_transformed:
            raise NotImplementedError(f"{no_second_derivative}, got create_graph=True{way_out}")
        computed = (False, *needs_grad[1:]) if grad_is_passthrough else needs_grad
        grads: list[Tensor] = []
        if any(computed):
            tensors = ctx.saved_tensors
            inputs, results = tensors[:num_tensors], tensors[num_tensors:]
            leaves = (*grads_out[:num_differentiable], computed, *inputs, *ctx.constants, *results)
            in_graph = torch.compiler.is_compiling() or ctx.is_transformed
            with contextlib.nullcontext() if in_graph else _below_autograd():  # saves host time
                grads = backward_op(*leaves)
        remaining = iter(grads)
        grads_in = tuple(next(remaining) if need else None for need in computed)
        if grad_is_passthrough and needs_grad[0]:
            return grads_out[0], *grads_in[1:]
        return grads_in

    _set_autograd(op, library, node_forward, node_backward, non_differentiable)

    # Autograd of the op of the gradient, which raises an error:
    def backward_node_forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        return tuple(_call_below_autograd(backward_op, inputs))

    def refuse_second_derivative(ctx: Any, *_: Any) -> None:
        raise NotImplementedError(f"{no_second_derivative}{way_out}")

    def refuse_batch(*_: Any) -> None:
        raise NotImplementedError(
            f"{name} has no gradient of a batch, got one of torch.func.vmap or of "
            "is_grads_batched=True: join its samples by offsets, or compute one after the other"
        )

    _set_autograd(backward_op, backward_library, backward_node_forward, refuse_second_derivative)
    for key in ("FuncTorchBatched", "Batched"):
        backward_library.impl(f"{name}_backward", refuse_batch, key)

    def check_and_call(*leaves: Any) -> Any:
        check(*leaves)
        results = op(*leaves)
        if is_single:
            return results
        return results[0] if num_differentiable == 1 else results[:num_differentiable]

    return op, check_and_call


def register_op_without_grad(
    name: str,
    *,
    forward: Callable[..., Any],
    fake: Callable[..., Any],
) -> torch._ops.OpOverload:
    """Register ``torchrec_jagged_attn::name``, an op without a gradient, for CPU and CUDA.

    The schema is inferred from the annotations of ``forward``, which runs with autocast disabled
    and returns new tensors.
    """
    return _define(name, forward, fake)[0]


def flatten(record: tuple[Any, ...]) -> list[Any]:
    """Return the arguments of an op, from a record of them: nested records are flattened."""
    leaves = []
    for field in record:  # called by every op: a loop takes less host time than a generator
        if isinstance(field, tuple):
            leaves += flatten(field)
        else:
            leaves.append(field)
    return leaves


def _builder(record: type[Arguments]) -> Callable[[Sequence[Any]], Arguments]:
    """Return the inverse of :func:`flatten`, which builds a ``record``."""
    nested = [
        (index, index + len(_leaf_types(x)), _builder(x))
        for index, x in enumerate(get_type_hints(record).values())
        if hasattr(x, "_fields")
    ]

    def build(leaves: Sequence[Any]) -> Arguments:
        fields = list(leaves)
        for begin, end, build_field in nested:  # earlier nested records are one field by then
            fields[begin:end] = (build_field(fields[begin:end]),)
        return record._make(fields)

    return build if nested else record._make


def _leaf_types(record: type) -> dict[str, Any]:
    """Return the names and types of the elements that :func:`flatten` returns."""
    leaves = {}
    for name, x in get_type_hints(record).items():
        leaves |= _leaf_types(x) if hasattr(x, "_fields") else {name: x}
    return leaves


def _parameters(leaf_types: dict[str, Any]) -> str:
    """Return the parameters of a schema."""
    return ", ".join(f"{SCHEMA_TYPES[x]} {name}" for name, x in leaf_types.items())


def _define(
    name: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    schema: str | None = None,
) -> tuple[torch._ops.OpOverload, torch.library.Library]:
    """Define an op without a gradient. Returns the op and its library.

    The first input must be a tensor; its device becomes the current device. By default, the schema
    is inferred from the annotations of ``implementation``.
    """
    if schema is None:
        schema = torch.library.infer_schema(implementation, mutates_args=())

    def run(*inputs: Any) -> Any:
        if forward_ad._current_level >= 0:  # calls below autograd are not checked elsewhere
            _refuse_tangents(name, inputs)
        with torch._C._DisableAutocast(), torch.cuda.device_of(inputs[0]):
            return implementation(*inputs)

    if name in _libraries:
        _libraries.pop(name)._destroy()
    library = _libraries[name] = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(name + schema)
    for key in DEVICES:
        library.impl(name, run, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    return op, library


def _set_autograd(
    op: torch._ops.OpOverload,
    library: torch.library.Library,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    non_differentiable: tuple[str, ...] = (),
) -> None:
    """Make ``forward`` and ``backward`` the ``torch.autograd.Function`` of ``op``.

    It is only used if an input requires a gradient, other than inputs named in
    ``non_differentiable``. ``forward`` calls ``op`` below autograd.
    """
    name = op._schema.name.split("::")[1]
    functions = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function = type(name, (torch.autograd.Function,), functions)
    single_level_function = type(name, (_SingleLevelFunction,), functions)
    detached = [i for i, x in enumerate(op._schema.arguments) if x.name in non_differentiable]

    def autograd(*inputs: Any) -> Any:
        if forward_ad._current_level >= 0:
            _refuse_tangents(name, inputs)
        needs_grad = torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs)
        if needs_grad:
            for i in detached:
                if inputs[i] is not None and inputs[i].requires_grad:
                    inputs = (*inputs[:i], inputs[i].detach(), *inputs[i + 1 :])
                    needs_grad = torch._C._any_requires_grad(*inputs)
        if not needs_grad:
            with _below_autograd():
                return op(*inputs)
        if not torch._C._are_functorch_transforms_active():
            return function.apply(*inputs)
        with enable_single_level_autograd_function():  # the dispatcher calls this at each level
            return single_level_function.apply(*inputs)  # pyright: ignore[reportAttributeAccessIssue]

    library.impl(name, autograd, "Autograd")


def _call_below_autograd(op: torch._ops.OpOverload, inputs: tuple[Any, ...]) -> Any:
    """Return ``op(*inputs)``, called by the forward of an autograd function.

    PyTorch disables gradients there. They are enabled again for the outer levels of nested
    transforms.
    """
    if torch._C._are_functorch_transforms_active():
        with torch.enable_grad(), _set_fwd_grad_enabled(True), _below_autograd():
            return op(*inputs)
    with _below_autograd():
        return op(*inputs)


def _refuse_tangents(name: str, inputs: tuple[Any, ...]) -> None:
    """Raise an error if an input has a tangent: forward-mode derivatives would be zero."""
    for x in inputs:
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(f"{name} has no forward-mode derivative, got a dual tensor")
