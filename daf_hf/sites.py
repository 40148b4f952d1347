"""Save sites: places in a model where autograd saves a tensor.

A site's key is the module whose call saves the tensor, the module that called it, whether it
trains, the two instructions (code object and offset) that lead to the operation, the kind of node
that produced the tensor, and the ordinal among equal ones within the call. (DoRA calls LoRA's A
twice: on the layer's input, and, for the norm of the weights, on an identity matrix.) It does not
count saves across modules or calls, so a dropped layer, a toggled dropout or an optional branch
never shifts another site. An attention mask, which there is for padded batches alone, is told from
the keys of a frozen projection, which no node produced either.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from functools import lru_cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from .allocation import Option
from .checkpointed import EXACT_BITS, saves_inputs
from .codecs import Codec
from .module_calls import Call, Followed
from .places import place_of
from .tensors import MATCHED_ROW, are_rows, operation

LAYOUT_NODES = frozenset(
    [
        *("View", "UnsafeView", "ReshapeAlias", "Reshape", "Expand", "Transpose", "Permute", "T"),
        *("Clone", "Squeeze", "Unsqueeze", "AsStrided", "Alias"),
    ]
)
"""Producers that only lay elements out anew: which of them runs depends on sizes."""

_OURS = f"{__package__}."

DIM_CONSTANT, DIM_BATCH, DIM_TOKENS, DIM_BOTH = range(4)


class Live(Enum):
    """Tokens whose rows are read in backward; see :mod:`daf_hf.rows`."""

    ALL = "all"
    UNPADDED = "unpadded"
    FIRST = "first"


@dataclass(eq=False)
class SaveSite:
    """A save site and what is known of it.

    Attributes:
        name: ``module/ordinal``; unique and stable from run to run of the same model.
        module: qualified name of the module.
        compressible: False when options exclude the module.
        least_bits: no fewer will do: 0, 8, or ``EXACT_BITS``.
        consumers: ``Node.slot`` of the autograd nodes that read the tensor.
        shape, dtype: of the last tensor that was saved here.
        nbytes: unique bytes that the site adds to plain training's, in the last step.
        probed: what calibration saw; None before.
        importance: squared relative gradient error per unit of ``distortion`` (moving average).
        error_at_zero: squared relative gradient error with the site at 0 bits, measured (moving
            average); None where it was not.
        distortions: for each candidate codec its distortion at 0..8 bits, relative to the
            tensor's own energy in the consumer's terms.
        candidates: the codecs and widths worth offering to the allocator.
        two_valued: calibration found exactly two values: stored in one plane without loss.
        keep: calibration found it to be dropout's noise, as the default generator drew it: the
            probability of an element's not being 0. The generator's state is stored.
        narrow: the dtype that calibration found its integers to fit into; None of others.
        normalised: one of its readers divides each row by the row's own size (LayerNorm, RMSNorm).
        derived: calibration found it to be a function of other saved tensors: not stored.
        feeds: others are functions of it.
        doubted: a step could not confirm that; it is stored from then on.
        shared_by: sites that calibration saw save the same elements again.
        live: of which tokens the rows are stored.
        alive: kinds of tokens that calibration found not to be all that is read.
        watched: in each step the gradient is looked at, whether it is zero but for the rows of
            these tokens.
        known: it was there at the last calibration.
        option: what the current plan chose; None for sites that need no choice.
        placed: codec and bits with which the last tensor was stored; or a word for how it was
            not encoded, and None.
    """

    name: str
    module: str
    compressible: bool = True
    least_bits: int = 0
    consumers: set[str] = field(default_factory=set)
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    nbytes: int = 0
    probed: Probed | None = None
    importance: float | None = None
    error_at_zero: float | None = None
    distortions: dict[Codec, tuple[float, ...]] = field(default_factory=dict)
    candidates: list[tuple[Codec, int]] = field(default_factory=list)
    two_valued: bool = False
    keep: float | None = None
    narrow: torch.dtype | None = None
    normalised: bool = False
    derived: bool = False
    feeds: bool = False
    doubted: bool = False
    shared_by: set[SaveSite] = field(default_factory=set)
    live: Live = Live.ALL
    alive: set[Live] = field(default_factory=set)
    watched: Live = Live.ALL
    known: bool = False
    option: Option | None = None
    placed: tuple[Codec, int] | tuple[str, None] = ("exact", None)

    @property
    def exact_size(self) -> int:
        """Bytes of an element that is held exactly."""
        return (self.narrow or self.dtype).itemsize

    @property
    def matched(self) -> bool:
        """Its rows are stored with their statistics (:mod:`daf_hf.matching`)."""
        probed = self.probed
        if probed is None or not self.normalised:
            return False
        return are_rows(probed.columns, probed.shape, MATCHED_ROW)

    @property
    def is_unmeasured(self) -> bool:
        """Its last tensor lost bits, and no calibration can tell what they are worth."""
        codec, _ = self.placed
        return self.probed is None and isinstance(codec, Codec) and not codec.lossless

    @property
    def consumer(self) -> str:
        """All consumers in one word."""
        return " ".join(sorted(self.consumers)) or "unknown"

    def costs(self, codec: Codec) -> tuple[float, ...]:
        """Predicted squared relative gradient error at 0..8 bits of a codec that was measured."""
        assert self.importance is not None
        found = [self.importance * distortion for distortion in self.distortions[codec]]
        return max(found[0], self.error_at_zero or 0.0), *found[1:]

    def widths(self, allowed: tuple[int, ...]) -> tuple[int, ...]:
        """Bit widths that it may be encoded at: those that options allow, or its own."""
        return {0: allowed, EXACT_BITS: ()}.get(self.least_bits, (self.least_bits,))


@dataclass(frozen=True)
class Batch:
    """Size of a batch: examples, and tokens an example (1 where there are none).

    Attributes:
        unpadded: tokens of all examples that are not padding; None where all are not.
    """

    examples: int
    tokens: int = 1
    unpadded: int | None = None

    def kept(self, live: Live) -> int:
        """Tokens of a kind, in all examples together."""
        if live is Live.FIRST:
            return self.examples
        if live is Live.UNPADDED and self.unpadded is not None:
            return self.unpadded
        return self.examples * self.tokens


@dataclass(frozen=True)
class Probed:
    """What calibration saw of a site, to predict sizes for other batches.

    Attributes:
        batch: the probe's size.
        shape: of the tensor.
        roles: how each dimension follows the batch.
        numel: elements to store (fewer than the shape's for an expanded tensor).
        columns: the dimensions of a row of its memory (:func:`daf_hf.tensors.geometry`).
        uses: tensors stored here in one forward pass; duplicates of others' do not count.
        mean_square, mean_magnitude: of the elements.
    """

    batch: Batch
    shape: tuple[int, ...]
    roles: tuple[int, ...]
    numel: int
    columns: tuple[int, ...]
    uses: int
    mean_square: float
    mean_magnitude: float

    def predict(self, batch: Batch, live: Live = Live.ALL) -> tuple[int, int]:
        """Elements, of tokens of this kind, and columns to expect for another batch."""
        examples = batch.examples / self.batch.examples
        tokens = batch.tokens / self.batch.tokens
        factors = [(1.0, examples, tokens, examples * tokens)[role] for role in self.roles]
        numel = round(self.numel * math.prod(factors))
        numel = numel * batch.kept(live) // (batch.examples * batch.tokens)
        return numel, math.prod(round(self.shape[d] * factors[d]) for d in self.columns)


def _kind(tensor: Tensor) -> str | bool:
    """What a site's key says of how the tensor was made."""
    if tensor.grad_fn is None:
        return tensor.ndim == 4 and tensor.shape[1] == 1  # attention's mask: one for all heads
    return _producer(type(tensor.grad_fn))


@lru_cache(maxsize=4096)
def _producer(node: type) -> str:
    kind = operation(node.__name__)
    return "layout" if kind in LAYOUT_NODES else kind


class SiteTracker:
    """Knows, in each thread, which module's call is under way, and names save sites.

    Args:
        model: the root module.
        include, exclude: fnmatch patterns on module names.
        on_call: called whenever a submodule is.
        checkpoint_bits: fewest bits of the inputs of checkpointed regions.

    Raises:
        ValueError: for a pattern that no module's name matches.

    Attributes:
        sites: by key, or by place (:mod:`daf_hf.places`) while other ranks alone have met them.
        ordinals: how many of each module's.
    """

    def __init__(
        self,
        model: nn.Module,
        include: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
        on_call: Callable[[], None] = lambda: None,
        checkpoint_bits: int = EXACT_BITS,
    ) -> None:
        self._model = weakref.ref(model)
        self._checkpoint_bits = checkpoint_bits
        self._on_call = on_call
        self.sites: dict[tuple[Any, ...], SaveSite] = {}
        self._include, self._exclude = tuple(include), tuple(exclude)
        names = [name for name, _ in model.named_modules()]
        for option, patterns in (("include", self._include), ("exclude", self._exclude)):
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise ValueError(
                        f"{option}={pattern!r} matches no module of the model; its modules are "
                        f"named like {names[len(names) // 2]!r} and {names[-1]!r}"
                    )
        self._local = threading.local()
        self._followed: weakref.WeakKeyDictionary[nn.Module, Followed] = weakref.WeakKeyDictionary()
        self.ordinals: dict[str, int] = {}

    def _root(self) -> nn.Module:
        model = self._model()
        assert model is not None
        return model

    def install(self) -> None:
        """Follow the calls of every submodule."""
        for name, module in self._root().named_modules():
            if name and module not in self._followed:
                self._followed[module] = Followed(module, name, self._calls, self._on_call)
            elif name:
                self._followed[module].again(module)

    def remove(self) -> None:
        """Undo :meth:`install`."""
        for followed in self._followed.values():
            followed.remove()

    def _calls(self) -> list[Call]:
        try:
            return self._local.calls
        except AttributeError:
            self._local.calls = []
            return self._local.calls

    def start(self) -> list[Call]:
        """Begin the root module's call in this thread; hand the result to :meth:`finish`."""
        before = self._calls()
        self._local.calls = [Call(self._root(), "")]
        return before

    def restart(self) -> None:
        """The root module is called again, while its last call was not yet finished."""
        calls = self._calls()
        if len(calls) == 1:
            calls[0].seen.clear()

    def finish(self, before: list[Call]) -> None:
        """End it, whatever calls an exception left open."""
        self._local.calls = before

    def current_module(self) -> nn.Module:
        """The module whose call is under way in this thread."""
        calls = self._calls()
        return calls[-1].module if calls else self._root()

    def site(self, frame: FrameType | None, tensor: Tensor) -> SaveSite:
        """The site of a tensor that is being saved.

        Args:
            frame: the Python frame that called the operation.
            tensor: with its ``grad_fn``, if it has one.
        """
        calls = self._calls()
        if not calls:
            calls.append(Call(self._root(), ""))
        call = calls[-1]
        path: tuple[Any, ...] = (_kind(tensor),)
        if frame is not None:
            back = frame.f_back
            path = (*path, frame.f_code, frame.f_lasti)
            # The root's own operations: called by ours, from several places.
            if back is not None and not back.f_globals.get("__name__", "").startswith(_OURS):
                path = (*path, back.f_code, back.f_lasti)
        ordinal = call.seen.get(path, 0)
        call.seen[path] = ordinal + 1
        caller = calls[-2].name if len(calls) > 1 else None
        key = (call.name, caller, call.module.training, path, ordinal)
        found = self.sites.get(key)
        return found if found is not None else self._add(key, call.name, saves_inputs(frame))

    def _add(self, key: tuple[Any, ...], module: str, checkpointed: bool = False) -> SaveSite:
        place = place_of(key)
        if place in self.sites:  # another rank has met it, and told
            self.sites = {key if k == place else k: site for k, site in self.sites.items()}
            return self.sites[key]
        number = self.ordinals.get(module, 0)
        self.ordinals[module] = number + 1
        compressible = any(fnmatchcase(module, p) for p in self._include) and not any(
            fnmatchcase(module, p) for p in self._exclude
        )
        least = self._checkpoint_bits if checkpointed else 0
        least = least if compressible else EXACT_BITS
        site = SaveSite(f"{module or 'model'}/{number}", module, compressible, least)
        self.sites[key] = site
        return site


def dimension_roles(
    first: tuple[int, ...], second: tuple[int, ...], batches: tuple[Batch, Batch]
) -> tuple[int, ...]:
    """How each dimension follows the batch, from shapes seen at two batch sizes.

    Where only the examples differ, or nothing, the size itself is the hint.
    """
    if len(first) != len(second):
        return (DIM_CONSTANT,) * len(second)
    sizes = [
        {DIM_BOTH: b.examples * b.tokens, DIM_TOKENS: b.tokens, DIM_BATCH: b.examples}
        for b in batches
    ]

    def role(old: int, new: int) -> int:
        fitting = [
            role for role in sizes[0] if old and new * sizes[0][role] == old * sizes[1][role]
        ]
        if old == new:
            fitting = [role for role in fitting if new == sizes[1][role] > 1]
        else:
            fitting = [role for role in fitting if new % sizes[1][role] == 0]
        return fitting[0] if fitting else DIM_CONSTANT

    return tuple(role(old, new) for old, new in zip(first, second, strict=True))
