"""Mistakes in what a pass goes through: launching, waiting, judging, late parts, tails, weights, arming, the plan."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

FLIGHT = "phalanx/ddp/reducer/flight.py"
LATE = "phalanx/ddp/reducer/late.py"
TAIL = "phalanx/ddp/reducer/tail.py"
SHARES = "phalanx/ddp/reducer/shares.py"
STRATEGY = "phalanx/ddp/reducer/strategy.py"
REDUCER = "phalanx/ddp/reducer/reducer.py"
ARMING = "phalanx/ddp/reducer/arming.py"
SETTLING = "phalanx/ddp/reducer/settling.py"
JOINED = "phalanx/ddp/reducer/joined.py"

MUTATIONS = (
    Mutation(
        name="flight: large gradients are packed without the rank's weight",
        file=FLIGHT,
        old="            bucket.take_one(place, self.strategy.pack_scale * self.shares.mine)\n",
        new="            bucket.take_one(place, self.strategy.pack_scale)\n",
        words="weights large",
    ),
    Mutation(
        name="flight: the last bucket leaves before the end of backward",
        file=FLIGHT,
        old="        while self.next < len(self.buckets) - 1 and not self.buckets[self.next].pending:\n",
        new="        while self.next < len(self.buckets) and not self.buckets[self.next].pending:\n",
        words="reentrant again",
    ),
    Mutation(
        name="flight: buckets leave in the order in which they fill",
        file=FLIGHT,
        old="        while self.next < len(self.buckets) - 1 and not self.buckets[self.next].pending:\n"
        "            self._take_and_send(self.buckets[self.next])\n",
        new="        for bucket in self.buckets[:-1]:\n"
        "            if bucket.stage is Stage.FILLING and not bucket.pending:\n"
        "                self._take_and_send(bucket)\n",
        also=(
            (
                "        for bucket in self.buckets[self.next :]:\n            self._take_and_send(bucket)\n",
                "        for bucket in self.buckets:\n            if bucket.stage is Stage.FILLING:\n"
                "                self._take_and_send(bucket)\n",
            ),
        ),
        words="unused many_buckets",
    ),
    Mutation(
        name="flight: weights are not told to the others",
        file=FLIGHT,
        old="        bucket.write_tail(self.reducer.step, used, self.shares.told)\n",
        new="        bucket.write_tail(self.reducer.step, used, None)\n",
        words="weights",
    ),
    Mutation(
        name="flight: a pass given up is not marked as such",
        file=FLIGHT,
        old="        if given_up:\n            bucket.tail.write_given_up(bucket.tail_data)\n",
        new="",
        words="Fail",
    ),
    Mutation(
        name="flight: the mean of a pass that another rank gave up is taken",
        file=FLIGHT,
        old="        if reading.num_given_up:\n            raise self.unequal()\n",
        new="",
        words="Fail",
        tests="tests/ddp/test_failures.py tests/ddp/test_accumulation.py tests/ddp/test_like_torch_groups.py",
    ),
    Mutation(
        name="flight: the mean is corrected for weights below one only",
        file=FLIGHT,
        old="        if reading.total_weight != self.collectives.world:\n",
        new="        if reading.total_weight < self.collectives.world:\n",
        words="weights",
    ),
    Mutation(
        name="flight: parameters that no rank used get a gradient of zeros",
        file=FLIGHT,
        old="        self.strategy.give(bucket, self.wanted.get(bucket.index))\n",
        new="        self.strategy.give(bucket, None)\n",
        words="unused",
        tests="tests/ddp/test_unused.py",
    ),
    Mutation(
        name="flight: a rank knows only of nested backwards of its own",
        file=FLIGHT,
        old="        self._nests_somewhere |= reading.nested\n",
        new="        self._nests_somewhere |= self._nests\n",
        words="reentrant overlapped",
        tests="tests/zero/test_overlap.py",
    ),
    Mutation(
        name="flight: sparse gradients are scaled as dense ones are",
        file=FLIGHT,
        old="        scale = self.strategy.sparse_scale if bucket.sparse else self.strategy.pack_scale\n",
        new="        scale = self.strategy.pack_scale\n",
        words="SparseWords phalanx",
        tests="tests/ddp/test_kinds.py",
    ),
    Mutation(
        name="flight: float16 is not taken for narrow when weights are shared out",
        file=FLIGHT,
        old="        narrow = self.strategy.may_narrow or any(b.dtype is torch.float16 for b in reducer.plan.buckets)\n",
        new="        narrow = self.strategy.may_narrow\n",
        words="weights float16",
    ),
    Mutation(
        name="late: the mean of what came late is not added",
        file=LATE,
        old="    run.strategy.join_late(bucket, part)\n",
        new="",
        words="reentrant again",
    ),
    Mutation(
        name="late: every slot's gradient counts as late",
        file=LATE,
        old="    part.states[:] = bytes(LOCAL if state == LATE else ABSENT for state in bucket.states)\n",
        new="    part.states[:] = bytes(LOCAL if state != LOCAL else ABSENT for state in bucket.states)\n",
        words="reentrant again",
    ),
    Mutation(
        name="late: which parameters came late is taken for which were used",
        file=LATE,
        old="    late = run.wanted.pop(bucket.index, None)\n",
        new="    late = run.wanted.get(bucket.index)\n",
        words="reentrant again",
    ),
    Mutation(
        name="late: what was unused at first and late nowhere counts as used",
        file=LATE,
        old="    return [int(early > 0 or after > 0) for early, after in zip(first, late, strict=True)]\n",
        new="    return [int(early >= 0 or after > 0) for early, after in zip(first, late, strict=True)]\n",
        words="reentrant again unused",
    ),
    Mutation(
        name="tail: late buckets are named by the number of the next one",
        file=TAIL,
        old="            out[_LATE_AT + bucket] = 1\n",
        new="            out[_LATE_AT + bucket + 1] = 1\n",
        words="reentrant again",
    ),
    Mutation(
        name="tail: ranks out of step are not noticed",
        file=TAIL,
        old="            in_step=counts[:_SIGNATURE_BITS] == [bit * self.world for bit in self._bits(step)],\n",
        new="            in_step=len(counts) == self.numel,\n",
        words="2_ranks",
        tests="tests/ddp/test_module.py",
    ),
    Mutation(
        name="tail: small weights are rounded away",
        file=TAIL,
        old="_WEIGHT_FRACTION_BITS = 72\n",
        new="_WEIGHT_FRACTION_BITS = 20\n",
        words="weights",
    ),
    Mutation(
        name="tail: a rank that gave a weight counts one beside it",
        file=TAIL,
        old="        default = self.world - counts[_WEIGHTED_AT]\n",
        new="        default = self.world - (counts[_WEIGHTED_AT] == self.world) * self.world\n",
        words="Join",
        tests="tests/ddp/test_weight.py",
    ),
    Mutation(
        name="tail: counts are not freed of the transport's scale",
        file=TAIL,
        old="        counts = [round(value / self._scale) for value in real.tolist()]\n",
        new="        counts = [round(value) for value in real.tolist()]\n",
        words="unused phalanx",
    ),
    Mutation(
        name="shares: a share is a part of one, not of the world",
        file=SHARES,
        old="    return Shares(mine * collectives.world / whole if whole else 0.0, None)\n",
        new="    return Shares(mine / whole if whole else 0.0, None)\n",
        words="weights hook",
    ),
    Mutation(
        name="shares: weights that are shared out before are told as well",
        file=SHARES,
        old="    return Shares(mine * collectives.world / whole if whole else 0.0, None)\n",
        new="    return Shares(mine * collectives.world / whole if whole else 0.0, weight)\n",
        words="weights hook",
    ),
    Mutation(
        name="strategy: the mean is read before the collective has ended",
        file=STRATEGY,
        old="        self.collectives.wait(bucket.work, where)\n\n\nclass AllReduce(Mean):\n",
        new="        bucket.work.is_completed()\n\n\nclass AllReduce(Mean):\n",
        words="large",
    ),
    Mutation(
        name="strategy: a tail that travels apart is not waited for",
        file=STRATEGY,
        old="        if bucket.tail_work is not None:\n            self.collectives.wait(bucket.tail_work, where)\n",
        new="",
        words="hook",
    ),
    Mutation(
        name="strategy: the transport scales, and packing scales as well",
        file=STRATEGY,
        old="        return 1.0 if self.collectives.fuses_scale else 1.0 / self.collectives.world\n",
        new="        return 1.0 / self.collectives.world\n",
        words="phalanx",
    ),
    Mutation(
        name="strategy: a result that a hook made elsewhere is not copied",
        file=STRATEGY,
        old="        if result.data_ptr() != bucket.body.data_ptr():\n            bucket.body.copy_(result)\n",
        new="        assert result.numel() == bucket.body.numel(), 'as large as what it was given'\n",
        words="hook",
        tests="tests/ddp/test_like_torch_hooks.py",
    ),
    Mutation(
        name="reducer: tails that travel apart are read as if the transport had scaled them",
        file=REDUCER,
        old="        scale = self.strategy.transport_scale if self._tail_rides(planned) and not planned.sparse else 1.0\n",
        new="        scale = self.strategy.transport_scale\n",
        words="overlapped phalanx unused",
    ),
    Mutation(
        name="reducer: a rank whose backward brought no gradient does not take part",
        file=REDUCER,
        old="            if not self._arming.is_owed or not any(param.requires_grad for param in self.params):\n"
        "                return  # as",
        new="            if self.state < OBSERVING:\n                return  # as",
        words="unused",
        tests="tests/ddp/test_like_torch_graphs.py tests/ddp/test_unused.py tests/ddp/test_module.py",
    ),
    Mutation(
        name="arming: a backward of a forward under no_sync is reduced",
        file=ARMING,
        old="            if not forward.reduces:\n                return False\n            if not forward.is_opaque:\n",
        new="            if not forward.is_opaque:\n",
        words="no_sync",
        tests="tests/ddp/test_accumulation.py",
    ),
    Mutation(
        name="arming: autograd.grad is reduced",
        file=ARMING,
        old="        return ending is not None and ending.forward.reduces and (ending.has_gradients or accumulates())\n",
        new="        return ending is not None and ending.forward.reduces\n",
        words="Look",
    ),
    Mutation(
        name="arming: one output under no_sync keeps the whole backward from being reduced",
        file=ARMING,
        old="        elif forward.reduces:\n            ending.forward = forward  # one output to be reduced is enough\n",
        new="",
        words="TwoForwards no_sync",
        tests="tests/ddp/test_accumulation.py tests/ddp/test_like_torch_graphs.py",
    ),
    Mutation(
        name="arming: a forward goes on waiting after its backward",
        file=ARMING,
        old="            if not forward.is_opaque:\n                forward.waits = False\n",
        new="",
        words="Hidden",
        tests="tests/ddp/test_like_torch_graphs.py tests/ddp/test_accumulation.py",
    ),
    Mutation(
        name="arming: a pass met first inside a nested one ends with that",
        file=ARMING,
        old="            self._note_outermost(listener, waiting[-1])\n",
        new="            self.note(listener, waiting[-1])\n",
        words="Hidden reentrant",
    ),
    Mutation(
        name="settling: each rank keeps its own order of gradients",
        file=SETTLING,
        old='    collectives.wait(collectives.broadcast(message, 0), "agreeing on the order of gradients")\n',
        new="",
        words="unused",
    ),
    Mutation(
        name="settling: a static graph that leaves a parameter out is not noticed",
        file=SETTLING,
        old="        if param.grad is None:\n            raise _changed_graph(reducer, bucket.specs[place].name)\n",
        new="        if param.grad is None:\n            continue\n",
        words="static",
        tests="tests/ddp/test_like_torch_graphs.py",
    ),
    Mutation(
        name="settling: a parameter that was left out may get gradient unnoticed",
        file=SETTLING,
        old='    reducer.hooks.refuse(dropped, "skip_all_reduce_unused_params=True")\n',
        new="",
        words="skip_unused",
        tests="tests/ddp/test_unused.py",
    ),
    Mutation(
        name="joined: a rank that has joined keeps the gradients of its own last backward",
        file=JOINED,
        old="    if takes:\n        # It is to have",
        new="    if takes and not run.joined:\n        # It is to have",
        words="Join unused",
        tests="tests/zero/test_join.py",
    ),
    Mutation(
        name="joined: a pass that only some ranks gave up is taken for one that all did",
        file=JOINED,
        old="    if first < len(run.buckets) and (reading is None or reading.num_given_up != run.collectives.world):\n",
        new="    if first < len(run.buckets) and (reading is None or not reading.num_given_up):\n",
        words="Fail",
        tests="tests/ddp/test_failures.py tests/ddp/test_accumulation.py",
    ),
)
