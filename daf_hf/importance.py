"""Importance metrics: how much the gradient suffers per unit of distortion at a save site.

A metric is a callable ``metric(site, probe) -> float``. The cost that the allocator minimises is
``importance * distortion``, summed over the sites, where a codec's distortion at a width is its
squared error relative to the tensor's energy (for GELU's input: in terms of GELU's derivative).
Published sensitivities are factors of an error model that falls with the width, such as
``1 / (2^b - 1)^2``; measured distortion takes that model's place, unless the allocator has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from .kernels.format import GROUP
from .registry import Registry
from .rounding import ranges
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

    def elements(self, site: SaveSite) -> list[Tensor]:
        """What the site saved in the probe: each tensor ``[rows, columns]``, not to be changed."""
        ...

    def output_gradient_norm(self, site: SaveSite) -> float:
        """Norm of the gradient that flows into the operations that read the site's tensors."""
        ...

    def rounded_gradient(self, site: SaveSite, bits: int, seed: int) -> list[Tensor | None]:
        """Change of the trained parameters' gradients when this site alone is rounded at random.

        Codes of ``bits`` bits (at least 1) between the minimum and the maximum of each 256
        elements, rounded without bias; equal seeds round alike. One tensor a parameter, in its
        shape; None for a parameter without a gradient.
        """
        ...


Metric = Callable[[SaveSite, Probe], float]

METRICS: Registry[Metric] = Registry(
    "importance", "daf_hf.importance", expected="a callable (site, probe) -> float"
)

GACT_BITS = 1
"""The width at which GACT's code perturbs a tensor; its error model is 1 there."""


def register_importance(name: str) -> Callable[[Metric], Metric]:
    """Register a metric under a name for ``importance="name"``.

    Example:
        >>> @register_importance("wide")
        ... def wide(site, probe):
        ...     return float(site.shape[-1])

    Raises:
        ValueError: when the name is taken by another metric.
    """
    return METRICS.register(name)


def resolve_importance(spec: str | Metric) -> Metric:
    """The metric that a name, a path or a callable stands for; see :class:`Registry`.

    Raises:
        ValueError: naming the option, the value and what is allowed.
    """
    return METRICS.resolve(spec)


@register_importance("gradient")
def gradient(site: SaveSite, probe: Probe) -> float:
    """Measured: quantize this site alone, compare the gradients of all trained parameters.

    ``|g(site quantized) - g|^2 / |g|^2 / distortion``, on a probe batch with dropout fixed; see
    :meth:`Probe.gradient_error`. Times distortion, that is the gradient's own relative error.
    """
    distortion = probe.distortion(site)
    return probe.gradient_error(site) / distortion if distortion > 0 else 0.0


@register_importance("error")
def error(site: SaveSite, probe: Probe) -> float:
    """The tensor's energy ``sum x^2``: times relative distortion, the squared error itself."""
    return site.probed.mean_square * site.probed.numel if site.probed else 0.0


@register_importance("magnitude")
def magnitude(site: SaveSite, probe: Probe) -> float:
    """Mean absolute value ``mean |x|``, which weighs relative distortion by the tensor's scale."""
    return site.probed.mean_magnitude if site.probed else 0.0


@register_importance("variance")
def variance(site: SaveSite, probe: Probe) -> float:
    """Variance times number of elements, ``n Var x``: the energy about the mean.

    What classical bit allocation weighs by: at high rate, a source of variance ``s^2`` has the
    distortion ``h s^2 4^-b`` for each of its ``n`` elements (Huang and Schultheiss, *Block
    quantization of correlated Gaussian random variables*, IEEE Trans. Communications 11(3), 1963).
    Relative distortion takes the place of ``h 4^-b``. Unlike ``error`` it ignores the mean, which
    statistics store.
    """
    tensors = probe.elements(site)
    return sum(float(t.float().var(correction=0)) * t.numel() for t in tensors if t.numel())


@register_importance("actnn")
def actnn(site: SaveSite, probe: Probe) -> float:
    """ActNN's bound on the variance of a weight's gradient, at one bit.

    ``G/6 sum R^2 |d|^2 / rows`` with the ranges ``R`` of groups of ``G = 256`` elements and the
    gradient ``d`` of the reading operation's output (Chen et al., *ActNN: Reducing Training Memory
    Footprint via 2-Bit Activation Compressed Training*, ICML 2021, arXiv 2104.14129, section 4).
    There, the variance at ``b`` bits is that over ``(2^b - 1)^2``: relative distortion takes that
    factor's place, and ``allocator="actnn"`` has the factor itself. ``d`` is averaged over rows, as
    ActNN's code does by default, so that row by row products become one. The formula is a linear
    layer's: for other operations it is a guess.
    """
    squares = rows = 0.0
    for tensor in probe.elements(site):
        squares += float(ranges(tensor).square().sum())
        rows += len(tensor)
    if not rows:
        return 0.0
    return GROUP / 6 * squares * probe.output_gradient_norm(site) ** 2 / rows


@register_importance("gact")
def gact(site: SaveSite, probe: Probe) -> float:
    """GACT's sensitivity: variance of the gradient under random rounding of this tensor alone.

    ``c = 1/2 E |g(r) - g(r')|^2`` over independent roundings ``r, r'`` to one bit, all parameters
    together (Liu et al., *GACT: Activation Compressed Training for Generic Network Architectures*,
    ICML 2022, arXiv 2206.11357; ``autoprec.py`` of its code). There, the variance at ``b`` bits is
    ``c`` times a factor that falls as ``4^-b``: relative distortion takes that factor's place, and
    ``allocator="gact"`` has the factor itself. One pair stands for the expectation, as in its code.
    """
    one, other = (probe.rounded_gradient(site, GACT_BITS, seed) for seed in (0, 1))
    pairs = zip(one, other, strict=True)
    differences = [a - b for a, b in pairs if a is not None and b is not None]
    return sum(float(d.float().square().sum()) for d in differences) / 2
