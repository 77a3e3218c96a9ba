"""What `explain` says: the pieces, their buckets, sizes and reasons, before and after training."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from phalanx.compile import explain
from phalanx.plan import BucketCaps
from tests.cluster import run_ranks
from tests.compile import zoo
from tests.compile.training import cut, train, wrap

pytestmark = pytest.mark.timeout(60)

CAPS = BucketCaps((1500, 1500))


def explained(name: str = "mlp") -> Any:
    torch._dynamo.reset()
    return explain(zoo.make(name), zoo.batch(0, 0)[0], compiler="aot_eager", caps=CAPS)


def test_a_model_is_explained_without_training_or_a_process_group() -> None:
    explanation = explained()
    assert [piece.piece for piece in explanation.pieces] == [0, 1, 2, 3]
    assert [piece.buckets for piece in explanation.pieces] == [(3,), (2,), (1,), (0,)]
    assert explanation.pieces[0].params == ("layers.0.bias", "layers.0.weight")
    assert explanation.pieces[0].num_bytes == (16 * 16 + 16) * 4
    assert explanation.pieces[-1].params[:2] == ("head.bias", "head.weight")
    assert all(piece.compiled for piece in explanation.pieces)
    reasons = [piece.reason for piece in explanation.pieces]
    assert reasons[0] == "" and all(reason.startswith("bucket full: it holds 0.001 of 0.001 MiB") for reason in reasons[1:])
    assert explanation.uncompiled == ()


def test_explaining_changes_neither_buffers_nor_random_state() -> None:
    torch._dynamo.reset()
    model = zoo.make("cnn")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    explain(model, zoo.batch(0, 0)[0], compiler="aot_eager", caps=CAPS)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all(param.grad is None for param in model.parameters())


class Counting(torch.nn.Module):
    """Puts another tensor in its buffer's place."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(16, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return self.head(x) * self.count


def test_explaining_leaves_a_buffer_in_its_place() -> None:
    torch._dynamo.reset()
    model = Counting()
    before = model.count
    explain(model, torch.ones(2, 16), compiler="aot_eager", caps=CAPS)
    assert model.count is before and before.item() == 0


def test_the_table_has_a_line_for_each_piece_and_names_what_is_in_no_graph() -> None:
    text = str(explained("unused"))
    assert text.count("yes") == 4
    assert "in no compiled graph: spare.bias, spare.weight" in text
    for heading in ("piece", "operators", "bucket", "parameters", "MiB", "compiled", "why it is cut"):
        assert heading in text


def test_the_reason_against_a_cut_is_told() -> None:
    explanation = explained("mutating")
    (piece,) = explanation.pieces
    assert "changes in place" in piece.reason


def test_the_picture_is_svg_with_every_piece_and_escaped_names(tmp_path: Any) -> None:
    explanation = explained()
    path = explanation.save(tmp_path / "cuts.svg")
    root = ElementTree.fromstring(path.read_text())
    texts = ["".join(each.itertext()) for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert sum(", piece " in text for text in texts) == 4
    assert sum(text.startswith("bucket ") and text.endswith("MiB") for text in texts) == 4
    value = explanation.to_json()
    value["pieces"][0]["params"] = ["<b>&"]
    from phalanx.compile.picture import draw

    ElementTree.fromstring(draw(value))


def before_and_after(rank: int, world: int) -> list[Any]:
    torch._dynamo.reset()
    wrapper = wrap("gpt")
    before = explain(wrapper, zoo.batch(0, rank)[0], compiler="aot_eager")
    compiled = cut(wrapper)
    train(rank, wrapper, compiled)
    after, through = explain(wrapper), explain(compiled)
    params = [[piece.params for piece in each.pieces] for each in (before, after, through)]
    return [params, before.plan.hash, after.plan.hash, wrapper.plan.hash]


def test_what_is_foretold_for_a_wrapper_is_what_happens() -> None:
    for (before, after, through), foretold, happened, in_force in run_ranks(1, before_and_after):
        assert before == after == through
        assert foretold == happened == in_force


def test_explaining_often_leaves_room_for_the_graphs_that_train() -> None:
    """Dynamo keeps a few graphs per function, and runs without any of them what is asked for after that."""
    torch._dynamo.reset()
    model, inputs = zoo.make("mlp"), zoo.batch(0, 0)[0]
    captured = []

    def keep(graph: torch.fx.GraphModule, examples: Any) -> Any:
        captured.append(graph)
        return graph.forward

    found = {str(explain(model, inputs, compiler="aot_eager", caps=CAPS)) for _ in range(10)}
    torch.compile(model, backend=keep)(inputs)
    assert len(found) == 1 and captured
