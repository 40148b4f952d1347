"""What accuracy.py compares: policies by name, their options, and the scores that count."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PLAIN, EXACT = "plain", "exact"

SCORES = {
    "cola": ("matthews_correlation",),
    "sst2": ("accuracy",),
    "mrpc": ("f1", "accuracy"),
    "stsb": ("spearmanr",),
    "qqp": ("f1", "accuracy"),
    "mnli": ("accuracy",),
    "qnli": ("accuracy",),
    "rte": ("accuracy",),
    "wnli": ("accuracy",),
}
"""For every task its metrics, as run_glue.py names them; the first one counts."""


@dataclass(frozen=True)
class Policy:
    """One way to hold saved activations.

    Attributes:
        ratio: plain training's bytes over the budget, where a setting names none. None: there is
            no budget, and no ratio can be asked for.
        options: of `daf_hf.DAFConfig`, besides the budget.
    """

    ratio: float | None
    options: Mapping[str, Any] = field(default_factory=dict)


POLICIES = {
    PLAIN: Policy(None),
    # Everything kept as it is: gradients are plain training's, and plain bytes are counted.
    EXACT: Policy(None),
    # Every site at one width; the ratio is that of fp32 to the width.
    "fixed8": Policy(4, {"allocator": "fixed8"}),
    "uniform4": Policy(8, {"allocator": "uniform", "bits": [4]}),
    "uniform2": Policy(16, {"allocator": "uniform", "bits": [2]}),
    # As these papers share out bits and quantize; their averages are 2 and 4 bits.
    "actnn": Policy(16, {"importance": "actnn", "allocator": "actnn", "codec": "group+uniform"}),
    "gact": Policy(8, {"importance": "gact", "allocator": "gact", "codec": "group+uniform"}),
    "daf": Policy(20),
}


@dataclass(frozen=True)
class Setting:
    """A policy, and the ratio of plain training's bytes to the budget.

    Attributes:
        policy: a name of `POLICIES`.
        ratio: None without a budget.
    """

    policy: str
    ratio: float | None

    @property
    def name(self) -> str:
        """Such as ``daf@20``, or ``plain``; also that of its runs' folders."""
        return self.policy if self.ratio is None else f"{self.policy}@{self.ratio:g}"

    @classmethod
    def parse(cls, text: str) -> Setting:
        """``POLICY`` or ``POLICY@RATIO``.

        Raises:
            ValueError: saying what would work.
        """
        policy, at, number = text.partition("@")
        if policy not in POLICIES:
            raise ValueError(f"setting {text!r}: use one of {', '.join(POLICIES)}, or NAME@RATIO")
        default = POLICIES[policy].ratio
        if not at:
            return cls(policy, default)
        if default is None:
            raise ValueError(f"setting {text!r}: {policy} has no budget; use {policy!r}")
        if not re.fullmatch(r"\d+(\.\d+)?", number) or float(number) <= 1:
            raise ValueError(f"setting {text!r}: use a ratio above 1, such as {policy}@20")
        return cls(policy, float(number))

    @property
    def order(self) -> tuple[int, float]:
        """By policy, then by ratio."""
        return list(POLICIES).index(self.policy), self.ratio or 0

    def daf_options(self, plain_bytes: float | None) -> dict[str, Any] | None:
        """What goes into ``--daf_config``; None for plain training.

        Args:
            plain_bytes: what plain training holds for backward in its worst step; not needed
                where there is no budget.
        """
        if self.policy == PLAIN:
            return None
        if self.ratio is None:
            return {"budget_mb": "inf", **POLICIES[self.policy].options}
        assert plain_bytes is not None
        budget = round(plain_bytes / 1e6 / self.ratio, 3)
        # The same system for all: what they differ in is the policy.
        return {"budget_mb": budget, "skip_padding": True, **POLICIES[self.policy].options}
