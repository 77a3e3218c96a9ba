"""From and to torch.save, torch.distributed.checkpoint and safetensors; and the command that does it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner, Result
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from phalanx import Checkpointer
from phalanx.cli.checkpoints import command
from phalanx.errors import ConfigError, StateError
from tests.checkpoint.runs import Run, differing
from tests.cluster import run_ranks

pytestmark = pytest.mark.timeout(60)


class Tied(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(20, 8)
        self.conv = nn.Conv2d(1, 3, 2).to(memory_format=torch.channels_last)
        self.out = nn.Linear(8, 20, bias=False)
        self.out.weight = self.embed.weight
        self.narrow = nn.Parameter(torch.rand(5, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        square = self.conv(self.embed(x).view(-1, 1, 2, 4)).mean((1, 2, 3))
        return self.out(self.embed(x)).sum((1, 2)[:1]) + square.sum() + self.narrow.float().sum()


def trained(seed: int = 0, steps: int = 3) -> tuple[Tied, torch.optim.Optimizer]:
    model = Tied(seed)
    rest = [*model.conv.parameters(), model.narrow]
    optimizer = torch.optim.Adam([{"params": [model.embed.weight], "lr": 0.5}, {"params": rest}])
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.tensor([1, 5, 7])).square().mean().backward()
        optimizer.step()
    return model, optimizer


def call(*arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments), catch_exceptions=False, standalone_mode=False)


def same_optimizer(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for index, state in mine["state"].items():
        for key, value in state.items():
            assert torch.equal(value, theirs["state"][index][key]), (index, key)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    model, optimizer = trained()
    with Checkpointer(tmp_path / "ours", model, optimizer) as checkpointer:
        checkpointer.save(3, {"loss": 0.5})
    return str(tmp_path / "ours")


def test_a_file_of_torch_save_is_restored(tmp_path: Path) -> None:
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}, tmp_path / "both.pt")
    torch.save({f"module.{key}": value for key, value in model.state_dict().items()}, tmp_path / "wrapped.pt")
    again, fresh = trained(1, steps=1)
    with Checkpointer(tmp_path, again, fresh) as checkpointer:
        restored = checkpointer.restore(source=tmp_path / "both.pt")
    assert restored is not None and restored.step == 3
    assert differing(dict(model.state_dict()), dict(again.state_dict())) == []
    same_optimizer(optimizer, fresh)
    third = Tied(2)
    with Checkpointer(tmp_path, third) as checkpointer:
        checkpointer.restore(source=tmp_path / "wrapped.pt")
        with pytest.raises(StateError, match="cannot be read as a file of torch"):
            checkpointer.restore(source=__file__)
    assert differing(dict(model.state_dict()), dict(third.state_dict())) == []


@pytest.mark.parametrize("form", ["dcp", "torch"])
def test_there_and_back(folder: str, tmp_path: Path, form: str) -> None:
    outside = str(tmp_path / "outside")
    assert call(folder, "export", form, outside).return_value == 0
    assert call(str(tmp_path / "back"), "import", form, outside).return_value == 0
    model, optimizer = trained()
    again, fresh = trained(1, steps=1)
    with Checkpointer(tmp_path / "back", again, fresh) as checkpointer:
        restored = checkpointer.restore(parts=["model", "optimizer"])
    assert restored is not None and restored.step == 3
    assert differing(dict(model.state_dict()), dict(again.state_dict())) == []
    same_optimizer(optimizer, fresh)


@pytest.mark.parametrize("form", ["dcp", "torch"])
def test_several_optimizers_there_and_back(tmp_path: Path, form: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def optimizers() -> dict[str, torch.optim.Optimizer]:
        return {str(n): torch.optim.Adam(layer.parameters(), lr=0.1 * (n + 1)) for n, layer in enumerate(model)}

    before, after = optimizers(), optimizers()
    model(torch.ones(2, 3)).sum().backward()
    for one in before.values():
        one.step()
    with Checkpointer(tmp_path / "ours", model, before) as checkpointer:
        checkpointer.save(3)
    assert call(str(tmp_path / "ours"), "export", form, str(tmp_path / "outside")).return_value == 0
    assert call(str(tmp_path / "back"), "import", form, str(tmp_path / "outside")).return_value == 0
    with Checkpointer(tmp_path / "back", model, after) as checkpointer:
        checkpointer.restore(parts=["model", "optimizer"])
    for name in before:
        same_optimizer(before[name], after[name])


def test_torchs_own_functions_read_what_is_exported(folder: str, tmp_path: Path) -> None:
    call(folder, "export", "dcp", str(tmp_path / "dcp"))
    model, optimizer = trained()
    again, fresh = trained(1, steps=1)
    weights, states = get_state_dict(again, fresh)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    set_state_dict(again, fresh, model_state_dict=weights, optim_state_dict=states)
    assert differing(dict(model.state_dict()), dict(again.state_dict())) == []
    for mine, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(optimizer.state[mine]["exp_avg"], fresh.state[theirs]["exp_avg"])
    loaded = tmp_path / "file.pt"
    call(folder, "export", "torch", str(loaded))
    state = torch.load(loaded, weights_only=True)
    third, other = trained(2, steps=0)
    third.load_state_dict(state["model"])
    other.load_state_dict(state["optimizer"])
    same_optimizer(optimizer, other)


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """As the format's description has it."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16}
    found = {}
    for name, told in header.items():
        if name != "__metadata__":
            begin, end = told["data_offsets"]
            values = torch.frombuffer(bytearray(data[8 + size + begin : 8 + size + end]), dtype=dtypes[told["dtype"]])
            found[name] = values.view(told["shape"])
    return found


