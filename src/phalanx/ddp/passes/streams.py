"""On which streams the gradients of a pass were made, so that whoever launches comes after all of them.

Autograd accumulates a gradient on the stream that was current when its part of the graph was made, in a thread of its
device. A bucket is launched by whichever gradient comes last in plan order: perhaps in the thread of another device, where
the current stream of the bucket's device is one that nobody has computed on. Memory belongs to the stream on which it was
allocated.

    one stream per device (nearly always)    a bucket is packed and launched there, whichever thread does it
    several                                  one of them waits for the others, and gradients are named to the allocator

When backward has ended autograd itself has joined these streams to the caller's, and nothing is to do here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from ..buckets.bucket import Bucket
from ..buckets.dense import DenseBucket


class GradientStreams:
    """The streams of one wrapper's gradients, by device. Used under the lock of the launch order."""

    def __init__(self) -> None:
        self._seen: dict[torch.device, list[torch.Stream]] = {}

    def forget(self) -> None:
        """A pass has ended, and in the next one every gradient has a hook: what this one used does not matter then."""
        self._seen.clear()

    def note(self, device: torch.device) -> None:
        """A gradient has been accumulated on the current stream of its device."""
        if device.type == "cpu":
            return
        seen = self._seen.setdefault(device, [])
        current = torch.accelerator.current_stream(device)
        if current not in seen:
            seen.append(current)

    @contextmanager
    def launching(self, bucket: Bucket) -> Iterator[None]:
        """Inside, the current stream of the bucket's device comes after all its gradients."""
        device = bucket.device
        seen = self._seen.get(device, [])
        current = torch.accelerator.current_stream(device) if seen else None
        chosen = current if current in seen or not seen else seen[-1]
        others = [stream for stream in seen if stream != chosen]
        if chosen is not None and others:
            for other in others:
                chosen.wait_stream(other)
            for param in bucket.params:
                # Allocated on one of the others, perhaps, and freed as soon as it is packed.
                if param.grad is not None and not param.grad.is_sparse:
                    param.grad.record_stream(chosen)
        with nullcontext() if chosen is None or chosen == current else chosen:
            yield

    def hold(self, bucket: Bucket) -> None:
        """The bucket is given out on the current stream: memory of another one must not be reused before that is over."""
        seen = self._seen.get(bucket.device, [])
        current = torch.accelerator.current_stream(bucket.device) if seen else None
        if current is not None and any(stream != current for stream in seen) and isinstance(bucket, DenseBucket):
            bucket.record_stream(current)
