"""Mistakes in ZeRO: engagement with a wrapper, gradient shards, reduce-scatter, shards of parameters, clipping."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

OVERLAP = "src/phalanx/zero/overlap/overlap.py"
GRADIENTS = "src/phalanx/zero/overlap/gradient_shards.py"
SCATTER = "src/phalanx/zero/overlap/reduce_scatter.py"
MARKER = "src/phalanx/zero/overlap/scattered_gradient.py"
SHARD = "src/phalanx/zero/partition/shard.py"
ELEMENT = "src/phalanx/zero/partition/element.py"
GATHERING = "src/phalanx/zero/partition/gathering.py"
CLIPPING = "src/phalanx/zero/clipping.py"
OPTIMIZER = "src/phalanx/zero/optimizer.py"
IN_BACKWARD = "src/phalanx/optim/in_backward.py"
STORAGE = "src/phalanx/zero/partition/storage.py"
SHARDED = "src/phalanx/zero/state/sharded_optimizer.py"

MUTATIONS = (
    Mutation(
        name="optimizer: the order of a loaded state is that of the parameters' values",
        file=OPTIMIZER,
        old='        self._settings.loaded([state["state"].get(param) for group in groups for param in group["params"]])\n',
        new='        self._settings.loaded([states[param] for param in sorted(states, key=str)])\n',
        words="Reload",
        tests="tests/zero/test_state.py",
    ),
    Mutation(
        name="sharded: a group that is added takes back options that were changed",
        file=SHARDED,
        old="        self.local.pull(groups)\n",
        new="",
        words="Group Rate overlapped",
        tests="tests/zero/test_changes.py",
    ),
    Mutation(
        name="sharded: a partition made anew is of the dtypes of the first one",
        file=SHARDED,
        old="        table = self.table.in_current_dtypes()\n",
        new="        table = self.table\n",
        words="Dtype overlapped",
        tests="tests/zero/test_changes.py",
    ),
    Mutation(
        name="optimizer: options that a closure changes are lost",
        file=OPTIMIZER,
        old="            closure = self._followed_by_options(closure)\n",
        new="            closure = closure\n",
        tests="tests/zero/test_closures.py",
    ),
    Mutation(
        name="overlap: backward returns before all parameters have arrived",
        file=OVERLAP,
        old="            self.sharded.partition.gathering.finish()\n            self.update.end()\n",
        new="            self.update.end()\n",
        words="overlapped",
    ),
    Mutation(
        name="overlap: whole gradients of the second stage are freed in the first step only",
        file=OVERLAP,
        old="                self._forget_gradients()  # whole means",
        new="                pass  # whole means",
        tests="tests/zero/test_overlap.py",
    ),
    Mutation(
        name="overlap: after a pass that failed, means of earlier ones are not gradients again",
        file=OVERLAP,
        old="            self.gradient_shards.give_up()\n",
        new="            self.gradient_shards._given = {}\n",
        words="Fail overlapped_later",
        tests="tests/zero/test_carried.py",
    ),
    Mutation(
        name="overlap: the whole means of the first backward are not divided",
        file=OVERLAP,
        old="        if self.gradient_shards is not None and whole:\n            self.gradient_shards.absorb()\n",
        new="        if self.gradient_shards is not None and whole:\n            self.gradient_shards.mark_all()\n",
        words="overlapped_later",
    ),
    Mutation(
        name="overlap: a backward that raised amid its updates is not remembered",
        file=OVERLAP,
        old="            self.update.raised()\n        elif self.gradient_shards",
        new="            self.update.end()\n        elif self.gradient_shards",
        words="Fail",
        tests="tests/zero/test_failed_backward.py",
    ),
    Mutation(
        name="gradient shards: the mean of the backward before is not added",
        file=GRADIENTS,
        old="                    gradient.add_(carried[k]) if used else gradient.copy_(carried[k])\n",
        new="                    None if used else gradient.copy_(carried[k])\n",
        words="overlapped_later",
        tests="tests/zero/test_overlap.py",
    ),
    Mutation(
        name="gradient shards: after a pass that failed, its own means are carried over",
        file=GRADIENTS,
        old="                self._carried[number] = kept or [gradient.clone()",
        new="                self._carried[number] = [gradient.clone()",
        words="Fail overlapped_later",
        tests="tests/zero/test_carried.py",
    ),
    Mutation(
        name="gradient shards: means that the user zeroed count as means",
        file=GRADIENTS,
        old="        return any(isinstance(grad, ScatteredGradient) and not grad.is_zero for grad in grads)\n",
        new="        return any(isinstance(grad, ScatteredGradient) for grad in grads)\n",
        words="zeros overlapped",
    ),
    Mutation(
        name="gradient shards: means set aside for a new partition are not taken back",
        file=GRADIENTS,
        old="                    gradient.copy_(mine.pop(_SET_ASIDE))\n",
        new="                    mine.pop(_SET_ASIDE)\n",
        words="overlapped_later",
        tests="tests/zero/test_carried.py",
    ),
    Mutation(
        name="gradient shards: units that two ranks compute count twice in the norm",
        file=GRADIENTS,
        old="        return [\n            live.owned(gradient)\n            for number, pairs",
        new="        return [\n            gradient.view(-1)\n            for number, pairs",
        words="clip overlapped_later",
        tests="tests/zero/test_clipping.py",
    ),
    Mutation(
        name="scatter: the memory kept apart begins a unit later",
        file=SCATTER,
        old="            return self._kept_apart[bucket.index], self.collectives.rank * size - UNIT\n",
        new="            return self._kept_apart[bucket.index], self.collectives.rank * size\n",
        words="overlapped_later stage=2",
    ),
    Mutation(
        name="scatter: weights correct the bucket, not the slice kept apart",
        file=SCATTER,
        old='        self.own(cast("DenseBucket", bucket)).mul_(factor)\n',
        new="        bucket.scale_mean(factor)\n",
        words="weights overlapped_later stage=2",
    ),
    Mutation(
        name="scatter: a mean that was set aside is not put back before it is used",
        file=SCATTER,
        old="            self.own(bucket).copy_(self._set_aside.pop(bucket.index))\n",
        new="            self._set_aside.pop(bucket.index)\n",
        words="reentrant overlapped stage=2",
        tests="tests/ddp/test_nested_backward.py",
    ),
    Mutation(
        name="scatter: a late part is added to memory that another bucket has taken over",
        file=SCATTER,
        old='        mean = self._set_aside.get(bucket.index, self.own(cast("DenseBucket", bucket)))\n',
        new='        mean = self.own(cast("DenseBucket", bucket))\n',
        words="reentrant overlapped stage=2",
        tests="tests/ddp/test_nested_backward.py",
    ),
    Mutation(
        name="marker: gradient added to a scattered one is replaced by the next",
        file=MARKER,
        old="            first.pending = new.clone() if first.pending is None else first.pending.add_(new)\n",
        new="            first.pending = new.clone()\n",
        words="no_sync overlapped_later",
        tests="tests/zero/test_overlap.py",
    ),
    Mutation(
        name="shard: edges are stepped from what they were at the last step",
        file=SHARD,
        old="        for edge in self._edges:\n            edge.load()\n",
        new="        for edge in self._edges:\n            if not edge.tensor.any():\n                edge.load()\n",
        words="Reload zero",
        tests="tests/zero/test_usage.py",
    ),
    Mutation(
        name="shard: whether a bucket is stepped depends on this rank's gradients",
        file=SHARD,
        old="        return any(param.requires_grad or param.grad is not None for param in self.params)\n",
        new="        return any(param.grad is not None for param in self.params)\n",
        words="Join zero",
        tests="tests/zero/test_join.py",
    ),
    Mutation(
        name="shard: the part behind the own one comes in one element late",
        file=SHARD,
        old="                (max(first, high), last, self._incoming),\n",
        new="                (max(first, high + 1), last, self._incoming),\n",
        words="zero",
    ),
    Mutation(
        name="element: shared parameters are changed while another rank computes with them",
        file=ELEMENT,
        old="            # Another rank may still be computing with the parameters that this one is about to change.\n"
        "            self.gathering.barrier()\n",
        new="            # Another rank may still be computing with the parameters that this one is about to change.\n"
        "            self.gathering.finish()\n",
        words="shared_parameters=True zero",
        tests="tests/zero/test_carried.py",
    ),
    Mutation(
        name="element: edges are sent before they are stored",
        file=ELEMENT,
        old="            shard.store()\n        if trace.recorder",
        new="        if trace.recorder",
        also=(("            self.gathering.launch(shard)\n", "            self.gathering.launch(shard), shard.store()\n"),),
        words="zero",
    ),
    Mutation(
        name="gathering: a buffer is filled again before what it brought is copied out",
        file=GATHERING,
        old="            while any(flight.buffer is buffer for flight in self._pending):\n"
        "                self._finish_oldest()\n",
        new="",
        words="zero",
        tests="tests/zero/test_carried.py",
    ),
    Mutation(
        name="clipping: each rank clips by the norm of its own shards",
        file=CLIPPING,
        old="    total = _norm_of_norms(torch.linalg.vector_norm(own, norm_type), limits, collectives)\n",
        new="    total = torch.linalg.vector_norm(own, norm_type)\n",
        words="clip overlapped_later",
        tests="tests/zero/test_clipping.py",
    ),
    Mutation(
        name="optimizer: a joined rank keeps the means that it stepped with",
        file=OPTIMIZER,
        old="            # What was given to this rank belongs to this step only; the others clear theirs themselves.\n"
        "            self.zero_grad()\n",
        new="            # What was given to this rank belongs to this step only; the others clear theirs themselves.\n"
        "            self._consolidated = None\n",
        words="Join zero",
        tests="tests/zero/test_join.py",
    ),
    Mutation(
        name="overlap: an update that raised when backward had ended is gone on with",
        file=OVERLAP,
        old="            self.update.raised()  # of what listeners raise",
        new="            self.update.is_under_way and self.update.end()  # of what listeners raise",
        tests="tests/zero/test_failed_backward.py",
    ),
    Mutation(
        name="overlap: the next optimizer finds the reduction of the first",
        file=OVERLAP,
        old="            reducer.use(AllReduce(reducer.collectives))\n        self.state = Engagement.DETACHED\n",
        new="            pass\n        self.state = Engagement.DETACHED\n",
        tests="tests/zero/test_failed_backward.py",
    ),
    Mutation(
        name="gradients: what is carried is gone when a bucket has it, though the pass may fail",
        file=GRADIENTS,
        old="            carried = None if again else self._carried.get(number)\n",
        new="            carried = self._carried.pop(number, None)\n",
        tests="tests/zero/test_failed_backward.py",
    ),
    Mutation(
        name="gradients: what is carried is added once more with a late part",
        file=GRADIENTS,
        old="        again = bucket.index in self._given",
        new="        again = False",
        tests="tests/zero/test_changes.py",
    ),
    Mutation(
        name="overlap: a group that is added takes the slices away from the gradients",
        file=OVERLAP,
        old="        self.gradient_shards, self.state = None, Engagement.OBSERVING\n        try:\n",
        new="        try:\n",
        tests="tests/zero/test_changes.py",
    ),
    Mutation(
        name="optimizer: a step is made by the options from before its closure",
        file=OPTIMIZER,
        old="            result = closure()\n            self._take_options()\n",
        new="            result = closure()\n            self._settings.check(self._is_shadowing)\n",
        tests="tests/zero/test_closures.py",
    ),
    Mutation(
        name="optimizer: ranks step by options that their closures left different",
        file=OPTIMIZER,
        old="            result = closure()\n            self._take_options()\n",
        new="            result = closure()\n            self._sharded.local.pull(self.param_groups)\n",
        tests="tests/zero/test_closures.py",
    ),
    Mutation(
        name="optimizer: options changed after the backward that stepped are taken for those of the step",
        file=OPTIMIZER,
        old="        elif changed := self._settings.changed_since_update():\n",
        new='        elif changed := "":\n',
        tests="tests/zero/test_closures.py",
    ),
    Mutation(
        name="optimizer: a step that raised midway is gone on from",
        file=OPTIMIZER,
        old="        if self.world_size == 1 and update.is_under_way:\n",
        new="        if update.is_under_way:\n",
        tests="tests/zero/test_torn.py",
    ),
    Mutation(
        name="optimizer: parameters between two steps are saved",
        file=OPTIMIZER,
        old="        self._sharded.refuse_torn()\n        if self.wrapper is not None:\n",
        new="        if self.wrapper is not None:\n",
        tests="tests/zero/test_torn.py",
    ),
    Mutation(
        name="element: a bucket is looked at when others have been stepped",
        file=ELEMENT,
        old="                shard.refresh()\n                shard.check_gradients()\n            local.update.begin()\n"
        "            for shard in due:\n",
        new="                pass\n            local.update.begin()\n            for shard in due:\n"
        "                shard.refresh()\n                shard.check_gradients()\n",
        tests="tests/zero/test_torn.py",
    ),
    Mutation(
        name="storage: memory that is read in another order is not noticed",
        file=STORAGE,
        old="        return (self.param.data_ptr(), self.param.stride()) != self._place\n",
        new="        return self.param.data_ptr() != self._place[0]\n",
        tests="tests/zero/test_placement.py",
    ),
    Mutation(
        name="scatter: in the second stage a bucket is given out when the next has taken its memory",
        file=SCATTER,
        old="        self.lag = LAGS[stage]\n",
        new="        self.lag = LAGS[1]\n",
        tests="tests/zero/test_memory.py",
    ),
    Mutation(
        name="optimizer: a second step for one backward does nothing in silence",
        file=OPTIMIZER,
        old="            overlap.refuse_used()\n",
        new="",
        tests="tests/zero/test_closures.py",
    ),
    Mutation(
        name="in backward: a parameter given twice keeps a hook when a wrapper takes over",
        file=IN_BACKWARD,
        old="else list(dict.fromkeys(params))\n",
        new="else list(params)\n",
        tests="tests/ddp/test_in_backward.py",
    ),
    Mutation(
        name="overlap: a pass that is observed scatters by a plan that it replaces",
        file=OVERLAP,
        old="        if used is self._scatter and not wrapper.reducer.settled:",
        new="        if False:",
        tests="tests/zero/test_changes.py",
    ),
    Mutation(
        name="overlap: an optimizer made midway divides its state when a backward begins",
        file=OVERLAP,
        old="        if reducer.settled:\n            # Not when",
        new="        if False:\n            # Not when",
        tests="tests/zero/test_changes.py",
    ),
    Mutation(
        name="overlap: whole gradients that a hook left are not known to have been used",
        file=OVERLAP,
        old="            if not self.scatters:\n                self._forget",
        new="            if self.stage == 2 and not self.scatters:\n                self._forget",
        tests="tests/zero/test_successors.py",
    ),
    Mutation(
        name="overlap: zeros of an earlier engagement stay without memory",
        file=OVERLAP,
        old="                fill_zeroed(param)  # which",
        new="                pass  # which",
        tests="tests/zero/test_successors.py",
    ),
    Mutation(
        name="wrappers: an optimizer that was dropped and not freed joins the next one",
        file="src/phalanx/ddp/wrappers.py",
        old="        gc.collect()\n",
        new="        pass\n",
        tests="tests/zero/test_successors.py",
    ),
    Mutation(
        name="one copy: parameters that all ranks share are not told from others",
        file=ELEMENT,
        old="            one_copy.mark(param for shard in self.shards for param in shard.params)\n",
        new="",
        tests="tests/zero/test_placement.py",
    ),
)
