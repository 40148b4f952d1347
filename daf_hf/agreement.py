"""What a forward pass is planned and measured for: the same on all ranks that make it together."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .distributed import Ranks
from .sites import Batch, Live


@dataclass(frozen=True)
class Terms:
    """What a rank brings to a forward pass, or what all of them go by in it.

    Attributes:
        batch: the inputs' size.
        limit_bytes: the budget.
        due: importances are to be measured.
        recalls: what an earlier training has learnt is to be taken up.
        undecided: the budget is to be chosen.
        wanted_bytes: what the last forward pass would have held with all the room there is; None
            where that is not known.
    """

    batch: Batch
    limit_bytes: float
    due: bool = False
    recalls: bool = False
    undecided: bool = False
    wanted_bytes: int | None = None

    def agreed(self, ranks: Ranks) -> Terms:
        """The terms that all ranks go by, in one message of a few numbers.

        The largest batch under the least budget: every rank gets the plan that the largest batch
        needs. What is due on one rank is due on all. Of what the last pass wanted nothing is
        learnt unless all ranks know it.
        """
        if ranks.alone:
            return self
        batch, wanted = self.batch, self.wanted_bytes
        examples, tokens, padded, unpadded, tight, due, recalls, undecided, unknown, most = map(
            float,
            ranks.largest(
                [
                    batch.examples,
                    batch.tokens,
                    batch.unpadded is not None,
                    batch.kept(Live.UNPADDED),
                    -self.limit_bytes,
                    self.due,
                    self.recalls,
                    self.undecided,
                    wanted is None,
                    -math.inf if wanted is None else wanted,
                ]
            ),
        )
        return Terms(
            Batch(int(examples), int(tokens), int(unpadded) if padded else None),
            -tight,
            bool(due),
            bool(recalls),
            bool(undecided),
            None if unknown else int(most),
        )
