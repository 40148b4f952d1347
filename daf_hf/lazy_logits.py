"""Logits that are not computed until somebody asks for something that needs all of them.

A head that returns `LazyLogits` leaves the model's code as it is: what a language model does with
its logits (casts, scaling, soft-capping, shifting, a log-softmax) works row by row and is noted;
what reduces them (the cross-entropy, and the sums and gathers of label smoothing) is computed chunk
by chunk; whatever else is asked of them gets the logits themselves, computed as ever.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from .chunked_loss import Cast, RowFunction, once, own_graph, reduced, summed_cross_entropy

logger = logging.getLogger("daf_hf")

_ATTRIBUTES = {"shape", "dtype", "device", "layout", "ndim", "requires_grad"} | {
    f"is_{name}" for name in ("cpu", "cuda", "sparse", "quantized", "nested", "mkldnn", "meta")
}
_FACTS = {"size", "dim", "ndimension", "numel", "nelement", "element_size", "__len__"} | {
    f"is_{name}" for name in ("floating_point", "complex")
}
_ELEMENTWISE = {
    *("tanh", "neg", "__neg__", "negative"),
    *("mul", "multiply", "__mul__", "__rmul__", "div", "divide", "true_divide"),
    *("__truediv__", "add", "__add__", "__radd__", "sub", "__sub__", "__rsub__"),
}
_TOO_LATE = {"register_hook", "retain_grad", "register_post_accumulate_grad_hook"}


class LazyLogits(Tensor):
    """The logits of hidden states, to be computed.

    Args:
        hidden: ``[..., width]``.
        weight: of the head, ``[vocabulary, width]``.
        bias: of the head, ``[vocabulary]``, or None.
        function: what maps hidden states to these values.
        made_of: the logits that they are made of, row by row.
    """

    _hidden: Tensor
    _function: RowFunction
    _versions: tuple[int, ...]
    _parameters: tuple[Tensor, Tensor | None]
    _whole: Tensor | None
    _used: bool
    _made: bool
    _wholes: list[tuple[Tensor, int]]

    @staticmethod
    def __new__(
        cls,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        function: RowFunction,
        made_of: LazyLogits | None = None,
    ) -> LazyLogits:
        with torch.no_grad(), _plain():  # no row of a head of one by one has the same dtype
            first = bias[:1] if bias is not None else None
            nothing = function(hidden.new_empty((0, 1)), weight[:1, :1], first)

        def empty() -> Tensor:
            shape = (*hidden.shape[:-1], weight.shape[0])
            return Tensor._make_wrapper_subclass(
                cls, shape, dtype=nothing.dtype, device=hidden.device
            )

        self: Any = _Unasked.apply(hidden, weight, bias, function, empty)
        self._hidden, self._parameters, self._function = hidden, (weight, bias), function
        self._whole, self._used, self._made = None, False, made_of is not None
        # Those that were computed, of all that are made of one head's: they may share memory.
        self._wholes = [] if made_of is None else made_of._wholes
        self._versions = tuple(tensor._version for tensor in _inputs(self))
        return self

    def whole(self) -> Tensor:
        """The logits, computed once, with their history.

        Raises:
            RuntimeError: when what they are computed from was changed in place in the meantime.
        """
        if self._whole is None:
            self._check()
            with _plain(), torch.inference_mode(False), torch.enable_grad():
                self._whole = self._function(self._hidden, *self._parameters)
            self._wholes.append((self._whole, self._whole._version))
        return self._whole

    def then(
        self, operation: Callable[[Tensor], Tensor] | None = None, hidden: Tensor | None = None
    ) -> LazyLogits:
        """These values, changed row by row, or those of other hidden states made of these."""
        self._check()
        self._used = True
        function = self._function if operation is None else self._function.then(operation)
        hidden = self._hidden if hidden is None else hidden
        return LazyLogits(hidden, *self._parameters, function, self)

    def reduce(self, by: Callable[..., Tensor], *args: Any) -> Tensor:
        """Apply a function of :mod:`chunked_loss` to the rows, as ``[tokens, width]``."""
        self._check()
        self._used = True
        hidden = self._hidden.reshape(-1, self._hidden.shape[-1])
        return by(hidden, *self._parameters, self._function, *args)

    def _check(self) -> None:
        _check_versions(_inputs(self), self._versions)
        if any(whole._version != version for whole, version in self._wholes):
            raise RuntimeError(
                "logits were changed in place before others that were made of them, or that they "
                "are made of, are computed; use chunked_loss=False"
            )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        lazy = args[0] if args and isinstance(args[0], LazyLogits) else None
        if lazy is not None and name in _TOO_LATE and (lazy._whole is None or lazy._used):
            raise RuntimeError(
                f"{name}() on logits that are never there as a whole; use chunked_loss=False"
            )
        if lazy is not None and lazy._whole is None:
            if _is_fact(func, name):
                with _plain():
                    return func(*args, **kwargs)
            rule = _RULES.get(name) if torch.is_grad_enabled() else None
            found = rule(lazy, func, args[1:], kwargs) if rule is not None else None
            if found is not None:
                return found
        return _on_whole(func, name, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(
            f"{func} reached logits that are never there as a whole; use chunked_loss=False"
        )


class _Unasked(Function):
    """The history of logits whose gradient arrives without that anybody asked for them.

    Functions of a user's own, and reentrant checkpoints among them, take a tensor as it is, past
    ``__torch_function__``.
    """

    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, function, empty) -> Tensor:
        ctx.inputs, ctx.function = (hidden, weight, bias), function
        ctx.versions = [tensor._version for tensor in ctx.inputs if tensor is not None]
        return empty()

    @staticmethod
    @once
    def backward(ctx: Any, incoming: Tensor) -> Any:
        _check_versions(ctx.inputs, ctx.versions)
        needed = ctx.needs_input_grad[:3]
        inputs = [
            tensor.detach().requires_grad_(wanted) if tensor is not None else None
            for tensor, wanted in zip(ctx.inputs, needed, strict=True)
        ]
        with own_graph():
            logits = ctx.function(*inputs)
            wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
            found = iter(torch.autograd.grad(logits, wanted, incoming))
        return *(next(found) if wanted else None for wanted in needed), None, None


def _check_versions(inputs: Any, versions: Any) -> None:
    if list(versions) != [tensor._version for tensor in inputs if tensor is not None]:
        raise RuntimeError(
            "hidden states or weights that logits are computed from were changed in place "
            "before these were asked for; use chunked_loss=False"
        )


def _inputs(lazy: LazyLogits) -> list[Tensor]:
    found = (lazy._hidden, *lazy._parameters)
    return [tensor for tensor in found if tensor is not None]


def _plain() -> Any:
    return torch._C.DisableTorchFunctionSubclass()


def _is_fact(func: Any, name: str) -> bool:
    """Whether it is answered without any element."""
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") in _ATTRIBUTES
    return name in _FACTS


def _on_whole(func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Do it to the logits themselves; in place too, as long as nobody noted the old ones."""
    changes = name.endswith("_") and not name.endswith("__")
    changes |= name == "__setitem__" or (name.startswith("__i") and name != "__invert__")
    changes |= name == "__get__" and getattr(func.__self__, "__name__", "") == "data"
    changed = kwargs.get("out", args[0] if changes and args else None)

    def replaced(value: Any) -> Any:
        if isinstance(value, LazyLogits):
            if value is changed and (value._used or value._made):
                raise RuntimeError(
                    f"{name}() changes logits that others were made of, before these are "
                    "computed; use chunked_loss=False"
                )
            if value._whole is None:
                logger.info("daf_hf: the logits are computed as a whole, for %s()", name)
            return value.whole()
        if isinstance(value, (list, tuple)):
            return type(value)(replaced(item) for item in value)
        return value

    with _plain():
        return func(
            *(replaced(value) for value in args),
            **{key: replaced(value) for key, value in kwargs.items()},
        )


