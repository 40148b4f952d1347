"""What is derived in a step: stored as an expression of what is held already."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .attention import INPUTS, Attention, Call, Slot
from .derivations import derivation, is_certain, packed_for
from .expressions import WITNESSES, Reader, Sampler, Source
from .handles import View, source_of
from .matching import Matched
from .packing import Packing
from .physical import Copy, Derived, Physical
from .placement import Placement
from .sites import SaveSite


class Deriver:
    """Finds what a tensor that is being saved follows from, and confirms it.

    Args:
        placement: where the others are.
        derives: whether anything may be derived.
    """

    def __init__(self, placement: Placement, derives: bool) -> None:
        self._placement = placement
        self._derives = derives
        self._sampler = Sampler()
        self._witnesses = Reader(self._witnesses_of)

    def renew(self) -> None:
        """Confirm by other elements from now on; none may be noted at the moment."""
        self._sampler.renew()

    def may_derive(self, flat: Tensor, tensor: Tensor, site: SaveSite) -> bool:
        """Whether to look: calibration has found it to follow, or its own node says so."""
        if not site.derived and (site.known or not self._derives):
            return False
        certain = is_certain(tensor)
        if not (site.derived or certain):
            return False
        # Beside keys that are not exact, row sums may not be, however small they are.
        return self._placement.wants_pages(flat, site) or (certain and site.compressible)

    def derive(self, flat: Tensor, tensor: Tensor, site: SaveSite) -> Physical | None:
        """Store nothing: the elements follow from what is held already."""
        versions = []

        def resolve(packed: Any) -> Source | None:
            found = source_of(packed)
            saved = found.saved if found else None
            while isinstance(saved, Matched):
                saved = saved.rows
            changeable = isinstance(saved, (Tensor, Copy, Packing))
            if changeable and packed.version:
                versions.append(packed.version)
            return found

        expression = derivation(tensor, flat.numel(), resolve)
        try:
            if expression is not None and expression.agrees(
                flat, self._witnesses, self._sampler.of(flat.numel())
            ):
                site.placed = "derived", None
                return Derived(site, expression, versions, tensor.dtype)
        except LookupError:  # no doubt: there was no room for the witnesses
            return None
        if expression is None and tensor.grad_fn is None:  # it may be told by what is saved next
            return None
        site.derived, site.doubted = False, True
        self._placement.unplanned.add(site)
        self._placement.ledger.count("doubted")
        return None

    def bind(self, view: View, tensor: Tensor) -> None:
        """Have fused attention's node read all that it has saved at the same moment.

        Args:
            view: of its output, which is derived.
            tensor: that output.
        """
        derived = view.physical
        if not isinstance(derived, Derived) or not isinstance(derived.expression, Attention):
            return
        call = Call(derived.expression.attended)
        own = {slot: packed_for(tensor, slot) for slot in (*INPUTS, "logsumexp")}
        for slot, packed in {**own, "output": view}.items():
            if isinstance(packed, View):  # what is a parameter is read as it is
                place = packed.physical
                # The output may be read by others too, as what it is derived from.
                alive = (place.saved, place) if slot == "output" else place.saved
                packed.physical = Slot(place.site, call, slot, alive)
                if slot == "logsumexp":
                    place.site.placed = "derived", None

    def take_witnesses(self, flat: Tensor, physical: Physical) -> None:
        """Note a few elements exactly, for what is derived from them; they count as held."""
        if self._placement.reserve_witnesses(physical, WITNESSES * flat.element_size()):
            physical.witnesses = self._sampler.of(flat.numel()).of(flat)

    def _witnesses_of(self, source: Physical | Tensor) -> Tensor:
        """The exact witnesses of a source.

        Raises:
            LookupError: it was stored before anything was known to follow from it.
        """
        if isinstance(source, Tensor):
            return self._sampler.of(source.numel()).of(source)
        if source.witnesses is None:
            raise LookupError
        return source.witnesses.clone()
