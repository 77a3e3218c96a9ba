"""What becomes of a caller's tensors when the turn of their call comes, and after it."""

from __future__ import annotations

import torch

from phalanx.comm.shm.transport.call import Call, Verb, gather_call, scatter_call


def test_contiguous_tensors_are_worked_on_where_they_lie() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    call = Call(Verb.ALL_REDUCE, [tensor])
    call.flatten(rank=0, world=2)
    call.outputs[0].add_(1)
    call.restore()
    assert call.outputs[0].shape == (6,) and tensor.flatten().tolist() == [1, 2, 3, 4, 5, 6]


def test_other_strides_are_copied_and_the_result_put_back() -> None:
    tensor = torch.arange(6.0).view(2, 3).t()
    call = Call(Verb.ALL_REDUCE, [tensor])
    call.flatten(rank=0, world=2)
    assert call.outputs[0].tolist() == [0, 3, 1, 4, 2, 5]
    call.outputs[0].add_(1)
    call.restore()
    assert tensor.tolist() == [[1, 4], [2, 5], [3, 6]]


def test_tensors_are_read_when_the_turn_comes_not_when_the_call_is_made() -> None:
    tensor = torch.zeros(2, 3).t()
    call = Call(Verb.ALL_REDUCE, [tensor])
    tensor.fill_(7)  # as a call queued before would
    call.flatten(rank=0, world=2)
    assert call.outputs[0].eq(7).all()


def test_a_root_that_only_gives_is_not_written_to() -> None:
    # Expanded: one element in memory, so that writing six to it is an error in torch.
    expanded = torch.ones(1).expand(6)
    for verb, rank in ((Verb.BROADCAST, 1), (Verb.REDUCE, 0)):
        call = Call(verb, [expanded], root=1)
        call.flatten(rank, world=2)
        assert call.outputs[0].tolist() == [1] * 6
        call.restore()


def test_one_tensor_stands_for_equal_parts() -> None:
    whole, part = torch.arange(6.0), torch.zeros(3)
    gather = Call(Verb.ALL_GATHER, [whole], [part])
    gather.flatten(rank=0, world=2)
    assert [piece.tolist() for piece in gather.outputs] == [[0, 1, 2], [3, 4, 5]]
    scatter = Call(Verb.REDUCE_SCATTER, [part], [whole])
    scatter.flatten(rank=0, world=2)
    assert scatter.whole is not None and scatter.whole.data_ptr() == whole.data_ptr()
    assert [piece.data_ptr() - whole.data_ptr() for piece in scatter.inputs] == [0, 12]


def test_ranks_without_a_part_in_a_gather_or_scatter_exchange_nothing() -> None:
    gather = gather_call([], torch.ones(3), root=1, world=2)
    assert [t.numel() for t in gather.inputs] == [0, 3] and [t.numel() for t in gather.outputs] == [0, 0]
    scatter = scatter_call(torch.ones(3), [], root=1, world=2)
    assert [t.numel() for t in scatter.outputs] == [0, 3] and [t.numel() for t in scatter.inputs] == [0, 0]


def test_inputs_that_outputs_would_overwrite_are_copied_and_what_stays_in_its_place_is_not() -> None:
    whole = torch.arange(6.0)
    for rank, span, is_copied in ((0, (0, 3), False), (1, (3, 6), False), (1, (0, 3), True), (0, (1, 4), True)):
        gather = Call(Verb.ALL_GATHER, [whole], [whole[slice(*span)]])
        gather.flatten(rank, world=2)
        assert (gather.inputs[0].data_ptr() != whole[span[0] :].data_ptr()) == is_copied
        scatter = Call(Verb.REDUCE_SCATTER, [whole[slice(*span)]], [whole])
        scatter.flatten(rank, world=2)
        assert (scatter.whole is None) == is_copied
    exchanged = Call(Verb.ALL_TO_ALL, [whole[:3], whole[3:]], [whole[:3], whole[3:]])
    exchanged.flatten(rank=0, world=2)
    assert [piece.data_ptr() - whole.data_ptr() for piece in exchanged.inputs] == [0, 12]