# Rules: (lazy, func, the other arguments, kwargs) -> the result, or None where they do not apply.


def _elementwise(lazy: LazyLogits, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Casts and arithmetic with numbers, and with constants of one element."""
    if not all(_is_constant(value) for value in (*args, *kwargs.values())):
        return None
    args = tuple(_as_it_is_now(value) for value in args)
    kwargs = {key: _as_it_is_now(value) for key, value in kwargs.items()}
    return lazy.then(lambda rows: func(rows, *args, **kwargs))


def _as_it_is_now(value: Any) -> Any:
    """A constant, whatever becomes of it later."""
    return value.clone() if isinstance(value, Tensor) else value


def _is_constant(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0 and not value.requires_grad and not isinstance(value, LazyLogits)
    return isinstance(value, (int, float, torch.dtype))


def _cast(lazy: LazyLogits, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    values = (*args, *kwargs.values())
    if len(values) == 1 and isinstance(values[0], torch.dtype):
        return lazy.then(Cast(values[0]))
    return None


def _float(lazy: LazyLogits, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    return None if args or kwargs else lazy.then(Cast(torch.float32))


def _contiguous(lazy: LazyLogits, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    return None if args or kwargs else lazy.then()


def _log_softmax(lazy: LazyLogits, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    options = dict(kwargs)
    dim = options.pop("dim", args[0] if args else None)
    dtype = options.pop("dtype", None)
    options.pop("_stacklevel", None)
    if len(args) > 1 or options or not _is_last(lazy, dim):
        return None
    return lazy.then(lambda rows: torch.log_softmax(rows, -1, dtype=dtype))


def _is_last(lazy: LazyLogits, dim: Any) -> bool:
    if isinstance(dim, (list, tuple)) and len(dim) == 1:
        (dim,) = dim
    return isinstance(dim, int) and dim in (-1, lazy.ndim - 1)


def _view(lazy: LazyLogits, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Other dimensions for the same rows."""
    shape = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
    if kwargs or not shape or not all(isinstance(size, int) for size in shape):
        return None
    shape = torch.empty(lazy.shape, device="meta").reshape(*shape).shape
    if not shape or shape[-1] != lazy.shape[-1]:
        return None
    return lazy.then(hidden=lazy._hidden.reshape(*shape[:-1], lazy._hidden.shape[-1]))


def _getitem(lazy: LazyLogits, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Some of the rows: slices that leave the last dimension whole."""
    (index,) = args
    index = index if isinstance(index, tuple) else (index,)
    if not all(part is Ellipsis or type(part) in (int, slice) for part in index):
        return None
    found = torch.empty(lazy.shape, device="meta")[index]
    if not found.ndim or found.shape[-1] != lazy.shape[-1] or found.stride(-1) != 1:
        return None
    if Ellipsis in index or len(index) == lazy.ndim:
        index = (*index[:-1], slice(None)) if index[-1] is not Ellipsis else index
    return lazy.then(hidden=lazy._hidden[index])


def _cross_entropy(lazy: LazyLogits, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The loss of a language model; class weights and soft targets are for whole logits."""
    names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction")
    options = {**dict(zip((*names, "label_smoothing"), args, strict=False)), **kwargs}
    target, reduction = options["target"], options.get("reduction", "mean")
    old = [options.get(name) for name in ("weight", "size_average", "reduce")]
    if old != [None] * 3 or lazy.ndim != 2 or reduction not in ("mean", "sum"):
        return None
    if target.shape != lazy.shape[:1]:
        return None
    ignored = options.get("ignore_index", -100)
    smoothing = options.get("label_smoothing", 0.0)
    loss = lazy.reduce(summed_cross_entropy, target, ignored, smoothing)
    return loss if reduction == "sum" else loss / (target != ignored).sum()


def _gather(lazy: LazyLogits, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    options = {**dict(zip(("dim", "index"), args, strict=False)), **kwargs}
    index = options.get("index")
    if not isinstance(index, Tensor) or index.shape[:-1] != lazy.shape[:-1]:
        return None
    if not _is_last(lazy, options.get("dim")) or len(options) > 2:
        return None
    return _reduce(lazy, lambda rows, chosen: rows.gather(-1, chosen), index)


def _sum(lazy: LazyLogits, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    options = {**dict(zip(("dim", "keepdim"), args, strict=False)), **kwargs}
    dim, keepdim, dtype = (options.pop(name, None) for name in ("dim", "keepdim", "dtype"))
    if options or not _is_last(lazy, dim):
        return None
    nothing = torch.empty((*lazy.shape[:-1], 0), dtype=torch.int64, device=lazy.device)
    total = _reduce(lazy, lambda rows, _: rows.sum(-1, keepdim=True, dtype=dtype), nothing)
    return total if keepdim else total.squeeze(-1)


def _reduce(lazy: LazyLogits, reduce: Callable[..., Tensor], index: Tensor) -> Tensor:
    count = math.prod(lazy.shape[:-1])
    found = lazy.reduce(reduced, reduce, index.reshape(count, index.shape[-1]))
    return found.reshape(*lazy.shape[:-1], found.shape[-1])


_RULES: dict[str, Callable[[LazyLogits, Any, tuple, dict[str, Any]], Any]] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    "to": _cast,
    "float": _float,
    "contiguous": _contiguous,
    "log_softmax": _log_softmax,
    "view": _view,
    "reshape": _view,
    "__getitem__": _getitem,
    "cross_entropy": _cross_entropy,
    "gather": _gather,
    "sum": _sum,
}
