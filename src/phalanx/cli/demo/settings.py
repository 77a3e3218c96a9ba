"""The demo's numbers, apart from what imports torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """The demo's numbers; sizes are for each rank."""

    num_steps: int = 1400
    seconds: float = 80.0
    width: int = 128
    num_layers: int = 4
    context: int = 64
    batch_size: int = 8
    bucket_cap_mb: float = 0.8
    """Four buckets or so: the first ones travel while backward goes on. By default this small a model gets one."""
    learning_rate: float = 3e-3
    sample_length: int = 320
