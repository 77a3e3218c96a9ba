"""Whatever a user gets wrong on the command line: one line, a remedy, exit code 2, no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.cli.main import main

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rnu"], "no such command 'rnu', did you mean 'run'?"),
        (["fly"], "no such command 'fly', there are run"),
        (["--fast"], "no such option --fast"),
        (["run"], "missing argument 'SCRIPT'"),
        (["run", "--nprc", "2", "a.py"], "no such option --nprc, did you mean --nproc?"),
        (["run", "missing.py"], "there is no script missing.py in"),
        (["scale", "nowhere", "3"], "there is no run in nowhere. Give the folder that phalanx run has named"),
        (["run", "missing"], "Name a module with --module"),
        (["run", "."], ". is a directory. Name the script"),
        (["run", "hidden/train.py"], "hidden/torch.py hides the package torch"),
        (["run", "hidden/torch.py"], "hidden/torch.py hides the package torch"),
        (["run", "--module", "no_such_module"], "no module 'no_such_module' can be imported"),
        (["run", "--module", "..."], "no module '...' can be imported"),
        (["run", "--module", "fine.py"], "Leave --module out to run a file"),
        (["run", "--module", "json.decodre"], "no module 'json.decodre' can be imported"),
        (["run", "--nproc", "many", "a.py"], "--nproc should be a number of workers or 'auto', got 'many'"),
        (["run", "--nproc", "²", "a.py"], "--nproc should be a number of workers"),
        (["run", "--nnodes", "²", "a.py"], "--nnodes should be a number of hosts"),
        (["run", "--nnodes", "2", "--endpoint", "head:²", "a.py"], "--endpoint should be HOST:PORT"),
        (["run", "--nproc", "0", "a.py"], "--nproc should be a number of workers"),
        (["run", "--nproc", "-1", "a.py"], "--nproc should be a number of workers"),
        (["run", "--nnodes", "4:2", "a.py"], "at least 4 and at most 2 hosts"),
        (["run", "--nnodes", "1:2:3", "a.py"], "--nnodes should be a number of hosts or MIN:MAX"),
        (["run", "--nnodes", "2", "a.py"], "2 hosts need a meeting point. Pass the same --endpoint"),
        (["run", "--nnodes", "2", "--endpoint", "head", "a.py"], "--endpoint should be HOST:PORT"),
        (["run", "--nnodes", "2", "--endpoint", "head:99999", "a.py"], "--endpoint should be HOST:PORT"),
        (
            ["run", "--nnodes", "2", "--endpoint", "h:1", "--node-rank", "2", "a.py"],
            "host number 2 is not in 0..1",
        ),
        (["run", "--node-rank", "one", "a.py"], "'one' is not a valid integer"),
        (["run", "--max-restarts", "-1", "a.py"], "-1 is not in the range"),
        (["run", "--run-dir", "a.py", "a.py"], "cannot create a run directory under a.py"),
        (["report"], "there is no run under runs"),
        (["top"], "there is no run under runs"),
        (["top", "empty"], "empty is no run directory"),
        (["runs", "--older-than", "3"], "Add --clean"),
        (["report", "nowhere"], "there is no run directory nowhere"),
        (["report", "a.py"], "a.py is a file"),
        (["report", "empty"], "empty holds no run"),
        (["report", "run", "--output", "no/such/folder/page.html"], "cannot write"),
        (["report", "run", "--perfetto", "empty"], "cannot write"),
        (["plan"], "missing argument 'MODULE:FUNCTION'"),
        (["plan", "a.py"], "'a.py' names no model"),
        (["plan", "a.py:build"], "a.py has no function 'build'"),
        (["plan", "missing.py:build"], "there is no file missing.py"),
        (["plan", "json:loads"], "json:loads failed: TypeError"),
        (["plan", "json:JSONDecoder"], "returned JSONDecoder, not a model"),
        (["plan", "a.py:build", "--world", "0"], "0 is not in the range"),
        (["plan", "torch.nn:Identity"], "no parameter that requires a gradient"),
        (["plan", "torch.nn:Identity", "--world", "3", "--hosts", "2"], "3 ranks cannot be spread evenly"),
        (["plan", "torch.nn:Identity", "--optimizer", "Magic"], "torch.optim has no optimizer 'Magic'"),
        (["bench"], "missing argument 'NAME'"),
        (["bench", "lunch"], "no benchmark 'lunch'; there are"),
        (["demo", "--nproc", "0"], "0 is not in the range"),
        (["demo", "--steps", "few"], "'few' is not a valid integer"),
        (["demo", "extra"], "unexpected extra argument"),
        (["doctor", "extra"], "unexpected extra argument"),
    ],
)
def test_a_mistake_is_one_line_with_a_remedy_and_exit_code_2(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("if __name__ == '__main__': print('ran')")
    (tmp_path / "fine.py").write_text("print('ran')")
    (tmp_path / "empty").mkdir()
    (tmp_path / "hidden").mkdir()
    for name in ("train.py", "torch.py"):
        (tmp_path / "hidden" / name).write_text("print('ran')")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"state": "finished"}')
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert words.lower() in said.err.lower()
    assert said.err.startswith("error: ") and said.err.count("\n") == 1
    assert "ran" not in said.out and "Traceback" not in said.err


@pytest.mark.thorough
def test_an_option_of_ours_after_the_scripts_name_is_said_to_be_the_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("import sys; print(sys.argv[1:])")
    for arguments, is_said in ((["--nproc=3"], True), (["--swap", "x"], True), (["--epochs", "3", "--trace"], False)):
        with pytest.raises(SystemExit) as ended:
            main(["run", "--nproc", "1", "a.py", *arguments])
        assert ended.value.code == 0
        assert ("stands after the script's name" in capsys.readouterr().err) == is_said


def test_help_lists_every_command_with_its_purpose(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(f"\n  {name} " in said for name in ("run", "demo", "doctor", "report", "plan", "bench"))


@pytest.mark.parametrize("name", ["run", "demo", "doctor", "report", "plan", "bench"])
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"Usage: phalanx {name}" in capsys.readouterr().out
