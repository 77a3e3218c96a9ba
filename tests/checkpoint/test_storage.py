"""The parts that know no torch: manifests, shares, policies, storages without a rename, the writer process."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
import subprocess
import sys
import time
from collections import Counter, deque
from pathlib import Path

import fsspec
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import nn

from phalanx import Checkpointer
from phalanx.checkpoint import process
from phalanx.checkpoint.process import SharedMemory, WriterProcess
from phalanx.checkpoint.reshard import Held, cover, renamed, share
from phalanx.checkpoint.storage import library
from phalanx.checkpoint.storage.disk import Disk, RemoteDisk
from phalanx.checkpoint.storage.library import Entry, Keep
from phalanx.checkpoint.storage.manifest import COMMITTED, Commit, Manifest, SaveName, content_hash, has_content
from phalanx.checkpoint.storage.writer import Job
from phalanx.checkpoint.tree import decode, encode
from phalanx.errors import ConfigError, StateError
from tests.checkpoint.runs import Run, differing
from tests.cluster import run_ranks

pytestmark = pytest.mark.timeout(60)
SIZES = st.lists(st.tuples(st.integers(0, 50), st.sampled_from([1, 2, 4, 8])), max_size=12)


@given(SIZES, st.integers(1, 5), st.sampled_from([1, 3, 16]))
def test_every_element_is_written_once(sizes: list[tuple[int, int]], world: int, grain: int) -> None:
    seen = [[0] * numel for numel, _ in sizes]
    for rank in range(world):
        for part in share(sizes, rank, world, grain):
            for at in range(part.start, part.stop):
                seen[part.index][at] += 1
    assert all(count == 1 for counts in seen for count in counts)


@pytest.mark.timeout(30)
def test_a_writer_ends_though_somebody_else_holds_its_input(tmp_path: Path) -> None:
    writer = WriterProcess(SharedMemory(), str(tmp_path), shows=False)
    writer._start()
    assert writer._process is not None and writer._process.stdin is not None
    # As a forked child does that lives on.
    held = os.dup(writer._process.stdin.fileno())
    try:
        writer.close()
    finally:
        os.close(held)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("is_polled", [False, True])
def test_who_ends_does_not_wait_for_the_part_of_a_rank_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_polled: bool
) -> None:
    monkeypatch.setattr(process, "_OTHERS_S", 0.2)
    memory = SharedMemory()
    memory.reserve(64, pinned=False)
    writer = WriterProcess(memory, str(tmp_path), shows=False)
    writer.submit(Job(str(tmp_path), Manifest("step-1.000001.00000000", 0, 2, 64), patience_s=60.0))
    started = writer._process
    assert started is not None
    while is_polled and not writer._is_written:
        assert writer.poll(1.0) is None
    try:
        writer.close()
        assert started.poll() is None, "it outlives whoever asked for it"
        assert list(tmp_path.glob("*/rank-0*")), "this rank's part is there"
    finally:
        started.kill()
        started.wait()
        memory.close()


def test_shares_are_even() -> None:
    sizes = [(1_000_000, 4), (10, 8), (3_000_000, 2)]
    shares = [sum((p.stop - p.start) * sizes[p.index][1] for p in share(sizes, rank, 3)) for rank in range(3)]
    assert max(shares) - min(shares) < 3 * 8 * 4096


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.data())
def test_any_range_is_found_in_what_was_saved(lengths: list[int], data: st.DataObject) -> None:
    held, at, offset = [], 0, 0
    for length in lengths:
        rank = data.draw(st.integers(0, 2))
        offset += data.draw(st.sampled_from([0, 64]))
        held.append(Held(at, at + length, rank, offset))
        at, offset = at + length, offset + 2 * length
    start = data.draw(st.integers(0, at))
    stop = data.draw(st.integers(start, at))
    found = list(cover(held, start, stop, 2))
    assert [i for one in found for i in range(one.start, one.stop)] == list(range(start, stop))
    for one in found:
        # Neighbours that come as one lie back to back where they say they do.
        for i in range(one.start, one.stop):
            origin = next(h for h in held if h.start <= i < h.stop)
            assert (one.rank, one.offset + 2 * (i - one.start)) == (origin.rank, origin.offset + 2 * (i - origin.start))
    with pytest.raises(LookupError, match=f"elements {at} to {at + 1}"):
        list(cover(held, 0, at + 1, 2))


def test_names_are_mapped_by_their_leading_parts() -> None:
    mapping = {"encoder": "body", "encoder.head": "head", "model": ""}
    assert renamed("encoder.0.weight", mapping) == "body.0.weight"
    assert renamed("encoder.head.bias", mapping) == "head.bias"
    assert renamed("encoders.weight", mapping) == "encoders.weight"
    assert renamed("model.weight", mapping) == "weight"


def test_states_of_all_kinds_survive_json() -> None:
    value = {
        "plain": [None, True, 3, 2**80, -0.5, float("inf"), "ä\n"],
        "keys": {1: "a", (2, "b"): {"@x": 1}, "@odd": 2},
        "kinds": (b"\0\xff", 1 + 2j, {3, 1}, deque([1, 2]), Counter({7: 2}), torch.float16, torch.device("cpu")),
        "numpy": (np.float64(0.1), np.int32(7), np.arange(6, dtype=np.uint32).reshape(2, 3)),
        "zero": torch.tensor(1.5, dtype=torch.bfloat16),
    }
    collide = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}
    tree, leaves = encode({**value, "t": [torch.arange(3)], "c": collide}, "it")
    back = decode(json.loads(json.dumps(tree)), lambda path: leaves[path])
    assert torch.equal(back.pop("t")[0], torch.arange(3))
    assert back["c"]["a.b"].item() == 1 and back["c"]["a"]["b"].item() == 0
    array = back["numpy"][2]
    assert array.dtype == np.uint32 and (array == value["numpy"][2]).all()
    assert type(back["numpy"][0]) is np.float64 and back["zero"].dtype is torch.bfloat16
    for key in ("plain", "keys", "kinds", "zero"):
        assert back[key] == value[key], key


def test_a_commit_of_which_a_byte_is_missing_is_none() -> None:
    manifests = {rank: Manifest("step-1.000001.00000000", rank, 2, 0).to_bytes() for rank in range(2)}
    text = Commit.of(manifests).to_bytes()
    assert Commit.from_bytes(text, "it") == Commit.of(manifests)
    for length in range(len(text)):
        with pytest.raises(StateError, match="truncated"):
            Commit.from_bytes(text[:length], "it")


def test_hashes_of_every_kind_are_verified() -> None:
    data = bytes(range(256))
    for kind in ("sha256", "blake2b"):
        expected = f"{kind}:{getattr(hashlib, kind)(data).hexdigest()[:32]}"
        assert has_content(data, expected) and not has_content(data[:-1], expected)
    assert has_content(data, content_hash(data)) and not has_content(data, "md5:" + "0" * 32)


def test_names_of_saves() -> None:
    name = SaveName(7, 20, "0123abcd")
    assert str(name) == "step-20.000007.0123abcd" and SaveName.parse(str(name)) == name
    assert SaveName.parse("step-20") is None and SaveName.parse("notes.txt") is None
    assert SaveName(8, 1, "0" * 8) > name


# -- policies --------------------------------------------------------------------------------------


def entry(step: int, **metrics: float) -> Entry:
    name = SaveName(step, step, "0" * 8)
    return Entry(name, f"x/{name}", Commit(str(name), (), {"metrics": metrics}))


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (Keep(last=2), [50, 60]),
        (Keep(last=1, every=20), [20, 40, 60]),
        (Keep(best="loss"), [30, 60]),
        (Keep(best="-loss", num_best=2), [10, 20, 60]),
        (Keep(best="unknown"), [60]),
    ],
)
def test_policies(keep: Keep, expected: list[int]) -> None:
    found = [entry(10, loss=5.0), entry(20, loss=4.0), entry(30, loss=1.0), entry(40, loss=2.0), entry(50), entry(60)]
    assert sorted(name.step for name in keep.keeps(found)) == expected


def test_a_policy_cannot_delete_everything() -> None:
    with pytest.raises(ConfigError, match="keeps something"):
        Keep(last=0)


def test_pruning_spares_saves_under_way_and_removes_stopped_ones(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, nn.Linear(2, 2)) as checkpointer:
        for step in range(3):
            checkpointer.save(step)
    begun = tmp_path / "step-9.000009.00000000"
    begun.mkdir()
    (begun / "rank-0.bin").write_bytes(b"half")
    folder = str(tmp_path)
    would = library.prune(Disk(), folder, Keep(last=1), dry_run=True)
    assert [one.step for one in would] == [0, 1] and len(os.listdir(folder)) == 4
    library.prune(Disk(), folder, Keep(last=1))
    assert begun.exists() and [one.step for one in library.entries(Disk(), folder)] == [2, 9]
    for path in (begun / "rank-0.bin", begun):
        os.utime(path, (time.time() - 100, time.time() - 100))
    library.prune(Disk(), folder, Keep(last=1, abandoned_after_s=50))
    assert [one.step for one in library.entries(Disk(), folder)] == [2]


def test_pruning_a_link_leaves_what_it_leads_to(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "archive", nn.Linear(2, 2)) as archive:
        archive.save(1)
    (saved,) = (tmp_path / "archive").iterdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / saved.name).symlink_to(saved)
    (tmp_path / "run" / "step-0.000000.00000000").symlink_to(tmp_path / "not mounted")
    with Checkpointer(tmp_path / "run", nn.Linear(2, 2)) as checkpointer:
        checkpointer.save(2)
    deleted = library.prune(Disk(), str(tmp_path / "run"), Keep(last=1))
    assert [one.step for one in deleted] == [1] and not (tmp_path / "run" / saved.name).is_symlink()
    (kept,) = library.entries(Disk(), str(tmp_path / "archive"))
    assert kept.commit is not None and list(library.problems(Disk(), kept)) == []
    assert (tmp_path / "run" / "step-0.000000.00000000").is_symlink()


# -- other storages --------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_storages_that_fsspec_reaches(tmp_path: Path, protocol: str) -> None:
    folder = f"memory://{tmp_path.name}" if protocol == "memory" else f"file://{tmp_path}/deeper"
    torch.manual_seed(0)
    model = nn.Linear(30, 30)
    optimizer = torch.optim.Adam(model.parameters())
    with Checkpointer(folder, model, optimizer, keep=2) as checkpointer:
        for step in range(4):
            model(torch.ones(1, 30)).sum().backward()
            optimizer.step()
            checkpointer.save(step)
        checkpointer.wait()
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        nn.init.zeros_(model.weight)
        restored = checkpointer.restore()
        assert restored is not None and restored.step == 3
        assert differing(expected, dict(model.state_dict())) == []
        deadline = time.monotonic() + 10
        while checkpointer.steps() != [2, 3] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert checkpointer.steps() == [2, 3]
    # A commit of which only a part was written is none: the save before it is the newest.
    disk = RemoteDisk(folder)
    last = library.entries(disk, folder)[-1]
    system, _ = fsspec.core.url_to_fs(folder)
    text = disk.read(f"{last.path}/{COMMITTED}")
    system.pipe_file(f"{last.path}/{COMMITTED}", text[: len(text) // 2])
    with Checkpointer(folder, model, optimizer) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None and restored.step == 2
    system.rm(folder, recursive=True)


def through_fsspec(rank: int, world: int, folder: str) -> list[str]:
    run = Run(rank, world, optimizer="alone")
    run.train(2)
    with run.checkpointer(folder) as checkpointer:
        checkpointer.save(2)
        checkpointer.wait()
        expected = run.state()
        run.train(1)
        checkpointer.restore()
        return [name for name in differing(expected, run.state()) if "running" not in name]


def test_several_ranks_commit_without_a_rename(tmp_path: Path) -> None:
    assert run_ranks(2, through_fsspec, f"file://{tmp_path}") == [[], []]


def test_new_folders_above_the_first_save_survive_a_power_cut(tmp_path: Path) -> None:
    synced: list[str] = []
    with Checkpointer(tmp_path / "runs" / "a", torch.nn.Linear(1, 1)) as checkpointer:
        real = checkpointer._disk.sync_folder
        checkpointer._disk.sync_folder = lambda path: (synced.append(path), real(path))[1]  # type: ignore[method-assign]
        for step in (1, 2):
            checkpointer.save(step)
            checkpointer.wait()
    assert synced == [str(tmp_path), str(tmp_path / "runs")]


def test_an_unknown_protocol_and_options_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fsspec cannot reach"):
        Checkpointer("nonsense://x")
    with pytest.raises(ConfigError, match="storage options"):
        Checkpointer(tmp_path, storage_options={"key": "x"})


# -- the writer process ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 8192, 8192 + 7])
@pytest.mark.parametrize("refused", ["nothing", "asking", "writing"])
def test_what_goes_past_the_page_cache_is_what_was_written(
    num_bytes: int, refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(num_bytes)
    pages = mmap.mmap(-1, max(1, num_bytes))  # memory as the writer's: blocks go by themselves only from whole pages
    pages[:num_bytes] = data
    disk, path = Disk(), str(tmp_path / "data")
    handle, write, set_flags = disk.create(path), os.write, fcntl.fcntl
    past = []

    def refusing(handle: int, data: memoryview) -> int:
        is_direct = bool(set_flags(handle, fcntl.F_GETFL) & os.O_DIRECT)
        if is_direct and refused == "writing":
            raise OSError(errno.EINVAL, "injected")
        written = write(handle, data)
        past.extend([written] if is_direct else [])
        return written

    def asked(handle: int, what: int, value: int = 0) -> int:
        if what == fcntl.F_SETFL and value & os.O_DIRECT and refused == "asking":
            raise OSError(errno.EINVAL, "injected")
        return set_flags(handle, what, value)

    monkeypatch.setattr("phalanx.checkpoint.storage.disk.os.write", refusing)
    monkeypatch.setattr("phalanx.checkpoint.storage.disk.fcntl.fcntl", asked)
    disk.pass_cache(handle)
    for begin in range(0, num_bytes, 4096):
        disk.write(handle, memoryview(pages)[begin : min(begin + 4096, num_bytes)])
    disk.sync(handle)
    disk.close(handle)
    assert (tmp_path / "data").read_bytes() == data
    assert refused == "nothing" or not past


def test_the_writer_does_not_import_torch(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, nn.Linear(4, 4)) as checkpointer:
        checkpointer.save(0)
        checkpointer.wait()
        process = checkpointer._writer._process  # type: ignore[attr-defined]
        mapped = Path(f"/proc/{process.pid}/maps").read_text()
        assert "torch" not in mapped and "numpy" not in mapped
        resident_kb = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * 4
        assert resident_kb < 40_000
        assert os.getsid(process.pid) != os.getsid(0)


@pytest.mark.thorough
def test_memory_during_a_save_is_one_share_more(tmp_path: Path) -> None:
    """Of both processes together, a page that they share counted once."""
    code = f"""
import os, time, torch
from pathlib import Path
from phalanx import Checkpointer
from phalanx.checkpoint import process

def held(pid):
    lines = Path(f"/proc/{{pid}}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))

if __name__ == "__main__":
    # Large beside the writer's own Python and what a heap grows by, some 25 MB together, which are not the share's.
    share = 256_000_000
    model = torch.nn.Linear(8000, 8000, bias=False)
    checkpointer = Checkpointer({str(tmp_path)!r}, model)
    before, most = held(os.getpid()), 0
    for step in range(2):
        checkpointer.save(step)
        pid = checkpointer._writer._process.pid
        while checkpointer.is_saving:
            try:
                # The writer's first look at a page makes half of it its own. Read while that went on, it would count twice.
                mine, writers, again = held(os.getpid()), held(pid), held(os.getpid())
                if abs(mine - again) < share // 50:
                    most = max(most, mine + writers)
            except (OSError, StopIteration):
                pass
            time.sleep(0.002)
    checkpointer.close()
    print((most - before) / share)
"""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, env=environ)
    assert found.returncode == 0, found.stderr
    # The share, and a Python of some megabytes, a few more where the heap had to grow. Two shares would be two.
    assert 0.9 < float(found.stdout) < 1.4
