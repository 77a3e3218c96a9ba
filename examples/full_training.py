"""A whole training script: loader, validation, metrics, early stopping, checkpoints, resuming, logging.

    python examples/full_training.py out                        alone
    phalanx run --nproc 2 examples/full_training.py out         two workers; start it again and it goes on

Points in two spirals are told apart. What differs from a script for one process is marked with `# <-`, and explained in
docs/from_one_process.md. Stop it in the middle of an epoch: the next start goes on after the last checkpoint's batch.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx


def spirals(num: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(2, (num,), generator=generator)
    angle = 2 * math.pi * torch.rand(num, generator=generator).sqrt()
    points = torch.stack([angle.cos(), angle.sin()], 1) * (angle * (1 - 2 * label))[:, None] / 2
    return TensorDataset(points + 0.02 * torch.randn(num, 2, generator=generator), label)


class Checkpoint:
    """Everything a run needs to go on, in one file."""

    def __init__(self, path: Path, parts: dict) -> None:
        self.path, self.parts = path, parts

    def save(self, worker: phalanx.Worker, **numbers) -> None:
        with worker.first_only() as mine:  # <- one rank writes; the others wait until the file is there
            if mine:
                states = {name: part.state_dict() for name, part in self.parts.items()}
                torch.save(states | {"numbers": numbers}, self.path.with_suffix(".new"))
                self.path.with_suffix(".new").replace(self.path)  # in one move: a crash leaves the old file or the new

    def load(self) -> dict:
        """The saved numbers, the parts being as they were; empty where nothing was saved. Every rank reads."""
        if not self.path.exists():
            return {}
        saved = torch.load(self.path, weights_only=True)
        for name, part in self.parts.items():
            part.load_state_dict(saved[name])
        return saved["numbers"]


@torch.no_grad()
def evaluate(worker: phalanx.Worker, model: nn.Module, loader) -> tuple[float, float]:
    """Loss and accuracy over the whole validation set, each rank looking at its part."""
    model.eval()
    total = torch.zeros(3, dtype=torch.float64)
    for x, y in loader:
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, y, reduction="sum")
        total += torch.stack([loss, (logits.argmax(1) == y).sum(), torch.tensor(len(y))]).cpu()
    model.train()
    loss, right, count = worker.mean(total).tolist()  # <- a ratio of means is the ratio of the sums
    return loss / count, right / count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--patience", type=int, default=3)
    parser.add_argument("--save-every", type=int, default=5, metavar="STEPS")
    parser.add_argument("--max-steps", type=int, default=0, help="stop after so many, wherever that is")
    arguments = parser.parse_args()

    worker = phalanx.init()  # <- joins the other workers, if there are any
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)).to(worker.device)
    model = phalanx.DistributedDataParallel(model)  # <- gradients are averaged
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    # <- each rank gets a part; batches of 64 over all ranks, whatever their number
    train = worker.loader(DataLoader(spirals(1000, 1), 64, shuffle=True), model, split_batches=True)
    valid = worker.loader(DataLoader(spirals(300, 2), 128))
    arguments.folder.mkdir(parents=True, exist_ok=True)
    parts = {"model": model.module, "optimizer": optimizer, "schedule": schedule, "train": train}
    checkpoint = Checkpoint(arguments.folder / "last.pt", parts)
    best, bad, step = float("inf"), 0, 0
    if numbers := checkpoint.load():
        best, bad, step = (numbers[name] for name in ("best", "bad", "step"))
        worker.print(f"going on at step {step}, epoch {train.epoch}")  # <- said once

    while train.epoch < arguments.epochs and bad < arguments.patience:
        epoch = train.epoch
        for x, y in train:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            step += 1
            if step % arguments.save_every == 0:
                checkpoint.save(worker, best=best, bad=bad, step=step)
            if step == arguments.max_steps:
                return
        train_loss = worker.mean(loss, train.count)  # <- of the whole last batch, not of this rank's part
        valid_loss, accuracy = evaluate(worker, model, valid)
        # The numbers are the same on every rank, so all ranks decide the same.
        best, bad = (valid_loss, 0) if valid_loss < best else (best, bad + 1)
        checkpoint.save(worker, best=best, bad=bad, step=step)
        worker.print(f"epoch {epoch}: loss {train_loss:.4f}, validation {valid_loss:.4f}, accuracy {accuracy:.3f}")
        if worker.is_first:  # <- one log
            with open(arguments.folder / "log.jsonl", "a") as log:
                print(json.dumps({"epoch": epoch, "step": step, "validation": valid_loss}), file=log)


if __name__ == "__main__":
    main()
