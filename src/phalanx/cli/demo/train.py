"""What each worker of the demo does: ordinary training code around phalanx's classes.

Tells the display what happens by lines of JSON on standard output, each after `MARK`.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

import phalanx
from phalanx.cli.demo.gpt import GPT, GPTShape, next_token_loss
from phalanx.cli.demo.settings import Settings
from phalanx.cli.demo.text import Text, batch, pieces_in_order
from phalanx.launch.worker import Worker, init
from phalanx.observe import trace
from phalanx.observe.stats import recent_mean

MARK = "@demo "
PROMPT = 'The "for" statement'
_CALIBRATION_STEPS = 12
_TELL_EVERY = 5
_EVALUATED_PIECES = 128
_EVALUATIONS = 8


class Training:
    """The model, its data and its optimizer on one rank."""

    def __init__(self, worker: Worker, settings: Settings) -> None:
        self.worker, self.settings = worker, settings
        self.text = Text()
        torch.manual_seed(0)
        shape = GPTShape(len(self.text.characters), settings.context, settings.width, settings.num_layers, 4)
        self.gpt = GPT(shape).to(worker.device)
        self.model = phalanx.DistributedDataParallel(
            self.gpt, gradient_as_bucket_view=True, bucket_cap_mb=settings.bucket_cap_mb
        )
        self.optimizer = phalanx.ZeroRedundancyOptimizer(
            self.model.parameters(),
            torch.optim.AdamW,
            overlap_with_ddp=True,
            lr=settings.learning_rate,
            betas=(0.9, 0.99),
            weight_decay=0.01,
        )
        # Each rank reads other places of the same text.
        self.generator = torch.Generator().manual_seed(1000 + worker.rank)

    def step(self) -> float:
        """One optimizer step; the mean loss of this rank's batch."""
        inputs, targets = batch(self.text.training, self.settings.batch_size, self.settings.context, self.generator)
        loss = next_token_loss(self.model(inputs.to(self.worker.device)), targets.to(self.worker.device))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """The mean loss on text never trained on: each rank takes its share of the pieces."""
        inputs, targets = pieces_in_order(self.text.held_out, self.settings.context)
        chosen = torch.linspace(0, len(inputs) - 1, _EVALUATED_PIECES).long()
        mine = chosen[self.worker.rank :: self.worker.world]
        total = torch.zeros(2)
        if len(mine):
            loss = next_token_loss(self.gpt(inputs[mine]), targets[mine])
            total = torch.tensor([loss.item() * len(mine), float(len(mine))])
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    def set_learning_rate(self, step: int, num_steps: int) -> None:
        """A short rise, then a cosine down to a tenth."""
        warm = min(1.0, (step + 1) / 40)
        cosine = 0.55 + 0.45 * math.cos(math.pi * min(1.0, step / max(1, num_steps)))
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * warm * cosine

    def memory(self) -> dict[str, int]:
        """Bytes by kind on this rank, and what the optimizer would hold unsharded."""
        found = self.optimizer.memory()
        mine = found.ranks[self.worker.rank]
        return {
            "state": mine.state,
            "unsharded_state": found.unsharded.state,
            "gradients": mine.gradients,
            "parameters": mine.parameters,
        }

    def replicas_identical(self) -> bool:
        """Whether every rank holds the same parameters to the last bit."""
        digest = hashlib.sha256()
        for parameter in self.gpt.parameters():
            digest.update(parameter.detach().cpu().contiguous().numpy().tobytes())
        mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self.worker.world)]
        dist.all_gather(found, mine)
        return all(torch.equal(mine, other) for other in found)


def tell(**facts: Any) -> None:
    """One line for the display."""
    sys.stdout.write(f"{MARK}{json.dumps(facts)}\n")
    sys.stdout.flush()


def agreed_steps(settings: Settings, elapsed_s: float) -> int:
    """How many steps fit into the time, from what the first ones took. Rank 0 decides for all."""
    fitting = int(settings.seconds / (elapsed_s / _CALIBRATION_STEPS))
    count = torch.tensor([max(_CALIBRATION_STEPS, min(settings.num_steps, fitting))])
    dist.broadcast(count, 0)
    return int(count.item())


def run(worker: Worker, settings: Settings) -> None:
    """Train, evaluate, compare, and tell."""
    training = Training(worker, settings)
    parameters = sum(parameter.numel() for parameter in training.gpt.parameters())
    tell(event="start", rank=worker.rank, world=worker.world, backend=worker.backend, parameters=parameters)
    before = training.held_out_loss()
    trace.scalar("held_out_loss", 0, before)
    first, last, after = _train(training)
    memory = training.memory()
    trace.fact(trace.MEMORY, memory)
    identical = training.replicas_identical()
    tell(
        event="end",
        rank=worker.rank,
        loss=[first, last],
        held_out=[before, after],
        identical=identical,
        memory=memory,
    )
    if worker.is_first:
        prompt = training.text.encode(PROMPT)
        sample = training.gpt.continue_text(prompt, settings.sample_length, temperature=0.55)
        tell(event="sample", text=training.text.decode(sample))
    dist.barrier()


def _train(training: Training) -> tuple[float, float, float]:
    """First and last loss of this rank's batches, and the last held-out loss."""
    settings = training.settings
    num_steps, held_out = settings.num_steps, 0.0
    losses: list[float] = []
    seconds: list[float] = []
    while len(losses) < num_steps:
        training.set_learning_rate(len(losses), num_steps)
        began = time.perf_counter()
        losses.append(training.step())
        seconds.append(time.perf_counter() - began)
        step = len(losses)
        trace.scalar(trace.LOSS, step, losses[-1])
        if step == _CALIBRATION_STEPS:
            num_steps = agreed_steps(settings, sum(seconds))
        if step % max(1, num_steps // _EVALUATIONS) == 0 or step == num_steps:
            held_out = training.held_out_loss()
            trace.scalar("held_out_loss", step, held_out)
        if step % _TELL_EVERY == 0 or step == num_steps:
            _tell_step(training, step, num_steps, losses, seconds)
    return losses[0], recent_mean(losses), held_out


def _tell_step(
    training: Training, step: int, num_steps: int, losses: list[float], seconds: list[float]
) -> None:
    tokens = training.settings.batch_size * training.settings.context
    speed = tokens / recent_mean(seconds)
    trace.scalar(trace.TOKENS_PER_S, step, speed)
    tell(
        event="step",
        rank=training.worker.rank,
        step=step,
        num_steps=num_steps,
        loss=recent_mean(losses),
        tokens_per_s=speed,
        resident=trace.resident_bytes(),
    )


def main(arguments: str) -> None:
    """One worker; `arguments` is `Settings` as JSON."""
    with init() as worker:
        run(worker, Settings(**json.loads(arguments)))


def as_argument(settings: Settings) -> str:
    """What `main` is given."""
    return json.dumps(asdict(settings))


if __name__ == "__main__":
    main(sys.argv[1])
