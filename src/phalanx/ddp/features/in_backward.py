"""Optimizers that step during backward, told by the reducer when means are there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from ..buckets.bucket import Bucket
from ..reducer.listener import Listener


class SteppedInBackward(Protocol):
    """An optimizer that steps parameters as soon as their gradients are final."""

    def hand_over(self) -> None:
        """Stop stepping from hooks of its own, which see gradients that are not averaged."""

    def gradients_ready(self, params: Iterable[torch.nn.Parameter]) -> None:
        """These parameters hold their mean."""

    def backward_ended(self) -> None:
        """All of them do."""


class StepInBackward(Listener):
    """Steps a bucket's parameters when they have been given their mean."""

    uses_means = True

    def __init__(self, optimizer: SteppedInBackward) -> None:
        optimizer.hand_over()
        self._optimizer = optimizer

    def bucket_given(self, bucket: Bucket) -> None:
        self._optimizer.gradients_ready(bucket.params)

    def pass_ended(self) -> None:
        self._optimizer.backward_ended()
