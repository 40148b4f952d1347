"""How a tensor's elements follow from those of others."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .tensors import contiguous_stride

WITNESSES = 64
"""Elements of a tensor by which a derivation is confirmed in each step."""

TOLERANCE = 1e-5
"""How far elements may be off relative to the largest, where rounding is finer than that."""

_UNIT = 1 << 30


class Places:
    """Positions of witnesses in a tensor.

    Attributes:
        positions: ``int64 [k]``.
    """

    __slots__ = ("_columns", "positions")

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions
        self._columns: dict[int, Tensor] = {}

    def of(self, flat: Tensor) -> Tensor:
        """The elements there."""
        return flat.index_select(0, self.positions)

    def of_columns(self, values: Tensor) -> Tensor:
        """Of ``values [columns]`` those that belong to the elements there."""
        size = values.numel()
        columns = self._columns.get(size)
        if columns is None:
            columns = self._columns[size] = self.positions % size
        return values.view(-1).index_select(0, columns)


class Sampler:
    """Where witnesses are taken: at random, and anew from time to time, so that what is off in
    part of a tensor is soon seen.

    Those of one value a row are in the rows in which the elements' own are.
    """

    def __init__(self) -> None:
        self._random = random.Random(0)
        self.renew()

    def renew(self) -> None:
        """Choose others from now on."""
        shares = [self._random.randrange(_UNIT) for _ in range(WITNESSES)]
        self._shares = torch.tensor(sorted(shares))
        self._known: dict[int, Places] = {}

    def of(self, numel: int) -> Places:
        """``WITNESSES`` places in a tensor of so many elements."""
        found = self._known.get(numel)
        if found is None:
            positions = (self._shares * numel).div_(_UNIT, rounding_mode="floor")
            found = self._known[numel] = Places(positions)
        return found


class Reader:
    """Reads the flat elements of sources, or their witnesses.

    Args:
        whole: gives all of a source's, in memory that the caller may change.
    """

    def __init__(self, whole: Callable[[Any], Tensor]) -> None:
        self.whole = whole

    def parts(self, source: Any) -> Iterator[tuple[int, Tensor]]:
        """The same in parts, each with the position of its first element."""
        yield 0, self.whole(source)


class Expression(ABC):
    """How a tensor's elements follow from those of sources.

    Attributes:
        witnessed: a few elements of the sources confirm it in each step.
    """

    witnessed = True

    @abstractmethod
    def operands(self) -> tuple[Expression, ...]:
        """What it is made of."""

    @property
    def numel(self) -> int:
        """Its elements: as many as the first operand's."""
        return self.operands()[0].numel

    def sources(self) -> Iterator[Any]:
        """What it is a function of."""
        for operand in self.operands():
            yield from operand.sources()

    @property
    def operations(self) -> int:
        """Passes over the elements that evaluating it takes."""
        return 1 + sum(operand.operations for operand in self.operands())

    @abstractmethod
    def evaluate(self, read: Reader, at: Places | None = None) -> Tensor:
        """The elements, in memory of their own.

        Args:
            read: the sources' elements.
            at: when ``read`` gives the elements at these places alone.
        """

    def parts(self, read: Reader, at: Places | None = None) -> Iterator[tuple[int, Tensor]]:
        """The same in parts, each with the position of its first element."""
        yield 0, self.evaluate(read, at)

    def agrees(self, flat: Tensor, read: Reader, at: Places | None = None) -> bool:
        """Whether the elements ``flat`` (those at ``at`` alone, if given) are what it says."""
        try:
            value = self.evaluate(read, at).float()
        except RuntimeError:  # types or sizes that do not go together
            return False
        return _close(value, flat if at is None else at.of(flat), flat.dtype)


def _close(value: Tensor, exact: Tensor, dtype: torch.dtype) -> bool:
    """Whether two differ by no more than a few roundings, of the elements and of typical terms."""
    exact = exact.float()
    if torch.equal(value, exact):  # most often, and it takes one pass instead of many
        return True
    sizes = exact.abs().nan_to_num(0.0, 0.0)
    eps = torch.finfo(dtype).eps
    typical = float(sizes.square().mean().sqrt())
    off = max(TOLERANCE * float(sizes.max()), 2 * eps * typical)
    return torch.allclose(value, exact, rtol=4 * eps, atol=off, equal_nan=True)


@dataclass(frozen=True)
class Source(Expression):
    """A saved tensor itself.

    Attributes:
        saved: gives the elements as they lie in memory.
        shape, stride: of the tensor; no strides where it lies row by row.
    """

    saved: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def operands(self) -> tuple[Expression, ...]:
        return ()

    def sources(self) -> Iterator[Any]:
        yield self.saved

    @property
    def operations(self) -> int:
        return getattr(self.saved, "operations", 0)

    def evaluate(self, read: Reader, at: Places | None = None) -> Tensor:
        return read.whole(self.saved)

    def lay_out(self, flat: Tensor) -> Tensor:
        """The tensor itself, of its elements as they lie in memory."""
        stride = contiguous_stride(self.shape) if self.stride is None else self.stride
        return flat.as_strided(self.shape, stride)

    def parts(self, read: Reader, at: Places | None = None) -> Iterator[tuple[int, Tensor]]:
        yield from read.parts(self.saved)


