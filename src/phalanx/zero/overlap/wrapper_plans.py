"""The plan of a wrapper as an optimizer's: what it must be like, how wide its buckets are, and who divides what by it."""

from __future__ import annotations

from ...ddp.module import DistributedDataParallel
from ...errors import ConfigError
from ...optim.in_backward import in_backward_optimizers
from ...plan import BucketCaps, BucketPlan, build_plan
from ...plan.buckets import DEFAULT_CAP_BYTES
from ..partition.element import NumberedPlan, numbered_plans
from ..partition.param_table import ParamTable
from ..state.sharded_optimizer import ShardedOptimizer

# However large the model: beyond this, what overlaps with backward saves more than fewer collectives do.
_MOST_BUCKET_BYTES = 256 * 1024 * 1024


def check_wrapper(wrapper: DistributedDataParallel, sharded: ShardedOptimizer, stage: int) -> None:
    """Refuse a wrapper whose backward cannot step what `sharded` divides, or divide that otherwise. Every rank calls it."""
    if sharded.collectives.group is not wrapper.process_group:
        raise ConfigError(
            "overlap_with_ddp=True needs the optimizer and DistributedDataParallel on the same process group. "
            "Give both the same process_group."
        )
    # It would step by the first backward, which is reduced whole, and find no gradients in the scattered ones.
    if in_backward_optimizers(wrapper.reducer.params):
        raise ConfigError(
            "overlap_with_ddp=True steps parameters in backward that apply_in_backward steps there already. Use one of both."
        )
    plan = wrapper.reducer.plan
    sparse = sharded.choice.partition == "element" and any(bucket.sparse for bucket in plan.buckets)
    if sparse and not sharded.use_whole_parameters("gradients are sparse"):
        names = [plan.specs[bucket.slots[0].param].name for bucket in plan.buckets if bucket.sparse]
        raise ConfigError(
            f"'{names[0]}' has sparse gradients, which cannot be scattered. Use Embedding(sparse=False), or "
            'partition="parameter".'
        )
    if sharded.choice.partition == "element" and wrapper.mixed_precision is None:
        _check_dtypes(wrapper)
    if stage == 2 and wrapper.gradient_as_bucket_view:
        raise ConfigError(
            "stage=2 frees gradients and gradient_as_bucket_view=True keeps memory for all of them. Use one of the two."
        )


def _check_dtypes(wrapper: DistributedDataParallel) -> None:
    for param, spec in zip(wrapper.reducer.params, wrapper.reducer.plan.specs, strict=True):
        if param.dtype != spec.dtype:
            raise ConfigError(
                f"'{spec.name}' is {param.dtype} and its grad_dtype {spec.dtype}: with overlap_with_ddp=True parameters are "
                'cut as their gradients are, in one dtype. Use partition="parameter", or overlap_with_ddp=False.'
            )


def wider_plan(wrapper: DistributedDataParallel) -> BucketPlan | None:
    """The wrapper's plan with fewer, larger buckets, where nobody asked for a size; None to keep the plan.

    A scattered bucket costs three collectives where a plain one costs one. Not for the second stage, where large buckets
    would cost the memory that it is to save. On a device the caps stay torch's: what is worthwhile was measured on CPUs.
    """
    reducer = wrapper.reducer
    if wrapper.caps_are_given or reducer.choose_buckets is not None or reducer.layout.on_device:
        return None
    plan = reducer.plan
    total = sum(bucket.num_bytes for bucket in plan.buckets)
    even = -(-total // reducer.collectives.worthwhile_buckets)
    cap = max(DEFAULT_CAP_BYTES, min(even, _MOST_BUCKET_BYTES))
    return build_plan(plan.specs, BucketCaps((cap,)), plan.order)


def plans_of_wrapper(wrapper: DistributedDataParallel, table: ParamTable) -> list[NumberedPlan]:
    """First the plan that the wrapper reduces by, so that its bucket i is ours; then those for what it leaves out."""
    reducer = wrapper.reducer
    _check_dtypes(wrapper)
    for param, spec in zip(reducer.params, reducer.plan.specs, strict=True):
        if param not in table.index_of:
            raise ConfigError(
                f"DistributedDataParallel reduces '{spec.name}', which is not among this optimizer's parameters: with "
                "overlap_with_ddp=True nobody would get its whole gradient. Give the optimizer all parameters, or "
                "use overlap_with_ddp=False."
            )
    numbers = tuple(table.index_of[param] for param in reducer.params)
    rest = sorted(set(range(len(table.params))) - set(numbers))
    known = wrapper.known_parameters()
    for number in rest:
        # Not one that the wrapper was told to ignore either: backward steps what it reduces, and nothing else.
        if table.params[number].requires_grad and id(table.params[number]) not in known:
            raise ConfigError(
                f"{table.names[number]} is not reduced by DistributedDataParallel: with overlap_with_ddp=True "
                "nobody would step it. Leave it to another optimizer, or use overlap_with_ddp=False."
            )
    return [NumberedPlan(reducer.plan, numbers), *numbered_plans(table, rest)]
