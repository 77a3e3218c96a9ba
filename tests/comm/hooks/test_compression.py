"""Compression without any rank: arithmetic, residuals, and what survives a save."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from phalanx.comm.hooks import Int8State, PowerSGDState, TopKState
from phalanx.comm.hooks.compress.int8 import dequantise, quantise
from phalanx.comm.hooks.compress.lowrank import as_matrix, is_worth_it, orthonormal, random_factor
from phalanx.comm.hooks.compress.residual import Residuals
from phalanx.comm.hooks.compress.topk import largest, select
from phalanx.errors import ConfigError, StateError
from tests.comm.hooks.buckets import Layout, make_bucket

pytestmark = pytest.mark.timeout(60)


@given(
    st.integers(1, 5),
    st.sampled_from([4, 32, 256]),
    st.floats(-40, 38),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_int8_blocks_and_their_residual_add_up_to_what_was_there(
    num_blocks: int, size: int, exponent: float, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(num_blocks * size)
    blocks = torch.randn(num_blocks, size, generator=generator, dtype=dtype) * 10.0**exponent
    blocks.clamp_(-3e38, 3e38)
    before, largest = blocks.clone(), blocks.abs().amax(1, keepdim=True)
    after = dequantise(quantise(blocks, feedback=True), blocks.shape, dtype)
    # Half a step of the block's scale, and a scale has 24 bits.
    assert bool(((after - before).abs() <= largest / 127 * 0.5001 + 1e-38).all())
    torch.testing.assert_close(after + blocks, before, rtol=1e-6, atol=1e-45)


def test_int8_blocks_with_nan_or_infinity_arrive_as_nan_and_leave_no_residual() -> None:
    blocks = torch.randn(4, 8)
    blocks[1, 3], blocks[2, 0] = torch.nan, -torch.inf
    blocks[3] = 0.0
    after = dequantise(quantise(blocks, feedback=True), blocks.shape, torch.float32)
    assert after[0].isfinite().all() and not after[1].isfinite().any() and not after[2].isfinite().any()
    assert not after[3].any()
    assert blocks.isfinite().all() and not blocks[1:].any()


def test_top_k_sends_the_largest_and_keeps_the_rest() -> None:
    values = torch.tensor([0.1, -5.0, 3.0, 0.0, -0.2, 4.0, 1.0])
    packed = select(values, 3, torch.float32)
    assert packed[:12].view(torch.int32).tolist() == [1, 2, 5]
    assert packed[16:28].view(torch.float32).tolist() == [-5.0, 3.0, 4.0]
    assert values.tolist() == pytest.approx([0.1, 0.0, 0.0, 0.0, -0.2, 0.0, 1.0])


@pytest.mark.parametrize("kind", ["normal", "sorted", "periodic", "constant", "nan", "zeros"])
def test_top_k_of_a_long_tensor_is_exact_however_its_sample_misleads(kind: str) -> None:
    magnitudes = torch.randn(2**17, generator=torch.Generator().manual_seed(3)).abs()
    if kind == "sorted":
        magnitudes = magnitudes.sort().values
    elif kind == "periodic":
        magnitudes[::64] += 100.0
    elif kind == "constant":
        magnitudes.fill_(2.0)
    elif kind == "nan":
        magnitudes[7] = torch.nan
    elif kind == "zeros":
        magnitudes[1000:] = 0.0
    indices = largest(magnitudes, 1500)
    assert indices.unique().tolist() == indices.tolist() and indices.numel() == 1500
    expected = magnitudes.topk(1500).values
    torch.testing.assert_close(magnitudes[indices].sort(descending=True).values, expected, equal_nan=True)


def test_top_k_keeps_what_a_narrow_dtype_rounds_away_and_nothing_that_is_not_finite() -> None:
    values = torch.tensor([1.0 + 2**-12, 0.5, torch.nan, torch.nan, torch.inf])
    select(values, 2, torch.float16)
    assert values.isfinite().all()
    values = torch.tensor([1.0 + 2**-12, 0.5])
    select(values, 1, torch.float16)
    assert values.tolist() == [2**-12, 0.5]
    values = torch.tensor([1e5, 0.5, 0.25])  # finite, and not in float16
    select(values, 2, torch.float16)
    assert values.tolist() == [0.0, 0.0, 0.25]


@given(st.integers(1, 4), st.integers(1, 30), st.integers(1, 30), st.integers(0, 30))
def test_bases_are_orthonormal_and_span_the_columns_even_of_deficient_matrices(
    count: int, rows: int, columns: int, true_rank: int
) -> None:
    columns = min(rows, columns)
    generator = torch.Generator().manual_seed(rows * 31 + columns)
    factors = torch.randn(count, rows, true_rank, generator=generator)
    matrices = factors @ torch.randn(count, true_rank, columns, generator=generator)
    bases = orthonormal(matrices)
    torch.testing.assert_close(bases.mT @ bases, torch.eye(columns).expand(count, -1, -1), atol=1e-5, rtol=0)
    torch.testing.assert_close(bases @ (bases.mT @ matrices), matrices, atol=1e-3, rtol=1e-3)


def test_epsilon_damps_directions_without_support() -> None:
    matrices = torch.tensor([[[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]])
    damped = orthonormal(matrices, epsilon=1e-3)
    assert damped[0, :, 0].norm() == pytest.approx(1 / 1.001)
    assert not damped[0, :, 1].any()


def test_gradients_of_any_dense_layout_are_matrices_where_a_view_can_show_them() -> None:
    image = torch.randn(8, 6, 3, 3)
    last = image.to(memory_format=torch.channels_last)
    for gradient in (image, last, torch.randn(5, 4).t()):
        matrix = as_matrix(gradient)
        assert matrix is not None and matrix.shape == (gradient.shape[0], gradient[0].numel())
        assert matrix.data_ptr() == gradient.data_ptr()
    assert as_matrix(torch.zeros(4)) is None and as_matrix(torch.zeros(0, 4)) is None
    assert as_matrix(torch.zeros(2, 3, 4).permute(1, 0, 2)) is None


def test_small_matrices_are_not_worth_it() -> None:
    assert is_worth_it(64, 64, 1, 2) and not is_worth_it(64, 64, 16, 2) and not is_worth_it(2, 1000, 1, 2)


def test_random_factors_do_not_depend_on_the_default_device() -> None:
    first = random_factor("a", (3, 2), 0, 5)
    with torch.device("meta"):
        assert torch.equal(first, random_factor("a", (3, 2), 0, 5))


def test_random_factors_depend_on_name_seed_and_step_and_on_nothing_else() -> None:
    torch.manual_seed(1)
    first = random_factor("a", (3, 2), 0, 5)
    state = torch.random.get_rng_state()
    assert torch.equal(first, random_factor("a", (3, 2), 0, 5))
    assert torch.equal(state, torch.random.get_rng_state())
    others = [
        random_factor("b", (3, 2), 0, 5),
        random_factor("a", (3, 2), 1, 5),
        random_factor("a", (3, 2), 0, 6),
    ]
    assert not any(torch.equal(first, other) for other in others)


def test_residuals_move_with_their_parameters_to_the_buckets_of_a_new_plan() -> None:
    residuals = Residuals()
    one, two = make_bucket(Layout(((4,), (3,))), 0, False), make_bucket(Layout(((5,),)), 1)
    residuals.add(one).copy_(torch.arange(1.0, 8.0))
    residuals.add(two, numel=8).fill_(9.0)
    assert residuals.add(one) is residuals.add(one)

    swapped = make_bucket(Layout(((5,), (4,))), 0, False)
    swapped._names = ("layer1.0", "layer0.0")
    assert residuals.add(swapped).tolist() == [9.0] * 5 + [1.0, 2.0, 3.0, 4.0]
    last = make_bucket(Layout(((3,), (2,))), 1)
    last._names = ("layer0.1", "unheard.of")
    assert residuals.add(last).tolist() == [5.0, 6.0, 7.0, 0.0, 0.0]


def test_residuals_move_also_from_a_bucket_that_has_none_any_more() -> None:
    residuals = Residuals()
    residuals.add(make_bucket(Layout(((4,), (3,))), 0)).copy_(torch.arange(1.0, 8.0))
    # Bucket 0 is of vectors now, or sparse: no hook asks for its residuals.
    moved = make_bucket(Layout(((4,),)), 1)
    moved._names = ("layer0.0",)
    assert residuals.add(moved).tolist() == [1.0, 2.0, 3.0, 4.0]
    assert residuals.named()["layer0.1"].tolist() == [5.0, 6.0, 7.0]


def test_residuals_go_to_another_dtype_with_their_gradients() -> None:
    residuals = Residuals()
    residuals.add(make_bucket(Layout(((4,),)))).fill_(1.0)
    bucket = make_bucket(Layout(((4,),), dtype=torch.float64))
    bucket.buffer().fill_(1e-12)
    residuals.begin()
    assert torch.equal(residuals.add(bucket), torch.full((4,), 1.0 + 1e-12, dtype=torch.float64)), "nothing is rounded"
    residuals.restore()
    assert torch.equal(residuals.named()["layer0.0"], torch.ones(4))


@pytest.mark.parametrize("how", ["loaded", "the model has gone there"])
def test_residuals_go_to_another_memory_format_element_by_element(how: str) -> None:
    shape, dtype = (2, 3, 4, 5), torch.float32
    first, last = make_bucket(Layout((shape,))), make_bucket(Layout((shape,), channels_last=frozenset({0})))
    values = torch.arange(120, dtype=dtype).view(shape)
    residuals = Residuals()
    residuals.add(first).view(shape).copy_(values)
    if how == "loaded":
        saved, residuals = pickle.loads(pickle.dumps(residuals.named())), Residuals()
        residuals.load(saved)
    flat = residuals.add(last)
    assert torch.equal(flat.as_strided(shape, last.gradients()[0].stride()), values)
    assert torch.equal(residuals.named()["layer0.0"], values)


def test_residuals_that_were_saved_flat_lie_as_they_lay() -> None:
    residuals, bucket = Residuals(), make_bucket(Layout(((7,), (2, 3, 4, 5)), channels_last=frozenset({1})))
    residuals.load({"layer0.1": torch.arange(120.0)})
    assert torch.equal(residuals.add(bucket), torch.cat([torch.zeros(7), torch.arange(120.0)]))


def test_residuals_that_wait_for_their_bucket_are_not_written_over() -> None:
    residuals = Residuals()
    residuals.add(make_bucket(Layout(((4,), (3,))), 0)).copy_(torch.arange(1.0, 8.0))
    other = make_bucket(Layout(((4,), (3,))), 0)
    other._names = ("another", "and another")
    for _ in range(3):
        residuals.begin()
        residuals.add(other).fill_(9.0)
        residuals.keep()
    assert residuals.named()["layer0.1"].tolist() == [5.0, 6.0, 7.0]


@pytest.mark.parametrize("moves", [False, True], ids=["the same plan", "a new plan"])
def test_residuals_are_as_before_when_a_step_was_thrown_away(moves: bool) -> None:
    residuals = Residuals()
    bucket = make_bucket(Layout(((4,), (3,))))
    residuals.add(bucket).copy_(torch.arange(1.0, 8.0))
    for turn in range(3):
        residuals.begin()
        seen = make_bucket(Layout(((3,), (4,)) if moves else ((4,), (3,))))
        seen._names = tuple(reversed(bucket.names())) if moves else bucket.names()
        seen.buffer().fill_(1.0)
        expected = torch.tensor([6.0, 7.0, 8.0, 2.0, 3.0, 4.0, 5.0] if moves else [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
        assert torch.equal(residuals.add(seen), expected)
        assert torch.equal(residuals.add(seen), expected + 1.0), "a late part is added to what the step has made of it"
        assert torch.equal(residuals.named()["layer0.1"], torch.tensor([5.0, 6.0, 7.0])), "what is saved counts"
        residuals.restore()
        assert residuals.add(bucket).tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], f"turn {turn}"
    residuals.begin()
    residuals.add(bucket).fill_(9.0)
    residuals.keep()
    residuals.restore()  # of no step
    assert residuals.add(bucket).tolist() == [9.0] * 7


def test_steps_that_count_take_turns_in_two_pieces_of_memory() -> None:
    residuals, bucket, seen = Residuals(), make_bucket(Layout(((4,),))), set()
    for _ in range(6):
        residuals.begin()
        seen.add(residuals.add(bucket, numel=8).data_ptr())
        residuals.keep()
    assert len(seen) == 2


def test_a_residual_of_another_size_is_a_state_error() -> None:
    residuals = Residuals()
    residuals.load({"layer0.0": torch.ones(3)})
    with pytest.raises(StateError, match=r"'layer0\.0' has shape \(3,\), its gradient \(4,\)"):
        residuals.add(make_bucket(Layout(((4,),))))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Int8State(block_size=6), "multiple of 4"),
        (lambda: Int8State(block_size=0), "block_size must be"),
        (lambda: TopKState(ratio=1.5), "ratio must be a number between 0"),
        (lambda: TopKState(start_iter=-1), "start_iter must be"),
        (lambda: PowerSGDState(matrix_approximation_rank=0), "matrix_approximation_rank must be"),
        (lambda: PowerSGDState(start_powerSGD_iter=True), "start_powerSGD_iter must be"),
        (lambda: PowerSGDState(orthogonalization_epsilon=-1e-8), "orthogonalization_epsilon must be"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()  # type: ignore[operator]


def test_whole_numbers_may_be_floats_as_settings_that_were_read_often_are() -> None:
    assert repr(PowerSGDState(matrix_approximation_rank=2.0).config()["matrix_approximation_rank"]) == "2"  # type: ignore[arg-type]
    assert repr(Int8State(block_size=256.0).config()["block_size"]) == "256"  # type: ignore[arg-type]


def test_a_foreign_or_broken_state_dict_changes_nothing() -> None:
    state = PowerSGDState()
    state.iter = 4
    good = state.state_dict()
    broken = [
        TopKState().state_dict(),
        {},
        {**good, "iter": -1},
        {**good, "iter": "4"},
        {**good, "factors": [torch.ones(1)]},
        {key: value for key, value in good.items() if key != "residuals"},
    ]
    for one in broken:
        with pytest.raises(StateError):
            state.load_state_dict(one)
    assert state.iter == 4


def test_pickling_keeps_settings_and_tensors_and_leaves_the_group_behind() -> None:
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    state = PowerSGDState(group, 3, start_powerSGD_iter=7, random_seed=5)
    state.iter = 11
    state.factors["a"] = torch.ones(2, 3)
    state.residuals.load({"a": torch.arange(4.0)})
    copy = pickle.loads(pickle.dumps(state))
    assert copy.process_group is None and copy.iter == 11 and copy.config() == state.config()
    assert torch.equal(copy.factors["a"], state.factors["a"])
    assert torch.equal(copy.residuals.named()["a"], torch.arange(4.0))
