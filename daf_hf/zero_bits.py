"""Errors of gradients with a site at 0 bits: at which sites they are measured, and what of others.

That error is coherent, unlike rounding's: what was measured at a few bits does not tell. How far it
is from what importance and distortion would have it differs by kind of site, and little from layer
to layer. So a few sites of each kind are measured, and stand for the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from .config import DAFConfig
from .gradient_error import kind_of
from .sites import SaveSite

ZERO_SITES = 3
"""Of each kind of site (the same in every layer), those whose error at 0 bits is measured."""


def sites_to_measure(due: Iterable[SaveSite], config: DAFConfig) -> set[SaveSite]:
    """Of the sites that are due, those whose error is measured: of each kind a few, evenly spaced.

    None where no site may be given 0 bits, or where costs are not in terms of gradients.
    """
    kinds: dict[str, list[SaveSite]] = {}
    if config.importance == "gradient" and 0 in config.bits:
        for site in due:
            kinds.setdefault(kind_of(site.name), []).append(site)
    return {
        sites[(len(sites) - 1) * place // max(1, min(ZERO_SITES, len(sites)) - 1)]
        for sites in kinds.values()
        for place in range(min(ZERO_SITES, len(sites)))
    }


def learn(measured: dict[SaveSite, float], sites: Iterable[SaveSite]) -> None:
    """Give sites their errors at 0 bits: measured, as a moving average, else by their kind's.

    For those not measured, importance times distortion is scaled by the geometric mean of what it
    was off by at those of their kind.

    Args:
        measured: squared relative errors of the gradient.
        sites: all that are to have an error.
    """
    factors: dict[str, list[float]] = {}
    for site, error in measured.items():
        old = site.error_at_zero
        site.error_at_zero = error if old is None else (old + error) / 2
        predicted = _predicted(site)
        if predicted > 0 and site.error_at_zero > 0:
            factor = math.log(site.error_at_zero / predicted)
            factors.setdefault(kind_of(site.name), []).append(factor)
    for site in sites:
        known = factors.get(kind_of(site.name))
        if site not in measured and known:
            factor = math.exp(sum(known) / len(known))
            site.error_at_zero = factor * _predicted(site)


def _predicted(site: SaveSite) -> float:
    """What a site's importance says of its error at 0 bits."""
    return (site.importance or 0.0) * min(errors[0] for errors in site.distortions.values())
