"""What each rank has measured, made one: afterwards all ranks have the same sites and figures.

Importances, distortions and errors at 0 bits are averaged over the ranks that have them. Of what
follows from a batch's shape the lowest rank's is taken, and of facts about a site what holds on
all ranks. A site that a rank has not met yet (an attention mask, where its batch had no padding)
is entered there too, and recognised when it is met.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from .calibration import Calibration, CalibrationError, NothingToMeasureError
from .candidates import reads_gelu_slope
from .codecs import Codec
from .distributed import Ranks, needs_others
from .host_memory import short_lived_blocks
from .places import Place, place_of
from .sites import Live, SaveSite, SiteTracker


@dataclass
class Outcome:
    """What came of a calibration.

    Attributes:
        failure: why nothing was measured; empty where something was.
        trains: False where this forward pass trains nothing.
        seconds: that it took.
        least_bytes: the least budget under which it is possible.
        token_seconds: of plain training, each token's share; None where it was not measured.
    """

    failure: str = ""
    trains: bool = True
    seconds: float = 0.0
    least_bytes: float = 0.0
    token_seconds: float | None = None


def measure(calibration: Calibration) -> Outcome:
    """Run a calibration, unless it would have to wait for other ranks in each forward pass."""
    compressor, outcome = calibration.compressor, Outcome()
    compressor.release_idle()  # what is kept exactly for the probe needs the room
    began = perf_counter()
    try:
        reason = needs_others(compressor.model)
        if reason:
            raise CalibrationError(reason)
        with short_lived_blocks():
            calibration.run()
    except NothingToMeasureError:
        outcome.trains = False
    except CalibrationError as error:
        # Its text alone: whoever keeps the record would keep the graph by the traceback.
        outcome.failure = str(error)
    finally:
        compressor.unplanned.clear()
    outcome.least_bytes, outcome.token_seconds = calibration.least_bytes, calibration.token_seconds
    outcome.seconds = perf_counter() - began
    return outcome


@dataclass(frozen=True)
class _Figures:
    """What one rank knows of a site.

    Attributes:
        site: its attributes by name, without codecs.
        distortions: by the codecs' texts. The codecs themselves, with codebooks of some KB, stay
            where they are until it is known whose are taken.
    """

    site: dict[str, Any]
    distortions: dict[str, tuple[float, ...]]


_Found = dict[Place, dict[int, _Figures]]

_SENT = (
    *("module", "compressible", "shape", "dtype", "consumers", "probed", "importance"),
    *("error_at_zero", "two_valued", "keep", "derived", "feeds", "doubted", "live", "alive"),
    *("watched", "known"),
)


def pool(ranks: Ranks, tracker: SiteTracker, measure: Callable[[], Outcome]) -> Outcome:
    """Measure on every rank, and make one of what all know of their sites then.

    To be called by all ranks.

    Args:
        ranks: all of them.
        tracker: its sites are afterwards those of all ranks, in the same order, equally named.
        measure: this rank's part; it writes what it finds into the sites.

    Returns:
        The outcome for all ranks: something was measured where it was on one.

    Raises:
        RuntimeError: when ``measure`` failed on another rank.
    """
    if ranks.alone:
        return measure()
    everyone = ranks.gather(lambda: (measure(), _figures_of(tracker)))
    found: _Found = {}
    for rank, (_, figures) in enumerate(everyone):
        for place, each in figures.items():
            found.setdefault(place, {})[rank] = each
    distortions = {place: _distortions(by_rank) for place, by_rank in found.items()}
    codecs = _codecs(ranks, tracker, found, distortions)
    _enter(tracker, found, distortions, codecs)
    return _common([outcome for outcome, _ in everyone])


def _figures_of(tracker: SiteTracker) -> dict[Place, _Figures]:
    return {
        place_of(key): _Figures(
            {name: getattr(site, name) for name in _SENT},
            {str(codec): errors for codec, errors in site.distortions.items()},
        )
        for key, site in tracker.sites.items()
    }


def _distortions(by_rank: dict[int, _Figures]) -> dict[str, tuple[float, ...]]:
    """Mean distortions of the codecs that most ranks have measured."""
    counts: dict[str, int] = {}
    for figures in by_rank.values():
        for text in figures.distortions:
            counts[text] = counts.get(text, 0) + 1
    most = max(counts.values(), default=0)
    curves = {
        text: [f.distortions[text] for f in by_rank.values() if text in f.distortions]
        for text, count in counts.items()
        if count == most
    }
    return {
        text: tuple(sum(each) / most for each in zip(*measured, strict=True))
        for text, measured in curves.items()
    }


def _codecs(
    ranks: Ranks,
    tracker: SiteTracker,
    found: _Found,
    distortions: dict[Place, dict[str, tuple[float, ...]]],
) -> dict[tuple[Place, str], Codec]:
    """The codecs by site and text, each from the lowest rank that has measured it."""
    owned: dict[int, list[tuple[Place, str]]] = {}
    for place, curves in distortions.items():
        for text in curves:
            owner = min(r for r, figures in found[place].items() if text in figures.distortions)
            owned.setdefault(owner, []).append((place, text))
    own = {
        (place_of(key), str(codec)): (codec.granularity, codec.codebook, codec.fitted)
        for key, site in tracker.sites.items()
        for codec in site.distortions
    }
    codecs = {}
    for owner, wanted in sorted(owned.items()):
        sent = [own[each] for each in wanted] if owner == ranks.rank else None
        parts = ranks.broadcast(sent, owner)
        codecs.update({each: Codec(*part) for each, part in zip(wanted, parts, strict=True)})
    return codecs


def _enter(
    tracker: SiteTracker,
    found: _Found,
    distortions: dict[Place, dict[str, tuple[float, ...]]],
    codecs: dict[tuple[Place, str], Codec],
) -> None:
    """Give the tracker the sites of all ranks."""
    own = {place_of(key): (key, site) for key, site in tracker.sites.items()}
    sites: dict[tuple[Any, ...], SaveSite] = {}
    ordinals: dict[str, int] = {}
    for place, by_rank in found.items():
        merged = _merged([figures.site for _, figures in sorted(by_rank.items())])
        module = merged["module"]
        key, site = own.get(place) or (place, SaveSite("", module))
        for name, value in merged.items():
            setattr(site, name, value)
        number = ordinals[module] = ordinals.get(module, -1) + 1
        site.name = f"{module or 'model'}/{number}"
        site.distortions = {codecs[place, text]: e for text, e in distortions[place].items()}
        if not reads_gelu_slope(site):
            site.distortions = {c: e for c, e in site.distortions.items() if not c.private}
        sites[key] = site
    tracker.sites = sites
    tracker.ordinals = {module: number + 1 for module, number in ordinals.items()}


def _merged(sites: list[dict[str, Any]]) -> dict[str, Any]:
    """One site's attributes from those of the ranks that have it, the lowest first."""
    measured = [site for site in sites if site["probed"] is not None] or sites
    merged = dict(measured[0])
    merged["consumers"] = set().union(*(site["consumers"] for site in sites))
    merged["alive"] = set().union(*(site["alive"] for site in sites))
    for name in ("importance", "error_at_zero"):
        merged[name] = _mean(site[name] for site in sites)
    for name in ("feeds", "doubted", "known"):
        merged[name] = any(site[name] for site in sites)
    for name in ("two_valued", "derived"):
        merged[name] = all(site[name] for site in measured)
    merged["derived"] &= not merged["doubted"]
    for name, otherwise in (("keep", None), ("live", Live.ALL)):
        if any(site[name] != merged[name] for site in measured):
            merged[name] = otherwise
    watched = [site["watched"] for site in sites if site["watched"] is not Live.ALL]
    merged["watched"] = watched[0] if watched else Live.ALL
    if merged["watched"] is not Live.ALL:
        merged["live"] = Live.ALL
    return merged


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _common(outcomes: list[Outcome]) -> Outcome:
    measured = [each for each in outcomes if each.trains and not each.failure]
    failures = [each.failure for each in outcomes if each.failure]
    return Outcome(
        failures[0] if failures and not measured else "",
        bool(measured or failures),
        max(each.seconds for each in outcomes),
        max((each.least_bytes for each in measured), default=0.0),
        _mean(each.token_seconds for each in measured),
    )
