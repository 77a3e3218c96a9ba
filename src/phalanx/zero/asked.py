"""What a ZeroRedundancyOptimizer was asked for beside its class, parameters and options: it is divided by that again when
the ranks change. Pure: no process group.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..checks import check_flags
from ..errors import ConfigError
from .partition.element import Placement
from .partition.kinds import PartitionChoice


@dataclass(frozen=True)
class Asked:
    """The constructor's arguments. `step_in_backward` is None where nobody said."""

    stage: int
    partition: str
    as_views: bool
    overlaps: bool
    step_in_backward: bool | None
    shares: bool

    @classmethod
    def of(
        cls, stage: int, partition: str, views: bool, overlaps: bool, step_in_backward: bool | None, shares: bool
    ) -> Asked:
        """As the constructor is given them. Raises ArgumentTypeError for what is neither yes nor no."""
        check_flags(parameters_as_bucket_view=views, overlap_with_ddp=overlaps, shared_parameters=shares)
        return cls(stage, partition, bool(views), bool(overlaps), step_in_backward, bool(shares))

    def __post_init__(self) -> None:
        check_flags(step_in_backward=self.step_in_backward)
        if isinstance(self.stage, bool) or self.stage not in (1, 2):
            raise ConfigError(f"stage must be 1 (state divided) or 2 (gradients too), got {self.stage!r}.")
        if self.step_in_backward is not None and not self.overlaps:
            raise ConfigError("step_in_backward has a meaning only with overlap_with_ddp=True. Leave it out.")

    @property
    def steps_in_backward(self) -> bool:
        """Whether backward itself makes the steps."""
        return self.overlaps and self.step_in_backward is not False

    def placement(self, choice: PartitionChoice, world: int) -> Placement:
        """Where parameters live before there is a wrapper to divide them by."""
        if self.shares and world > 1:
            if choice.partition != "element":
                raise ConfigError(
                    f"shared_parameters=True needs the element partition, but this is the parameter partition "
                    f"({choice.reason}). Use shared_parameters=False."
                )
            return Placement.SHARED
        # Overlapped, the buckets are the wrapper's, of which nothing is known yet.
        return Placement.BUCKET if self.as_views and not self.overlaps else Placement.OWN

    def in_words(self, choice: PartitionChoice) -> dict[str, str]:
        """What must be the same on all ranks, by the names that users give it."""
        return {
            "stage": str(self.stage),
            "partition": choice.partition,
            "overlap_with_ddp": str(self.overlaps),
            "step_in_backward": str(self.steps_in_backward),
            "parameters_as_bucket_view": str(self.as_views),
            "shared_parameters": str(self.shares),
        }
