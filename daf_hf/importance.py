"""Importance metrics: how much the gradient suffers per unit of distortion at a save site.

A metric is a callable ``metric(site, probe) -> float``. The cost that the allocator minimises is
``importance * distortion``, summed over the sites, where a codec's distortion at a width is its
squared error relative to the tensor's energy (for GELU's input: in terms of GELU's derivative).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol, cast

from .sites import SaveSite


class Probe(Protocol):
    """What calibration offers to a metric."""

    def gradient_error(self, site: SaveSite) -> float:
        """Squared relative change of the gradient when this site alone is quantized.

        The gradients of PEFT's adapters and of what it trains in full beside them are taken
        separately, each relative to its own norm, and their changes are added.
        """
        ...

    def distortion(self, site: SaveSite) -> float:
        """The site's distortion in :meth:`gradient_error`'s measurement."""
        ...


Metric = Callable[[SaveSite, Probe], float]

_METRICS: dict[str, Metric] = {}


def register_importance(name: str) -> Callable[[Metric], Metric]:
    """Register a metric under a name for ``importance="name"``.

    Example:
        >>> @register_importance("wide")
        ... def wide(site, probe):
        ...     return float(site.shape[-1])

    Raises:
        ValueError: when the name is taken by another metric.
    """

    def register(metric: Metric) -> Metric:
        if _METRICS.setdefault(name, metric) is not metric:
            raise ValueError(f"importance metric {name!r} is registered already: use another name")
        return metric

    return register


def resolve_importance(spec: str | Metric) -> Metric:
    """The metric that a name, a ``"package.module:object"`` path or a callable stands for.

    Raises:
        ValueError: naming the option, the value and what is allowed.
    """
    if isinstance(spec, str) and spec in _METRICS:
        return _METRICS[spec]
    if not isinstance(spec, str) and callable(spec):
        return cast(Metric, spec)
    help_ = (
        f"use one of {sorted(_METRICS)}, 'package.module:object', or a callable (site, probe) -> "
        "float"
    )
    if not isinstance(spec, str) or ":" not in spec:
        raise ValueError(f"importance={spec!r}: {help_}")
    module, _, name = spec.partition(":")
    try:
        metric: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"importance={spec!r} cannot be loaded ({error}): {help_}") from error
    if not callable(metric):
        raise ValueError(f"importance={spec!r} is not callable: {help_}")
    return cast(Metric, metric)


@register_importance("gradient")
def gradient(site: SaveSite, probe: Probe) -> float:
    """Measured: quantize this site alone, compare the gradients of all trained parameters.

    ``|g(site quantized) - g|^2 / |g|^2 / distortion``, on a probe batch with dropout fixed; see
    :meth:`Probe.gradient_error`.
    """
    distortion = probe.distortion(site)
    return probe.gradient_error(site) / distortion if distortion > 0 else 0.0


@register_importance("error")
def error(site: SaveSite, probe: Probe) -> float:
    """The squared error itself: the tensor's energy times its relative distortion."""
    return site.probed.mean_square * site.probed.numel if site.probed else 0.0


@register_importance("magnitude")
def magnitude(site: SaveSite, probe: Probe) -> float:
    """Mean absolute value of the elements."""
    return site.probed.mean_magnitude if site.probed else 0.0
