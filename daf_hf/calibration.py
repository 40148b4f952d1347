"""Calibration: who consumes each saved tensor, how codecs distort it, what that does to gradients.

Three kinds of forward pass: a pilot of a few tokens, to label consumers and learn how sizes follow
the batch; a survey of the whole batch that keeps nothing, to measure sizes and distortions; and
graphs of a few examples with everything kept, in which one backward pass a site restores that site
alone from its quantized form. Nothing of the user's is changed: RNG states, gradients, buffers and
parameters are afterwards what they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from . import zero_bits
from .batches import Inputs, NothingToLearnError, batch_of, cut, scalar_loss
from .chunked_loss import own_graph
from .codec_times import now
from .codecs import Codec
from .gauge import Gauge
from .gradient_error import GradientError, squared_norm
from .graph_probe import GraphProbe
from .importance import resolve_importance
from .liveness import find_live, find_watch
from .model_state import untouched
from .off_zero import all_zero, moved, signed_steps
from .probing import Graph, ProbeTooLargeError
from .saved_tensors import Compressor
from .sites import DIM_CONSTANT, Batch, Live, Probed, SaveSite, dimension_roles
from .survey import Survey

PROBE_BITS = 2
"""Width at which importances are measured; it ranks sites at other widths too."""

PILOT_EXAMPLES = 2
PILOT_SHARE = 3
"""Sixteenths of the tokens that the pilot takes."""

CUTS = ((True, True), (True, False), (False, False))
"""Whether a probe takes a part of the examples, and of the tokens: what is tried in turn."""

SMALL_SHARE = 0.05
"""Sites below this share of the average site's bytes are not measured."""

SMALLEST_PROBE_TOKENS = 4
SHARE_OF_BUDGET = 0.9
"""Of the budget, what a graph that keeps everything may take."""

Result = TypeVar("Result")


class CalibrationError(Exception):
    """No measurement was possible; says why."""


class NothingToMeasureError(CalibrationError):
    """This forward pass trains nothing; another one may."""


class _ModelFailedError(Exception):
    """The model could not be run on the part of the batch that it was given."""


