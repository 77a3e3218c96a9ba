"""A run folder made by an enemy: `phalanx report` shows what it says and does nothing that it asks for."""

from __future__ import annotations

import json
import os
import stat
import tracemalloc
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from phalanx.cli.main import cli
from phalanx.compile.stitch import CUTS
from phalanx.errors import StateError
from phalanx.observe import perfetto, report, trace
from phalanx.observe.figures.findings import findings
from phalanx.observe.figures.timeline import MOST_PIECES, timeline
from phalanx.observe.run import load
from phalanx.observe.stats import bucket_times, passes
from tests.observe.synthetic import MS, plan, training_events, write_trace
from tests.security.intruder import NOBODY, needs_root

pytestmark = pytest.mark.timeout(120)

ATTACKS = [
    "</script><script>window.taken=1</script>",
    "<img src=x onerror=window.taken=1>",
    "\"><svg onload='window.taken=1'>",
    "' onmouseover='window.taken=1",
    "{{ 7 * 7 }}{% include '/etc/passwd' %}",
    "<!--<script>",
]


class Elements(HTMLParser):
    """What a browser would make of a page: how many of each element, and every attribute that runs something."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.active: list[tuple[str, str, str | None]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] += 1
        for name, value in attrs:
            if name.startswith("on") or (value or "").strip().lower().startswith("javascript:"):
                self.active.append((tag, name, value))


def make_run(folder: Path, text: str) -> Path:
    """A run in which every text that its maker can choose is `text`."""
    events: list[list[Any]] = training_events(0, 3)
    events += [
        ["span", text, 1 * MS, 2 * MS, 1, {"bucket": text, "note": text}],
        ["instant", trace.WARNING, 1 * MS, 1, {"text": text}],
        ["instant", trace.FAILURE, 1 * MS, 1, {"text": text, "traceback": text}],
        ["scalar", text, 1 * MS, 0, 1.0],
        ["scalar", text, 2 * MS, 1, 2.0],
        ["fact", "plan", 1 * MS, json.loads(json.dumps(plan().to_json()).replace("head.weight", "NAME"))],
        ["fact", trace.MEMORY, 1 * MS, {text: 5, "state": 7}],
        ["fact", text, 1 * MS, text],
    ]
    piece = {"graph": text, "piece": 0, "buckets": [0], "params": [text], "num_operators": text, "num_bytes": 1}
    piece |= {"error": text, "reason": text}
    events.append(["fact", CUTS, 1 * MS, {"plan": text, "num_buckets": text, "pieces": [piece, piece]}])
    write_trace(folder, 0, 1, json.loads(json.dumps(events).replace("NAME", json.dumps(text)[1:-1])), host=text, boot=text)
    end = dict.fromkeys(("rank", "how", "message", "traceback", "hint", "doing"), text)
    facts: dict[str, Any] = dict.fromkeys(("title", "shown", "state", "nproc", "started"), text)
    facts |= {"command": [text], "failure": {**end, "others": [end]}}
    (folder / "run.json").write_text(json.dumps(facts))
    return folder


@pytest.mark.parametrize("text", ATTACKS)
def test_what_a_trace_says_is_shown_and_never_part_of_the_page(tmp_path: Path, text: str) -> None:
    harmless = Elements(report.render(load(make_run(tmp_path / "harmless", "no <harm> done"))))
    page = report.render(load(make_run(tmp_path / "enemy", text)))
    found = Elements(page)
    assert found.counts == harmless.counts and found.active == harmless.active
    assert "root:x:0" not in page


def test_a_world_that_fits_in_no_memory_is_told_of(tmp_path: Path) -> None:
    # It would fit in this one; what is kept of it must not grow with it.
    world = 1 << 20
    for rank in (0, 3):
        write_trace(tmp_path, rank, world, training_events(rank, 3))
    run = load(tmp_path)
    tracemalloc.start()
    try:
        said = [str(finding.text) for finding in findings(run)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert any(text.startswith(f"No trace of rank 1, 2, 4, 5, 6, 7, 8, 9 … of {world}") for text in said)
    assert peak < 4 * world


def _with_value(folder: Path, value: int) -> None:
    write_trace(folder, 0, 1, [*training_events(0, 3), ["scalar", "loss", 1 * MS, 1, value]])


def _with_other(folder: Path, other: str) -> None:
    make_run(folder, "harmless")
    facts = json.loads((folder / "run.json").read_text())
    facts["failure"]["others"] = [other]
    (folder / "run.json").write_text(json.dumps(facts))


@pytest.mark.parametrize(("make", "said"), [(_with_value, 10**400), (_with_other, "7")], ids=["value", "other"])
def test_what_no_run_says_is_refused_in_words(tmp_path: Path, make: Callable[[Path, Any], None], said: Any) -> None:
    make(tmp_path, said)
    with pytest.raises(StateError, match="is malformed"):
        CliRunner().invoke(cli, ["report", str(tmp_path)], standalone_mode=False, catch_exceptions=False)


@pytest.mark.parametrize("make", [report.write, perfetto.export])
def test_nothing_is_written_through_a_link_that_came_with_the_run(tmp_path: Path, make: Callable[..., Path]) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    folder = make_run(tmp_path / "run", "harmless")
    (folder / "made").symlink_to(precious)
    written = make(load(folder), folder / "made")
    assert precious.read_text() == "keep me" and not written.is_symlink() and "harmless" in written.read_text()
    assert written.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("make", [report.write, perfetto.export])
def test_what_a_link_of_ones_own_leads_to_is_written_to(tmp_path: Path, make: Callable[..., Path]) -> None:
    # As /dev/stdout, and /dev/null in whose place root could put a file.
    run = load(make_run(tmp_path / "run", "harmless"))
    goal, link = tmp_path / "goal", tmp_path / "link"
    link.symlink_to(goal)
    assert make(run, link).is_symlink() and "harmless" in goal.read_text()
    link.unlink()
    link.symlink_to("/dev/null")
    assert make(run, link).is_symlink() and Path("/dev/null").is_char_device()


@needs_root
def test_a_device_stays_one(tmp_path: Path) -> None:
    run = load(make_run(tmp_path / "run", "harmless"))
    os.mknod(tmp_path / "null", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    assert report.write(run, tmp_path / "null").is_char_device()


@needs_root
def test_a_link_of_another_user_is_not_followed(tmp_path: Path) -> None:
    run = load(make_run(tmp_path / "run", "harmless"))
    (tmp_path / "link").symlink_to(tmp_path / "goal")
    os.lchown(tmp_path / "link", NOBODY, NOBODY)
    assert not report.write(run, tmp_path / "link").is_symlink() and not (tmp_path / "goal").exists()


def test_an_exported_trace_is_plain_json(tmp_path: Path) -> None:
    out = perfetto.export(load(make_run(tmp_path / "enemy", ATTACKS[0])), tmp_path / "trace.json")
    assert json.loads(Path(out).read_text())


def test_a_page_tells_the_owner_of_the_folder_nothing_of_ours(tmp_path: Path) -> None:
    private = tmp_path / "private" / "rank-00000"
    private.mkdir(parents=True)
    (private / "stdout.log").write_text("my password")
    folder = tmp_path / "run"
    (folder / "attempt-0").mkdir(parents=True)
    (folder / "run.json").write_text('{"state": "failed"}')
    (folder / "attempt-0" / "rank-00000").symlink_to(private)
    own = folder / "attempt-0" / "rank-00001"
    own.mkdir()
    (own / "stdout.log").write_text("harmless")
    (own / "stderr.log").mkdir()
    page = report.write(load(folder), folder / "report.html")
    assert "harmless" in page.read_text() and "my password" not in page.read_text()
    # Links to records and traces of ours are followed: so nobody else may read the page where they can.
    assert page.stat().st_mode & 0o777 == 0o600


CROSSED: dict[str, tuple[str, str]] = {"collectives": ("reduce", "forward"), "backwards": ("backward", "waiting")}


@pytest.mark.parametrize("kind", CROSSED)
def test_spans_that_all_lie_across_each_other_neither_take_for_ever_nor_fill_the_memory(tmp_path: Path, kind: str) -> None:
    # By pairs, these were tens of millions of pieces, each a bar on the page.
    long, short = CROSSED[kind]
    events: list[list[Any]] = training_events(0, 1)
    events += [["span", long, MS + at, 9 * MS - at, 1, {"bucket": 0, "bytes": 4}] for at in range(5_000)]
    events += [["span", short, 2 * MS + 4 * at, 2 * MS + 4 * at + 2, 1, {}] for at in range(5_000)]
    write_trace(tmp_path, 0, 1, events)
    run = load(tmp_path)
    assert bucket_times(run) and len(passes(run.ranks[0])) >= 1 and perfetto.events(run)
    drawn = [len(rank["communication"]) for one in timeline(run)["passes"] for rank in one["ranks"]]
    assert max(drawn) <= 2 * MOST_PIECES
