"""The exact mean over tokens when ranks hold unequally many.

Averaging each rank's mean loss counts a token of a short batch more than one of a long batch. With
`model.weight(tokens)` the averaged gradient is that of the mean over all tokens of all ranks, at no extra cost.
The script checks it against one process that sees everything.

    phalanx run --nproc 2 examples/weighted_tokens.py
"""

import torch
from torch import nn
from torch.nn import functional

import phalanx

VOCABULARY, WIDTH, LONGEST = 50, 16, 12
PADDING = -100


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY))


def batch_of(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of a rank: rank 0's are short, later ranks' longer; the rest is padding."""
    generator = torch.Generator().manual_seed(100 + rank)
    tokens = torch.randint(VOCABULARY, (6, LONGEST), generator=generator)
    targets = torch.randint(VOCABULARY, (6, LONGEST), generator=generator)
    targets[:, 3 * (rank + 1) :] = PADDING
    return tokens, targets


def loss_of(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=PADDING)


def main() -> None:
    worker = phalanx.init()
    model = phalanx.DistributedDataParallel(build())
    tokens, targets = batch_of(worker.rank)
    count = int((targets != PADDING).sum())
    with model.weight(count):
        loss_of(model, tokens, targets).backward()

    reference = build()
    everything = [batch_of(rank) for rank in range(worker.world)]
    loss_of(reference, *(torch.cat(parts) for parts in zip(*everything, strict=True))).backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    difference = max((mine.grad - theirs.grad).abs().max().item() for mine, theirs in pairs)
    assert difference < 1e-6, difference
    print(f"rank {worker.rank}: {count} tokens; gradient of the global mean to within {difference:.0e}")


if __name__ == "__main__":
    main()
