"""Rows that no gradient reaches, and that need not be stored.

A row is what a saved tensor has of one token. Of tokens that are padding nothing is learnt: their
gradients are zero in every layer. Where a model reads its last hidden state at the first token
alone, that is so of all other tokens in what the last layer computes for itself. Which sites that
holds for is found in calibration, by whether anything changes when the rows are zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .batches import Inputs, batch_of
from .leases import Lease
from .physical import Derived, Physical
from .repeats import Repeated
from .sites import DIM_BATCH, DIM_BOTH, DIM_TOKENS, Batch, Live, SaveSite

MASK_INPUT = "attention_mask"

SMALLEST_BLOCK = 16
"""Elements of a row, as it lies in memory, below which picking rows costs more than it saves."""


class Rows:
    """The tokens of one batch.

    Args:
        inputs: of the model's forward pass.

    Attributes:
        masks: for each kind ``bool [examples, tokens]``; a kind that leaves nothing out is not
            there.
        lease: of their bytes, once something is restored by them.
    """

    def __init__(self, inputs: Inputs) -> None:
        batch = batch_of(inputs)
        self.examples, self.tokens = batch.examples, batch.tokens
        self.masks: dict[Live, Tensor] = {}
        self.lease: Lease | None = None
        if batch.tokens < 2:
            return
        mask = _padding(inputs, (batch.examples, batch.tokens))
        if mask is not None:
            self.masks[Live.UNPADDED] = mask
        first = torch.zeros(batch.examples, batch.tokens, dtype=torch.bool)
        first[:, 0] = True
        self.masks[Live.FIRST] = first

    @property
    def nbytes(self) -> int:
        """Bytes of the masks."""
        return sum(mask.nbytes for mask in self.masks.values())

    @property
    def batch(self) -> Batch:
        """Their number."""
        mask = self.masks.get(Live.UNPADDED)
        unpadded = None if mask is None else int(mask.sum())
        return Batch(self.examples, self.tokens, unpadded)

    def of(
        self, live: Live, shape: tuple[int, ...], stride: tuple[int, ...], roles: tuple[int, ...]
    ) -> Tensor | None:
        """Which rows of a tensor's memory are read: ``bool [rows]`` on the CPU.

        Args:
            live: the kind of tokens.
            shape: of the saved tensor, whose elements fill their extent.
            stride: its strides.
            roles: how each dimension follows the batch.

        Returns:
            None where all are, or where rows cannot be told apart.
        """
        mask = self.masks.get(live)
        if mask is None or len(roles) != len(shape) or 0 in shape:
            return None
        # Outermost first; what is repeated is not in memory.
        dims = sorted((d for d in range(len(shape)) if stride[d]), key=lambda d: -stride[d])
        found = self._axes(dims, shape, roles)
        if found is None:
            return None
        last, example, token = found
        if math.prod(shape[d] for d in dims[last + 1 :]) < SMALLEST_BLOCK:
            return None
        outer = [shape[d] for d in dims[: last + 1]]
        picked = mask.view(-1)[example * self.tokens + token]
        return picked.expand(outer).reshape(-1)

    def _axes(
        self, dims: list[int], shape: tuple[int, ...], roles: tuple[int, ...]
    ) -> tuple[int, Tensor, Tensor] | None:
        """The place of the last dimension that rows depend on, and their examples and tokens."""
        place = {DIM_BATCH: -1, DIM_TOKENS: -1, DIM_BOTH: -1}
        for index, dim in enumerate(dims):
            if place.get(roles[dim]) == -1:
                place[roles[dim]] = index  # of keys and queries, the outer one

        def axis(index: int, last: int) -> Tensor:
            size = shape[dims[index]]
            return torch.arange(size).view(-1, *[1] * (last - index))

        if place[DIM_BOTH] >= 0:
            last = place[DIM_BOTH]
            repeats, rest = divmod(shape[dims[last]], self.examples * self.tokens)
            if rest:
                return None
            return last, torch.zeros((), dtype=torch.int64), axis(last, last) // repeats
        if place[DIM_BATCH] < 0 or place[DIM_TOKENS] < 0:
            return None
        last = max(place[DIM_BATCH], place[DIM_TOKENS])
        found: list[Any] = []
        for role, count in ((DIM_BATCH, self.examples), (DIM_TOKENS, self.tokens)):
            repeats, rest = divmod(shape[dims[place[role]]], count)
            if rest:
                return None
            found.append(axis(place[role], last) // repeats)
        return last, found[0], found[1]


class Pick(NamedTuple):
    """Some rows of a tensor; see :meth:`Rows.of`. Keeps no more than the batch's masks alive."""

    rows: Rows
    live: Live
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    roles: tuple[int, ...]

    def __call__(self) -> Tensor:
        """``bool [rows]`` on the CPU."""
        picked = self.rows.of(self.live, self.shape, self.stride, self.roles)
        assert picked is not None
        return picked


