"""A checkpoint made by an enemy, with hashes that are right: refused in words, and nothing waits or grows by it."""

from __future__ import annotations

import json
import os
import signal
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from phalanx import Checkpointer
from phalanx.checkpoint import source
from phalanx.checkpoint.safetensors import read_safetensors
from phalanx.checkpoint.source import read_torch_file
from phalanx.checkpoint.storage import disk, library
from phalanx.checkpoint.storage.manifest import digest
from phalanx.checkpoint.tree import decode
from phalanx.cli.checkpoints import command
from phalanx.errors import ConfigError, StateError

pytestmark = pytest.mark.timeout(60)

Forgery = Callable[[dict[str, Any]], Any]


def trained() -> tuple[nn.Linear, torch.optim.Adam]:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Checkpointer(tmp_path, *trained()) as checkpointer:
        checkpointer.save(1)
    return tmp_path


def forge(folder: Path, change: Forgery) -> None:
    """Change the manifest, and make all hashes fit."""
    (save,) = folder.glob("step-1.*")
    manifest = json.loads((save / "rank-0.json").read_text())
    change(manifest)
    text = json.dumps(manifest).encode()
    (save / "rank-0.json").write_bytes(text)
    commit = json.loads((save / "COMMITTED").read_bytes().splitlines()[0])
    commit |= {"manifests": [[len(text), digest(text)]], "about": manifest["about"]}
    body = json.dumps(commit).encode() + b"\n"
    (save / "COMMITTED").write_bytes(body + digest(body).encode() + b"\n")


def _state(manifest: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = manifest["texts"]["optimizer"]["states"]["weight"]["dict"]
    return found


FORGERIES: dict[str, Forgery] = {
    "strides beyond the tensor": lambda m: m["tensors"]["model/weight"].__setitem__(3, [1000, 1]),
    "another name of nothing": lambda m: m["texts"]["model"].__setitem__("aliases", {"x": "nowhere"}),
    "no texts": lambda m: m["texts"].__setitem__("model", None),
    "a tensor of elsewhere": lambda m: m["texts"]["model"].__setitem__("extra", {"@tensor": "../../etc/passwd"}),
    "a window of less than nothing": lambda m: m["texts"]["model"].__setitem__("extra", {"a": {"@window": [-1, []]}}),
    "a void of a terabyte": lambda m: m["texts"]["model"].__setitem__("extra", {"a": {"@scalar": ["V1", 1 << 40]}}),
    "a dtype that is a function": lambda m: _state(m)["step"].__setitem__("dtype", "load"),
    "a number that is none": lambda m: _state(m)["step"].__setitem__("value", "x"),
    "one place many times": lambda m: m["extents"].extend(100 * m["extents"]),
    "one tensor of a state at several places": lambda m: _state(m).__setitem__("more", _state(m)["exp_avg"]),
    "a step without end": lambda m: m["about"].__setitem__("step", float("inf")),
    "so many bytes that no time is long enough": lambda m: m["about"].__setitem__("total_bytes", 1e300),
    "fewer bytes than none": lambda m: m["about"].__setitem__("total_bytes", -1),
}


@pytest.mark.filterwarnings("ignore:.*Passed over for an older one")
@pytest.mark.parametrize("kind", FORGERIES)
def test_a_forged_checkpoint_is_refused_in_words(folder: Path, kind: str) -> None:
    forge(folder, FORGERIES[kind])
    with Checkpointer(folder, *trained()) as checkpointer, pytest.raises(StateError):
        checkpointer.restore()
    with pytest.raises((StateError, ConfigError)):
        arguments = [str(folder), "export", "torch", str(folder / "out.pt")]
        CliRunner().invoke(command, arguments, catch_exceptions=False, standalone_mode=False)


UNFIT: dict[str, Forgery] = {
    "options a number": lambda m: m["texts"]["optimizer"]["groups"][0].__setitem__("options", 3),
    "no options": lambda m: m["texts"]["optimizer"]["groups"][0].__delitem__("options"),
    "a state of nothing": lambda m: m["texts"]["optimizer"]["states"].__setitem__("bias", {}),
    "a part of nothing": lambda m: _state(m).__setitem__("exp_avg", {}),
    "a part that is a list": lambda m: _state(m).__setitem__("exp_avg", [1]),
    "a number without a value": lambda m: _state(m)["step"].__delitem__("value"),
    "a dtype that is none": lambda m: _state(m)["step"].__setitem__("dtype", 3),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_a_forged_state_is_refused_before_the_model_is_loaded(folder: Path, kind: str) -> None:
    forge(folder, UNFIT[kind])
    model, optimizer = trained()
    before = [param.detach().clone() for param in model.parameters()]
    with Checkpointer(folder, model, optimizer) as checkpointer, pytest.raises(StateError):
        checkpointer.restore()
    assert all(map(torch.equal, model.parameters(), before))


RANDOM: dict[str, Forgery] = {
    "text": lambda m: m["texts"].__setitem__("random", "x"),
    "without Python's": lambda m: m["texts"]["random"].__delitem__("python"),
    "Python's a number": lambda m: m["texts"]["random"].__setitem__("python", 3),
    "numpy's a list": lambda m: m["texts"]["random"].__setitem__("numpy", []),
    "torch's a text": lambda m: m["texts"]["random"].__setitem__("torch", "x"),
    "devices a number": lambda m: m["texts"]["random"].__setitem__("devices", 3),
}


@pytest.mark.parametrize("kind", RANDOM)
def test_forged_random_numbers_are_refused_before_anything_is_loaded(folder: Path, kind: str) -> None:
    forge(folder, RANDOM[kind])
    model, optimizer = trained()
    before = [param.detach().clone() for param in model.parameters()]
    with Checkpointer(folder, model, optimizer) as checkpointer, pytest.raises(StateError, match="random"):
        checkpointer.restore()
    assert all(map(torch.equal, model.parameters(), before))


@pytest.fixture
def ends_soon() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("read", [read_safetensors, read_torch_file])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path, read: Callable[[str], Any], ends_soon: None) -> None:
    os.mkfifo(tmp_path / "model")
    with pytest.raises(StateError, match="not a plain file"):
        read(str(tmp_path / "model"))


@pytest.mark.parametrize("name", ["COMMITTED", "rank-0.json"])
def test_a_text_that_is_all_holes_is_not_read_into_memory(folder: Path, name: str) -> None:
    (save,) = folder.glob("step-1.*")
    size = (save / name).stat().st_size
    os.truncate(save / name, 1 << 29)
    said = CliRunner().invoke(command, [str(folder), "verify"], standalone_mode=False).output
    assert "more than 256 MiB" in said and "1 problem" in said
    os.truncate(save / name, size)
    assert "whole" in CliRunner().invoke(command, [str(folder), "verify"], standalone_mode=False).output


def test_a_text_that_could_not_be_read_again_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "LONGEST_BYTES", 8)
    with pytest.raises(OSError, match="it has more than"):
        disk.Disk().publish(str(tmp_path), "rank-0.json", bytes(9), "0")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["packed", "repeated"])
