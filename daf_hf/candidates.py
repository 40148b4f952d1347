"""Which codecs are tried at a site: the option ``codec``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .codebook_check import check_codebook
from .codecs import (
    BINARY,
    BUILT_IN,
    FRUGAL,
    GELU,
    GENERAL,
    RECTIFIED,
    SIGN,
    Codec,
    codebook_names,
    named,
)
from .kernels.format import Codebook, Granularity, Statistics
from .user_objects import load_object

if TYPE_CHECKING:
    from .sites import SaveSite

AUTO = "auto"
ENTRY_POINTS = "daf_hf.codecs"
_GRANULARITIES = {granularity.name.lower(): granularity for granularity in Granularity}
_ASKS_FOR_ZEROS = ("ReluBackward0.result", "CompiledFunctionBackward.saved_tensors")
_LONG = 32
"""Fewer elements than this are not worth statistics of their own."""
UNPLANNED_BITS = 4
UNPLANNED_COSTS = tuple(4.0**-bits for bits in range(9))
"""Width and costs for sites that no plan knows yet (a tensor's own energy counts 1)."""


@dataclass(frozen=True)
class Candidates:
    """The codecs that an option allows.

    Attributes:
        automatic: those of this package, and codebooks fitted to what a site saves.
        others: codecs, and codebooks by name or as they are, which go with every granularity.
    """

    automatic: bool
    others: tuple[Codec | Codebook | str, ...]

    def at(self, site: SaveSite, flat: Tensor, cols: int) -> list[Codec]:
        """Codecs worth measuring for a tensor ``flat`` of ``cols`` columns."""
        if self.automatic and reads_sign(site):
            return [SIGN]
        granularities = [Granularity.GROUP, Granularity.TENSOR]
        rows = flat.numel() // cols
        if cols >= _LONG:
            granularities.append(Granularity.TOKEN)
        if rows >= _LONG and cols > 1:
            granularities.append(Granularity.CHANNEL)
        found: dict[Codec, None] = {}
        if self.automatic:
            books = ["uniform", "normal"]
            if keeps_zeros(site, flat):
                books = [RECTIFIED.codebook]
            elif float(flat.min()) >= 0:
                books.append("root")
            found.update(dict.fromkeys(Codec(g, book) for g in granularities for book in books))
            found[GELU] = None
        for each in self.others:
            found.update(dict.fromkeys(_codecs(each, granularities)))
        return [codec for codec in found if serves(codec, site)]

    def unplanned(self, frugal: bool, rectified: bool = False) -> Codec:
        """The codec for a site that no plan knows.

        Args:
            frugal: bits are few.
            rectified: the least element is zero.
        """
        if self.automatic and rectified:
            return RECTIFIED
        if self.automatic:
            return FRUGAL if frugal else GENERAL
        codecs = [codec for each in self.others for codec in _codecs(each, [Granularity.GROUP])]
        return next(codec for codec in codecs if not codec.private)


def reads_gelu_slope(site: SaveSite) -> bool:
    """Whether GELU's backward is the only consumer: then only GELU's derivative matters."""
    return site.consumers == {"GeluBackward0.self"}


def reads_sign(site: SaveSite) -> bool:
    """Whether ReLU's backward is the only consumer of its result: then only the sign matters."""
    return site.consumers == {"ReluBackward0.result"}


def serves(codec: Codec, site: SaveSite) -> bool:
    """Whether what the codec restores is of use to all that reads the site's tensors."""
    own = {GELU.codebook: reads_gelu_slope, SIGN.codebook: reads_sign}
    return not codec.private or own[codec.codebook](site)


def keeps_zeros(site: SaveSite, flat: Tensor) -> bool:
    """Whether zeros must stay zeros: ReLU's backward, or a compiled one, asks where they are.

    A zero that is restored as anything else opens the way to a gradient that is as large as the
    others, however small the error: importances, which are measured at few bits, cannot tell.
    """
    asked = any(reader in _ASKS_FOR_ZEROS for reader in site.consumers)
    return asked and float(flat.min()) == 0


def resolve_codecs(spec: Any) -> Candidates:
    """What the option ``codec`` stands for.

    Raises:
        ValueError: naming the option, the value and what is allowed.
    """
    entries = list(spec) if isinstance(spec, (list, tuple)) else [spec]
    automatic = any(isinstance(entry, str) and entry == AUTO for entry in entries)
    others = [_resolve(e) for e in entries if not (isinstance(e, str) and e == AUTO)]
    if not automatic and all(isinstance(each, Codec) and each.private for each in others):
        raise ValueError(
            f"codec={spec!r}: use at least one codec that serves every tensor, such as "
            "'group+uniform' ('gelu' and 'sign' serve one consumer alone), or 'auto'"
        )
    return Candidates(automatic, tuple(dict.fromkeys(others)))


def _codecs(each: Codec | Codebook | str, granularities: Iterable[Granularity]) -> list[Codec]:
    if isinstance(each, Codec):
        return [each]
    book = each if isinstance(each, Codebook) else named(each)
    if book.statistics is Statistics.NONE:
        granularities = [Granularity.TENSOR]
    return [Codec(granularity, each) for granularity in granularities]


def _resolve(spec: Any) -> Codec | Codebook | str:
    """What one entry of the option stands for."""
    found = _by_name(spec) if isinstance(spec, str) else _made(spec, spec)
    if found == BINARY.codebook or (isinstance(found, Codec) and found.lossless):
        raise ValueError(
            f"codec={spec!r}: two-valued tensors take 'binary' by themselves; {_help()}"
        )
    return found


def _by_name(text: str) -> Codec | Codebook | str:
    """``[GRANULARITY+]CODEBOOK``, where the latter is a codebook's name or leads to one."""
    head, plus, tail = text.partition("+")
    granularity = _GRANULARITIES.get(head) if plus else None
    name = text if granularity is None else tail
    found = name if name in codebook_names() else _load(text, name)
    if isinstance(found, Codec):
        if granularity is not None:
            raise ValueError(f"codec={text!r}: {name} is a whole codec; leave out {head + plus!r}")
        return found
    if found in (GELU.codebook, SIGN.codebook):
        return GELU if found == GELU.codebook else SIGN
    return found if granularity is None else _codecs(found, [granularity])[0]


def _load(text: str, name: str) -> Codec | Codebook:
    try:
        found = load_object(name, ENTRY_POINTS)
    except Exception as error:  # a module may raise anything
        raise ValueError(f"codec={text!r} cannot be loaded ({error}): {_help()}") from error
    return _made(text, found)


def _made(spec: Any, found: Any) -> Codec | Codebook:
    """A codec or a codebook of the user's own, or what a function of theirs makes, checked."""
    try:
        made = _call(found) if callable(found) else found
        if not isinstance(made, (Codec, Codebook)):
            raise TypeError(f"{type(made).__name__} is neither a Codec nor a Codebook")
        book = made.book if isinstance(made, Codec) else made
        if book.name not in BUILT_IN:
            check_codebook(book)
        elif book is not named(book.name):
            raise ValueError(f"codebook {book.name!r}: this is the name of one of daf_hf's")
    except Exception as error:  # a function may raise anything
        raise ValueError(f"codec={spec!r} cannot serve ({error}): {_help()}") from error
    return made


@cache
def _call(make: Callable[[], Any]) -> Any:
    """What a function makes: the same whenever it is asked."""
    return make()


def _help() -> str:
    books = [name for name in codebook_names() if name != BINARY.codebook]
    return (
        f"use {AUTO!r}, GRANULARITY+CODEBOOK with a granularity of {sorted(_GRANULARITIES)} and a "
        f"codebook of {books}, 'package.module:object', 'path/to/file.py:object', an "
        f"entry point of the group {ENTRY_POINTS!r}, a Codec, a Codebook, a function that returns "
        "one of these two, or a list of such"
    )
