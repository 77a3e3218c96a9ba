"""Another user makes the folder in which torch looks for compiled code: nothing of it is run."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import pytest

from phalanx.launch.start import caches
from phalanx.launch.start.caches import own_temporaries, usual_cache
from tests.security.intruder import NOBODY, Running, needs_root

pytestmark = pytest.mark.timeout(60)

SAY = """
import tempfile
print("temporary files are in", tempfile.gettempdir(), flush=True)
"""


@pytest.fixture
def usual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = usual_cache()
    assert found is not None
    return found


def test_it_is_where_torch_looks(usual: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    assert str(usual) == default_cache_dir()
    monkeypatch.setenv("LOGNAME", "a/b:c")
    assert str(usual_cache()) == default_cache_dir()


@pytest.mark.parametrize("kind", ["missing", "own", "link", "open"])
def test_a_folder_of_ones_own_is_used_and_one_that_all_can_change_is_not(usual: Path, kind: str) -> None:
    if kind == "link":
        usual.symlink_to(usual.parent)
    elif kind != "missing":
        usual.mkdir()
        usual.chmod(0o777 if kind == "open" else 0o755)
    said: list[str] = []
    with own_temporaries(said.append) as found:
        assert list(found) == ["TMPDIR"] * (kind == "open") and len(said) == len(found)
        assert all(os.stat(folder).st_mode & 0o777 == 0o700 for folder in found.values())
    assert not any(map(os.path.exists, found.values()))
    assert usual.exists() == (kind != "missing")  # who compiles nothing leaves nothing


COMPILE = """
import os, tempfile
import torch
torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1).step()
folder = os.path.join(tempfile.gettempdir(), os.environ["NAME"])
print("before:", os.path.exists(folder), flush=True)
if os.environ["WHOSE"] == "theirs":
    os.mkdir(folder)
    os.chown(folder, 65534, 65534)
import torch._inductor.codecache
print("after:", oct(os.stat(folder).st_mode), flush=True)
"""


OPEN = """
import os
os.umask(0)
del os.environ["TORCHINDUCTOR_CACHE_DIR"]  # of the tests
import torch
model = torch.nn.Linear(2, 2)
torch.optim.SGD(model.parameters(), lr=0.1).step()
torch.compile(model, backend="aot_eager")(torch.ones(1, 2)).sum().backward()
"""


def test_what_torch_makes_without_a_umask_is_not_taken_for_anybodys(tmp_path: Path, usual: Path) -> None:
    with Running(tmp_path / "a", OPEN, "--nproc", "1", cold=True, TMPDIR=str(tmp_path)) as run:
        assert run.end() == 0, run.said()
    assert usual.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("told", [None, "usual", "elsewhere"])
def test_what_torch_has_told_its_children_is_not_obeyed(
    usual: Path, monkeypatch: pytest.MonkeyPatch, told: str | None
) -> None:
    # Whoever starts the run may have stepped an optimizer, upon which torch names the usual place in the environment.
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    if told is not None:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(usual if told == "usual" else usual.parent / "mine"))
    usual.mkdir()
    usual.chmod(0o777)
    with own_temporaries(lambda line: None) as found:
        assert ("TORCHINDUCTOR_CACHE_DIR" in found) == (told == "usual")
        assert all(place.startswith(found["TMPDIR"]) for place in found.values())


def test_a_host_without_a_place_for_temporary_files_is_none_of_our_business(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise FileNotFoundError("no usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", fail)
    with own_temporaries(pytest.fail) as found:
        assert not found
    caches._make_usual()


@needs_root
@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_a_worker_makes_it_before_torch_uses_it(tmp_path: Path, whose: str) -> None:
    environ = {"NAME": Path(str(usual_cache())).name, "WHOSE": whose, "TMPDIR": str(tmp_path)}
    with Running(tmp_path / "a", COMPILE, "--nproc", "1", cold=True, **environ) as run:
        assert run.end() == (0 if whose == "ours" else 1)
    assert "before: False" in run.said()
    assert ("after: 0o40700" if whose == "ours" else "belongs to user 65534, and torch.compile would run") in run.said()


@needs_root
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_folder_of_another_user_is_not(usual: Path, kind: str) -> None:
    usual.mkdir() if kind == "folder" else usual.symlink_to("/root")
    os.chown(usual, NOBODY, NOBODY, follow_symlinks=False)
    with own_temporaries(lambda line: None) as found:
        assert "TMPDIR" in found


@needs_root
def test_a_run_takes_no_code_from_a_folder_of_another_user(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    theirs = tmp_path / Path(str(usual_cache())).name
    theirs.mkdir()
    os.chown(theirs, NOBODY, NOBODY)
    with Running(tmp_path / "a", SAY, "--nproc", "1", cold=True, TMPDIR=str(tmp_path)) as run:
        assert run.end() == 0
    assert f"{theirs} belongs to user {NOBODY}, and torch.compile would run" in run.said()
    found = re.search(r"temporary files are in (\S+)", run.said())
    assert found is not None and Path(found[1]).parent == tmp_path and not Path(found[1]).exists()