@dataclass(frozen=True)
class Product(Expression):
    """``left * right * scale``, element by element; either may be a mask of bool or integers."""

    left: Expression
    right: Expression
    scale: float = 1.0

    def operands(self) -> tuple[Expression, ...]:
        return self.left, self.right

    def evaluate(self, read: Reader, at: Places | None = None) -> Tensor:
        left, right = self.left, self.right
        product = left.evaluate(read, at)
        if not product.dtype.is_floating_point:  # a mask: the other one is what can hold the result
            left, right = right, left
            product = left.evaluate(read, at)
        # The two need not be in memory whole at the same time.
        for start, part in right.parts(read, at):
            product[start : start + len(part)].mul_(part)
        return product if self.scale == 1.0 else product.mul_(self.scale)


@dataclass(frozen=True)
class Scaled(Expression):
    """``x`` times a number, times one factor a row ``[rows]``, or one a column ``[columns]``."""

    x: Expression
    number: float = 1.0
    rows: Source | None = None
    columns: Tensor | None = None

    def operands(self) -> tuple[Expression, ...]:
        return (self.x,) if self.rows is None else (self.x, self.rows)

    def evaluate(self, read: Reader, at: Places | None = None) -> Tensor:
        x = self.x.evaluate(read, at)
        if self.number != 1.0:
            x = x.mul_(self.number)
        if self.rows is not None:
            factors = self.rows.evaluate(read, at).view(-1, 1)
            x = x.view(len(factors), -1).mul_(factors).view(-1)
        if self.columns is not None:
            count = self.columns.numel()
            if at is None:
                x = x.view(-1, count).mul_(self.columns).view(-1)
            else:
                x = x.mul_(at.of_columns(self.columns))
        return x


@dataclass(frozen=True)
class Sum(Expression):
    """``left + right * scale``."""

    left: Expression
    right: Expression
    scale: float = 1.0

    def operands(self) -> tuple[Expression, ...]:
        return self.left, self.right

    def evaluate(self, read: Reader, at: Places | None = None) -> Tensor:
        total = self.left.evaluate(read, at)
        for start, part in self.right.parts(read, at):
            total[start : start + len(part)].add_(part, alpha=self.scale)
        return total


@dataclass
class Shifted(Expression):
    """``x`` and a number that the elements themselves tell, as the graph does not."""

    x: Expression
    number: float = 0.0

    def operands(self) -> tuple[Expression, ...]:
        return (self.x,)

    def evaluate(self, read: Reader, at: Places | None = None) -> Tensor:
        return self.x.evaluate(read, at).add_(self.number)

    def agrees(self, flat: Tensor, read: Reader, at: Places | None = None) -> bool:
        exact = flat if at is None else at.of(flat)
        try:
            value = self.x.evaluate(read, at).float()
        except RuntimeError:
            return False
        self.number = float((exact.float() - value).median())
        return math.isfinite(self.number) and _close(value + self.number, exact, flat.dtype)


@dataclass(frozen=True)
class Function(Expression):
    """A function of each element by itself.

    Attributes:
        apply: may write into what it is given.
    """

    x: Expression
    apply: Callable[[Tensor], Tensor]

    def operands(self) -> tuple[Expression, ...]:
        return (self.x,)

    def evaluate(self, read: Reader, at: Places | None = None) -> Tensor:
        return self.apply(self.x.evaluate(read, at))


@dataclass(frozen=True)
class LayerNorm(Expression):
    """``(x - mean) * rstd * weight + bias`` over rows of ``size`` elements.

    The statistics are those that the forward pass saved; weight and bias ``[size]`` or None.
    """

    x: Source
    mean: Source
    rstd: Source
    weight: Tensor | None
    bias: Tensor | None
    size: int

    def operands(self) -> tuple[Expression, ...]:
        return self.x, self.mean, self.rstd

    def evaluate(self, read: Reader, at: Places | None = None) -> Tensor:
        columns = self.size if at is None else 1
        x = self.x.evaluate(read, at).float().view(-1, columns)
        rstd = self.rstd.evaluate(read, at).float().view(-1, 1)
        shift = self.mean.evaluate(read, at).float().view(-1, 1) * -rstd
        torch.addcmul(shift, x, rstd, out=x)
        for parameter, apply in ((self.weight, x.mul_), (self.bias, x.add_)):
            if parameter is not None:
                apply(parameter if at is None else at.of_columns(parameter).view(-1, 1))
        return x.view(-1)
