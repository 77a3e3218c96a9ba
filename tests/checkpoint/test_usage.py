"""What a Checkpointer promises around saving and restoring: refusals, partial loads, names, failures on every rank."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import phalanx
from phalanx import Checkpointer, DistributedDataParallel
from phalanx.checkpoint import Keep
from phalanx.checkpoint.storage import library
from phalanx.checkpoint.storage.disk import Disk
from phalanx.errors import ArgumentTypeError, CheckpointError, ConfigError, MismatchError, StateError
from tests.checkpoint.runs import Run, differing
from tests.cluster import run_ranks, spawn_ranks

pytestmark = pytest.mark.timeout(60)


def small(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 1) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()


def same(one: nn.Module, other: nn.Module) -> bool:
    return differing(dict(one.state_dict()), dict(other.state_dict())) == []


# -- one process, no group -------------------------------------------------------------------------


def save_without_output(rank: int, world: int, folder: Path) -> int:
    os.close(1)  # as of a daemon; whatever is opened next gets its number
    model = small()
    with Checkpointer(folder, model) as checkpointer:
        checkpointer.save(3)
    with Checkpointer(folder, small(1)) as checkpointer:
        restored = checkpointer.restore()
    assert restored is not None
    return restored.step


def test_a_process_without_standard_output_saves_too(tmp_path: Path) -> None:
    (outcome,) = spawn_ranks(1, save_without_output, tmp_path, backend=None)
    assert outcome.value == 3, outcome


@pytest.mark.parametrize("name", ["Adam", "SGD", "LBFGS", "NAdam", "RMSprop"])
def test_a_plain_model_without_a_group(tmp_path: Path, name: str) -> None:
    make: Any = getattr(torch.optim, name)
    options = {"momentum": 0.9} if name == "SGD" else {}

    def advance(model: nn.Module, optimizer: Any, count: int) -> None:
        for _ in range(count):
            x = torch.randn(6, 4)

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)

    model = small()
    optimizer = make(model.parameters(), lr=0.05, **options)
    with Checkpointer(tmp_path, model, optimizer) as checkpointer:
        advance(model, optimizer, 3)
        checkpointer.save(3)
        advance(model, optimizer, 3)
    again = small(1)
    fresh = make(again.parameters(), lr=0.5, **options)
    with Checkpointer(tmp_path, again, fresh) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None and (restored.step, restored.left_out) == (3, [])
        advance(again, fresh, 3)
    assert same(model, again)


def test_every_kind_of_random_number(tmp_path: Path) -> None:
    own, numbers, plain, old = torch.Generator(), np.random.default_rng(3), random.Random(4), np.random.RandomState(5)
    extra: dict[str, Any] = {"own": own, "numbers": numbers, "plain": plain, "old": old}
    extra |= {"scaler": torch.amp.GradScaler("cpu", init_scale=8.0), "best": {"loss": 0.25, "at": (3, "x")}}

    def draw() -> list[float]:
        a = [random.random(), float(np.random.rand()), float(torch.rand(())), float(torch.rand((), generator=own))]
        return [*a, float(numbers.random()), plain.random(), float(old.normal())]

    with Checkpointer(tmp_path, extra=extra) as checkpointer:
        draw()
        checkpointer.save(1)
        checkpointer.wait()
        expected = draw()
        restored = checkpointer.restore()
        assert restored is not None and restored.values["best"] == {"loss": 0.25, "at": (3, "x")}
        assert draw() == expected


def test_a_bfloat16_model_keeps_states_in_other_precisions(tmp_path: Path) -> None:
    model = small().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for param in model.parameters():
        optimizer.state[param] = {"master": torch.full(param.shape, 1 / 3, dtype=torch.float32)}
    with Checkpointer(tmp_path, model, optimizer) as checkpointer:
        checkpointer.save(0)
        checkpointer.wait()
        optimizer.state.clear()
        # SGD's own states have another name, so its class is not known to have this one.
        with pytest.raises(StateError, match="not a state of SGD"):
            checkpointer.restore()
        plain = type("Own", (torch.optim.SGD,), {})(model.parameters(), lr=0.1)
    with Checkpointer(tmp_path, model, plain) as checkpointer:
        checkpointer.restore()
    state = plain.state[next(iter(model.parameters()))]["master"]
    assert state.dtype == torch.float32 and bool((state == torch.tensor(1 / 3)).all())


def test_a_renamed_layer_and_a_model_without_its_head(tmp_path: Path) -> None:
    class Old(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = small(), nn.Linear(2, 3)

    class New(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = small(9), nn.Linear(2, 7)

    old, new = Old(), New()
    with Checkpointer(tmp_path, old) as checkpointer:
        checkpointer.save(5)
    with Checkpointer(tmp_path, new) as checkpointer:
        with pytest.raises(StateError, match=r"'body\.0\.bias' is not in the checkpoint"):
            checkpointer.restore()
        with pytest.raises(StateError, match=r"'head\.weight' has shape \(7, 2\), saved was \(3, 2\)"):
            checkpointer.restore(rename={"encoder": "body"})
        head = new.head.weight.detach().clone()
        restored = checkpointer.restore(parts=["model"], rename={"encoder": "body"}, skip=["head.*"])
    assert restored is not None
    assert sorted(restored.left_out) == ["model 'head.bias': skipped", "model 'head.weight': skipped"]
    assert same(old.encoder, new.body) and torch.equal(new.head.weight, head)


def test_an_optimizer_is_matched_by_names_not_numbers(tmp_path: Path) -> None:
    model = small()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer, 2)
    with Checkpointer(tmp_path, model, optimizer) as checkpointer:
        checkpointer.save(2)
    again = small(1)
    backwards = [{"params": [param]} for param in reversed(list(again.parameters()))]
    other = torch.optim.Adam(backwards, lr=0.5)
    with Checkpointer(tmp_path, again, other) as checkpointer:
        checkpointer.restore()
    for mine, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(optimizer.state[mine]["exp_avg"], other.state[theirs]["exp_avg"])
    assert [group["lr"] for group in other.param_groups] == [0.1] * len(backwards)


def test_gradients_that_no_step_has_used_are_kept(tmp_path: Path) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(tmp_path, model, optimizer) as checkpointer:
        step(model, optimizer)
        checkpointer.save(1)  # used: nothing to keep
        model(torch.randn(6, 4)).square().mean().backward()
        expected = [param.grad.clone() for param in model.parameters() if param.grad is not None]
        checkpointer.save(2)
        checkpointer.wait()
        optimizer.zero_grad()
        assert checkpointer.restore(1) is not None
        assert all(param.grad is None for param in model.parameters())
        assert checkpointer.restore(2) is not None
    found = [param.grad for param in model.parameters()]
    assert all(grad is not None and torch.equal(grad, old) for grad, old in zip(found, expected, strict=True))


def test_a_compiled_model_has_plain_names_and_empty_tensors_are_kept(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.compile(small())
            self.empty = nn.Parameter(torch.empty(0, 3))
            self.turned = nn.Parameter(torch.rand(6, 4).t())
            self.complex = nn.Parameter(torch.randn(5, dtype=torch.complex64))
            self.register_buffer("wide", torch.rand(3, 1).expand(3, 4))

    model, plain = Model(), Model()
    plain.body = small(1)
    with Checkpointer(tmp_path, torch.compile(model)) as checkpointer:
        checkpointer.save(0)
        checkpointer.save(1)
    with Checkpointer(tmp_path, plain) as checkpointer, pytest.raises(RuntimeError, match="wide"):
        checkpointer.restore()  # torch refuses to write to memory that overlaps itself
    plain.wide = plain.wide.contiguous()
    with Checkpointer(tmp_path, plain) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None and restored.left_out == []
    expected = {name.replace("_orig_mod.", ""): value for name, value in model.state_dict().items()}
    assert differing(expected, dict(plain.state_dict())) == []
    found = library.entries(Disk(), str(tmp_path))
    assert list(library.differences(Disk(), *found)) == []


def test_what_cannot_be_saved_is_refused_by_its_name(tmp_path: Path) -> None:
    class Strange:
        def state_dict(self) -> dict[str, Any]:
            return {"a": [1, {"inner": object()}]}

        def load_state_dict(self, state: Any) -> None: ...

    with Checkpointer(tmp_path, small(), scheduler=Strange()) as checkpointer:
        with pytest.raises(StateError, match=r"scheduler has a builtins\.object at 'a\.1\.inner'"):
            checkpointer.save(0)
        assert checkpointer.restore() is None and os.listdir(tmp_path) == []
    with pytest.raises(ArgumentTypeError, match="loader has no state_dict"):
        Checkpointer(tmp_path, loader=[1, 2])
    with Checkpointer(tmp_path, small()) as checkpointer, pytest.raises(ConfigError, match="step must be"):
        checkpointer.save(-1)


def test_a_folder_that_cannot_be_written_is_an_error_and_loses_nothing(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    model = small()
    with pytest.raises(CheckpointError, match="Not a directory"), Checkpointer(blocked / "below", model) as checkpointer:
        checkpointer.save(0)
    with Checkpointer(tmp_path / "good", model) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        # The writer finds the name taken: whatever it meets is raised at the next call, and the one after goes on.
        real = checkpointer._writer.submit
        checkpointer._writer.submit = lambda job: (_block(job), real(job))[1]  # type: ignore[method-assign]
        checkpointer.save(2)
        with pytest.raises(CheckpointError, match=r"step 2 was not written: FileExistsError: .*rank-0\.bin"):
            checkpointer.wait()
        checkpointer._writer.submit = real  # type: ignore[method-assign]
        checkpointer.save(3)
        checkpointer.wait()
        assert checkpointer.steps() == [1, 3]


def _block(job: Any) -> None:
    os.makedirs(f"{job.folder}/{job.manifest.save}")
    Path(f"{job.folder}/{job.manifest.save}/rank-0.bin").touch()


def test_a_writer_that_is_killed_is_named_and_replaced(tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    checkpointer = Checkpointer(tmp_path, model)
    checkpointer.save(1)
    checkpointer.wait()
    process = checkpointer._writer._process  # type: ignore[attr-defined]
    os.kill(process.pid, signal.SIGSTOP)
    checkpointer.save(2)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(CheckpointError, match="step 2 was not written: the writer process died with exit code -9"):
        checkpointer.save(3)
    checkpointer.save(4)
    checkpointer.close()
    assert checkpointer.steps() == [1, 4]


def test_back_pressure_waits_for_the_save_under_way(tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    with Checkpointer(tmp_path, model, keep=Keep(last=2, best="-score")) as checkpointer:
        for number in range(6):
            with torch.no_grad():
                model.bias.fill_(number)
            # Each save writes over the memory of the one before.
            checkpointer.save(number, {"score": 10.0 if number == 1 else number})
        checkpointer.wait()
        assert not checkpointer.is_saving and checkpointer.progress == "no save is under way"
        _until(lambda: checkpointer.steps() == [1, 4, 5])
        for number in (1, 4, 5):
            checkpointer.restore(number)
            assert model.bias.tolist() == [number] * 64


def _until(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.01)


def test_two_processes_at_once_save_both(tmp_path: Path) -> None:
    one, other = small(1), small(2)
    with Checkpointer(tmp_path, one) as first, Checkpointer(tmp_path, other) as second:
        for number in range(5):
            first.save(number)
            second.save(100 + number)
        first.wait()
        second.wait()
        assert sorted(first.steps()) == [*range(5), *range(100, 105)]
        first.restore(102)
        assert same(one, other)


def test_the_newest_is_the_latest_not_the_furthest(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, small()) as checkpointer:
        checkpointer.save(40)
        checkpointer.save(30)
        restored = checkpointer.restore()
        assert restored is not None and restored.step == 30


# -- several ranks ---------------------------------------------------------------------------------


def refusals(rank: int, world: int, folder: str) -> list[str]:
    run = Run(rank, world, optimizer="plain")
    found = []

    def attempt(checkpointer: Checkpointer, number: int) -> None:
        try:
            checkpointer.save(number)
        except (StateError, MismatchError) as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("saved")

    with run.checkpointer(folder, timeout_s=1.0) as checkpointer:
        run.train(2)
        with run.model.no_sync():
            attempt(checkpointer, 0)
            run.model(run.loader._data[:4]).sum().backward()
        attempt(checkpointer, 1)  # gradients of this rank alone
        run.train(1)
        attempt(checkpointer, 2 + rank)  # another step on every rank
        if rank == 0:
            attempt(checkpointer, 5)  # on one rank only
        torch.distributed.barrier()
        attempt(checkpointer, 6)
        checkpointer.wait()
        found.append(str(checkpointer.steps()))
    return found


def test_what_is_refused_is_refused_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(2, refusals, str(tmp_path))
    for said in (first, second):
        assert "no_sync" in said[0] and "in the midst of accumulation" in said[1], said
        assert "Every rank has to call the same" in said[2], said
        assert said[-2:] == ["saved", "[6]"]
    assert "save(step=5) was not called by ranks [1] within 1 s" in first[3]


def scattered(rank: int, world: int, folder: str) -> str:
    model = DistributedDataParallel(nn.Linear(8, 8))
    zero = phalanx.ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, overlap_with_ddp=True, step_in_backward=False, lr=0.1
    )
    for _ in range(2):
        zero.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        zero.step()
    with Checkpointer(folder, model, zero) as checkpointer:
        checkpointer.save(0)
        zero.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        try:
            checkpointer.save(1)
        except StateError as error:
            return str(error)
    return "saved"


def test_gradients_divided_among_ranks_are_not_lost(tmp_path: Path) -> None:
    for said in run_ranks(2, scattered, str(tmp_path)):
        assert "Step first" in said


class FailingLoader:
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def state_dict(self) -> dict[str, Any]:
        if self._rank == 1:
            raise KeyError("the loader of rank 1 is broken")
        return {}

    def load_state_dict(self, state: Any) -> None: ...


def one_rank_fails(rank: int, world: int, folder: str) -> list[str]:
    model = nn.Linear(16, 16)
    found = []
    broken = Checkpointer(folder, model, loader=FailingLoader(rank))
    try:
        broken.save(1)
    except (KeyError, StateError) as error:
        found.append(f"{type(error).__name__}: {error}")
    broken.close()
    # The writer of rank 1 cannot write: rank 0 hears of it, by the note in the folder.
    checkpointer = Checkpointer(folder, model)
    if rank == 1:
        real = checkpointer._writer.submit
        checkpointer._writer.submit = lambda job: (_block_rank(job, 1), real(job))[1]  # type: ignore[method-assign]
    checkpointer.save(2)
    try:
        checkpointer.close()
    except CheckpointError as error:
        found.append(str(error))
    # A rank whose part never reaches its writer tells the others through the store.
    checkpointer = Checkpointer(folder, model)
    if rank == 1:
        checkpointer._writer.submit = _raise  # type: ignore[method-assign]
    try:
        checkpointer.save(3)
        checkpointer.wait()
    except (CheckpointError, MemoryError) as error:
        found.append(f"{type(error).__name__}: {error}")
    return [*found, str(checkpointer.steps())]


def _block_rank(job: Any, rank: int) -> None:
    os.makedirs(f"{job.folder}/{job.manifest.save}", exist_ok=True)
    Path(f"{job.folder}/{job.manifest.save}/rank-{rank}.bin").touch()


def _raise(job: Any) -> None:
    raise MemoryError("no memory for the copy")


def test_one_rank_that_fails_fails_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(2, one_rank_fails, str(tmp_path), timeout_s=40)
    assert first[0].startswith("StateError: rank 0: step 1 was not saved, as rank 1 could not: KeyError"), first
    assert second[0].startswith("KeyError"), second
    for said in (first, second):
        assert "step 2 was not written" in said[1] and "FileExistsError" in said[1], said
        assert said[-1] == "[]"
    assert "no memory for the copy" in first[2] and second[2].startswith("MemoryError")


def different_models(rank: int, world: int, folder: str) -> str:
    model = nn.Linear(4, 4 + rank)
    with pytest.raises(MismatchError) as refused:
        Checkpointer(folder, model).save(0)
    return str(refused.value)


def test_ranks_with_different_models_are_refused(tmp_path: Path) -> None:
    for said in run_ranks(2, different_models, str(tmp_path)):
        assert "rank 1 have other tensors" in said


def own_buffers(rank: int, world: int, folder: str) -> tuple[float, float]:
    model = DistributedDataParallel(nn.BatchNorm1d(4), broadcast_buffers=False)
    model.module.running_mean.fill_(rank + 1)
    with Checkpointer(folder, model) as checkpointer:
        checkpointer.save(0)
        checkpointer.wait()
        model.module.running_mean.zero_()
        checkpointer.restore()
    return model.module.running_mean[0].item(), torch.distributed.get_rank() + 1.0


def test_buffers_that_nobody_synchronises_are_each_ranks_own(tmp_path: Path) -> None:
    for found, expected in run_ranks(2, own_buffers, str(tmp_path)):
        assert found == expected


def torch_ddp(rank: int, world: int, folder: str) -> list[str]:
    run = Run(rank, world, optimizer="plain")
    run.train(3)
    with run.checkpointer(folder) as checkpointer:
        checkpointer.save(3)
    torch.manual_seed(1)
    theirs = torch.nn.parallel.DistributedDataParallel(type(run.net)())
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.5)
    with Checkpointer(folder, theirs, optimizer) as checkpointer:
        restored = checkpointer.restore(strict=True)
        assert restored is not None
    assert optimizer.param_groups[0]["lr"] == 1e-2
    wrong = differing(run.state(), dict(theirs.module.state_dict()))
    for mine, other in zip(run.net.parameters(), theirs.module.parameters(), strict=True):
        wrong += [] if torch.equal(run.optimizer.state[mine]["exp_avg"], optimizer.state[other]["exp_avg"]) else ["exp_avg"]
    return wrong


def test_into_torchs_own_wrapper_and_optimizer(tmp_path: Path) -> None:
    # Rank 0's running statistics are everybody's.
    assert run_ranks(2, torch_ddp, str(tmp_path))[0] == []
