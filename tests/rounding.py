"""Rounding errors, propagated alongside a computation in fp64: the model of the tolerance rule.

A rounding changes a number ``x`` by ``δ · x``, ``|δ| ≤ u``, which is half an epsilon, up or down
whatever the others do. To first order the error of a result is ``Σ aᵢ δᵢ``. It exceeds
``λ · u · √(Σ aᵢ²)`` with a probability below ``2 exp(-λ² / 2)`` (Hoeffding's inequality).
:class:`RoundingErrors` computes ``u² · Σ aᵢ²`` for each element of an oracle's output and
gradients. Implementations may differ in the order of sums and in the precision of intermediate
results:

- Each result is rounded to the dtype tested.
- Both operands of a matrix product are rounded to that dtype, or truncated where it is TF32.
- Sums are taken in fp32 (fp64 for fp64). If ``n`` terms ``t`` with the sum ``s`` are added in no
  particular order, the mean square of the ``k``-th partial sum is at most
  ``(k/n)² · s² + k/n · (1 - k/n) · Σt²``. Each of them is rounded: ``u² · n · (s² / 3 + Σt² / 6)``.
  So the error grows with the root of the number of terms. Only where terms are equal,
  ``ρ = s² / (n · Σt²)`` is 1, may all roundings be alike: ``ρ · (u · n · s / 2)²``, up to the worst
  case, is added without ``λ``.
- Errors of terms that are summed may have a common cause, so they add up. Errors of the operands of
  a matrix product count as independent.

Source:
    Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput.
    41(5), 2019; Higham, "Accuracy and Stability of Numerical Algorithms", section 3.3.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

DEVIATIONS = 6.0
"""``λ``: an element exceeds its bound with a probability below 1e-7 whatever the distribution of
``δ``, and below 1e-24 for the uniform one.
"""


class RoundingErrors(TorchDispatchMode):
    """A context that computes, for fp64 tensors, which errors a computation in ``dtype`` may have.

    Tensors made outside of it are exact. An operator without a rule is refused.

    Args:
        dtype: the coarsest dtype of the computation that is tested.

    Raises:
        NotImplementedError: in the context, an operator has no rule.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.unit, self.least = _unit(dtype)
        self.unit_of_sums, _ = _unit(torch.promote_types(dtype, torch.float32))
        is_tf32 = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
        self.unit_of_products = 2**-10 if is_tf32 else self.unit
        # By storage: a view of a tensor has a view of its errors, and sees changes in place.
        self._of_storage: dict[int, tuple[StorageWeakRef, Tensor]] = {}
        self._kept = 64  # number of storages after which expired ones are dropped
        self._entered = []

    def __enter__(self) -> RoundingErrors:
        """Also decompose PyTorch's attention into operators that have rules."""
        self._entered.append(sdpa_kernel(SDPBackend.MATH))
        self._entered[-1].__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._entered.pop().__exit__(*error)

    def bound(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The largest error of each element of ``x`` that is allowed in a result in ``dtype``."""
        unit, least = _unit(dtype)
        bound = unit * x.abs() + least
        if (squares := self.squares(x)) is not None:
            bound += DEVIATIONS * squares.sqrt()
        return bound.masked_fill_(~x.isfinite(), 0)

    def squares(self, x: Any) -> Tensor | None:
        """``u² · Σ aᵢ²`` of each element of ``x``, a view; ``None`` if they are exact."""
        if not _is_tracked(x) or not x.numel():
            return None
        entry = self._of_storage.get(x.untyped_storage()._cdata)
        return entry and entry[1].as_strided(x.shape, x.stride(), x.storage_offset())

    def rounded(self, out: Tensor) -> Tensor:
        """Errors of rounding ``out`` to the dtype, added to its :meth:`squares`."""
        return out.square().mul_(self.unit**2).add_(self.least**2).nan_to_num_(0, 0, 0)

    def summed(self, num_terms: Tensor | float, out: Tensor, squares: Tensor) -> Tensor:
        """Errors of the partial sums of ``out``, of terms with ``squares``."""
        out2 = out.square()
        alike = out2 / squares.clamp(min=1e-300) / (2 * DEVIATIONS) ** 2
        return (out2 * (alike + 1 / 3)).add_(squares, alpha=1 / 6) * (
            num_terms * self.unit_of_sums**2
        )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run ``func`` and its rule."""
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if func.is_view or name in SAME_MEMORY:
            return func(*args, **kwargs)
        into = kwargs.get("out", args[0] if args and name.endswith("_") else None)
        if into is not None:
            return self._write(func, name, into, args, kwargs)
        out = func(*args, **kwargs)
        outs = out if isinstance(out, (tuple, list)) else [out]
        if name in EXACT or not any(_is_float(x) and x.numel() for x in outs):
            return out
        dtypes = {x.dtype for x in outs if _is_float(x)}
        if dtypes != {torch.float64}:
            if len(dtypes) > 1 or any(self.squares(x) is not None for x in _flat(args, kwargs)):
                names = ", ".join(sorted(map(str, dtypes)))
                raise NotImplementedError(f"{func} must return fp64, got {names}")
        elif name in COPIES:
            if (squares := self.copied(func, args, kwargs)) is not None:
                self._set(outs[0], squares)
        elif name in RULES:
            squares = RULES[name](self, func, out, *args, **kwargs)
            squares = squares if isinstance(squares, tuple) else [squares]
            for x, x_errors in zip(filter(_is_tracked, outs), squares, strict=True):
                self._set(x, x_errors)
        else:
            raise NotImplementedError(f"{func} has no rule in {__name__}")
        return out

    def copied(self, func: Any, args: tuple, kwargs: dict) -> Tensor | None:
        """:meth:`squares` of what ``func`` returns, which copies elements; numbers are exact."""
        if all(self.squares(x) is None for x in _flat(args, kwargs)):
            return None
        numbers = (int, float) if func._schema.name in WITH_NUMBERS else ()

        def convert(x: Any) -> Any:
            if _is_tracked(x):
                squares = self.squares(x)
                return torch.zeros_like(x) if squares is None else squares
            if isinstance(x, (tuple, list)):
                return [convert(y) if _is_tracked(y) else y for y in x]
            return 0 if isinstance(x, numbers) else x

        return func(*map(convert, args), **{name: convert(x) for name, x in kwargs.items()})

    def _write(self, func: Any, name: str, into: Tensor, args: tuple, kwargs: dict) -> Tensor:
        """Run an operator in place by its variant that returns a new tensor."""
        if not _is_tracked(into):
            return func(*args, **kwargs)
        if name in FILLS:
            out, squares = func(*args, **kwargs), None
        else:
            value = args[1]
            if name != "copy_":
                operator = getattr(torch.ops.aten, name.removesuffix("_"))
                with self:
                    value = operator(*args, **{k: x for k, x in kwargs.items() if k != "out"})
            out, squares = into.copy_(value), self.squares(value)
        self._set(out, 0.0 if squares is None and self.squares(out) is not None else squares)
        return out

    def _set(self, x: Tensor, squares: Tensor | float | None) -> None:
        if squares is None or not x.numel():
            return
        storage = x.untyped_storage()
        size = storage.nbytes() // x.element_size()
        if storage._cdata not in self._of_storage:
            if len(self._of_storage) > self._kept:
                kept = {k: x for k, x in self._of_storage.items() if not x[0].expired()}
                self._of_storage, self._kept = kept, 2 * len(kept) + 64
            reference = StorageWeakRef(storage)
            if isinstance(squares, Tensor) and x.numel() == size and x.is_contiguous():
                self._of_storage[storage._cdata] = reference, squares.expand(x.shape).reshape(-1)
                return
            self._of_storage[storage._cdata] = reference, x.new_zeros(size)
        x_errors = self.squares(x)
        assert x_errors is not None
        x_errors.copy_(torch.as_tensor(squares))


def _unit(dtype: torch.dtype) -> tuple[float, float]:
    """Half an epsilon, and the error of numbers that are too small for it.

    In fp64 the oracle rounds, too. Only of fp16 are subnormal numbers used everywhere.
    """
    info = torch.finfo(dtype)
    least = info.eps * info.smallest_normal if dtype == torch.float16 else info.smallest_normal
    return info.eps / (1 if dtype == torch.float64 else 2), least


def _flat(args: tuple, kwargs: dict) -> Iterator[Any]:
    """All arguments, including elements of lists."""
    for x in (*args, *kwargs.values()):
        yield from x if isinstance(x, (tuple, list)) else (x,)


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _is_tracked(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.float64


SAME_MEMORY = {"_reshape_alias", "_unsafe_view", "detach", "lift_fresh"}
EXACT = {
    "arange", "empty", "empty_like", "empty_strided", "eye", "floor", "full", "full_like",
    "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "ones", "ones_like",
    "scalar_tensor", "sign", "zeros", "zeros_like",
}  # fmt: skip
FILLS = {"bernoulli_", "fill_", "normal_", "resize_", "set_", "uniform_", "zero_"}
COPIES = {
    "_to_copy", "cat", "clone", "constant_pad_nd", "diagonal_backward", "embedding", "flip",
    "gather", "index", "index_copy", "index_select", "masked_fill", "masked_select", "repeat",
    "roll", "scatter", "select_backward", "select_scatter", "slice_backward", "slice_scatter",
    "stack", "tril", "triu", "where",
}  # fmt: skip
WITH_NUMBERS = {"aten::masked_fill", "aten::where", "aten::constant_pad_nd"}

RULES: dict[str, Callable] = {}


def _rule(*names: str) -> Callable:
    def register(function: Callable) -> Callable:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def _total(*terms: Tensor | None) -> Tensor:
    """The sum of the terms that are not ``None``."""
    return functools.reduce(torch.add, [term for term in terms if term is not None])


def _times(squares: Tensor | None, factor: Tensor | float) -> Tensor | None:
    """Errors times ``factor`` squared."""
    return None if squares is None else squares * factor**2


@_rule("add", "sub")
def _add(errors, func, out, a, b, alpha=1):
    return _total(errors.squares(a), _times(errors.squares(b), alpha), errors.rounded(out))


@_rule("neg")
def _neg(errors, func, out, x):
    return errors.squares(x)


@_rule("mul")
def _mul(errors, func, out, a, b):
    a_errors, b_errors = _times(errors.squares(a), b), _times(errors.squares(b), a)
    return _total(a_errors, b_errors, errors.rounded(out))


@_rule("div")
def _div(errors, func, out, a, b, **_):
    a_errors, b_errors = errors.squares(a), _times(errors.squares(b), out)
    divided = None if a_errors is None and b_errors is None else _total(a_errors, b_errors) / b**2
    return _total(divided, errors.rounded(out))


@_rule("addcmul")
def _addcmul(errors, func, out, x, a, b, value=1):
    a_errors, b_errors = _times(errors.squares(a), b * value), _times(errors.squares(b), a * value)
    rounded = errors.rounded(a * b * value)
    return _total(errors.squares(x), a_errors, b_errors, rounded, errors.rounded(out))


@_rule("pow")
def _pow(errors, func, out, x, exponent):
    return _unary(errors, out, x, exponent * x ** (exponent - 1))


def _unary(errors, out, x, slope):
    return _total(_times(errors.squares(x), slope), errors.rounded(out))


UNARY = {
    "abs": lambda x, y: x.sign(),
    "clamp": lambda x, y: x == y,
    "log": lambda x, y: 1 / x,
    "rsqrt": lambda x, y: 0.5 * y**3,
    "sqrt": lambda x, y: 0.5 / y,
    "square": lambda x, y: 2 * x,
}
"""Derivatives, of the argument and the result."""
for _name, _slope in UNARY.items():
    RULES[_name] = lambda errors, func, out, x, *args, slope=_slope, **_: _unary(
        errors, out, x, slope(x, out)
    )


def _gelu_slope(x: Tensor) -> Tensor:
    density = torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * density


EXPONENTIAL = {
    "exp": lambda x, y: y,
    "sigmoid": lambda x, y: y * (1 - y),
    "silu": lambda x, y: torch.sigmoid(x) * (1 + x * torch.sigmoid(-x)),
}
"""Derivatives of operators with an exponential, whose argument is rounded."""
for _name, _slope in EXPONENTIAL.items():

    def _exponential(errors, func, out, x, *args, slope=_slope, **_):
        rounded = (x.abs() * errors.unit_of_sums).nan_to_num_(0, 0, 0).square_()
        return (_total(errors.squares(x), rounded) * slope(x, out).square()).nan_to_num_(
            0, 0, 0
        ) + errors.rounded(out)

    RULES[_name] = _exponential


def _of_small_sigmoid(errors: RoundingErrors, factor: Tensor) -> Tensor:
    """Error of ``factor`` times a sigmoid that underflows to zero."""
    return (factor * errors.least).square_().nan_to_num_(0, 0, 0)


@_rule("silu")
def _silu(errors, func, out, x, power_rule=RULES["silu"]):
    return power_rule(errors, func, out, x) + _of_small_sigmoid(errors, x)


@_rule("gelu")
def _gelu(errors, func, out, x, **_):
    x_errors = _total(errors.squares(x), (x * errors.unit_of_sums).square_())
    # 1 + erf(x) loses bits where x is negative.
    return (
        x_errors * _gelu_slope(x) ** 2 + (x * errors.unit_of_sums).square_() + errors.rounded(out)
    )


@_rule("sigmoid_backward")
def _sigmoid_backward(errors, func, out, grad, y):
    grad2 = _times(errors.squares(grad), y * (1 - y))
    y_errors = _times(errors.squares(y), grad * (1 - 2 * y))
    # 1 - y loses bits where y is close to one.
    return _total(grad2, y_errors, errors.rounded(grad * y), errors.rounded(out))


@_rule("silu_backward")
def _silu_backward(errors, func, out, grad, x):
    s = torch.sigmoid(x)
    slope = s * (1 + x * (1 - s))
    second = s * (1 - s) * (2 + x * (1 - 2 * s))
    rounded = (x.abs() * errors.unit_of_sums).square_()
    x_errors = _total(errors.squares(x), rounded) * (grad * second) ** 2
    parts = errors.rounded(grad * s * (1 + x.abs())) + _of_small_sigmoid(errors, grad * x)
    return _total(_times(errors.squares(grad), slope), x_errors, parts, errors.rounded(out))


@_rule("gelu_backward")
def _gelu_backward(errors, func, out, grad, x, **_):
    density = torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)
    x_errors = _times(errors.squares(x), grad * density * (2 - x.square()))
    grad2 = _times(errors.squares(grad), _gelu_slope(x))
    return _total(x_errors, grad2, errors.rounded(grad * (1 + x.abs())))


@_rule("mm", "bmm", "mv")
def _product(errors, func, out, a, b):
    a_errors, b_errors = errors.squares(a), errors.squares(b)
    a2, b2 = a.square(), b.square()
    squares = func(a2, b2)
    operand_errors = (2 * squares + out.square()) * errors.unit_of_products**2
    return _total(
        None if a_errors is None else func(a_errors, b2),
        None if b_errors is None else func(a2, b_errors),
        operand_errors.add_(errors.least**2),
        errors.summed(a.shape[-1], out, squares),
    )


@_rule("addmm", "baddbmm")
def _add_product(errors, func, out, x, a, b, beta=1, alpha=1):
    packet = torch.ops.aten.mm if func._schema.name == "aten::addmm" else torch.ops.aten.bmm
    product2 = _product(errors, packet, packet(a, b), a, b)
    return _total(_times(errors.squares(x), beta), product2 * alpha**2, errors.rounded(out))


@_rule("sum", "mean", "index_add", "index_put", "embedding_dense_backward")
def _sum(errors, func, out, x, *args, **kwargs):
    """Sums of terms, in which ``func`` is linear; their errors may be equal."""

    def apply(convert: Callable[[Tensor], Tensor]) -> Tensor:
        some = [convert(y) if _is_tracked(y) else y for y in (x, *args)]
        return func(*some, **kwargs)

    if func._schema.name == "aten::index_put" and not any(args[2:]):
        return errors.copied(func, (x, *args), kwargs)

    def deviations(x: Tensor) -> Tensor:
        squares = errors.squares(x)
        return torch.zeros_like(x) if squares is None else squares.sqrt()

    squares, num_terms = apply(torch.square), apply(torch.ones_like)
    if func._schema.name == "aten::mean":
        number = x.numel() / max(out.numel(), 1)
        squares, num_terms = squares / number, number
    return apply(deviations).square() + errors.summed(num_terms, out, squares) + errors.rounded(out)


@_rule("native_layer_norm")
def _layer_norm(errors, func, out, x, shape, weight, bias, eps):
    dims = list(range(x.dim() - len(shape), x.dim()))
    with errors:
        mean = x.mean(dims, keepdim=True)
        centered = x - mean
        scale = (centered.square().mean(dims, keepdim=True) + eps).rsqrt()
        y = centered * scale
        y = y if weight is None else y * weight
        y = y if bias is None else y + bias
    return tuple(map(errors.squares, (y, mean, scale)))


@_rule("native_layer_norm_backward")
def _layer_norm_backward(errors, func, out, grad, x, shape, mean, scale, weight, bias, mask):
    dims = list(range(x.dim() - len(shape), x.dim()))
    rows = [i for i in range(x.dim()) if i not in dims]
    with errors:
        y = (x - mean) * scale
        y_grad = grad if weight is None else grad * weight
        left = y_grad - y_grad.mean(dims, keepdim=True) - y * (y_grad * y).mean(dims, keepdim=True)
        found = left * scale, (grad * y).sum(rows), grad.sum(rows)
    return tuple(errors.squares(x) for x, wanted in zip(found, mask, strict=True) if wanted)


@_rule("_softmax", "_safe_softmax")
def _softmax(errors, func, p, x, dim, *_, **__):
    """``p · (δ - Σ p δ)``, of errors δ of scores, and of the sum of powers."""
    p2, num_terms = p.square(), x.shape[dim] if x.dim() else 1
    below = (x - x.amax(dim, keepdim=True)).nan_to_num_(0, 0, 0)
    x_errors = _total(errors.squares(x), (below * errors.unit_of_sums).square_()).nan_to_num_(
        0, 0, 0
    )
    shared = (p2 * x_errors).sum(dim, keepdim=True)
    shared = shared + errors.unit_of_sums**2 * num_terms / 2
    return p2 * (x_errors + shared) + errors.rounded(p)


@_rule("_softmax_backward_data")
def _softmax_backward(errors, func, out, grad, p, dim, *_):
    """``p · (g - Σ p g)``."""
    grad2, p_errors = errors.squares(grad), errors.squares(p)
    terms, num_terms = p * grad, p.shape[dim] if p.dim() else 1
    mean, squares = terms.sum(dim, keepdim=True), terms.square().sum(dim, keepdim=True)
    terms2 = _total(_times(grad2, p), _times(p_errors, grad), errors.rounded(terms))
    mean2 = terms2.sum(dim, keepdim=True) + errors.summed(num_terms, mean, squares)
    mean2 = mean2 + errors.rounded(mean)
    left2 = _total(grad2, mean2, errors.rounded(grad - mean))
    return _total(left2 * p.square(), _times(p_errors, grad - mean), errors.rounded(out))
