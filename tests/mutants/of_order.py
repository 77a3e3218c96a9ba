"""Mistakes in what several wrappers of one backward do to each other."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

FLIGHT = "src/phalanx/ddp/passes/backward.py"
HOOKS = "src/phalanx/ddp/reducer/hooks.py"
ORDER = "src/phalanx/ddp/passes/order.py"
REDUCER = "src/phalanx/ddp/reducer/reducer.py"
MODULE = "src/phalanx/ddp/module.py"
BUCKET = "src/phalanx/ddp/buckets/dense.py"
ARMING = "src/phalanx/ddp/passes/arming.py"
TESTS = "tests/ddp/test_several_wrappers.py"

MUTATIONS = (
    Mutation(
        name="local: an update begins before all ranks are known to make it",
        file="src/phalanx/zero/partition/local.py",
        old="        self.await_others()\n",
        new="",
        tests="tests/mismatch/test_mismatch.py::test_a_setting_that_differs_is_an_error_on_every_rank",
    ),
    Mutation(
        name="zero settings: ranks that step by other settings have cast the same vote",
        file="src/phalanx/zero/settings.py",
        old="        if any(differs[:2]):\n            self._collectives.agree",
        new="        if not differs:\n            self._collectives.agree",
        tests="tests/mismatch/test_mismatch.py::test_a_setting_that_differs_is_an_error_on_every_rank",
    ),
    Mutation(
        name="order: a wrapper does not wait for the one before it",
        file=FLIGHT,
        old="        if order.has_several and any(other.has_early_buckets for other in order.before(self.reducer)):\n",
        new="        if self.next < 0:\n",
        tests=TESTS,
    ),
    Mutation(
        name="order: the first forward is the first to launch",
        file=ORDER,
        old="        return [reducer for _, reducer in sorted(found, key=lambda pair: -pair[0])]\n",
        new="        return [reducer for _, reducer in sorted(found, key=lambda pair: pair[0])]\n",
        tests=TESTS,
    ),
    Mutation(
        name="order: at the end of backward each wrapper goes to its own end at once",
        file=REDUCER,
        old="                take_turns([reducer.end() for reducer in sharing])\n",
        new="                for reducer in sharing:\n                    take_turns([reducer.end()])\n",
        tests=TESTS,
    ),
    Mutation(
        name="order: a wrapper without gradient begins only at the end",
        file=REDUCER,
        old="            other.begin_owed()\n",
        new="            pass\n",
        tests=TESTS,
    ),
    Mutation(
        name="order: ranks agree on the reduction when a pass begins, and not in launch order",
        file=FLIGHT,
        old="        reducer.listeners.tell(Listener.pass_began, joined)\n",
        new="        reducer.listeners.tell(Listener.pass_began, joined)\n"
        "        reducer.listeners.tell(Listener.launches_begin, joined)\n",
        tests=TESTS,
    ),
    Mutation(
        name="order: an input that is an output is returned as it is",
        file=MODULE,
        old=" if self.reducer.order.has_several else output\n",
        new=" if self.reducer is None else output\n",
        tests=TESTS,
    ),
    Mutation(
        name="order: a wrapper that a failed backward did not reach is left out",
        file=REDUCER,
        old="            self.order.fail_waiting(self, ending.backward)\n",
        new="            pass\n",
        tests=TESTS,
    ),
    Mutation(
        name="order: a backward that raises behind a frozen wrapper is one of no other",
        file=REDUCER,
        old="        if self.has_failed or accumulates:  #",
        new="        if self.has_failed:  #",
        tests="tests/ddp/test_after_failure.py",
    ),
    Mutation(
        name="order: a backward that raises is one of every wrapper that waits for a backward",
        file=ORDER,
        old="        graph = running_graph()\n",
        new="        graph = None\n",
        tests=TESTS,
    ),
    Mutation(
        name="order: a pass without gradient of this rank leaves the wrapper armed",
        file=REDUCER,
        old="            self._arming.reduced()\n",
        new="            pass\n",
        tests="tests/ddp/test_what_is_reduced.py",
    ),
    Mutation(
        name="order: gradients that a failed backward left on some ranks only stay so",
        file="src/phalanx/ddp/passes/joined.py",
        old="    _fill_in(run)\n",
        new="    pass\n",
        tests="tests/ddp/test_after_failure.py",
    ),
    Mutation(
        name="order: what a wrapper owes is forgotten with its memory",
        file=ORDER,
        old="            self._owing.append(reducer)\n",
        new="            pass\n",
        tests="tests/ddp/test_after_failure.py",
    ),
    Mutation(
        name="order: what one wrapper owes waits until that wrapper is used again",
        file=ORDER,
        old="if known.has_failed and (known is asking or not known.is_torn)]\n",
        new="if known.has_failed and known.backward == asking.backward]\n",
        tests="tests/ddp/test_after_failure.py",
    ),
    Mutation(
        name="order: what one wrapper owes to the old group is never sent when it goes to another",
        file=MODULE,
        old="        recover_before_leaving(before, self.process_group)\n",
        new="",
        tests="tests/ddp/test_after_failure.py",
    ),
    Mutation(
        name="order: what was changed after a backward that raised is told for that backward",
        file="src/phalanx/ddp/buckets/tail.py",
        old=" and not counts[_GIVEN_UP_AT]:\n",
        new=":\n",
        tests="tests/ddp/test_after_failure.py",
    ),
    Mutation(
        name="order: wrappers of one shape have the same signature",
        file="src/phalanx/ddp/reducer/layout.py",
        old='        signature = f"{self._number}/{self.plan.hash}/{planned.index}"\n',
        new='        signature = f"{self.plan.hash}/{planned.index}"\n',
        tests=TESTS,
    ),
    Mutation(
        name="order: hooks that users add stay behind ours",
        file=REDUCER,
        old="        self.hooks.stay_last()\n",
        new="",
        tests=TESTS,
    ),
    Mutation(
        name="order: every wrapper has the number one",
        file=MODULE,
        old="        return order.num_named\n",
        new="        return 1\n",
        tests=TESTS,
    ),
    Mutation(
        name="order: a wrapper gives back None where another one has given a mean",
        file=BUCKET,
        old="        elif self._owners[place] is not None:\n",
        new="        else:\n",
        tests=TESTS,
    ),
    Mutation(
        name="order: a parameter that another wrapper has reduced is called unused",
        file=REDUCER,
        old="        unused = self.sharers.leave_out(run.unused_everywhere, self.params)\n",
        new="        unused = run.unused_everywhere\n",
        tests=TESTS,
    ),
    Mutation(
        name="order: a backward of another wrapper is taken for one's own",
        file=ARMING,
        old="        elif self.state is not Armed.DEMANDED and reducer.sharers.have_noted:\n"
        "            return Beginning.LOCAL\n",
        new="",
        tests=TESTS,
    ),
    Mutation(
        name="order: of two means of one parameter the second takes the place of the first",
        file=FLIGHT,
        old="        self.reducer.sharers.claim(self.reducer, self)\n",
        new="",
        tests=TESTS,
    ),
    Mutation(
        name="crossed: only groups of the same members are looked at",
        file="src/phalanx/comm/crossed.py",
        old="    if theirs == mine and elsewhere is not None:\n",
        new="    if False:\n",
        tests="tests/comm/test_crossed.py",
    ),
    Mutation(
        name="zero settings: of an optimizer whose memory is freed the options are told that were read last",
        file="src/phalanx/zero/settings.py",
        old="            self._groups = optimizer.param_groups  #",
        new="            self._groups = [{**group} for group in optimizer.param_groups]  #",
        also=(
            (
                "        return self._groups\n",
                "        return self._groups if optimizer is None else optimizer.param_groups\n",
            ),
        ),
        tests="tests/mismatch/test_mismatch.py::test_what_may_differ_leaves_all_ranks_with_the_same_bits",
    ),
    Mutation(
        name="zero settings: only the options that were given are told",
        file="src/phalanx/zero/settings.py",
        old="        self._keys = own_options(optimizer)\n        self._equal",
        new="        self._equal",
        tests="tests/mismatch/test_mismatch.py::test_a_setting_that_differs_is_an_error_on_every_rank",
    ),
    Mutation(
        name="zero settings: nobody is told that gradients differ",
        file="src/phalanx/zero/settings.py",
        old="        if any(differs):\n",
        new="        if any(differs[:2]):\n",
        tests="tests/zero/test_gradient_vote.py",
    ),
    Mutation(
        name="gradient vote: of a hook too all ranks must have the same",
        file="src/phalanx/zero/gradient_vote.py",
        old=" or any(reducer.strategy.name is not None for reducer in self._reducers):",
        new=":",
        tests="tests/zero/test_gradient_vote.py",
    ),
    Mutation(
        name="gradient vote: zeros differ from none",
        file="src/phalanx/zero/gradient_vote.py",
        old=" if any(row) else 0\n",
        new="\n",
        tests="tests/zero/test_gradient_vote.py",
    ),
)