def test_a_small_file_that_would_fill_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(source, "_ALWAYS_FITS_BYTES", 1 << 16)
    path, values = tmp_path / "model.pt", torch.zeros(1 << 20)
    torch.save({"weight": values.clone() if kind == "packed" else values[:1].clone().expand(1 << 20)}, path)
    if kind == "packed":
        with zipfile.ZipFile(path) as archive:
            parts = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, part in parts.items():
                archive.writestr(name, part)
    what = "files in it" if kind == "packed" else "tensors"  # before anything is unpacked
    with pytest.raises(StateError, match=f"the {what} would take .* bytes, of a file of {path.stat().st_size}"):
        read_torch_file(str(path))
    torch.save({"weight": values, "tied": values}, path)
    assert read_torch_file(str(path)).whole("model/tied").shape == values.shape


def test_names_that_would_fill_the_memory_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_ALWAYS_FITS_BYTES", 1 << 10)
    forge(folder, lambda m: m["texts"]["model"].__setitem__("aliases", {f"x{n}": "weight" for n in range(100)}))
    with pytest.raises(StateError, match="100 further names"):
        shown(folder, "export", "torch", str(folder / "out.pt"))


def test_one_tensor_is_not_copied_for_every_place_in_a_text(folder: Path) -> None:
    (entry,) = library.entries(disk.Disk(), str(folder))
    saved = source.CheckpointSource(disk.Disk(), entry)
    saved.infos["model_extra/x"] = saved.infos["model/bias"]
    saved._held["model_extra/x"] = saved._held["model/bias"]
    saved.texts[0]["model"]["extra"] = {"a": {"@tensor": "x"}}
    assert saved.model_extra()["a"].shape == (3,)
    saved.texts[0]["model"]["extra"]["b"] = {"@tensor": "x"}
    with pytest.raises(StateError, match="'x' at several places"):
        saved.model_extra()


def test_numbers_of_numpy_come_back() -> None:
    assert decode({"@scalar": ["<f4", 1.5]}, lambda path: torch.empty(0)).dtype.str == "<f4"


def test_what_is_exported_takes_no_place_of_a_device(folder: Path) -> None:
    # Root who puts a file in the place of /dev/null takes it from everybody.
    (folder / "null").symlink_to("/dev/null")
    shown(folder, "export", "safetensors", str(folder / "null"))
    assert (folder / "null").is_symlink() and Path("/dev/null").is_char_device()


def shown(folder: Path, *more: str) -> str:
    return CliRunner().invoke(command, [str(folder), *more], catch_exceptions=False, standalone_mode=False).output


@pytest.mark.parametrize("name", ["[/red]", "[link=a]x[/link]", ":bomb:"])
def test_the_name_of_a_metric_is_shown_and_not_obeyed(folder: Path, name: str) -> None:
    forge(folder, lambda m: m["about"].__setitem__("metrics", {name: 1.0}))
    assert f"{name} " in shown(folder)


def test_a_number_that_no_float_can_hold_is_damage(folder: Path) -> None:
    forge(folder, lambda m: m["about"].__setitem__("metrics", {"loss": 10**400}))
    assert "damaged" in shown(folder) and "1 problem" in shown(folder, "verify")


def test_a_folder_is_known_by_one_name_only(folder: Path) -> None:
    (folder / "step-\N{ARABIC-INDIC DIGIT ONE}.000001.00000000").mkdir()
    assert shown(folder, "delete") == "" and len(shown(folder).splitlines()) == 2


@pytest.mark.parametrize("read", [read_safetensors, read_torch_file, disk.Disk().read])
def test_what_was_a_file_a_moment_ago_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[str], Any], ends_soon: None
) -> None:
    os.mkfifo(tmp_path / "model")
    monkeypatch.setattr(os.path, "isfile", lambda path: True)  # as whoever swaps it lets us see it
    with pytest.raises((StateError, OSError), match="not a plain file"):
        read(str(tmp_path / "model"))
