"""What a kernel on a device needs to find pages: brought there in one copy.

Page ``p`` of a table lies at ``segments[p >> shift] + (p & ((1 << shift) - 1)) * PAGE_BYTES``.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

from .format import PageSpace


@dataclass(frozen=True)
class DevicePages:
    """A page table and the memory it points into, on a device.

    Attributes:
        table: ``int32 [pages]``, the page numbers.
        segments: ``int64``, the address of each segment, 0 where one was given back.
        shift: log2 of the pages in a segment.
        flag: ``int32 [1]``, zero: for a kernel to tell the host what it found.
    """

    table: Tensor
    segments: Tensor
    shift: int
    flag: Tensor


def upload(table: array, count: int, space: PageSpace, device: torch.device) -> DevicePages:
    """The first ``count`` pages of ``table`` and the segments of ``space``, on ``device``.

    The host does not wait for the copy: it is ordered on the device's current stream.
    """
    segments = len(space.pointers)
    host = torch.empty(2 * segments + 1 + count, dtype=torch.int32, pin_memory=device.type != "cpu")
    words = host.numpy()
    words[: 2 * segments] = memoryview(space.pointers).cast("B").cast("i")
    words[2 * segments] = 0
    words[2 * segments + 1 :] = memoryview(table)[:count]
    here = host.to(device, non_blocking=True)
    return DevicePages(
        table=here[2 * segments + 1 :],
        segments=here[: 2 * segments].view(torch.int64),
        shift=space.pages_per_segment.bit_length() - 1,
        flag=here[2 * segments : 2 * segments + 1],
    )
