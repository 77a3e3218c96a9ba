"""Mistakes in who works for whom: optimizers and wrappers, gradients that have been used, parts that ranks make alone."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

OVERLAP = "src/phalanx/zero/overlap/overlap.py"
GRADIENTS = "src/phalanx/zero/overlap/gradient_shards.py"
SHARDED = "src/phalanx/zero/state/sharded_optimizer.py"
IN_BACKWARD = "src/phalanx/optim/in_backward.py"

MUTATIONS = (
    Mutation(
        name="overlap: a step hook finds local gradients in the midst of a backward",
        file=OVERLAP,
        old="or not self.scatters else self.gradient_shards.shown()",
        new="or not self.scatters else nullcontext()",
        tests="tests/zero/test_successors.py",
    ),
    Mutation(
        name="overlap: a gradient that is changed after its update is ignored",
        file=OVERLAP,
        old="            self._refuse_changed()\n",
        new="            pass\n",
        tests="tests/zero/test_successors.py",
    ),
    Mutation(
        name="overlap: backwards of a wrapper that was left for another one are stepped by nobody",
        file=OVERLAP,
        old="            former.reducer.listeners.add(LeftWrapper(partial(_is_in_use, weakref.ref(self))))\n",
        new="",
        tests="tests/zero/test_successors.py",
    ),
    Mutation(
        name="overlap: an optimizer steps by the slices of its last backward, where another one has the wrapper",
        file=OVERLAP,
        old="        self.engaged()  # where another optimizer has taken over",
        new="        # where another optimizer has taken over",
        tests="tests/zero/test_successors.py",
    ),
    Mutation(
        name="gradients: what is added to a scattered gradient by a factor is added without it",
        file=GRADIENTS,
        old="and not kwargs and _is_like(args[1], first):",
        new="and _is_like(args[1], first):",
        tests="tests/zero/test_successors.py",
    ),
    Mutation(
        name="sharded: a rank whose class refuses its parameters raises alone",
        file=SHARDED,
        old="            made = error\n",
        new="            raise error\n",
        tests="tests/zero/test_params.py",
    ),
    Mutation(
        name="state: what belongs to no parameter is left out of a state in silence",
        file="src/phalanx/zero/state/local_state.py",
        old="        if strange:\n",
        new="        if False:\n",
        tests="tests/zero/test_state.py",
    ),
    Mutation(
        name="scattered: slices that wait for another optimizer are taken for one's own",
        file=GRADIENTS,
        old="            if not held.is_zero:\n",
        new="            if False:\n",
        tests="tests/zero/test_successors.py::test_slices_that_wait_for_another_optimizer_are_not_lost_in_silence",
    ),
    Mutation(
        name="clipping: the factor is rounded to the precision of the gradients",
        file="src/phalanx/zero/clipping.py",
        old="        dtype = torch.promote_types(part.dtype.to_real(), torch.float32)\n",
        new="        dtype = part.dtype.to_real()\n",
        tests="tests/zero/test_clipping.py",
    ),
    Mutation(
        name="in backward: a parameter given twice keeps a hook when a wrapper takes over",
        file=IN_BACKWARD,
        old="else list({id(one): one for one in params}.values())\n",
        new="else list(params)\n",
        tests="tests/ddp/test_in_backward.py",
    ),
    Mutation(
        name="in backward: a part of a shared layer's gradient steps it",
        file=IN_BACKWARD,
        old="            if self.max_norm is None and not self._is_nested():\n",
        new="            if self.max_norm is None:\n",
        tests="tests/ddp/test_in_backward.py",
    ),
)