def take(flat: Tensor, picked: Tensor) -> Tensor:
    """The elements of some rows, flat. ``picked``: ``bool [rows]`` on the CPU."""
    index = picked.nonzero().squeeze(1).to(flat.device)
    return flat.view(len(picked), -1).index_select(0, index).view(-1)


def spread(kept: Tensor, picked: Tensor, out: Tensor) -> Tensor:
    """Undo :func:`take`: fill the flat ``out`` with these rows, and zeros for the others."""
    rows = out.view(len(picked), -1)
    index, others = (which.nonzero().squeeze(1).to(out.device) for which in (picked, ~picked))
    rows.index_copy_(0, index, kept.view(-1, rows.shape[1]))
    rows.index_fill_(0, others, 0.0)
    return out


class LiveRows(Physical):
    """Elements of which some rows are stored; the others are restored as zeros.

    Args:
        site: the save site.
        kept: the stored rows.
        pick: which they are.
        spread: puts them among zeros.
    """

    __slots__ = ("kept", "pick", "spread")

    def __init__(
        self,
        site: SaveSite,
        kept: Physical,
        pick: Pick,
        spread: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        super().__init__(site, private=kept.private)
        self.kept = kept
        self.pick = pick
        self.spread = spread

    def flat(self) -> Tensor:
        return self.spread(self.kept.flat(), self.pick())


def lacks_rows(physical: Any) -> bool:
    """Whether rows are missing of what is restored, or of what it is derived from."""
    if isinstance(physical, Derived):
        return any(lacks_rows(source) for source in physical.expression.sources())
    if isinstance(physical, Repeated):
        return lacks_rows(physical.once)
    return isinstance(physical, LiveRows)


class Watch:
    """Looks at a gradient, whether it is zero in rows that other sites do not store.

    Args:
        site: where the tensor was saved whose gradient this is.
        pick: the rows in which it need not be.
        output: the tensor's number among its node's outputs.
    """

    def __init__(self, site: SaveSite, pick: Pick, output: int) -> None:
        self._site = site
        self._pick = pick
        self._output = output

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        """A hook before the node that made the tensor.

        Raises:
            RuntimeError: a gradient arrives at a row that was not stored; names the site and the
                option.
        """
        picked, gradient = self._pick(), gradients[self._output]
        if gradient is None:
            return
        rows = gradient.reshape(len(picked), -1)
        if bool(rows[(~picked).to(rows.device)].any()):
            raise RuntimeError(
                f"at {self._site.name} a gradient reaches more than {_WORDS[self._pick.live]}, "
                "which is all that calibration saw, and so other tokens' rows were not stored: "
                "use skip_padding=False"
            )


_WORDS = {Live.UNPADDED: "tokens that are not padding", Live.FIRST: "the first token"}


def _padding(inputs: Inputs, shape: tuple[int, int]) -> Tensor | None:
    """The attention mask of a batch, if it is one of this shape that leaves anything out.

    Not where a first token is padding: a model that reads the first one reads it there too.
    """
    mask = inputs[1].get(MASK_INPUT)
    if not isinstance(mask, Tensor) or tuple(mask.shape) != shape:
        return None
    mask = mask.detach().cpu() != 0
    return mask if bool(mask[:, 0].all()) and not bool(mask.all()) else None
