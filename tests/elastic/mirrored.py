"""An elastic run in one process: rank 0 of several, whose peers do exactly what it does and say what it says.

No group and no launcher: a loss is a `PeerFailure` that the program raises where it likes, and the next generation has as
many ranks as `worlds` says. What ranks write goes to files as in a run, the peers' shares as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from phalanx.data.loader import Loader
from phalanx.elastic import training as training_module
from phalanx.elastic.image import RankImage
from phalanx.elastic.training import Training
from phalanx.errors import PeerFailure
from phalanx.launch.elastic.heads import VOID, Files, Paths, newest
from phalanx.launch.elastic.member import Formed


def lose() -> None:
    """A peer is gone."""
    raise PeerFailure("a rank is lost", [1])


class Echo:
    """`Exchange` with peers who say the same."""

    def __init__(self, world: int) -> None:
        self.rank, self.world, self.is_first, self.generation = 0, world, True, 1

    def all_objects(self, value: Any) -> list[Any]:
        return [value] * self.world

    def from_first(self, value: Any) -> Any:
        return value

    def number_with(self, flag: bool) -> int:
        return self.world * flag


class Launcher:
    """What `Member` is to a training."""

    def __init__(self, worlds: Iterable[int]) -> None:
        self.number, self.interruption, self.has_trained = 0, None, False
        self.pauses_at: set[int] = set()
        self._worlds, self._generations = iter(worlds), list[list[Files]]()
        self.formed = self._form()

    def _form(self) -> Formed:
        kept = [([one.head() for one in files], files) for files in self._generations]
        heads, before = next(((heads, files) for heads, files in reversed(kept) if newest(heads) != VOID), ([], []))
        world, number = next(self._worlds), len(self._generations) + 1
        files = [Files(f"mirrored-{number}-{rank}") for rank in range(world)]
        self._generations.append(files)
        paths = [tuple(Paths.of(one.paths) for one in some) for some in (files, before)]
        members = tuple(range(world)), tuple(range(len(before)))
        return Formed(number, 0, members[0], "", paths[0], paths[1], members[1], newest(heads) if heads else VOID, True)

    def newest(self) -> int:
        """The newest version that outlives the ranks of the generation under way."""
        return newest([one.head() for one in self._generations[-1]])

    def meet(self, why: str, silent: Any = (), preserve: Any = None) -> Formed:
        self.formed = self._form()
        return self.formed

    def committed(self, version: int) -> bool:
        if version in self.pauses_at:
            self.pauses_at.discard(version)
            return True
        return False

    def leave_on_signal(self) -> None: ...

    def take_notes(self) -> list[Any]:
        return []

    def tell(self, what: str, **facts: Any) -> None: ...

    def close(self) -> None:
        for one in (one for files in self._generations for one in files):
            one.close()


class Run:
    """One training with its parts; `worlds` are the numbers of ranks, generation by generation."""

    def __init__(self, patch: pytest.MonkeyPatch, worlds: Iterable[int] = (2, 2, 2, 2), samples: int = 12) -> None:
        self.member = Launcher(worlds)
        world = self.member.formed.world
        self.exchange = Echo(world)
        self.worker = SimpleNamespace(rank=0, world=world, member=self.member, exchange=self.exchange)
        self.worker.barrier = self.worker.part = lambda: None
        self.worker.rejoin = self._rejoin
        patch.setattr(training_module, "current_worker", lambda: self.worker)
        torch.manual_seed(0)
        self.model: Any = torch.nn.Linear(2, 1)
        self.data = DataLoader(TensorDataset(torch.arange(2.0 * samples).view(samples, 2) / samples), batch_size=2)
        self.training: Any = None

    def _rejoin(self, formed: Formed, interruption: Any) -> None:
        self.worker.world, self.exchange.world, self.exchange.generation = formed.world, formed.world, formed.generation

    def loader(self) -> Loader:
        exchange: Any = self.exchange
        return Loader(self.data, exchange, torch.device("cpu"), uneven="join")

    def prepare(self, optimizer: Any, scheduler: Any = None, loader: Any = None, extra: Any = None) -> Training:
        training = Training(self.model, optimizer, scheduler, loader, extra, None)
        real = training._transaction.write

        def write(image: RankImage, version: int, rank: int, world: int, passing: Any) -> None:
            real(image, version, rank, world, passing)
            for peer in range(1, world):
                mirror = RankImage(self.member.formed.images[peer], peer, world)
                real(mirror, version, peer, world, passing)
                mirror.close()

        training._transaction.write = write  # type: ignore[method-assign]
        self.training = training
        return training

    def step(self, optimizer: Any, x: torch.Tensor) -> None:
        self.model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def close(self) -> None:
        if self.training is not None:
            self.training._leave_group()
        self.member.close()


class Once:
    """Something that happens the first time only."""

    def __init__(self, what: Callable[[], None] = lose) -> None:
        self._what, self.has_happened = what, False

    def __call__(self) -> None:
        if not self.has_happened:
            self.has_happened = True
            self._what()
