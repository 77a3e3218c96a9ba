"""Whatever happens to the files afterwards is noticed, named, and answered with the newest checkpoint that is whole."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from phalanx import Checkpointer
from phalanx.checkpoint.storage import library
from phalanx.checkpoint.storage.disk import Disk
from phalanx.errors import StateError
from tests.checkpoint.runs import Run, differing
from tests.cluster import run_ranks

pytestmark = pytest.mark.timeout(60)


def model(value: float) -> nn.Sequential:
    made = nn.Sequential(nn.Linear(300, 40), nn.Linear(40, 4))
    with torch.no_grad():
        for param in made.parameters():
            param.fill_(value)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints: step 1 of ones, step 2 of twos."""
    for step in (1, 2):
        with Checkpointer(tmp_path, model(step)) as checkpointer:
            checkpointer.save(step)
    return tmp_path


def newest(folder: Path) -> Path:
    return max(folder.glob("step-2.*"))


def restored(folder: Path, step: int | None = None) -> tuple[int, float]:
    target = model(0)
    with Checkpointer(folder, target) as checkpointer:
        result = checkpointer.restore(step)
    assert result is not None
    values = {float(value) for param in target.parameters() for value in param.detach().unique()}
    assert len(values) == 1, "a mixture"
    return result.step, values.pop()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def swap_manifests(folder: Path) -> None:
    older = max(folder.glob("step-1.*"))
    shutil.copy(older / "rank-0.json", newest(folder) / "rank-0.json")


DAMAGES = {
    "a flipped bit": (lambda f: flip(newest(f) / "rank-0.bin", 1000), r"rank-0\.bin: rank 0: damaged: parameter '0\.w"),
    "the last bit": (lambda f: flip(newest(f) / "rank-0.bin", -20), r"rank-0\.bin: rank 0: damaged"),
    "a flipped bit of a manifest": (lambda f: flip(newest(f) / "rank-0.json", 200), r"rank-0\.json: rank 0: not the man"),
    "a flipped bit of the commit": (lambda f: flip(newest(f) / "COMMITTED", 30), r"COMMITTED is truncated or damaged"),
    "a truncated commit": (lambda f: _truncate(newest(f) / "COMMITTED"), r"COMMITTED is truncated or damaged"),
    "a missing file": (lambda f: (newest(f) / "rank-0.bin").unlink(), r"rank-0\.bin: rank 0: is missing"),
    "a missing manifest": (lambda f: (newest(f) / "rank-0.json").unlink(), r"rank-0\.json: rank 0: is missing"),
    "a truncated file": (lambda f: _truncate(newest(f) / "rank-0.bin"), r"truncated at \d+ of \d+ bytes, within parameter"),
    "something added": (lambda f: _append(newest(f) / "rank-0.bin"), r"something was added"),
    "a foreign manifest": (swap_manifests, r"rank-0\.json: rank 0: not the manifest that was committed"),
    "another's folder": (lambda f: _rename_commit(f), r"is that of step-1\..*renamed or mixed up"),
}


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def _rename_commit(folder: Path) -> None:
    shutil.copy(max(folder.glob("step-1.*")) / "COMMITTED", newest(folder) / "COMMITTED")


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_named_and_the_newest_good_one_offered(folder: Path, kind: str) -> None:
    damage, message = DAMAGES[kind]
    damage(folder)
    with pytest.raises(StateError, match=message) as refused:
        restored(folder, step=2)
    assert "The newest good checkpoint is that of step 1: restore(step=1)." in str(refused.value)
    with pytest.warns(UserWarning, match="Passed over for an older one"):
        assert restored(folder) == (1, 1.0)
    assert restored(folder, step=1) == (1, 1.0)


def test_every_single_byte_of_a_checkpoint_counts(folder: Path) -> None:
    """Flipped anywhere but in the padding between extents, it is noticed."""
    entry = library.entries(Disk(), str(folder))[-1]
    manifest = library.manifests(Disk(), entry)[0]
    covered = bytearray(manifest.num_bytes)
    for extent in manifest.extents:
        size = (extent.stop - extent.start) * manifest.tensors[extent.key].itemsize
        covered[extent.offset : extent.offset + size] = b"\1" * size
    for name in ("rank-0.bin", "rank-0.json", "COMMITTED"):
        path = newest(folder) / name
        for at in range(0, path.stat().st_size, 1 if name == "COMMITTED" else 997):
            if name == "rank-0.bin" and not covered[at]:
                continue
            flip(path, at)
            found = library.entries(Disk(), str(folder))[-1]
            assert list(library.problems(Disk(), found)), (name, at)
            flip(path, at)
    assert not list(library.problems(Disk(), library.entries(Disk(), str(folder))[-1]))


def test_a_folder_copied_half_is_no_checkpoint(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    copy = tmp_path_factory.mktemp("copy")
    half = copy / newest(folder).name
    half.mkdir()
    shutil.copy(newest(folder) / "rank-0.bin", half)
    with Checkpointer(copy, model(0)) as checkpointer:
        assert checkpointer.restore() is None
    shutil.copy(newest(folder) / "COMMITTED", half)
    with pytest.raises(StateError, match=r"no checkpoint in .* is whole.*rank-0\.json: rank 0: is missing"):
        restored(copy)


def test_a_refused_checkpoint_changes_nothing(folder: Path) -> None:
    target = nn.Sequential(nn.Linear(300, 40), nn.Linear(40, 5))
    before = {name: value.clone() for name, value in target.state_dict().items()}
    with Checkpointer(folder, target) as checkpointer, pytest.raises(StateError, match=r"'1\.weight' has shape \(5, 40\)"):
        checkpointer.restore()
    assert differing(before, dict(target.state_dict())) == []


def test_a_step_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(StateError, match=r"no checkpoint of step 7 .*there are \[1, 2\]"):
        restored(folder, step=7)


def test_loading_runs_no_pickle(folder: Path) -> None:
    refuse = mock.Mock(side_effect=AssertionError("something was unpickled"))
    names = ("load", "loads", "Unpickler")
    with mock.patch.multiple(pickle, **dict.fromkeys(names, refuse)), mock.patch.object(torch, "load", refuse):
        assert restored(folder) == (2, 2.0)


def damaged_for_one(rank: int, world: int, folder: str) -> str:
    run = Run(rank, world, optimizer="alone")
    run.train(1)
    with run.checkpointer(folder) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        torch.distributed.barrier()
        if rank == 0:
            # Rank 1's file, which rank 1 verifies.
            flip(max(Path(folder).glob("step-1.*")) / "rank-1.bin", 64)
        torch.distributed.barrier()
        before = run.state()
        try:
            checkpointer.restore(1)
        except StateError as error:
            assert differing(before, run.state()) == []
            return str(error)
    return "restored"


def test_what_one_rank_sees_is_raised_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(2, damaged_for_one, str(tmp_path))
    assert "(seen by rank 1)" in first and "(seen by" not in second
    for said in (first, second):
        assert "rank-1.bin: rank 1: damaged" in said and "No other checkpoint in the folder is whole" in said