def test_safetensors(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    assert call(folder, "export", "safetensors", str(path)).return_value == 0
    expected: dict[str, Any] = dict(trained()[0].state_dict())
    del expected["out.weight"]  # shared with embed.weight
    assert differing(expected, read_safetensors(path)) == []
    # And back: the memory that two names share has one of them in the file.
    assert call(str(tmp_path / "back"), "import", "safetensors", str(path)).return_value == 0
    for source in (None, path):
        again = Tied(1)
        with Checkpointer(tmp_path / "back", again) as checkpointer:
            restored = checkpointer.restore(source=source)
        assert restored is not None and restored.step == 3
        assert differing(dict(trained()[0].state_dict()), dict(again.state_dict())) == []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:5], "truncated"),
        (lambda data: data[:40], "truncated"),
        (lambda data: data[:-1], "does not fit"),
        (lambda data: (2**62).to_bytes(8, "little") + data[8:], "truncated"),
        (lambda data: data[:8] + b"[" + data[9:], "damaged"),
        (lambda data: data.replace(b"F32", b"X32"), "X32"),
        (lambda data: data.replace(b'"shape":[20,8]', b'"shape":[2,-8]'), "does not fit"),
        # The same bytes for two tensors; a shape beyond all numbers, for no bytes at all.
        (lambda data: _with_entry(data, "U8", [640], [0, 640]), "some overlap"),
        (lambda data: _with_entry(data, "F32", [0, 2**70], [0, 0]), "no tensor can have"),
        (lambda data: _with_entry(data, "F32", [0, 2**62, 8], [0, 0]), "no tensor can have"),
    ],
)
def test_a_damaged_file_of_safetensors_is_refused(folder: str, tmp_path: Path, damage: Any, message: str) -> None:
    path = tmp_path / "model.safetensors"
    call(folder, "export", "safetensors", str(path))
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert path.read_bytes() != whole
    model = Tied(1)
    with Checkpointer(tmp_path, model) as checkpointer, pytest.raises(StateError, match=message):
        checkpointer.restore(source=path)
    assert differing(dict(Tied(1).state_dict()), dict(model.state_dict())) == []


def _with_entry(data: bytes, dtype: str, shape: list[int], offsets: list[int]) -> bytes:
    length = int.from_bytes(data[:8], "little")
    more = {"more": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}
    header = json.dumps(json.loads(data[8 : 8 + length]) | more).encode()
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


@pytest.mark.parametrize(
    "loaded",
    [
        {0: torch.ones(2)},
        {"model": {}, "optimizer": {"state": "x", "param_groups": "y"}},
        {"model": {}, "optimizer": {"state": {}, "param_groups": [{"lr": 1}]}},
        {"model": {}, "optimizer": {"state": {0: 5}, "param_groups": [{"params": [0]}]}},
    ],
)
def test_a_file_of_torch_with_something_else_in_it_is_named(tmp_path: Path, loaded: Any) -> None:
    torch.save(loaded, tmp_path / "odd.pt")
    with Checkpointer(tmp_path, nn.Linear(1, 1)) as checkpointer:
        with pytest.raises(StateError, match=r"odd\.pt is no state of a model, or of a model and its optimizer"):
            checkpointer.restore(source=tmp_path / "odd.pt")


def saved_divided(rank: int, world: int, folder: str) -> dict[str, torch.Tensor]:
    run = Run(rank, world)
    run.train(3)
    with run.checkpointer(folder) as checkpointer:
        checkpointer.save(3)
    run.optimizer.consolidate_state_dict(0)
    return run.optimizer.state_dict() if rank == 0 else {}


def test_a_divided_state_is_exported_whole(tmp_path: Path) -> None:
    expected = run_ranks(3, saved_divided, str(tmp_path / "ours"))[0]
    call(str(tmp_path / "ours"), "export", "torch", str(tmp_path / "whole.pt"))
    found = torch.load(tmp_path / "whole.pt", weights_only=True)["optimizer"]
    for index, state in expected["state"].items():
        for key, value in state.items():
            assert torch.equal(value, found["state"][index][key]), (index, key)


# -- the command -----------------------------------------------------------------------------------


def test_list_verify_compare_delete(folder: str) -> None:
    model, optimizer = trained(steps=4)
    with Checkpointer(folder, model, optimizer) as checkpointer:
        for step in (4, 5):
            checkpointer.save(step, {"loss": float(step)})
    listed = call(folder)
    assert listed.return_value == 0 and "loss 0.5" in listed.stdout and "step-5.000003" in listed.stdout.replace("\n", "")
    assert call(folder, "verify").return_value == 0
    assert call(folder, "compare", "4", "5").return_value == 0
    differs = call(folder, "compare", "3", "4")
    assert differs.return_value == 1 and "parameter 'embed.weight': other values" in differs.stdout
    would = call(folder, "delete", "--best", "loss", "--dry-run")
    assert "would delete step-4" in would.stdout and "step-3" not in would.stdout
    assert call(folder, "delete", "--best", "loss").return_value == 0
    assert "step-4" not in call(folder).stdout
    damaged = next(Path(folder).glob("step-5.*")) / "rank-0.bin"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    verified = call(folder, "verify")
    assert verified.return_value == 1 and "truncated at" in verified.stdout
    assert "the newest good checkpoint is that of step 3" in verified.output
    with pytest.raises(ConfigError, match="not whole"):
        call(folder, "export", "torch", "/nowhere")
    with pytest.raises(ConfigError, match="nothing was deleted"):
        call(folder, "delete")
    assert "step-3" in call(folder).stdout
    with pytest.raises(ConfigError, match="no checkpoint of step 77"):
        call(folder, "verify", "--step", "77")


def test_an_empty_folder_is_said_to_be_empty(tmp_path: Path) -> None:
    assert call(str(tmp_path)).return_value == 1
