"""What a run keeps is its user's own: modes, folders of others, links, a full disk."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from phalanx.errors import ConfigError
from phalanx.launch.rundir import RunDirectory, open_private
from phalanx.observe import trace
from tests.security.intruder import NOBODY, Running, as_nobody, attempt, needs_root

pytestmark = pytest.mark.timeout(120)

FAILING = """
print("kept", flush=True)
raise ValueError("seven")
"""


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o277])
def test_folders_are_0700_and_files_0600_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        directory = RunDirectory.create(tmp_path, "train")
        files = directory.rank(0, 0)
        os.close(open_private(files.stdout))
        directory.record(state="running")
    finally:
        os.umask(before)
    for path in (directory.root, directory.attempt(0), files.directory):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for path in (files.stdout, directory.root / "run.json"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_everything_a_real_run_leaves_is_private(tmp_path: Path) -> None:
    with Running(tmp_path, FAILING, "--nproc", "1", "--trace", prefix=["sh", "-c", 'umask 000; exec "$@"', "sh"]) as run:
        assert run.end() == 1
    (root,) = (tmp_path / "runs").iterdir()
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [root, *root.rglob("*")]}
    assert {"run.json", "stdout.log", "stderr.log", "error.json", "stacks.txt", "trace-rank00000.jsonl"} <= set(found)
    assert {mode for name, mode in found.items() if "." in name} == {0o600}, found
    assert {mode for name, mode in found.items() if "." not in name} == {0o700}, found


@needs_root
def test_another_user_can_read_nothing_of_a_run(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder.name:
            folder.chmod(folder.stat().st_mode | 0o055)
    directory = RunDirectory.create(tmp_path / "runs", "train")
    directory.record(state="running")
    for command in (["ls", str(directory.root)], ["cat", str(directory.root / "run.json")]):
        code, said = attempt(as_nobody(*command))
        assert code != 0 and "denied" in said.lower()


@needs_root
@pytest.mark.parametrize("trap", ["owned", "writable", "link"])
def test_a_run_directory_that_others_could_swap_is_refused(tmp_path: Path, trap: str) -> None:
    place = tmp_path / "place"
    if trap == "link":
        (tmp_path / "goal").mkdir()
        place.symlink_to(tmp_path / "goal")
        os.lchown(place, NOBODY, NOBODY)
    else:
        place.mkdir()
        place.chmod(0o777 if trap == "writable" else 0o755)
        os.chown(place, NOBODY if trap == "owned" else 0, 0)
    words = "can be changed by every user" if trap == "writable" else f"belongs to user {NOBODY}"
    for parent in (place, place / "runs"):
        with pytest.raises(ConfigError, match=words):
            RunDirectory.create(parent, "train")
    place.chmod(0o1777) if trap == "writable" else os.lchown(place, 0, 0)
    assert RunDirectory.create(place, "train").root.exists(), "sticky, or one's own, will do"


@needs_root
@pytest.mark.parametrize("way", ["link", "links", "dots"])
def test_what_lies_behind_a_link_is_looked_at_as_well(tmp_path: Path, way: str) -> None:
    # The link is one's own and leads to a folder of one's own, which everybody can replace.
    shared, home = tmp_path / "shared", tmp_path / "home"
    (shared / "mine" / "deep").mkdir(parents=True)
    shared.chmod(0o777)
    home.mkdir()
    (home / "first").symlink_to(shared / "mine" / "deep")
    (home / "link").symlink_to("first" if way == "links" else shared / "mine" / "deep")
    place = home / "link" / ".." / "runs" if way == "dots" else home / "link"
    with pytest.raises(ConfigError, match=f"{shared} can be changed by every user"):
        RunDirectory.create(place, "train")
    shared.chmod(0o755)
    assert RunDirectory.create(place, "train").root.exists()


@needs_root
def test_nothing_is_made_where_a_link_of_others_leads(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    os.lchown(tmp_path / "link", NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=f"belongs to user {NOBODY}"):
        RunDirectory.create(tmp_path / "link" / "new" / "runs", "train")
    assert not list((tmp_path / "precious").iterdir())


def test_a_link_to_itself_is_said(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match="cannot create a run directory"):
        RunDirectory.create(tmp_path / "loop", "train")


@needs_root
def test_who_owns_the_working_directory_may_own_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A container runs as root in a project of its user, who could change the script as well.
    os.chown(tmp_path, NOBODY, NOBODY)
    monkeypatch.chdir(tmp_path)
    assert RunDirectory.create("runs", "train").root.exists()


def test_a_link_in_the_place_of_a_new_file_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    (tmp_path / "link").symlink_to(precious)
    with pytest.raises(FileExistsError):
        open_private(tmp_path / "link")
    assert precious.read_text() == "keep me"


@pytest.mark.parametrize("what", ["link", "pipe", "second name"])
def test_a_trace_is_not_written_into_what_lies_there(tmp_path: Path, what: str) -> None:
    # `trace.start`, or PHALANX_TRACE_DIR under another launcher, in a folder that others can write to.
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    place = tmp_path / "shared" / "trace-rank00000.jsonl"
    place.parent.mkdir()
    {"link": place.symlink_to, "second name": place.hardlink_to, "pipe": lambda goal: os.mkfifo(place)}[what](precious)
    trace.start(place.parent, rank=0, world=1)
    trace.stop()
    assert precious.read_text() == "keep me" and '"phalanx_trace"' in place.read_text()
    assert stat.S_IMODE(place.stat().st_mode) == 0o600


TALKATIVE = """
for number in range(2000):
    print(f"line {number} " + "x" * 100, flush=True)
print("the last line", flush=True)
if "fail" in sys.argv:
    raise ValueError("seven")
"""


@needs_root
@pytest.mark.parametrize("mood", [pytest.param("well", marks=pytest.mark.thorough), "fail"])
def test_a_full_disk_is_said_once_with_the_path_and_costs_no_line_on_the_screen(tmp_path: Path, mood: str) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    mount = f'mount -t tmpfs -o size=64k,nr_inodes=100 none {runs} && exec "$@"'
    script = TALKATIVE.replace('"fail" in sys.argv', str(mood == "fail"))
    with Running(tmp_path, script, "--nproc", "2", prefix=["unshare", "--mount", "sh", "-c", mount, "sh"]) as run:
        assert run.end() == (1 if mood == "fail" else 0), run.said()
    said = run.said()
    notices = re.findall(r"phalanx: (\S+/std(?:out|err)\.log) cannot be written: No space left on device", said)
    assert len(notices) == 1 and str(runs) in notices[0], said[-2000:]
    for rank in (0, 1):
        lines = re.findall(rf"^{rank} │ (?:line (\d+) x+|(the last line))$", said, re.MULTILINE)
        assert [int(number) for number, _ in lines[:-1]] == list(range(2000)) and lines[-1][1], "every line, in order"
    if mood == "fail":
        assert re.search(r"rank \d failed first \(exit code 1\)", said) and "ValueError: seven" in said


