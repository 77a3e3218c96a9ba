"""What people write by mistake, or what befalls a save at a bad moment, and was once taken in silence."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import nn

from phalanx import Checkpointer
from phalanx.checkpoint import Keep
from phalanx.checkpoint import checkpointer as checkpointer_module
from phalanx.checkpoint.agreement import Agreement
from phalanx.checkpoint.storage import library, writer
from phalanx.checkpoint.storage.disk import Disk
from phalanx.checkpoint.storage.manifest import Manifest, data_file, manifest_file
from phalanx.checkpoint.tree import decode, encode
from phalanx.cli.checkpoints import command
from phalanx.comm.ranks import Ranks
from phalanx.errors import ArgumentTypeError, CheckpointError, ConfigError, StateError
from tests.cluster import run_ranks

pytestmark = pytest.mark.timeout(60)


class Pair(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
        with torch.no_grad():
            for param in self.parameters():
                param.fill_(value)

    def values(self) -> tuple[float, float]:
        return float(self.body.bias[0].detach()), float(self.head.bias[0].detach())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Checkpointer(tmp_path / "saved", Pair(1)) as checkpointer:
        checkpointer.save(1, {"loss": 0.5})
    return tmp_path / "saved"


# -- what is asked for -----------------------------------------------------------------------------


def test_one_name_given_as_a_string_is_one_name(folder: Path) -> None:
    model = Pair(0)
    with Checkpointer(folder, model) as checkpointer:
        restored = checkpointer.restore(parts="model", skip="head.*")
    assert restored is not None and model.values() == (1, 0)


def test_names_that_fit_nothing_are_said(folder: Path) -> None:
    with Checkpointer(folder, Pair(0)) as checkpointer:
        restored = checkpointer.restore(skip=["haed.*"], rename={"encoder": "body"})
    assert restored is not None
    assert "skip 'haed.*': no parameter has such a name" in restored.left_out
    assert "rename 'encoder': nothing was saved under this name" in restored.left_out


def test_two_tensors_cannot_become_one(folder: Path) -> None:
    model = Pair(0)
    with Checkpointer(folder, model) as checkpointer:
        with pytest.raises(StateError, match=r"makes both 'body\.\w+' and 'head\.\w+' into 'body"):
            checkpointer.restore(rename={"head": "body"}, strict=False)
        assert model.values() == (0, 0)


@pytest.mark.parametrize("keep", ["3", True, 2.0])
def test_a_policy_of_the_wrong_kind_is_refused_at_once(tmp_path: Path, keep: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="keep must be a number"):
        Checkpointer(tmp_path, Pair(0), keep=keep)


def test_a_policy_in_numpys_numbers_is_one(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, Pair(1), keep=Keep(last=np.int64(1), every=np.int32(5))) as checkpointer:
        for step in (5, 6, 7):
            checkpointer.save(step)
    assert checkpointer.steps() == [5, 7]


def test_a_run_of_which_only_a_stopped_save_is_there_does_not_start_anew_in_silence(folder: Path) -> None:
    (save,) = folder.iterdir()
    (save / "COMMITTED").unlink()
    with Checkpointer(folder, Pair(0)) as checkpointer, pytest.warns(UserWarning, match="never committed.*COMMITTED"):
        assert checkpointer.restore() is None


# -- metrics ---------------------------------------------------------------------------------------


def test_a_loss_of_nan_is_never_the_best(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, Pair(0)) as checkpointer:
        for step, loss in enumerate([float("nan"), 2.0, 1.0, float("nan"), 3.0]):
            checkpointer.save(step, {"loss": loss})
    found = library.entries(Disk(), str(tmp_path))
    for best, expected in (("loss", {2, 4}), ("-loss", {4})):
        assert {name.step for name in Keep(best=best).keeps(found)} == expected


def test_a_metric_that_nobody_has_deletes_nothing(folder: Path) -> None:
    with Checkpointer(folder, Pair(2), keep=Keep(best="lose")) as checkpointer:
        # The writer says it after the commit, so it is heard at a later call.
        with pytest.warns(UserWarning, match="'lose' by which the best is to stay; they have loss"):
            for step in (2, 3):
                checkpointer.save(step, {"loss": 0.7})
                checkpointer.wait()
        assert checkpointer.steps() == [1, 2, 3]
    with pytest.raises(ConfigError, match="Nothing was deleted"):
        CliRunner().invoke(command, [str(folder), "delete", "--best", "lose"], catch_exceptions=False, standalone_mode=False)
    assert len(library.entries(Disk(), str(folder))) == 3


# -- states ----------------------------------------------------------------------------------------


def test_a_conjugate_is_not_taken_for_what_it_is_the_conjugate_of(tmp_path: Path) -> None:
    model, again = nn.Module(), nn.Module()
    for one in (model, again):
        values = torch.randn(3, dtype=torch.complex64)
        one.register_buffer("values", values)
        one.register_buffer("conjugate", values.conj())
    with Checkpointer(tmp_path, model) as checkpointer:
        checkpointer.save(0)
    with Checkpointer(tmp_path, again) as checkpointer:
        checkpointer.restore()
    assert torch.equal(model.get_buffer("values"), again.get_buffer("values"))


def test_frozen_sets_and_windows_come_back_as_they_were() -> None:
    state = {"losses": deque([1.0, 2.0], maxlen=2), "seen": {frozenset({1, 2}): "a"}}
    tree, leaves = encode(state, "it")
    assert not leaves
    back = decode(json.loads(json.dumps(tree)), lambda path: torch.empty(0))
    assert back == state
    back["losses"].append(3.0)
    assert list(back["losses"]) == [2.0, 3.0]


@pytest.mark.parametrize(
    "moment",
    [np.datetime64("2026-01-02"), np.datetime64(7, "ns"), np.timedelta64(7, "ns"), np.timedelta64(7, "25s")],
)
def test_moments_come_back_with_their_units(moment: Any) -> None:
    tree, _ = encode({"at": moment}, "it")
    back = decode(json.loads(json.dumps(tree)), lambda path: torch.empty(0))["at"]
    assert back == moment and back.dtype == moment.dtype
    never = type(moment)("NaT", "ns")
    tree, _ = encode(never, "it")
    assert np.isnat(decode(json.loads(json.dumps(tree)), lambda path: torch.empty(0)))


@pytest.mark.parametrize(
    "value", [np.longdouble(1), np.ones(2, dtype=np.longdouble), np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")])[0]]
)
def test_what_numpy_alone_can_hold_is_refused_when_it_is_saved(value: Any) -> None:
    with pytest.raises(StateError, match=r"it has a numpy.* at 'a', which cannot be saved"):
        encode({"a": value}, "it")


class Picky:
    """A scheduler that loads on every rank but the last."""

    def __init__(self, fails: bool) -> None:
        self._fails = fails

    def state_dict(self) -> dict[str, Any]:
        return {"at": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._fails:
            raise KeyError("no such milestone")


def one_cannot_load(rank: int, world: int, folder: str) -> str:
    with Checkpointer(folder, Pair(1), scheduler=Picky(rank == 1), timeout_s=20.0) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        begun = time.monotonic()
        try:
            checkpointer.restore()
        except (KeyError, StateError) as error:
            return f"{type(error).__name__}: {error}, {'soon' if time.monotonic() - begun < 10 else 'late'}"
    return "restored"


def test_a_state_that_one_rank_cannot_load_is_an_error_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(2, one_cannot_load, str(tmp_path))
    assert "rank 1 could not load all of" in first and "no such milestone" in first and first.endswith("soon")
    assert second.startswith("KeyError")


def slow_to_verify(rank: int, world: int, folder: str) -> str:
    checkpointer = Checkpointer(folder, Pair(1), timeout_s=1.0)
    checkpointer.save(1)
    checkpointer.wait()
    real = checkpointer_module.problems

    def slowly(*arguments: Any) -> Any:
        time.sleep(3.0 * rank)
        return real(*arguments)

    # As if the storage gave a hundred bytes a second.
    with mock.patch.multiple(checkpointer_module, problems=slowly, _SLOWEST_BYTES_PER_S=100.0):
        restored = checkpointer.restore()
    checkpointer.close()
    return str(restored and restored.step)


def test_a_rank_that_has_more_to_read_is_waited_for(tmp_path: Path) -> None:
    assert run_ranks(2, slow_to_verify, str(tmp_path)) == ["1", "1"]


def damage_found_at_once(rank: int, world: int, folder: str) -> str:
    checkpointer = Checkpointer(folder, Pair(1), timeout_s=1.0)
    for number in (1, 2):
        checkpointer.save(number)
        checkpointer.wait()
    real = checkpointer_module.problems

    def slowly(disk: Disk, entry: library.Entry, *rest: Any) -> Any:
        if entry.step == 2 and rank == 0:
            return iter([library.Problem("rank-0.bin", 0, "damaged")])
        time.sleep(3.0 * rank)
        return real(disk, entry, *rest)

    with mock.patch.multiple(checkpointer_module, problems=slowly, _SLOWEST_BYTES_PER_S=100.0):
        with pytest.warns(UserWarning, match="Passed over for an older one"):
            restored = checkpointer.restore()
    checkpointer.close()
    return str(restored and restored.step)


def test_a_rank_that_finds_damage_waits_for_those_that_still_read(tmp_path: Path) -> None:
    assert run_ranks(2, damage_found_at_once, str(tmp_path)) == ["1", "1"]


def test_a_rank_that_comes_at_the_last_moment_has_come() -> None:
    store = dist.HashStore()
    store.set("0/1", json.dumps({"doing": "it", "value": 1}))
    late = mock.Mock(wraps=store)
    # It is not there when this rank looks, and has come when it is about to give up.
    late.check.side_effect = itertools.chain([False], itertools.repeat(mock.DEFAULT))
    agreement = Agreement(None, 0.0)
    agreement.world, agreement._store, agreement.ranks = 2, late, Ranks((0, 1), 0, "rank 0")
    assert [one["value"] for one in agreement.exchange({"value": 0}, "it")] == [0, 1]
    late.delete_key.assert_not_called()


# -- disks -----------------------------------------------------------------------------------------


class FullForOne(Disk):
    """No room for the data of rank 1."""

    def create(self, path: str) -> Any:
        if path.endswith(data_file(1)):
            raise OSError(28, "No space left on device", path)
        return super().create(path)


def test_a_full_disk_gets_back_what_the_other_ranks_had_written(tmp_path: Path) -> None:
    """Else each attempt would leave their parts there for a day, and the disk stay full."""
    failed = []

    def write(rank: int) -> None:
        job = writer.Job(str(tmp_path), Manifest("step-1.000001.00000000", rank, 2, 64), patience_s=30.0)
        try:
            writer.Save(job, memoryview(bytes(64)), FullForOne(), lambda _: None).run()
        except (OSError, CheckpointError) as error:
            failed.append(str(error))

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(2)]
    threads[0].start()
    while not (tmp_path / "step-1.000001.00000000" / manifest_file(0)).exists():
        time.sleep(0.001)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert len(failed) == 2
    assert not list(tmp_path.rglob("*.bin"))


@pytest.mark.timeout(20)
def test_a_job_that_cannot_be_sent_is_waited_for_by_nobody(tmp_path: Path) -> None:
    options = {"auto_mkdir": True, "token": {1, 2}}  # fsspec takes a set, JSON does not
    checkpointer = Checkpointer(f"file://{tmp_path}/saved", Pair(1), storage_options=options)
    with pytest.raises(TypeError, match="set is not JSON serializable"):
        checkpointer.save(1)
    assert not checkpointer.is_saving
    checkpointer._options.pop("token")
    checkpointer.save(2)
    checkpointer.close()
    assert checkpointer.steps() == [2]


def nowhere(rank: int, world: int) -> str:
    with Checkpointer("/dev/null/checkpoints", Pair(1)) as checkpointer:
        try:
            checkpointer.save(1)
        except Exception as error:  # of which class is what is asked
            return f"{type(error).__name__}: {error}"
    return "saved"


def test_a_folder_that_cannot_be_written_is_the_same_error_on_every_rank() -> None:
    """Who catches it on one rank and trains on must not be left by the others."""
    for said in run_ranks(2, nowhere):
        assert said.startswith("CheckpointError: ") and "/dev/null/checkpoints cannot be written: Not a directory" in said


def told_by_looking(rank: int, world: int, folder: str) -> str:
    checkpointer = Checkpointer(folder, Pair(1), patience_s=40.0)
    if rank == 1:
        checkpointer._writer.submit = lambda job: _lose_the_folder(job, checkpointer)  # type: ignore[method-assign]
    checkpointer.save(1)
    begun = time.monotonic()
    if rank == 1:
        while checkpointer.is_saving:
            time.sleep(0.01)
    try:
        checkpointer.wait()
    except CheckpointError as error:
        return f"{error}, {'soon' if time.monotonic() - begun < 20 else 'late'}"
    finally:
        checkpointer._finalizer()
    return "saved"


def _lose_the_folder(job: writer.Job, checkpointer: Checkpointer) -> None:
    """A writer whose disk can be told nothing: its own folder is elsewhere, and no folder at all."""
    job.folder = "/dev/null/elsewhere"
    type(checkpointer._writer).submit(checkpointer._writer, job)


def test_a_failure_that_was_seen_by_looking_reaches_the_others(tmp_path: Path) -> None:
    for said in run_ranks(2, told_by_looking, str(tmp_path)):
        assert "step 1 was not written" in said and "/dev/null/elsewhere" in said and said.endswith("soon")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: os.truncate(path, 10), "truncated at 10 of"),
        (lambda path: path.unlink(), "is missing"),
        (lambda path: (path.unlink(), path.mkdir()), "not a plain file"),
    ],
)
def test_damaged_files_are_named_by_every_command(folder: Path, damage: Any, words: str) -> None:
    with Checkpointer(folder, Pair(2)) as checkpointer:
        checkpointer.save(2)
    damage(next(folder.glob("step-2.*")) / "rank-0.bin")
    with pytest.raises(StateError, match=r"rank-0\.bin: rank 0: "):
        CliRunner().invoke(command, [str(folder), "compare", "1", "2"], catch_exceptions=False, standalone_mode=False)
    verified = CliRunner().invoke(command, [str(folder), "verify"], catch_exceptions=False, standalone_mode=False)
    assert verified.return_value == 1 and words in verified.output


# -- the command -----------------------------------------------------------------------------------


def test_a_step_below_nought_is_refused_where_it_would_hide_the_checkpoint(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "file.pt")
    arguments = [str(tmp_path / "out"), "import", "torch", str(tmp_path / "file.pt"), "--step", "-3"]
    assert CliRunner().invoke(command, arguments).exit_code == 2
    assert not os.path.exists(tmp_path / "out")


def test_the_list_of_checkpoints_fits_eighty_columns(folder: Path) -> None:
    (folder / "step-123456.000002.00000000").mkdir()
    listed = CliRunner().invoke(command, [str(folder)], env={"COLUMNS": "80"}, catch_exceptions=False, standalone_mode=False)
    title, *rows = listed.output.splitlines()
    assert title.split() == ["step", "saved", "ranks", "size", "metrics"]
    assert len(rows) == 2 and "loss 0.5" in rows[0] and "not committed" in rows[1]
