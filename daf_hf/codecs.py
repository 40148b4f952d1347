"""Codecs: granularity and codebook, with their decode tables.

The codebooks are embedded (see :mod:`daf_hf.kernels.format`): any width from 0 to 8 bits reads a
prefix of the same 8-bit code. Tables hold what minimises the squared error in each bin under the
distribution that the codebook is made for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from .codebook_check import CELLS_MAX, check_codebook
from .kernels.format import MAX_BITS, Codebook, Granularity, Layout, Statistics, wide_statistics

_CELLS = 4096
_LAYOUTS_KEPT = 1024
_SIGN_DENSITY = 2.0**60  # cells per unit of `sign`: the least number that counts as positive
_HALF_WIDTH = 8.0  # of the grid of `normal` (standard deviations) and of `gelu` (the value itself)


def _cell_edges(low: float, high: float) -> torch.Tensor:
    return torch.linspace(low, high, _CELLS + 1, dtype=torch.float64)


def _tables(representative) -> tuple[torch.Tensor, ...]:
    """Tables for 0..8 bits from ``representative(first, last)``, a bin of 8-bit codes' value."""
    return tuple(
        torch.tensor(
            [
                representative(code << (8 - bits), ((code + 1) << (8 - bits)) - 1)
                for code in range(1 << bits)
            ],
            dtype=torch.float64,
        ).float()
        for bits in range(MAX_BITS + 1)
    )


@cache
def uniform() -> Codebook:
    """Equal bins between the unit's minimum and maximum, restored at their centres."""
    tables = _tables(lambda first, last: (first + last + 1) / 512)
    return Codebook("uniform", Statistics.RANGE, 0.0, 256.0, 256, None, tables)


@cache
def normal() -> Codebook:
    """Bins of equal sigmoid(0.98 z), close to a Gaussian's quantiles, with conditional means."""
    edges = _cell_edges(-_HALF_WIDTH, _HALF_WIDTH)
    centre = (edges[1:] + edges[:-1]) / 2
    lut = (torch.sigmoid(0.98 * centre) * 256).floor().clamp(0, 255).to(torch.uint8)
    lut[0], lut[-1] = (0, 255)  # so that every code is used: the outer bins reach to infinity
    density = torch.exp(-(edges**2) / 2) / math.sqrt(2 * math.pi)
    cumulative = torch.special.ndtr(edges)

    def conditional_mean(first: int, last: int) -> float:
        inside = torch.nonzero((lut >= first) & (lut <= last)).flatten()
        if not len(inside):  # a code that no cell maps to is never written
            return 0.0
        left, right = int(inside[0]), int(inside[-1]) + 1
        mass = float(cumulative[right] - cumulative[left])
        if mass < 1e-9:
            return float(centre[inside].mean())
        return float(density[left] - density[right]) / mass

    tables = _tables(conditional_mean)
    return Codebook(
        "normal", Statistics.MOMENTS, -_HALF_WIDTH, _CELLS / (2 * _HALF_WIDTH), _CELLS, lut, tables
    )


@cache
def root() -> Codebook:
    """Equal bins in the square root between minimum and maximum: for softmax outputs."""
    centre = (torch.arange(_CELLS, dtype=torch.float64) + 0.5) / _CELLS
    lut = (centre.sqrt() * 256).floor().to(torch.uint8)

    def mean_square(first: int, last: int) -> float:
        low, high = first / 256, (last + 1) / 256
        return (low * low + low * high + high * high) / 3

    return Codebook("root", Statistics.RANGE, 0.0, float(_CELLS), _CELLS, lut, _tables(mean_square))


@cache
def rectified() -> Codebook:
    """The unit's minimum, exactly, and bins of what is above it: for outputs of ReLU.

    ReLU's backward asks which of its outputs are zero. A minimum of zero is restored as zero, and
    nothing else is but what is nearest to it: at any width but 0. Hence as many cells as there may
    be. The bins are equal in the square root, with a half-normal's means, whose maximum is at three
    standard deviations.
    """
    centre = (torch.arange(CELLS_MAX, dtype=torch.float64) + 0.5) / CELLS_MAX
    lut = (128 + (centre.sqrt() * 128).floor()).to(torch.uint8)
    lut[0] = 0
    mass = torch.exp(-((3 * centre) ** 2) / 2)

    def conditional_mean(first: int, last: int) -> float:
        inside = (lut >= max(first, 128)) & (lut <= last)
        if not inside.any():  # the minimum, or a code that is never written
            return 0.0
        return float((mass * centre)[inside].sum() / mass[inside].sum())

    tables = _tables(conditional_mean)
    return Codebook("rectified", Statistics.RANGE, 0.0, float(CELLS_MAX), CELLS_MAX, lut, tables)


def gelu_slope(x: torch.Tensor) -> torch.Tensor:
    """Derivative of GELU: Phi(x) + x phi(x)."""
    # By erf, which torch vectorizes, unlike special.ndtr.
    return 0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x * torch.exp(-x * x / 2) / math.sqrt(
        2 * math.pi
    )


