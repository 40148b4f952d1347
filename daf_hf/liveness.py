"""Which tokens' rows of a site are read in backward, found on a graph."""

from __future__ import annotations

import torch
from torch import nn

from .backward import differences_between, gradients_of
from .probing import Graph, WrittenInPythonError
from .rows import spread, take
from .sites import Live, SaveSite

WATCHES_TRIED = 4
"""Sites whose gradients are looked at, for one that can be watched."""


def find_live(graph: Graph, site: SaveSite, parameters: list[nn.Parameter]) -> None:
    """Learn of which tokens the site's rows are read; after ``graph.gradients``.

    Of a kind alone, if nothing changes when all other tokens' rows are zero, and something
    does when its own are: otherwise nothing at all may have been read.
    """
    for live in (Live.UNPADDED, Live.FIRST) if graph.takes_first else (Live.UNPADDED,):
        if live in site.alive:
            continue
        others = _reads(graph, site, live, True, parameters)
        if others:
            site.alive.add(live)
            site.live = Live.ALL if site.live is live else site.live
        elif others is False and _reads(graph, site, live, False, parameters):
            site.live = live
    for item in graph.items[site]:
        item.picked = graph.picked(item, site.live)


def find_watch(graph: Graph) -> SaveSite | None:
    """The last site whose own gradient is zero in all rows but those that are stored.

    It must be so whatever is restored above: a quantized softmax gives masked keys a weight,
    and with it a gradient, which means nothing.
    """
    latest = [
        site
        for site, items in reversed(graph.items.items())
        if items[0].edge is not None and items[0].picked is not None
    ][:WATCHES_TRIED]
    if not latest or graph.runs_again:
        return None
    everything = [item for items in graph.items.values() for item in items]
    for item in everything:
        if item.flat.dtype.is_floating_point and item.flat.numel():
            item.restored = torch.full_like(item.flat, float(item.flat.float().mean()))
    gradients = gradients_of([graph.loss], [graph.items[s][0].edge for s in latest], None)
    for item in everything:
        item.restored = None
    for site, gradient in zip(latest, gradients, strict=True):
        picked = graph.items[site][0].picked
        if gradient is not None and picked is not None and bool(gradient.any()):
            rows = gradient.reshape(len(picked), -1)
            if not bool(rows[(~picked).to(rows.device)].any()):
                return site
    return None


def _reads(
    graph: Graph, site: SaveSite, live: Live, others: bool, parameters: list[nn.Parameter]
) -> bool | None:
    """Whether anything is read of the rows of these tokens, or of all others.

    None where there are none, or where that cannot be told.
    """
    items = graph.derived_from(graph.items[site])
    zeroed = []
    for item in graph.items[site]:
        picked = graph.picked(item, live)
        if picked is None or not bool(picked.any()):
            return None
        kept = picked if others else ~picked
        zeroed.append(spread(take(item.flat, kept), kept, torch.empty_like(item.flat)))
    found = []
    try:
        for values in (zeroed, [item.flat for item in graph.items[site]]):
            for item, value in zip(graph.items[site], values, strict=True):
                item.restored = value
            graph.evaluate(items)  # in both, as that may round
            found.append(graph.passed_on(items))
    except WrittenInPythonError:
        return None
    finally:
        graph.restore(site)
    differences = differences_between(*found)
    if not differences or not others:
        return bool(differences)
    # A row of values at a key that is masked reaches the gradient of its weight, but no
    # further: the weight is zero.
    return any(d is not None and bool(d.any()) for d in graph.below(differences, parameters))
