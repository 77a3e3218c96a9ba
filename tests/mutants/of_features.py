"""Mistakes around the reducer: mixed precision, join, buffers, distributed autograd, sparse sums, hooks, plans."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

PRECISION = "src/phalanx/ddp/features/precision.py"
JOIN = "src/phalanx/ddp/features/join.py"
NONFINITE = "src/phalanx/ddp/features/nonfinite.py"
CONTEXT = "src/phalanx/ddp/features/dist_autograd.py"
BUFFERS = "src/phalanx/ddp/features/buffers.py"
ROWS = "src/phalanx/comm/sparse.py"
HALF = "src/phalanx/comm/hooks/compress/half.py"
INT8 = "src/phalanx/comm/hooks/compress/int8.py"
ROUND = "src/phalanx/comm/hooks/compress/round.py"
RESIDUAL = "src/phalanx/comm/hooks/compress/residual.py"
PARAMS = "src/phalanx/plan/params.py"
BUCKETS = "src/phalanx/plan/buckets.py"
SHARDS = "src/phalanx/plan/shards.py"
STEPS = "src/phalanx/ddp/features/steps.py"

MUTATIONS = (
    Mutation(
        name="steps: groups of plain optimizers may have any parameters",
        file=STEPS,
        old="(optimizer), kind, left_out, options, numbers, divided)",
        new="(optimizer), kind, left_out, options, numbers)",
        tests="tests/mismatch/test_mismatch.py::test_a_setting_that_differs_is_an_error_on_every_rank",
    ),
    Mutation(
        name="steps: steps of plain optimizers are not counted",
        file=STEPS,
        old="            count.stepped(before, _Step(part, optimizer))\n",
        new="            pass\n",
        tests="tests/mismatch/test_mismatch.py::test_a_setting_that_differs_is_an_error_on_every_rank",
    ),
    Mutation(
        name="steps: a step inside a step is one more",
        file=STEPS,
        old="        del self._steps[max(0, before - self._num_before) :]\n",
        new="",
        tests="tests/mismatch/test_mismatch.py::test_what_may_differ_leaves_all_ranks_with_the_same_bits",
    ),
    Mutation(
        name="steps: options are those of the last step only",
        file=STEPS,
        old="self.used, _read(self.groups, part.options)\n",
        new="self.used, self.used\n",
        tests="tests/mismatch/test_mismatch.py::test_a_setting_that_differs_is_an_error_on_every_rank",
    ),
    Mutation(
        name="steps: options that were used are not told",
        file=STEPS,
        old="        return part.optimizer, part.left_out, part.divided, part.options, self.used, _read",
        new="        return part.optimizer, part.left_out, part.divided, part.options, (), _read",
        tests="tests/mismatch/test_mismatch.py::test_a_setting_that_differs_is_an_error_on_every_rank",
    ),
    Mutation(
        name="steps: parameters that an optimizer has not are not told",
        file=STEPS,
        old="        return part.optimizer, part.left_out, part.divided, part.options, self.used, _read",
        new='        return part.optimizer, "", part.options, self.used, _read',
        tests="tests/mismatch/test_mismatch.py::test_a_setting_that_differs_is_an_error_on_every_rank",
    ),
    Mutation(
        name="steps: options are not read anew after a pass that failed",
        file=STEPS,
        old="        if self._told_step is not None:\n",
        new="        if steps and self._told_step is not None:\n",
        tests="tests/mismatch/test_mismatch.py::test_what_may_differ_leaves_all_ranks_with_the_same_bits",
    ),
    Mutation(
        name="steps: a loaded state leaves a step with the groups before it",
        file=STEPS,
        old="            if step is not None and step.part.of() is optimizer:\n",
        new="            if step is not None and step.part.of() is None:\n",
        tests="tests/mismatch/test_mismatch.py",
    ),
    Mutation(
        name="steps: what was told is not told anew with other options",
        file=STEPS,
        old="        if told != self._numbered[0]:\n",
        new="        if told[:1] != self._numbered[0][:1]:\n",
        tests="tests/mismatch/test_mismatch.py::test_a_setting_that_differs_is_an_error_on_every_rank",
    ),
    Mutation(
        name="steps: what ranks did by themselves is harmless whatever became of the parameters",
        file=STEPS,
        old="        if not are_equal(\"parameters\") or (",
        new="        if (",
        tests="tests/mismatch/test_mismatch.py::test_a_setting_that_differs_is_an_error_on_every_rank",
    ),
    Mutation(
        name="steps: options that are about to differ are harmless",
        file=STEPS,
        old=" or (are_equal(\"used\") and not are_equal(\"now\")):\n",
        new=":\n",
        tests="tests/mismatch/test_mismatch.py::test_a_setting_that_differs_is_an_error_on_every_rank",
    ),
    Mutation(
        name="steps: what ranks did by themselves is an error even if it was made good",
        file=STEPS,
        old="        self._last = ()  # it stays another one until the next step\n        return True\n",
        new="        return False\n",
        tests="tests/mismatch/test_mismatch.py::test_what_may_differ_leaves_all_ranks_with_the_same_bits",
    ),
    Mutation(
        name="join: a rank without inputs does not follow a change of dtype",
        file="src/phalanx/ddp/features/join.py",
        old="        ddp.follow_moved_parameters()\n",
        new="",
        words="Join GradDtype",
        tests="tests/ddp/test_join.py",
    ),
    Mutation(
        name="nonfinite: a pass given up for another wrapper raises in the next forward",
        file=NONFINITE,
        old="        if reducer.current is None:\n",
        new="        if not said:\n",
        tests="tests/ddp/test_nonfinite.py",
    ),
    Mutation(
        name="precision: a gradient stays in low precision after backward",
        file=PRECISION,
        old="                param.grad = param.grad.to(gradient_dtype(param))\n",
        new="                pass\n",
        words="mixed no_sync",
    ),
    Mutation(
        name="precision: gradients come back in the dtype of their parameters, whatever was chosen for them",
        file="src/phalanx/ddp/features/precision.py",
        old="!= gradient_dtype(param):\n                param.grad = param.grad.to(gradient_dtype(param))\n",
        new="!= param.dtype:\n                param.grad = param.grad.to(param.dtype)\n",
        tests="tests/ddp/test_kinds.py",
    ),
    Mutation(
        name="precision: low-precision copies that were freed are not made again",
        file=PRECISION,
        old="            self._low = self._make_low()\n        self._put_low(self._full",
        new="            self._low = [each.data for each in (*self._params, *self._buffers)]\n"
        "        self._put_low(self._full",
        words="mixed recomputed TwoForwards",
        tests="tests/ddp/test_precision.py",
    ),
    Mutation(
        name="precision: what another wrapper has put low is taken for the full one",
        file=PRECISION,
        old="        self._put_low(self._full_elsewhere())\n",
        new="        self._put_low()\n",
        tests="tests/ddp/test_precision.py",
    ),
    Mutation(
        name="precision: parameters stay low after a backward that raised",
        file=PRECISION,
        old="        BackwardEnd(self._end_backward).queue()\n",
        new="        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)\n",
        words="mixed Fail",
    ),
    Mutation(
        name="precision: a backward inside a forward lowers what is low already",
        file=PRECISION,
        old="        if self.state not in (Precision.FULL, Precision.KEPT):\n            return\n",
        new="        if self.state is Precision.BACKWARD:\n            return\n",
        tests="tests/ddp/test_precision.py",
    ),
    Mutation(
        name="precision: what forward did to a buffer is lost",
        file=PRECISION,
        old="                full.copy_(changed)\n",
        new="                pass\n",
        words="mixed",
        tests="tests/ddp/test_precision.py",
    ),
    Mutation(
        name="join: a joined rank reduces with a backward that is not reduced",
        file=JOIN,
        old="        if reduces:\n            ddp.reducer.join_others(self._weight)\n",
        new="        ddp.reducer.join_others(self._weight)\n",
        words="Join",
        tests="tests/ddp/test_join.py",
    ),
    Mutation(
        name="join: those who have joined are to match an evaluation",
        file="src/phalanx/ddp/module.py",
        old="            Join.notify_join_context(self)\n"
        "            self._sync_buffers_at(BufferHookLocation.PRE_FORWARD)\n"
        "            if self._join_config.enable:\n",
        new="        Join.notify_join_context(self)\n"
        "        self._sync_buffers_at(BufferHookLocation.PRE_FORWARD)\n"
        "        if self._join_config.enable:\n",
        tests="tests/ddp/test_join.py",
    ),
    Mutation(
        name="join: joined ranks count in the mean though they are not to",
        file=JOIN,
        old="        self._weight = None if divide_by_initial_world_size else 0.0\n",
        new="        self._weight = None\n",
        words="Join",
        tests="tests/ddp/test_join.py",
    ),
    Mutation(
        name="dist_autograd: what a parameter held before is returned changed",
        file=CONTEXT,
        old="                param.grad = None if pair is None else pair[0].copy_(pair[1])\n",
        new="                param.grad = None if pair is None else pair[0]\n",
        tests="tests/remote/test_with_ddp.py tests/torch_suite/test_under_dist_autograd.py",
        words="views",
    ),
    Mutation(
        name="dist_autograd: the mean does not go back into the context",
        file=CONTEXT,
        old="            gradient.copy_(param.grad)\n",
        new="            gradient.add_(0)\n",
        tests="tests/remote/test_with_ddp.py",
        words="views",
    ),
    Mutation(
        name="buffers: buffers always come from rank 0",
        file=BUFFERS,
        old='                replicate(tensors, collectives, source, "synchronising buffers")\n',
        new='                replicate(tensors, collectives, 0, "synchronising buffers")\n',
        words="Conv",
        tests="tests/ddp/test_buffers.py tests/ddp/test_join.py",
    ),
    Mutation(
        name="buffers: ignored buffers are synchronised too",
        file=BUFFERS,
        old="                if buffer is not None and id(buffer) not in seen and full not in self._ignored:\n",
        new="                if buffer is not None and id(buffer) not in seen:\n",
        words="Conv",
        tests="tests/ddp/test_buffers.py tests/ddp/test_like_torch_groups.py",
    ),
    Mutation(
        name="rows: the parcel that did not fit is not sent again",
        file=ROWS,
        old="        if needed <= sent:\n            return work\n",
        new="        if needed <= 2 * sent:\n            return work\n",
        words="SparseWords many_rows",
        tests="tests/comm/test_sparse.py",
    ),
    Mutation(
        name="rows: the first rank's rows are left out of the sum",
        file=ROWS,
        old="zip(self._parcels, self._rows, strict=True)\n            if rows\n",
        new="zip(self._parcels[1:], self._rows[1:], strict=True)\n            if rows\n",
        words="SparseWords",
        tests="tests/comm/test_sparse.py",
    ),
    Mutation(
        name="rows: facts are read from the larger parcels that were sent without them",
        file=ROWS,
        old="        again = self._send(self._words, facts[self._collectives.rank])\n        self._facts = facts\n",
        new="        again = self._send(self._words, facts[self._collectives.rank])\n",
        words="SparseWords many_rows",
        tests="tests/comm/test_sparse.py",
    ),
    Mutation(
        name="int8: what was sent stays in the residual",
        file=INT8,
        old="        blocks.addcmul_(rounded, scale, value=-1.0)\n",
        new="",
        tests="tests/comm/hooks/test_compression.py",
    ),
    Mutation(
        name="int8: a residual that is not a number is kept",
        file=INT8,
        old="            blocks.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)\n",
        new="            pass\n",
        tests="tests/comm/hooks/test_compression.py",
    ),
    Mutation(
        name="powersgd: gradients that are sent in full are also kept as residuals",
        file=ROUND,
        old="            one.source.zero_()  # sent in full: no residual\n",
        new="",
        tests="tests/comm/hooks/test_average.py",
    ),
    Mutation(
        name="powersgd: the residual is what is left of the gradient of all ranks",
        file=ROUND,
        old="                source.addmm_(batch.left[nth], batch.right[nth].mT, alpha=-1.0)\n",
        new="                source.zero_()\n",
        tests="tests/comm/hooks/test_average.py",
    ),
    Mutation(
        name="residual: a new plan loses what was kept",
        file=RESIDUAL,
        old="            self._loose.update(kept.pieces())\n        self._kept.clear()\n",
        new="            kept.pieces()\n        self._kept.clear()\n",
        tests="tests/comm/hooks/test_compression.py",
    ),
    Mutation(
        name="buckets: offsets do not count the parameter before",
        file=BUCKETS,
        old="        offset += specs[param].numel\n",
        new="        offset += max(specs[param].numel - 1, 0)\n",
        tests="tests/plan/test_buckets.py",
    ),
    Mutation(
        name="buckets: a parameter that fills the cap exactly does not fit",
        file=BUCKETS,
        old="        if filling.params and filling.num_bytes + spec.num_bytes > cap:\n",
        new="        if filling.params and filling.num_bytes + spec.num_bytes >= cap:\n",
        tests="tests/plan/test_buckets.py",
    ),
    Mutation(
        name="shards: the last shard does not reach the end of the bucket",
        file=SHARDS,
        old="    return -(-numel // world)\n",
        new="    return max(numel // world, 1)\n",
        words="overlapped",
        tests="tests/plan/test_shards.py",
    ),
    Mutation(
        name="shards: a cut unit is computed from the cut on",
        file=SHARDS,
        old="        begin = start // UNIT * UNIT\n",
        new="        begin = start\n",
        words="zero",
        tests="tests/plan/test_shards.py",
    ),
    Mutation(
        name="plan: gradients travel in the dtype of their parameters, whichever the user chose for them",
        file=PARAMS,
        old="    return param.grad_dtype or param.dtype\n",
        new="    return param.dtype\n",
        tests="tests/ddp/test_kinds.py",
    ),
    Mutation(
        name="buffers: those of layers that were added after wrapping are left alone",
        file=BUFFERS,
        old="        if _children_of(self._modules) != self._children:\n",
        new="        if not self._children:\n",
        tests="tests/ddp/test_buffers.py",
    ),
    Mutation(
        name="residuals: those of a bucket that no longer asks stay behind",
        file="src/phalanx/comm/hooks/compress/residual.py",
        old="        if kept is not None or any(not names.isdisjoint(other.names) for other in self._kept.values()):\n",
        new="        if kept is not None:\n",
        tests="tests/comm/hooks/test_compression.py",
    ),
    Mutation(
        name="residuals: memory of those that wait is used again",
        file="src/phalanx/comm/hooks/compress/residual.py",
        old="                if (new := self._kept.get(index)) is not None and new is not old and new.names == old.names\n",
        new="                if self._kept.get(index) is not old\n",
        tests="tests/comm/hooks/test_compression.py",
    ),
    Mutation(
        name="phalanx group: complex numbers go to gloo, which takes no heed of strides",
        file="src/phalanx/comm/group/arguments.py",
        old="        can_do = op is ReduceOp.SUM\n",
        new="        can_do = False\n",
        tests="tests/comm/group/test_process_group.py",
    ),
    Mutation(
        name="PowerSGD: factors of a step that may be thrown away are saved",
        file="src/phalanx/comm/hooks/compress/powersgd.py",
        old="        factors = self.factors if self._factors_before is None else self._factors_before\n",
        new="        factors = self.factors\n",
        tests="tests/comm/hooks/test_torch.py",
    ),
    Mutation(
        name="lane: what was to be waited for next stays in the queue where the waiting thread may not run it",
        file="src/phalanx/comm/group/lane.py",
        old="            if not self._is_announced and not self._done.is_set():\n",
        new="            if False:\n",
        tests="tests/comm/group/test_lane.py",
    ),
    Mutation(
        name="lane: an entry wakes the thread for one work of several",
        file="src/phalanx/comm/group/lane.py",
        old="                    self._perform(self._queue.popleft())\n            if self._closed",
        new="                    self._perform(self._queue.popleft())\n                break\n            if self._closed",
        tests="tests/comm/group/test_lane.py",
    ),
    Mutation(
        name="sparse: a hook is shown rows without this rank's weight",
        file="src/phalanx/ddp/reducer/strategy.py",
        old="        gradient = bucket.multiply()\n",
        new="        gradient = bucket.gradient\n",
        tests="tests/ddp/test_weight.py",
    ),
)
