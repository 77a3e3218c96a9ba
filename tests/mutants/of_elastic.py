"""Mistakes in elastic runs: what is undone, what is written when, who is told, woken and given up."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

TRAINING = "src/phalanx/elastic/training.py"
KEEPING = "src/phalanx/elastic/keeping.py"
TRANSACTION = "src/phalanx/elastic/transaction.py"
DECISION = "src/phalanx/elastic/decision.py"
GROUP = "src/phalanx/launch/elastic/group.py"
MEMBERSHIP = "src/phalanx/launch/elastic/membership.py"
COORDINATOR = "src/phalanx/launch/elastic/coordinator.py"
SILENCE = "src/phalanx/launch/elastic/silence.py"
INTERRUPTION = "src/phalanx/comm/failure/interruption.py"
LOG = "src/phalanx/comm/failure/log_store.py"
WAITER = "src/phalanx/comm/failure/waiter.py"
RENDEZVOUS = "src/phalanx/comm/shm/transport/rendezvous.py"
CHECKPOINTER = "src/phalanx/checkpoint/checkpointer.py"

RUNS = "tests/elastic/test_training.py"
HELD = f"{RUNS}::test_runs_through_faults_come_to_what_their_steps_give[held]"
WRITTEN = f"{RUNS}::test_runs_through_faults_come_to_what_their_steps_give[written]"
PURE = "tests/elastic/test_membership.py"
SIGNS = "tests/elastic/test_signs.py"
WAITS = "tests/comm/failure/test_interruption.py"
MEETING = "tests/elastic/test_coordinator.py"
AROUND = "tests/elastic/test_around.py"

MUTATIONS = (
    Mutation(
        name="elastic: a rank goes on before all have written the step",
        file=TRAINING,
        old="        self._worker.barrier()\n        self._version, self._keeping = version, Keeping.WRITTEN\n",
        new="        self._version, self._keeping = version, Keeping.WRITTEN\n",
        tests=WRITTEN,
    ),
    Mutation(
        name="elastic: gradients of a step that never was are kept",
        file=TRAINING,
        old="        self._transaction.forget_gradients()\n",
        new="",
        tests=HELD,
    ),
    Mutation(
        name="elastic: random numbers are not set back",
        file=TRANSACTION,
        old="            set_randomness(own[\"random\"])\n",
        new="            pass\n",
        tests=HELD,
    ),
    Mutation(
        name="elastic: the loader goes on where the lost step was",
        file=TRAINING,
        old="self._loader.go_on(taken.passing[\"parts\"][\"loader\"], in_loop)",
        new="self._loader.go_on(self._loader.state_dict(), in_loop)",
        tests=HELD,
    ),
    Mutation(
        name="elastic: buffers are not set back",
        file=TRANSACTION,
        old="                buffer.detach().copy_(value)\n",
        new="                pass\n",
        tests=HELD,
    ),
    Mutation(
        name="elastic: a step that all have made is not counted",
        file=DECISION,
        old="    return Decision(newest + 1, whole[0],",
        new="    return Decision(newest, whole[0],",
        tests="tests/elastic/test_decision.py",
    ),
    Mutation(
        name="elastic: a member that others waited for in vain is not fenced",
        file=MEMBERSHIP,
        old="            if self.workers.get(other) is WorkerState.TRAINING and other in self.members:\n",
        new="            if self.workers.get(other) is WorkerState.STARTING and other in self.members:\n",
        tests=PURE,
    ),
    Mutation(
        name="elastic: a silent member is not fenced",
        file=MEMBERSHIP,
        old="            actions += self._kill(worker, \"it gave no sign of life for the time limit\")\n",
        new="            pass\n",
        tests=PURE,
    ),
    Mutation(
        name="elastic: members that are all silent are killed with what they hold",
        file=MEMBERSHIP,
        old="        if left and set(left) <= set(found) and not set(left) <= self._woken:\n",
        new="        if not left and found:\n",
        tests=PURE,
    ),
    Mutation(
        name="elastic: those who wait are not told that their generation is over",
        file=COORDINATOR,
        old="                            self._pages[worker].end_generation(number, members.index(by))\n",
        new="                            pass\n",
        tests=MEETING,
    ),
    Mutation(
        name="elastic: the end of a generation is told to the next one as well",
        file="src/phalanx/launch/elastic/page.py",
        old="        if self._page.over < self._generation:\n",
        new="        if not self._page.over:\n",
        tests=SIGNS,
    ),
    Mutation(
        name="elastic: the time in which the launcher was stopped counts as the workers' silence",
        file=SILENCE,
        old="min(now - self._looked_at, LONGEST_LOOK_S)",
        new="now - self._looked_at",
        tests=SIGNS,
    ),
    Mutation(
        name="elastic: a worker that holds Python's lock is taken for silent",
        file=SILENCE,
        old="                sign.ticks, sign.at = ticks, self._clock\n",
        new="                sign.ticks = ticks\n",
        tests=SIGNS,
    ),
    Mutation(
        name="elastic: a wait in the store does not ask whether it is pointless",
        file=INTERRUPTION,
        old="            raise error\n        try:\n",
        new="            pass\n        try:\n",
        tests=WAITS,
    ),
    Mutation(
        name="elastic: a rank that accepts others does not ask whether they come",
        file=RENDEZVOUS,
        old="        self._store.check([_key(self.rank)])\n",
        new="",
        tests=WAITS,
    ),
    Mutation(
        name="elastic: the roll is believed before the launcher",
        file=WAITER,
        old="        if (told := self.board.interruption()) is not None:\n",
        new="        if (told := self.board.interruption()) is None and told is not None:\n",
        tests=WAITS,
    ),
    Mutation(
        name="elastic: a record counts before it is whole",
        file=LOG,
        old="        end, view = self._end[0], memoryview(record)\n",
        new="        end, view = self._end[0], memoryview(record)\n        self._end[0] = end + len(record)\n",
        tests=WAITS,
    ),
    Mutation(
        name="elastic: a store's lock is waited for without end",
        file=LOG,
        old="                if error is not None:\n                    raise error from None\n",
        new="",
        tests=WAITS,
    ),
    Mutation(
        name="elastic: attempts at a group that failed change its keys",
        file=GROUP,
        old="    dist.distributed_c10d._world.group_count = 0\n",
        new="",
        tests="tests/elastic/test_group.py",
    ),
    Mutation(
        name="elastic: a group that was given up is made after all",
        file=INTERRUPTION,
        old="        _give_up(thread)\n",
        new="",
        tests="tests/elastic/test_group.py",
    ),
    Mutation(
        name="elastic: a Checkpointer stays with the ranks of the beginning",
        file=CHECKPOINTER,
        old="        if self._agreement.is_of(group):\n            return\n",
        new="        return\n",
        tests=HELD,
    ),
    Mutation(
        name="elastic: a step with a closure is held",
        file=TRAINING,
        old="if self._steps.ended > 1 or self._steps.has_closure:",
        new="if self._steps.ended > 1:",
        tests="tests/elastic/test_undoing.py",
    ),
    Mutation(
        name="elastic: what else changes a trained parameter is not looked at",
        file=KEEPING,
        old="            self.is_needed = count != self._count_changes() or (norms is not None and norms !=",
        new="            self.is_needed = (norms is None and norms !=",
        tests=AROUND,
    ),
    Mutation(
        name="elastic: options that the script sets after a step are not looked at",
        file=KEEPING,
        old="_not_scheduled(after[1])\n        is_irregular",
        new="_not_scheduled(after[1])\n        before, after = before[:1], after[:1]\n        is_irregular",
        tests=AROUND,
    ),
    Mutation(
        name="elastic: a scheduler that is stepped now and then is foreseen",
        file=KEEPING,
        old="is_irregular = (followed is not None and followed != self.follows) or (",
        new="is_irregular = (",
        tests=AROUND,
    ),
    Mutation(
        name="elastic: who comes waits at the end of epochs that are over",
        file=TRAINING,
        old=" and self._loader.epoch == count and self._loader.is_at_beginning:",
        new=":",
        tests=AROUND,
    ),
    Mutation(
        name="elastic: who comes with another model takes all with it",
        file=TRAINING,
        old="if not self._has_entered or all(one[0].version is not None for one in said):",
        new="if True:",
        tests=AROUND,
    ),
    Mutation(
        name="elastic: a function that returns in its loop leaves a step uncommitted",
        file=TRAINING,
        old="        if self._steps.ended:\n            self._commit(in_loop=False, is_last=True)\n",
        new="",
        tests=AROUND,
    ),
    Mutation(
        name="elastic: a loader for evaluation stays where it was",
        file="src/phalanx/data/loader.py",
        old="if self._generation != self._exchange.generation:",
        new="if False:",
        tests=AROUND,
    ),
    Mutation(
        name="elastic: an epoch that is dealt anew is at its end",
        file="src/phalanx/data/loader.py",
        old="bool(self._position) and not self._expected_digest and self._source.is_over(self._position)",
        new="bool(self._position) and self._source.is_over(self._position)",
        tests=AROUND,
    ),
    Mutation(
        name="groups: a forked child collects those that were destroyed",
        file="src/phalanx/comm/group/lifetime.py",
        old="    gc.freeze()\n",
        new="",
        tests="tests/processes/test_starts.py::test_a_forked_child_does_not_collect_groups_that_its_parent_has_destroyed",
    ),
    Mutation(
        name="groups: a forked child keeps gloo's connections",
        file="src/phalanx/comm/failure/gloo_threads.py",
        old="            os.dup2(nothing, fd, inheritable=False)\n",
        new="            pass\n",
        tests="tests/processes/test_starts.py::test_the_end_of_a_rank_is_seen_though_a_child_of_it_lives_on",
    ),
    Mutation(
        name="checkpoints: a writer ends only when nobody holds its input",
        file="src/phalanx/checkpoint/storage/writer.py",
        old="        if header == END:\n            return\n",
        new="        if header == END:\n            continue\n",
        tests="tests/checkpoint/test_storage.py::test_a_writer_ends_though_somebody_else_holds_its_input",
    ),
    Mutation(
        name="elastic: a second training takes what the first has left for its own",
        file="src/phalanx/elastic/refusal.py",
        old="    member.has_trained = True\n",
        new="",
        tests=AROUND,
    ),
    Mutation(
        name="elastic: what a script does to parameters through .data is not seen",
        file=KEEPING,
        old=" or (norms is not None and norms != self._norms())",
        new="",
        tests=AROUND,
    ),
    Mutation(
        name="elastic: who waits alone writes buffers of a step that never was",
        file=TRANSACTION,
        old="        self.put_back(passing)\n",
        new="",
        tests="tests/elastic/test_undoing.py",
    ),
    Mutation(
        name="elastic: what the last of a generation has written is forgotten",
        file=COORDINATOR,
        old="            self._shelf.preserved(message[\"generation\"], worker)\n",
        new="            pass\n",
        tests=MEETING,
    ),
)
