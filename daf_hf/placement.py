"""Where a tensor's elements go: the generator's state, pages, exact memory, or a file.

Nothing here decides on bits; that is the plan's part (:mod:`daf_hf.planning`).
"""

from __future__ import annotations

import logging
import math
import os
import threading
from time import perf_counter

import torch
from torch import Tensor

from .accounting import Ledger
from .arena import PAGE_COST, Arena
from .candidates import UNPLANNED_BITS, UNPLANNED_COSTS, resolve_codecs
from .checkpointed import EXACT_BITS
from .codecs import BINARY, Codec
from .config import DAFConfig
from .dropout import Draws
from .forks import INNER, free_after_fork
from .giving_way import GivingWay, Way
from .kernels import get_backend
from .kernels.format import MAX_BITS
from .kernels.noise import STATE_BYTES, Stream, streams
from .leases import DeferredEnds, Lease
from .matching import Matched, RowStatistics
from .packing import Job, Packer, Packing, choose_packer
from .physical import Copy, Drawn, Narrow, Pages, Physical, Refused, Spilled, Yielding
from .refusal import BudgetError, Refusal
from .room import Room
from .rows import spread
from .sites import SaveSite
from .spill import Parcel, SpillFile
from .stored import Stored
from .tensors import LARGEST, is_representable, may_be_two_valued, narrowest
from .workspace import Workspace

logger = logging.getLogger("daf_hf")

SMALLEST_BYTES = 4096
"""Tensors below this are kept exactly."""

COMPRESSIBLE = (torch.float32, torch.bfloat16, torch.float16)


