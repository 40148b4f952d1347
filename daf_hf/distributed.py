"""The processes that train one model together, and what they tell each other.

Each rank has its own arena. What plans follow from is the same on all of them (see
:mod:`daf_hf.agreement` and :mod:`daf_hf.pooling`). Ranks talk in forward passes that all of them
make at the same time: those inside ``DistributedDataParallel.forward`` of a model in training
mode, and those of a model that FSDP shards. Any other forward pass is a rank's own affair, also
where ``torch.distributed`` is initialised: ranks may well train different models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

Value = TypeVar("Value")

_GROUPS_KEPT = 8


class Ranks:
    """The ranks of one training, as one of them sees them. Every method is to be called by all.

    Messages have a gloo group of their own: they are never taken for one of the model's own
    communications, whatever the device.

    Args:
        group: of :mod:`torch.distributed`; None for a process that trains alone, which agrees
            with itself at no cost.

    Attributes:
        rank, size: this one, counted from 0, and how many there are.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    @property
    def alone(self) -> bool:
        """Whether there is nobody to agree with."""
        return self.size == 1

    def largest(self, values: Sequence[float]) -> list[float]:
        """For each place in the list, the largest of all ranks' numbers (fp64; no NaN)."""
        if self.alone:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, self._group)
        return tensor.tolist()

    def gather(self, work: Callable[[], Value]) -> list[Value]:
        """Do something on every rank, and have what came of it on each: a list by rank.

        Raises:
            RuntimeError: when it failed on another rank, with what that one raised.
            Exception: what it raised on this one, which the others are told.
        """
        try:
            value = work()
        except Exception as error:
            self.fail(error)
            raise
        return [value] if self.alone else self._exchange((None, value))

    def fail(self, error: BaseException | None) -> None:
        """In place of :meth:`gather`: tell the others, who wait there, what went wrong here."""
        if not self.alone and isinstance(error, Exception):
            with suppress(RuntimeError):  # they may be gone already
                self._exchange((f"{type(error).__name__}: {error}", None), raises=False)

    def _exchange(self, message: tuple[str | None, Any], raises: bool = True) -> list[Any]:
        found = self._all(message)
        for rank, (failure, _) in enumerate(found):
            if failure is not None and raises:
                raise RuntimeError(f"daf_hf: training ends, for rank {rank} failed: {failure}")
        return [value for _, value in found]

    def _all(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, self._group)
        return found

    def broadcast(self, value: Any, rank: int) -> Any:
        """What one of the ranks has."""
        if self._group is None or self.alone:
            return value
        held = [value]
        dist.broadcast_object_list(held, dist.get_global_rank(self._group, rank), self._group)
        return held[0]


ALONE = Ranks()


def ranks_of(model: nn.Module) -> Ranks:
    """The ranks that make the present forward pass of a model together."""
    if not (dist.is_available() and dist.is_initialized()):
        return ALONE
    group = _group_of(model)
    if group is None or dist.get_world_size(group) == 1 or not dist.is_gloo_available():
        return ALONE
    return _ranks_in(group)


def needs_others(model: nn.Module) -> str:
    """Why one rank alone cannot run the model, whatever the others do; empty where it can."""
    if not (dist.is_available() and dist.is_initialized()):
        return ""
    if _is_sharded(model):
        return "FSDP keeps its parameters in parts, which a rank cannot put together alone"
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return "SyncBatchNorm has each forward pass wait for those of all ranks"
    return ""


def _is_sharded(model: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # they take a while

    return any(isinstance(m, (FSDPModule, FullyShardedDataParallel)) for m in model.modules())


def trained_module(model: nn.Module) -> nn.Module:
    """The module that ``DistributedDataParallel`` wraps, or the model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _group_of(model: nn.Module) -> dist.ProcessGroup | None:
    ddp = DistributedDataParallel._get_active_ddp_module()
    if ddp is not None and any(module is model for module in ddp.modules()):
        # Some may evaluate alone; inside `join`, those whose data have ended make no more passes.
        together = model.training and not ddp._join_config.enable
        return ddp.process_group if together else None
    return dist.group.WORLD if _is_sharded(model) else None


@lru_cache(maxsize=_GROUPS_KEPT)
def _ranks_in(group: dist.ProcessGroup) -> Ranks:
    """The members of a group, with a group of their own."""
    members = dist.get_process_group_ranks(group)
    own: Any = dist.new_group(members, backend="gloo", use_local_synchronization=True)
    return Ranks(own)
