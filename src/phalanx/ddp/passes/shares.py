"""Each rank's share in the mean: Σ share·gradient / Σ share.

A rank multiplies its gradients with its weight while it packs them, and the tail adds the weights up, so that the sum can be
divided when it is back. float16, and a hook that may use it, cannot hold a gradient times a number of tokens: there the
ranks add up their weights first, by a small collective before the first bucket of each pass, and multiply with numbers
near one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...comm.collectives import Collectives


@dataclass(frozen=True, slots=True)
class Shares:
    """`mine`: what this rank's gradients are multiplied with. `told`: what its tails say; None is 1 like everyone's."""

    mine: float | torch.Tensor = 1.0
    told: float | None = None

    @property
    def is_nought(self) -> bool:
        """Whether this rank is known to count nothing. On a device nobody asks."""
        return not isinstance(self.mine, torch.Tensor) and self.mine == 0.0

    def on(self, device: torch.device) -> float | torch.Tensor:
        """`mine` where gradients of this device can be multiplied with it: a model may be on several."""
        mine = self.mine
        return mine.to(device, non_blocking=True) if isinstance(mine, torch.Tensor) else mine

    @classmethod
    def of(cls, weight: float | None) -> Shares:
        """Where large numbers fit, a rank needs to know nobody's weight but its own."""
        return cls(1.0 if weight is None else float(weight), weight)


def agree_on_shares(weight: float | None, collectives: Collectives, device: torch.device) -> Shares:
    """The shares where large numbers may not fit. Every rank calls it at the same point."""
    mine = 1.0 if weight is None else float(weight)
    # Filled, not copied: a copy to a device would make the host wait.
    total = torch.full((1,), mine, dtype=torch.float64, device=device)
    collectives.wait(collectives.all_reduce(total), "adding up the weights of the ranks")
    if device.type != "cpu":
        shares = torch.where(total > 0, mine * collectives.world / total, torch.zeros_like(total))
        return Shares(shares[0], None)
    whole = float(total.item())
    return Shares(mine * collectives.world / whole if whole else 0.0, None)