class Placement:
    """Puts elements where the plan and the budget want them, and restores them.

    Args:
        config: the options.
        device: of the model.

    Raises:
        ValueError: for an option that cannot serve this device.

    Attributes:
        arena, workspace, ledger, draws, backend, packer: the parts; no packer where elements are
            encoded at once.
        candidates: the codecs that the options allow.
        waiting_bytes: of elements that wait to be encoded; they count as held outside the arena.
        lock: held while the arena changes, and by the caller of what does not take it itself.
        ends: what waits for the lock.
        refuses: an overflow is refused (:class:`BudgetError`) rather than spilled.
        refusal: what was refused in this forward pass.
        calibrated: there are importances to plan by.
        frugal: the budget was too small even to calibrate.
        unplanned: sites seen since the last calibration that no plan knows.
        giving_way: what is held exactly, and need not be.
        release_when_free: gives back all memory that holds nothing, at once or, where the lock is
            held, by its next holder; called with None.
        room: finds room under the budget.
    """

    def __init__(self, config: DAFConfig, device: torch.device) -> None:
        self._config = config
        self.device = device
        self.candidates = resolve_codecs(config.codec)
        self.backend = get_backend(config.backend, device)
        self.packer = packer = choose_packer(config.packing, device, self.backend)
        self._pages = packer.pages if packer else self.backend
        limit = config.budget_bytes
        self.arena = packer.arena(limit) if packer else Arena(limit, device)
        self.waiting_bytes = 0
        self.workspace = Workspace()
        self.ledger = Ledger()
        self.draws = Draws(streams(self.backend))
        self.refuses = config.on_overflow == "error"
        self.refusal = Refusal()
        self.calibrated = False
        self.frugal = False
        self.unplanned: set[SaveSite] = set()
        self.lock = free_after_fork(threading.Lock(), INNER)
        self.ends = DeferredEnds(self.lock)
        self.release_when_free = self.ends.later(self._release_idle)
        self._spill = SpillFile(config.spill_mb * 1e6)
        self._spilling: list[float] = []  # budgets that had no room, of which nobody was told
        if config.on_overflow == "spill":
            self.arena.spill = self._spill_planes
        self.giving_way = GivingWay(self)
        self.room = Room(self.arena, self.giving_way, self.settle, self._give_way)
        self._end_outside = self.ends.later(self.arena.release_outside)
        self._end_pages = self.ends.later(self.arena.remove)
        self._end_exact = self.ends.later(self._unhold)
        self._end_waiting = self.ends.later(self._unwait)
        self._count_later = self.ends.later(self.ledger.count)

    def place(self, flat: Tensor, cols: int, site: SaveSite, cdata: int, whole: bool) -> Physical:
        """Store ``flat``: as the generator's state, in one plane, as planned, or exactly.

        A normalisation's rows are encoded with their statistics.
        """
        physical = self._place(flat, cols, site, cdata, whole)
        if not site.matched or not isinstance(physical, (Pages, Packing)):
            return physical
        return self._with_statistics(physical, self._statistics(flat, cols))

    def _statistics(self, flat: Tensor, cols: int) -> RowStatistics:
        began = perf_counter()
        found = RowStatistics.of(flat, cols)
        self.ledger.kernel_seconds += perf_counter() - began
        return found

    def _with_statistics(self, rows: Physical, statistics: RowStatistics) -> Physical:
        lease = self.reserve(statistics.nbytes)
        return rows if lease is None else Matched(rows.site, rows, statistics, lease)

    def _place(self, flat: Tensor, cols: int, site: SaveSite, cdata: int, whole: bool) -> Physical:
        if self.wants_pages(flat, site):
            if not site.known:
                self.unplanned.add(site)
            option = site.option
            if site.keep is not None:
                physical = self._draw_again(flat, site, site.keep)
                if physical is not None:
                    return physical
            if site.two_valued or (option is None and may_be_two_valued(flat)):
                binary = Stored(BINARY.layout(flat.numel(), cols, 1), 1, (1,), ())
                physical = self._encode(flat, site, binary, BINARY)
                if physical is not None:
                    return physical
            if self._may_quantize(flat, site):
                physical = self._encode(flat, site, *self._planned(flat, cols, site))
                if physical is not None:
                    return physical
        return self._narrow(flat, site, cdata) or self._hold(flat, cols, site, cdata, whole)

    def _may_quantize(self, flat: Tensor, site: SaveSite) -> bool:
        """Whether elements may lose bits."""
        if flat.dtype is torch.bool or not self.widths(site):
            return False
        if site.option is not None:
            return site.option.codec is not None
        if site.known and (site.derived or site.doubted):
            return False  # the plan has no bits for it: it is exact, and gives way at need
        return self.may_lose_bits(flat, site)

    def may_lose_bits(self, flat: Tensor, site: SaveSite) -> bool:
        """Whether there is a codec for them, whatever the plan says."""
        if site.candidates:
            return True
        if site.known and site.probed is not None and not (site.derived or site.doubted):
            return False  # no codec could represent them
        # Masks hold the least number there is, beside which all others would be alike.
        return not LARGEST <= float(flat.abs().max()) < math.inf

    def _draw_again(self, flat: Tensor, site: SaveSite, keep: float) -> Physical | None:
        """Hold what the elements were drawn from; None where they were not."""
        began = perf_counter()
        noise = self.draws.recognise(flat, keep)
        self.ledger.kernel_seconds += perf_counter() - began
        if noise is None or self.refusal or not self.room.reserve(STATE_BYTES):
            return None
        site.placed = "drawn", None
        return Drawn(site, Lease(self._end_outside, STATE_BYTES), noise, self.draw)

    def widths(self, site: SaveSite) -> tuple[int, ...]:
        """Bit widths that a site's tensors may be encoded at, ascending."""
        return site.widths(self._config.bits)

    def wants_pages(self, flat: Tensor, site: SaveSite) -> bool:
        """Whether a tensor may be encoded at all."""
        return (
            site.compressible
            and flat.nbytes >= SMALLEST_BYTES
            and (flat.dtype in COMPRESSIBLE or flat.dtype is torch.bool)
        )

    def _planned(self, flat: Tensor, cols: int, site: SaveSite) -> tuple[Stored, Codec]:
        option, allowed = site.option, self.widths(site)
        if option is None or option.codec is None or option.bits is None:
            # Beside a plan these are few, and many bits for them cost little.
            most = MAX_BITS if self.calibrated else UNPLANNED_BITS
            bits = max((b for b in allowed if b <= most), default=allowed[0])
            codec, costs = self.unplanned_codec(flat), UNPLANNED_COSTS
        else:
            codec, bits, costs = option.codec, option.bits, option.costs
        return Stored(codec.layout(flat.numel(), cols, bits), bits, allowed, costs), codec

    def unplanned_codec(self, flat: Tensor) -> Codec:
        """A codec that serves whoever reads the elements."""
        rectified = bool(flat.numel()) and float(flat.min()) == 0
        return self.candidates.unplanned(self.frugal, rectified)

    def _encode(
        self, flat: Tensor, site: SaveSite, stored: Stored, codec: Codec
    ) -> Physical | None:
        """Encode into pages; None when the codec cannot represent the elements."""
        if self.refusal or not self.room.insert(stored):
            if self.refuses and not is_representable(flat, codec.lossless):
                return None  # what is counted must be what would be held
            fewest = stored.layout.pages(stored.widths[0])
            return self._overflow(flat, site, fewest * PAGE_COST)
        if self.packer and not codec.lossless:
            packing = self._hand_over(self.packer, flat, site, stored, codec)
            if packing is not None:
                return packing
        return self._write(flat, site, stored, codec)

    def _write(self, flat: Tensor, site: SaveSite, stored: Stored, codec: Codec) -> Pages | None:
        """Fill the pages of ``stored``; None, and they are free, where they cannot represent it."""
        began, done = perf_counter(), False
        try:
            done = self._pages.encode(
                flat, stored.layout, stored.bits, stored.table, self.arena.space
            )
        finally:
            self.ledger.kernel_seconds += perf_counter() - began
            if not done:
                self.arena.remove(stored)
        if not done:
            if not codec.lossless:
                self.ledger.count("not_finite")
            return None
        return self._in_pages(flat, site, stored, codec)

    def _in_pages(self, flat: Tensor, site: SaveSite, stored: Stored, codec: Codec) -> Pages:
        site.placed = codec, stored.bits
        lease = Lease(self._end_pages, stored)
        return Pages(site, lease, codec.private, stored, flat.dtype, self.decode)

    def _hand_over(
        self, packer: Packer, flat: Tensor, site: SaveSite, stored: Stored, codec: Codec
    ) -> Packing | None:
        """Leave it to the worker to fill the pages of ``stored``.

        None where the elements have no room until then: the worker is behind, and to encode them
        at once is to help. Half of the room is left to the pages of what comes next.
        """
        nbytes, arena = flat.nbytes, self.arena
        if not packer.takes(flat) or 2 * nbytes > arena.room_bytes:
            return None
        arena.outside_bytes += nbytes
        self.waiting_bytes += nbytes
        counted, waits = Lease(self._end_outside, nbytes), Lease(self._end_waiting, nbytes)
        pages = self._in_pages(flat, site, stored, codec)
        elements, encode = packer.encoder(flat, stored, arena.space)

        def pack() -> bool:
            done = encode()
            if not done:
                site.placed = "exact", None
                count("not_finite")
            return done

        count = self._count_later
        copy = Copy(site, elements, counted, flat.device)
        return packer.submit(Job(copy, pages, pack, waits))

    def _give_way(self, held: Yielding, way: Way) -> None:
        """Encode elements that were held exactly, into the room that they leave."""
        try:
            if self.arena.spill is not None and self._spill.fits(held.elements.nbytes):
                place: Physical | None = Spilled(held.site, held.elements, self._spill)
                self.ledger.count("spilled")
            else:
                place = self._encode_in_exchange(held, way)
        except BaseException:  # no disk, or no memory: there may be some another time
            self.giving_way.add(held)
            raise
        if place is None:
            return
        rows = held.site.matched and isinstance(place, Pages)
        statistics = self._statistics(held.elements, held.cols) if rows else None
        held.move_to(place)
        self.ends.settle()
        if statistics is not None:
            held.move_to(self._with_statistics(place, statistics))

    def _encode_in_exchange(self, held: Yielding, way: Way) -> Physical | None:
        site, flat = held.site, held.elements
        if not self.arena.exchange(way.stored, way.freed):
            return None
        place = self._write(flat, site, way.stored, way.codec)
        if place is not None:
            self.room.forgone_bytes += way.saved_bytes
        return place

    def _hold(self, flat: Tensor, cols: int, site: SaveSite, cdata: int, whole: bool) -> Physical:
        """Hold exactly: the storage itself where that costs no more than a copy."""
        ledger = self.ledger
        shared = whole and (
            ledger.is_held_exactly(cdata) or ledger.storage_bytes(cdata) <= flat.nbytes
        )
        needed = ledger.hold_exactly(cdata) if shared else flat.nbytes
        site.placed = "exact", None
        self.refusal.inputs_exact |= site.compressible and site.least_bits == EXACT_BITS
        lossy = flat.dtype in COMPRESSIBLE and self.widths(site) and self.wants_pages(flat, site)
        way = None
        if lossy and (self.refusal or not self.room.fits(needed)):
            way = self.giving_way.way(flat, cols, site, needed)
        try:
            kept = not self.refusal and self.room.reserve(needed, way.score if way else math.inf)
        except BaseException:  # the disk is full, to which others were to be spilled
            if shared:
                ledger.release_exactly(cdata)
            raise
        if kept:
            held = flat if shared or not whole else flat.clone()
            lease = Lease(self._end_exact, cdata) if shared else Lease(self._end_outside, needed)
            if not lossy:
                return Copy(site, held, lease)
            copy = Yielding(site, held, cols, lease, cdata if shared else None)
            self.giving_way.add(copy)
            return copy
        if shared:
            ledger.release_exactly(cdata)
        if way is None:
            return self._overflow(flat, site, needed)
        saved_bytes = way.saved_bytes  # before it is lowered further
        physical = self._encode(flat, site, way.stored, way.codec)
        if physical is None:
            return self._overflow(flat, site, needed)
        self.room.forgone_bytes += saved_bytes
        return physical

    def _narrow(self, flat: Tensor, site: SaveSite, cdata: int) -> Physical | None:
        """Hold integers in a narrower dtype; None where there is none."""
        small = flat.nbytes < SMALLEST_BYTES or not site.compressible
        dtype = flat.dtype if small or self.ledger.is_held_exactly(cdata) else narrowest(flat)
        if dtype is flat.dtype:
            return None
        needed = flat.numel() * dtype.itemsize
        site.placed = "narrow", None
        if self.refusal or not self.room.reserve(needed):
            return self._overflow(flat, site, needed)
        return Narrow(site, flat.to(dtype), Lease(self._end_outside, needed), flat.dtype)

    def _overflow(self, flat: Tensor, site: SaveSite, needed: int) -> Physical:
        """What to do with elements that have no room even at the fewest bits."""
        spill = self._spill_file()
        if not self.refuses and spill.fits(flat.nbytes):
            if not self.ledger.counts.get("spilled") and self._config.on_overflow == "error":
                self._spilling.append(self.arena.limit_bytes)
            self.ledger.count("spilled")
            return Spilled(site, flat, spill)
        if not self.refusal:
            self.refusal.begin(self.arena.limit_bytes, self.arena.held_bytes, self._config.bits[0])
        self.refusal.add(site.name, needed)
        return Refused(site, self.refusal)

    def _spill_planes(self, pages: Tensor) -> Parcel | None:
        """Keep planes that leave the arena elsewhere; None where there is no room for them."""
        spill = self._spill_file()
        if not spill.fits(pages.nbytes):
            return None
        self.ledger.count("spilled")
        return Parcel(pages, spill)

    def _spill_file(self) -> SpillFile:
        """That of this process, which may have been forked."""
        if self._spill.process != os.getpid():
            self._spill = SpillFile(self._config.spill_mb * 1e6)
        return self._spill

    def tell(self) -> None:
        """Warn of what was spilled; not while the lock is held, which who listens may want."""
        while self._spilling:
            logger.warning(
                "daf_hf: the budget of %g MB has no room for all that this step saves beside what "
                "is held exactly and at the fewest bits; the rest is spilled to a file, which is "
                "slow",
                self._spilling.pop() / 1e6,
            )

    def take_refusal(self) -> BudgetError | None:
        """The error that a forward pass without enough room ends in; None when it had enough."""
        with self.lock:
            refusal, self.refusal = self.refusal, Refusal()
        return refusal.error() if refusal else None

    def release_idle(self) -> None:
        """Pack what waits, and give back all memory that holds nothing; takes the lock."""
        with self.lock:
            self.settle()
            self._release_idle()

    def _release_idle(self, _: object = None) -> None:
        self.arena.trim()
        self.workspace.clear()

    def settle(self) -> bool:
        """Pack what waits for it, and run what waits for the lock; False when nothing did.

        The caller holds the lock. Afterwards all that is held is what would be held without a
        worker, so what the budget has room for does not depend on how fast the worker is.
        """
        began = perf_counter()
        packed = self.packer is not None and self.packer.finish_all()
        self.ledger.kernel_seconds += perf_counter() - began
        return self.ends.settle() or packed

    # Restoring ---------------------------------------------------------------------------------

    def decode(self, stored: Stored, dtype: torch.dtype, start: int | None = None) -> Tensor:
        """The elements of ``stored``, or of its part that starts there, as a new flat tensor."""
        with self.lock:
            began = perf_counter()
            stored, space = self.arena.whole(stored)
            if start is not None:
                stored = stored.part(start)  # now that nobody moves or drops its pages
            if not self.packer or self.packer.idle:  # to trim is to wait for all jobs
                self.arena.trim_if_idle()
            out = self.workspace.empty(stored.layout.numel, dtype, self.device)
            self._pages.decode(out, stored.layout, stored.bits, stored.table, space)
            self.ledger.kernel_seconds += perf_counter() - began
        return out

    def draw(self, stream: Stream, numel: int, dtype: torch.dtype) -> Tensor:
        """The next ``numel`` elements of a stream as a new flat tensor."""
        with self.lock:
            began = perf_counter()
            out = self.workspace.empty(numel, dtype, self.device)
            stream.fill(out)
            self.ledger.kernel_seconds += perf_counter() - began
        return out

    def spread(self, kept: Tensor, picked: Tensor) -> Tensor:
        """A new flat tensor of zeros but for some rows.

        Args:
            kept: the elements of these, flat.
            picked: ``bool [rows]`` on the CPU.
        """
        with self.lock:
            began = perf_counter()
            width = kept.numel() // int(picked.sum())
            out = self.workspace.empty(len(picked) * width, kept.dtype, kept.device)
            spread(kept, picked, out)
            self.ledger.kernel_seconds += perf_counter() - began
        return out

    # Exact bytes -------------------------------------------------------------------------------

    def reserve_witnesses(self, physical: Physical, nbytes: int) -> bool:
        """Count a tensor's witnesses; False without room. What finds none later may drop them."""
        physical.witness_lease = self.reserve(nbytes)
        if physical.witness_lease is None:
            return False
        self.room.note_witnesses(physical)
        return True

    def reserve(self, nbytes: int) -> Lease | None:
        """Count bytes that are held beside the elements; None without room."""
        if self.refusal or not self.room.reserve(nbytes):
            return None
        return Lease(self._end_outside, nbytes)

    def hold_storage(self, cdata: int) -> Lease:
        """Count a storage that is kept as it is, once however many tensors keep it."""
        self.arena.outside_bytes += self.ledger.hold_exactly(cdata)
        return Lease(self._end_exact, cdata)

    def hold_unknown(self, nbytes: int) -> Lease:
        """Count a tensor that is not understood; takes the lock."""
        with self.lock:
            self.arena.outside_bytes += nbytes
        return Lease(self._end_outside, nbytes)

    def _unhold(self, cdata: int) -> None:
        self.arena.release_outside(self.ledger.release_exactly(cdata))

    def _unwait(self, nbytes: int) -> None:
        self.waiting_bytes -= nbytes