@cache
def _slopes() -> tuple[np.ndarray, np.ndarray]:
    """GELU's derivative where it rises, between its extrema at -sqrt(2) and sqrt(2); its inputs."""
    inputs = torch.linspace(-math.sqrt(2.0), math.sqrt(2.0), 1 << 16, dtype=torch.float64)
    return gelu_slope(inputs).numpy(), inputs.numpy()


def slope_inputs(slopes: np.ndarray) -> np.ndarray:
    """Inputs between -sqrt(2) and sqrt(2) at which GELU has these derivatives."""
    return np.interp(slopes, *_slopes())


@cache
def gelu() -> Codebook:
    """Equal bins of GELU's derivative, which is all that GELU's backward needs of its input.

    No statistics. The value restored is *another* input with nearly the same derivative, between
    the derivative's extrema at -sqrt(2) and sqrt(2): never use it for any other consumer.
    """
    edges = _cell_edges(-_HALF_WIDTH, _HALF_WIDTH)
    low, *_, high = _slopes()[0].tolist()
    slope = gelu_slope((edges[1:] + edges[:-1]) / 2)
    lut = ((slope - low) / (high - low) * 256).floor().clamp(0, 255).to(torch.uint8)

    def input_of(first: int, last: int) -> float:
        middle = low + (high - low) * (first + last + 1) / 512
        return slope_inputs(np.array([middle])).item()

    tables = _tables(input_of)
    return Codebook(
        "gelu", Statistics.NONE, -_HALF_WIDTH, _CELLS / (2 * _HALF_WIDTH), _CELLS, lut, tables
    )


@cache
def sign() -> Codebook:
    """1 for what is positive, else 0: all that ReLU's backward needs of its result.

    No statistics; every bit but the first is of no use. Another codec's value for 0 is not 0, at
    whatever width, and lets gradients pass where there are none: never use it for any other
    consumer.
    """
    lut = torch.tensor([0, 128], dtype=torch.uint8)
    tables = _tables(lambda first, last: float(first >= 128))
    return Codebook("sign", Statistics.NONE, 0.0, _SIGN_DENSITY, 2, lut, tables)


@cache
def binary() -> Codebook:
    """Exactly two values in the whole tensor, told apart by their bits: one plane, lossless."""
    tables = tuple(torch.zeros(1 << bits) for bits in range(MAX_BITS + 1))
    return Codebook("binary", Statistics.PAIR, 0.0, 0.0, 2, None, tables)


_CODEBOOKS: dict[str, Any] = {
    "uniform": uniform,
    "normal": normal,
    "root": root,
    "rectified": rectified,
    "gelu": gelu,
    "sign": sign,
    "binary": binary,
}
"""Cached functions without arguments."""

BUILT_IN = frozenset(_CODEBOOKS)


def register_codebook(name: str) -> Callable[[Callable[[], Codebook]], Callable[[], Codebook]]:
    """Register what makes a codebook, for codecs such as ``"group+name"``.

    It is called at once, and what it returns is checked.

    Example:
        >>> @register_codebook("laplace")
        ... def laplace():
        ...     samples = np.random.default_rng(0).laplace(size=1_000_000)
        ...     return codebook_from_samples("laplace", samples)

    Raises:
        ValueError: when the name is taken by another codebook, or this one cannot serve.
    """

    def register(make: Callable[[], Codebook]) -> Callable[[], Codebook]:
        known = _CODEBOOKS.get(name)
        if known is not None and known.__wrapped__ is not make:
            raise ValueError(f"codebook {name!r} is registered already: use another name")
        made = cache(make)
        book = made()
        if not isinstance(book, Codebook):
            raise ValueError(
                f"codebook {name!r}: {make!r} must return a Codebook, not {type(book).__name__}"
            )
        check_codebook(replace(book, name=name))
        _CODEBOOKS[name] = made
        return make

    return register


def codebook_from_levels(
    name: str, levels: Any, statistics: str | Statistics = "moments"
) -> Codebook:
    """A codebook whose codes are the nearest of the given levels.

    A shorter code stands for the levels that begin with it, and is restored as their mean; codes
    longer than the levels need add nothing.

    Args:
        name: what it is called in reports.
        levels: 2 to 256 distinct values in any order, normalised: in standard deviations from the
            mean (``"moments"``), as the share of the range (``"range"``: 0 to 1), or as they are
            (``"none"``).
        statistics: what a unit is normalised by: ``"moments"``, ``"range"`` or ``"none"``.

    Raises:
        ValueError: for levels or statistics that cannot serve.
    """
    kind = statistics_of(statistics)
    values = np.unique(np.asarray(levels, dtype=np.float64))
    if not 2 <= len(values) <= 1 << MAX_BITS or not np.isfinite(values).all():
        raise ValueError(f"codebook {name!r}: use 2 to 256 distinct finite levels")
    low, high = values[0], values[-1]
    density = _CELLS / (high - low)
    centres = low + (np.arange(_CELLS) + 0.5) / density
    nearest = np.searchsorted((values[1:] + values[:-1]) / 2, centres)
    # The most significant bits are those that choose among few levels.
    depth = (len(values) - 1).bit_length()
    codes = nearest << (MAX_BITS - depth)
    code_of_level = np.arange(len(values)) << (MAX_BITS - depth)

    def mean(first: int, last: int) -> float:
        # Without a level of its own: the nearest below; it is never written.
        end = max(1, int(np.searchsorted(code_of_level, last, "right")))
        start = min(int(np.searchsorted(code_of_level, first)), end - 1)
        return float(values[start:end].mean())

    lut = torch.from_numpy(codes.astype(np.uint8))
    book = Codebook(name, kind, float(low), float(density), _CELLS, lut, _tables(mean))
    check_codebook(book)
    return book


