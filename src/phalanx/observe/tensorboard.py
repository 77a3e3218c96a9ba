"""A run's curves as TensorBoard event files, where TensorBoard is installed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from phalanx.errors import ConfigError
from phalanx.observe.run import Run


def export(run: Run, directory: str | Path) -> int:
    """Write every curve of every rank under `directory`, one folder a rank, and return how many points.

    Points without a step of their own are numbered in order, each curve for itself.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError("TensorBoard is not installed. Install it with: pip install tensorboard") from None
    count = 0
    # Moments are counted from the run's first event, whichever rank had it.
    began_ns = run.began_wall_ns or 0
    for rank in run.ranks:
        unnumbered: Counter[str] = Counter()
        with SummaryWriter(str(Path(directory) / f"rank-{rank.rank:05d}")) as writer:
            for scalar in rank.scalars:
                step = unnumbered[scalar.name] if scalar.step is None else scalar.step
                unnumbered[scalar.name] += 1
                writer.add_scalar(scalar.name, scalar.value, step, walltime=(began_ns + scalar.at) / 1e9)
                count += 1
    return count
