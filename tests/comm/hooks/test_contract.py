"""What is refused at registration, what is refused of a hook's answer, and what a bucket promises."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from phalanx.comm.bucket import GradBucket
from phalanx.comm.hooks import (
    adopt_hook,
    allreduce_hook,
    bf16_compress_hook,
    check_hook,
    fp16_compress_wrapper,
    hook_future,
    hook_result,
    int8_hook,
    noop_hook,
    powerSGD_hook,
    topk_hook,
)
from phalanx.errors import ArgumentTypeError, ConfigError, ReductionError
from tests.comm.hooks.buckets import COMPLEX, IMAGES, MATRICES, make_bucket

if TYPE_CHECKING:
    import torch.distributed as only_for_type_checkers

pytestmark = pytest.mark.timeout(30)


class CallableHook:
    def __call__(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return noop_hook(state, bucket)


def unresolvable(state: Any, bucket: only_for_type_checkers.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return noop_hook(state, bucket)


def misnamed(state: Any, grads: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return noop_hook(state, grads)


def _annotated(bucket: object, returned: object) -> Any:
    def hook(state, bucket):  # type: ignore[no-untyped-def]
        return noop_hook(state, bucket)

    hook.__annotations__ = {"bucket": bucket, "return": returned}
    return hook


FUTURE = torch.futures.Future[torch.Tensor]


@pytest.mark.parametrize(
    "hook",
    [
        allreduce_hook,
        powerSGD_hook,
        int8_hook,
        topk_hook,
        bf16_compress_hook,
        fp16_compress_wrapper(allreduce_hook),
        CallableHook(),
        functools.partial(misnamed),
        unresolvable,
        misnamed,
        lambda state, bucket: noop_hook(state, bucket),
        _annotated(dist.GradBucket, FUTURE),
        _annotated(GradBucket, FUTURE),
        _annotated("dist.GradBucket", "torch.futures.Future[torch.Tensor]"),
        print,
    ],
)
def test_hooks_as_torch_users_write_them_are_accepted(hook: Any) -> None:
    check_hook(hook)


def test_what_cannot_be_called_is_a_type_error() -> None:
    with pytest.raises(ArgumentTypeError, match=r"Communication hook must be callable\."):
        check_hook(1)
    assert issubclass(ArgumentTypeError, TypeError)


@pytest.mark.parametrize("bucket", [int, "int", "torch.Tensor", "Missing"])
def test_a_wrong_bucket_annotation_is_a_value_error(bucket: object) -> None:
    with pytest.raises(ConfigError, match=r"bucket annotation should be dist\.GradBucket\."):
        check_hook(_annotated(bucket, FUTURE))
    assert issubclass(ConfigError, ValueError)


@pytest.mark.parametrize("returned", [int, torch.Tensor, torch.futures.Future, "int", "Future[int]", None])
def test_a_wrong_return_annotation_is_a_value_error(returned: object) -> None:
    with pytest.raises(ConfigError, match=r"Communication hook: return annotation should be torch.futures.Future"):
        check_hook(_annotated(dist.GradBucket, returned))


def test_bf16_on_cuda_needs_a_nccl_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(ArgumentTypeError, match="BF16 all reduce communication hook required CUDA 11"):
        check_hook(bf16_compress_hook, torch.device("cuda", 0))
    check_hook(bf16_compress_hook, torch.device("cpu"))
    check_hook(allreduce_hook, torch.device("cuda", 0))


def test_a_hook_that_returns_no_future_is_named_with_its_bucket() -> None:
    bucket = make_bucket(MATRICES, index=3)
    with pytest.raises(
        RuntimeError, match=r"bucket 3: callback must return a torch.futures.Future object, but got int"
    ):
        hook_future(1, bucket)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    assert hook_future(future, bucket) is future


def test_results_are_taken_as_tensors_or_lists_of_one_in_any_precision_and_shape() -> None:
    bucket = make_bucket(MATRICES)
    value = torch.arange(float(MATRICES.numel))
    for given in (
        value,
        [value],
        (value,),
        value.half(),
        value.double(),
        value.view(1, -1),
        [value.view(-1, 1)],
    ):
        result = hook_result(given, bucket)
        assert result.dim() == 1 and torch.equal(result.float()[:2000], value[:2000])
    complex_bucket = make_bucket(COMPLEX)
    assert hook_result(torch.ones(COMPLEX.numel, dtype=torch.complex128), complex_bucket).is_complex()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "holds NoneType, expected a tensor"),
        ([], "holds a list of 0, expected a tensor"),
        (torch.zeros(3), "holds 3 elements, expected 1295 elements"),
        (torch.zeros(1295, dtype=torch.int64), "holds dtype torch.int64"),
        (torch.zeros(1295, dtype=torch.complex64), "holds dtype torch.complex64"),
        (torch.zeros(1295, device="meta"), "holds one on meta, expected a tensor on cpu"),
    ],
)
def test_results_that_do_not_fit_are_refused(value: object, words: str) -> None:
    with pytest.raises(ReductionError, match=words):
        hook_result(value, make_bucket(MATRICES))


def test_sparse_buckets_take_sparse_results_of_their_shape() -> None:
    sparse = torch.eye(4).to_sparse()
    bucket = GradBucket(index=0, buffer=sparse, gradients=[sparse], parameters=[sparse], is_last=True)
    assert bucket.gradients()[0] is sparse and hook_result([sparse], bucket) is sparse
    with pytest.raises(ReductionError, match="expected shape"):
        hook_result(torch.eye(3).to_sparse(), bucket)


def test_gradients_are_views_of_the_buffer_with_the_parameters_strides() -> None:
    bucket = make_bucket(IMAGES)
    bucket.buffer().copy_(torch.arange(float(IMAGES.numel)))
    for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
        assert gradient.shape == parameter.shape and gradient.stride() == parameter.stride()
    bucket.gradients()[1].zero_()
    assert not bucket.buffer()[-240:].any()
    assert bucket.spans() == ((0, 432), (432, 240))


def test_gradients_follow_the_buffer_that_a_hook_sets_until_it_is_restored() -> None:
    bucket = make_bucket(IMAGES)
    other = torch.ones(IMAGES.numel + 7, dtype=torch.float16)[7:]
    bucket.set_buffer(other)
    assert bucket.buffer() is other and bucket.origin() is not other
    assert all(bool((gradient == 1).all()) for gradient in bucket.gradients())
    assert bucket.gradients()[0].stride() == bucket.parameters()[0].stride()
    bucket.reset()
    assert bucket.buffer() is bucket.origin() and not bucket.gradients()[0].any()
    bucket.set_buffer(torch.ones(2))
    with pytest.raises(ReductionError, match="cannot show gradients"):
        bucket.gradients()


def test_a_complex_bucket_is_also_one_of_reals_over_the_same_memory() -> None:
    bucket = make_bucket(COMPLEX)
    real = bucket.real()
    real.gradients()[0][..., 1] = 2.0
    assert bool((bucket.gradients()[0] == 2.0j).all())
    assert real.spans() == ((0, 640), (640, 18))
    plain = make_bucket(MATRICES)
    assert plain.real() is plain


def test_a_bucket_without_names_has_positions() -> None:
    assert make_bucket(COMPLEX, index=4, named=False).names() == ("bucket4[0]", "bucket4[1]")


def test_only_hooks_that_launch_from_callbacks_are_wrapped() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, quantization_hooks
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power_sgd

    global _torch_power_sgd
    _torch_power_sgd = torch_power_sgd
    chaining = [
        torch_power_sgd.powerSGD_hook,
        torch_power_sgd.batched_powerSGD_hook,
        quantization_hooks.quantization_pertensor_hook,
        functools.partial(quantization_hooks.quantization_perchannel_hook, bucket_size=64),
        default_hooks.fp16_compress_wrapper(torch_power_sgd.powerSGD_hook),
        fp16_compress_wrapper(torch_power_sgd.powerSGD_hook),
        _calls_it_by_its_module,
    ]
    for hook in chaining:
        assert adopt_hook(hook) is not hook
    for hook in (
        default_hooks.allreduce_hook,
        default_hooks.fp16_compress_hook,
        powerSGD_hook,
        noop_hook,
        print,
    ):
        assert adopt_hook(hook) is hook


_torch_power_sgd: Any = None


def _calls_it_by_its_module(state: Any, bucket: GradBucket) -> Any:
    return _torch_power_sgd.powerSGD_hook(state, bucket)