def statistics_of(statistics: str | Statistics) -> Statistics:
    """The statistics that a user names.

    Raises:
        ValueError: naming what is allowed.
    """
    names = {"moments": Statistics.MOMENTS, "range": Statistics.RANGE, "none": Statistics.NONE}
    found = names.get(statistics, statistics) if isinstance(statistics, str) else statistics
    if found not in names.values():
        raise ValueError(f"statistics={statistics!r}: use one of {list(names)}")
    return Statistics(found)


def named(name: str) -> Codebook:
    """The codebook that is called so.

    Raises:
        ValueError: there is none, naming those there are.
    """
    if name not in _CODEBOOKS:
        raise ValueError(f"there is no codebook {name!r}: use one of {codebook_names()}")
    return _CODEBOOKS[name]()


def codebook_names() -> list[str]:
    """Names of the codebooks that there are."""
    return sorted(_CODEBOOKS)


def cell_centres(book: Codebook) -> np.ndarray:
    """Middle of each of a codebook's cells, normalised: ``float64 [cells]``."""
    return book.grid_origin + (np.arange(book.cells) + 0.5) / book.grid_density


@dataclass(frozen=True)
class Codec:
    """A granularity and a codebook.

    Attributes:
        granularity: what shares one pair of statistics.
        codebook: name of the codebook, or a codebook of the user's own.
        fitted: a codebook made for one site (see :mod:`daf_hf.fitting`), in place of the one that
            is called so.
    """

    granularity: Granularity
    codebook: str | Codebook
    fitted: Codebook | None = None
    _layouts: dict[tuple[int, int, bool], Layout] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def book(self) -> Codebook:
        if self.fitted is not None:
            return self.fitted
        return self.codebook if isinstance(self.codebook, Codebook) else named(self.codebook)

    @property
    def lossless(self) -> bool:
        return self.codebook == "binary"

    @property
    def private(self) -> bool:
        """Whether what is restored serves one kind of consumer alone."""
        return self.codebook in ("gelu", "sign")

    def layout(self, numel: int, cols: int, bits: int) -> Layout:
        """Layout of a tensor of ``numel`` elements and ``cols`` columns at ``bits`` bits."""
        book = self.book
        wide = wide_statistics(self.granularity, bits) or book.statistics is Statistics.PAIR
        layout = self._layouts.get((numel, cols, wide))
        if layout is None:
            if len(self._layouts) >= _LAYOUTS_KEPT:
                self._layouts.clear()
            layout = Layout(numel, cols, self.granularity, book, wide)
            self._layouts[numel, cols, wide] = layout
        return layout

    def __str__(self) -> str:
        fitted = "fitted " if self.fitted else ""
        name = self.codebook.name if isinstance(self.codebook, Codebook) else self.codebook
        if self.book.statistics in (Statistics.NONE, Statistics.PAIR):
            return fitted + name
        return f"{fitted}{self.granularity.name.lower()}+{name}"


BINARY = Codec(Granularity.TENSOR, "binary")
GELU = Codec(Granularity.TENSOR, "gelu")
SIGN = Codec(Granularity.TENSOR, "sign")
GENERAL = Codec(Granularity.GROUP, "uniform")
"""The codec for what nothing is known of."""

FRUGAL = Codec(Granularity.GROUP, "normal")
"""The same where bits are few: its error is then less than half."""

RECTIFIED = Codec(Granularity.GROUP, "rectified")
"""The same for what has no elements below zero."""


def parse_codec(text: str) -> Codec:
    """The codec named ``"granularity+codebook"``, ``"gelu"`` or ``"binary"``.

    The codebook may be one that :func:`register_codebook` knows.

    Raises:
        ValueError: naming what is allowed.
    """
    head, _, tail = text.rpartition("+")
    names = [g.name.lower() for g in Granularity]
    if tail not in _CODEBOOKS or (head and head not in names):
        raise ValueError(
            f"unknown codec {text!r}: use GRANULARITY+CODEBOOK with a granularity of {names} "
            f"and a codebook of {sorted(_CODEBOOKS)}"
        )
    return Codec(Granularity[head.upper()] if head else Granularity.TENSOR, tail)