class Calibration:
    """One calibration: a pilot, a survey, and probes on a few small graphs.

    Args:
        compressor: whose sites are calibrated.
        forward: the model's own forward.
        inputs: the batch from which the probe is cut.
        limit_bytes: what it may hold of; the budget where None.
        anew: measure all sites; else those alone that have no importance yet.

    Raises:
        CalibrationError: when nothing could be measured.

    Attributes:
        plain_bytes: what plain training holds for backward of the whole batch.
        least_bytes: the least budget under which this batch can be calibrated.
        token_seconds: of plain training's forward and backward pass, each token's share; None
            where nobody asks for it.
    """

    def __init__(
        self,
        compressor: Compressor,
        forward: Callable[..., Any],
        inputs: Inputs,
        limit_bytes: float | None = None,
        anew: bool = True,
    ) -> None:
        self._anew = anew
        self.compressor = compressor
        self._forward = forward
        self._inputs = inputs
        self._whole = batch_of(inputs)
        self._gauge = Gauge(compressor)
        self._limit_bytes = limit_bytes
        self.plain_bytes = 0
        self.least_bytes = 0.0
        self.token_seconds: float | None = None
        self._errors = GradientError(compressor.model)
        self._parameters = self._errors.parameters
        widths = [b for b in compressor.config.bits if b] or [max(compressor.config.bits)]
        self._bits = min(widths, key=lambda bits: abs(bits - PROBE_BITS))
        self._codecs: dict[SaveSite, Codec] = {}
        self._nbytes: dict[SaveSite, int] = {}
        self._cuts_examples = self._cuts_tokens = True

    def run(self) -> None:
        """Measure, and write what was found into the sites."""
        if not self._whole.examples * self._whole.tokens:
            raise NothingToMeasureError("the batch is empty")
        with untouched(self.compressor.model, self.compressor.device):
            self._on_parts(self._run)
        for site in self.compressor.tracker.sites.values():
            site.known = True

    def visit(self) -> None:
        """Have the sites seen, and who reads them, in a small forward pass; measure nothing."""
        if not self._whole.examples * self._whole.tokens:
            raise NothingToMeasureError("the batch is empty")

        def look() -> None:
            with self._pilot() as pilot:
                pilot.find_readers()

        with untouched(self.compressor.model, self.compressor.device):
            self._on_parts(look)

    def _on_parts(self, work: Callable[[], None]) -> None:
        """Not every model takes fewer tokens, or fewer examples, than its batch has."""
        for self._cuts_examples, self._cuts_tokens in CUTS:
            try:
                return work()
            except _ModelFailedError as error:
                reason = str(error)
        raise CalibrationError(f"the model cannot be run for it ({reason})")

    def _run(self) -> None:
        with self._pilot() as pilot:
            bytes_per_token = pilot.nbytes / (pilot.batch.examples * pilot.batch.tokens)
            self.least_bytes = pilot.nbytes / SHARE_OF_BUDGET
            pilot.find_readers()
            _learn_derived(pilot)
            moves, complete = self._moves_off_zero(pilot)
            if not complete:  # what the pilot left out may be what the loss is about
                moves = self._within_budget(bytes_per_token, self._moves_at)
            with moved(moves):  # what is all zero for one step alone, no codec could be measured on
                self._survey(pilot)
        with moved(moves):
            self._within_budget(bytes_per_token, self._measure_at)

    def _limit(self) -> float:
        """What graphs may hold, now: the budget may change while they are made."""
        asked = self._limit_bytes
        limit = self.compressor.arena.limit_bytes if asked is None else asked
        return limit * SHARE_OF_BUDGET

    # Sizes and distortions ---------------------------------------------------------------------

    def _build(self, start: int, size: Batch) -> Graph:
        with _blaming_the_model():
            inputs = cut(self._inputs, start, size)
            return Graph(self.compressor, self._forward, inputs, self._limit)

    def _size(self, examples: int, tokens: int) -> Batch:
        """So many, where the batch may be cut to so many."""
        whole = self._whole
        return Batch(
            min(examples, whole.examples) if self._cuts_examples else whole.examples,
            min(tokens, whole.tokens) if self._cuts_tokens else whole.tokens,
        )

    def _pilot(self) -> Graph:
        """A very small graph: who reads what, and how sizes follow the batch."""
        tokens = max(SMALLEST_PROBE_TOKENS, self._whole.tokens * PILOT_SHARE // 16)
        while True:
            size = self._size(PILOT_EXAMPLES, tokens)
            try:
                return self._build(0, size)
            except ProbeTooLargeError:
                tokens = max(SMALLEST_PROBE_TOKENS, tokens // 2)
                if self._size(PILOT_EXAMPLES, tokens) == size:
                    raise CalibrationError(
                        f"even {size.examples} examples of {size.tokens} tokens, held exactly, "
                        "exceed the budget"
                    ) from None

    def _survey(self, pilot: Graph) -> None:
        with _blaming_the_model():
            inputs = cut(self._inputs, 0, self._whole)
            survey = Survey(self.compressor, self._forward, inputs, self._gauge)
        self.plain_bytes = survey.nbytes + survey.copied_bytes
        for site, found in survey.findings.items():
            roles = (DIM_CONSTANT,) * len(found.shape)
            if site in pilot.items:
                small = pilot.items[site][0].shape
                roles = dimension_roles(small, found.shape, (pilot.batch, self._whole))
            site.probed = Probed(
                self._whole,
                found.shape,
                roles,
                found.numel,
                found.columns,
                found.uses,
                found.mean_square,
                found.mean_magnitude,
            )
            site.two_valued, site.keep = found.two_valued, found.keep
            site.narrow = found.narrow
            site.distortions = found.distortions
            if found.distortions:
                self._nbytes[site] = found.numel * found.uses * site.dtype.itemsize
                self._codecs[site] = min(
                    found.distortions, key=lambda codec: found.distortions[codec][self._bits]
                )

    # Importances -------------------------------------------------------------------------------

    def _within_budget(self, bytes_per_token: float, work: Callable[[Batch], Result]) -> Result:
        """Do what takes a graph of some examples, of as many as fit the budget."""
        whole = self._whole
        # Attention grows with the square of the tokens, so a linear guess is on the low side.
        per_example = max(1.0, 1.2 * bytes_per_token * whole.tokens)
        fitting = self._limit() / per_example
        examples = self.compressor.config.calibration_batch
        # One example alone has no gradient where a loss compares it with others of its batch.
        size = self._size(min(examples, max(2, int(min(fitting, examples)))), whole.tokens)
        if fitting < 1:
            size = self._size(1, max(SMALLEST_PROBE_TOKENS, int(whole.tokens * fitting)))
        while True:
            try:
                return work(size)
            except ProbeTooLargeError:
                smaller = self._size(size.examples // 2, size.tokens)
                if size.examples == 1:
                    smaller = self._size(1, max(SMALLEST_PROBE_TOKENS, size.tokens // 2))
                if smaller == size or not smaller.examples:
                    what = "one example" if self._cuts_examples else "the batch"
                    raise CalibrationError(f"{what}, held exactly, exceeds the budget") from None
                size = smaller

    def _measure_at(self, size: Batch) -> None:
        """Probe as many examples as asked for, in graphs of this size."""
        weighted: dict[SaveSite, float] = {}
        at_zero: dict[SaveSite, float] = {}
        weights = 0.0
        if math.isfinite(self.compressor.config.time_budget):
            self._time_plain(size)
        due = self._due_sites()
        fewest_zero = [site for site in due if not site.least_bits]
        at_zero_too = zero_bits.sites_to_measure(fewest_zero, self.compressor.config)
        for start, count in self._parts(size):
            with self._build(start, Batch(count, size.tokens)) as graph:
                graph.find_readers()
                with _blaming_the_model():
                    reference = graph.gradients(self._parameters)
                weight = squared_norm(reference) / graph.scale**2
                if not math.isfinite(weight):
                    raise CalibrationError("the probe's gradients are not finite")
                weights += weight
                self._find_live(graph)
                probe = GraphProbe(
                    graph, self._gauge, self._codecs, self._bits, self._errors, reference
                )
                for site in due:
                    graph.check()
                    if site in graph.items:
                        weighted[site] = weighted.get(site, 0.0) + weight * self._value(site, probe)
                        if site in at_zero_too:
                            error = probe.error_at_zero(site)
                            at_zero[site] = at_zero.get(site, 0.0) + weight * error
                        graph.restore(site)
        if not weights:
            raise CalibrationError(
                f"{size.examples} of its {self._whole.examples} examples, which is what fits, have "
                "no gradient"
            )
        self._learn({site: total / weights for site, total in weighted.items()})
        errors = {site: total / weights for site, total in at_zero.items()}
        zero_bits.learn(errors, self._large_sites())

    def _time_plain(self, size: Batch) -> None:
        """Measure plain training's time, on a graph of this size."""
        args, kwargs = cut(self._inputs, 0, size)
        device = self.compressor.device
        with _blaming_the_model(), own_graph():
            began = now(device)
            loss = scalar_loss(self._forward(*args, **kwargs), self.compressor.config.seed)
            torch.autograd.grad(loss, self._parameters, allow_unused=True)
            self.token_seconds = (now(device) - began) / (size.examples * size.tokens)

    def _find_live(self, graph: Graph) -> None:
        """Of which tokens rows are stored. One site is watched in every step."""
        if not self.compressor.config.skip_padding:
            return
        for site in graph.items:
            site.watched = Live.ALL
            if site in self._nbytes and not site.least_bits:
                find_live(graph, site, self._parameters)
        sites = [site for site in graph.items if site.live is not Live.ALL]
        if any(graph.items[site][0].picked is not None for site in sites):
            watched = find_watch(graph)
            if watched is None:  # nobody would notice if it did not hold for a batch
                for site in sites:
                    site.alive.add(site.live)
                    site.live = Live.ALL
            else:
                # Zeros in its own rows would hide a gradient from it.
                watched.watched, watched.live = watched.live, Live.ALL
                for item in graph.items[watched]:
                    item.picked = None

    def _value(self, site: SaveSite, probe: GraphProbe) -> float:
        """What the metric says of a site."""
        spec = self.compressor.config.importance
        value: Any = resolve_importance(spec)(site, probe)
        message = (
            f"importance={spec!r} gave {value!r} for {site.name}: a metric must return a finite "
            "number that is not negative"
        )
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise ValueError(message) from None
        if not math.isfinite(number) or number < 0:
            raise ValueError(message)
        return number

    def _learn(self, measured: dict[SaveSite, float]) -> None:
        """Give every site its importance: a moving average of what was measured."""
        effects = [value for value in measured.values() if value > 0]
        # No effect at all may be the probe's fault: its part of the batch may not have used it.
        typical = sum(effects) / len(effects) if effects else 0.0
        for site, value in measured.items():
            value = value or typical
            old = site.importance
            site.importance = value if old is None else (old + value) / 2
        large = {*measured, *self._large_sites()}
        dearest = max((s.importance or 0.0 for s in large), default=0.0)
        for site in self._codecs:
            if site not in large or site.importance is None:
                site.importance = dearest

    def _due_sites(self) -> list[SaveSite]:
        """The large sites that are to be measured this time."""
        return [s for s in self._large_sites() if self._anew or s.importance is None]

    def _large_sites(self) -> list[SaveSite]:
        """The sites worth a backward pass each.

        The many small ones (statistics of normalisations, LoRA's inner activations) are taken to
        be as dear as the dearest: they then get many bits, which costs next to nothing.
        """
        average = sum(self._nbytes.values()) / max(1, len(self._nbytes))
        return [site for site, size in self._nbytes.items() if size >= SMALL_SHARE * average]

    def _moves_off_zero(self, graph: Graph) -> tuple[dict[nn.Parameter, Tensor], bool]:
        """Steps for parameters that are all zero; whether all have one."""
        zero = all_zero(self._parameters)
        with _blaming_the_model():
            gradients = graph.gradients(zero) if zero else []
        return signed_steps(zero, gradients)

    def _moves_at(self, size: Batch) -> dict[nn.Parameter, Tensor]:
        """The same from graphs of this size, as many as it takes."""
        moves: dict[nn.Parameter, Tensor] = {}
        for start, count in self._parts(size):
            with self._build(start, Batch(count, size.tokens)) as graph:
                found, complete = self._moves_off_zero(graph)
            moves = found | moves
            if complete:
                break
        return moves

    def _parts(self, size: Batch) -> Iterator[tuple[int, int]]:
        """The first and the number of the examples of each graph of a probe."""
        asked = min(self.compressor.config.calibration_batch, self._whole.examples)
        examples = max(size.examples, asked)
        for start in range(0, examples, size.examples):
            yield start, min(size.examples, examples - start)


def _learn_derived(graph: Graph) -> None:
    """Tell the sites whose tensors all follow from others, and those that these follow from."""
    for site, items in graph.items.items():
        follow = all(item.expression is not None for item in items)
        site.derived = follow and not site.least_bits and not site.doubted
        for item in items:
            for source in item.sources() if item.witnessed else ():
                source.site.feeds |= site.derived


@contextmanager
def _blaming_the_model() -> Iterator[None]:
    """What goes wrong inside, the model could not do."""
    try:
        yield
    except (CalibrationError, ProbeTooLargeError):
        raise
    except NothingToLearnError as error:
        raise NothingToMeasureError(str(error)) from None
    except Exception as error:
        # Its text alone: its traceback would keep the graph.
        raise _ModelFailedError(f"{type(error).__name__}: {error}") from None
