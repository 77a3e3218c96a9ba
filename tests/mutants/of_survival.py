"""Mistakes in state that survives its rank: marks and log, the vote, moving there, finishing a step for another."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

HEADS = "src/phalanx/launch/elastic/heads.py"
JOURNAL = "src/phalanx/elastic/journal.py"
PLACE = "src/phalanx/elastic/place.py"
REPLAY = "src/phalanx/elastic/replay.py"
IN_PLACE = "src/phalanx/elastic/in_place.py"
TRAINING = "src/phalanx/elastic/training.py"
TESTS = "tests/elastic/test_in_place.py"
RUNS = "tests/elastic/test_training.py"

MUTATIONS = (
    Mutation(
        name="journal: a piece is marked as logged before it is",
        file=JOURNAL,
        old="        self._log[: end - begin].copy_(memory[begin:end])\n"
        "        # Not before: a mark without its copy would put back something else.\n"
        "        self._mark(self.progress.at(piece, is_logged=True))\n",
        new="        self._mark(self.progress.at(piece, is_logged=True))\n"
        "        self._log[: end - begin].copy_(memory[begin:end])\n",
        tests=TESTS,
    ),
    Mutation(
        name="journal: a piece counts as put back before it is",
        file=JOURNAL,
        old="            memory[begin:end].copy_(self._log[: end - begin])\n"
        "            self._mark(self.progress.at(self.progress.done))\n",
        new="            self._mark(self.progress.at(self.progress.done))\n"
        "            memory[begin:end].copy_(self._log[: end - begin])\n",
        tests=TESTS,
    ),
    Mutation(
        name="journal: a piece that is being stepped counts as done",
        file=JOURNAL,
        old="at(piece, is_logged=True))\n",
        new="at(piece + 1, is_logged=True))\n",
        tests=TESTS,
    ),
    Mutation(
        name="heads: a step that only some have begun is undone",
        file=HEADS,
        old="    newest_begun = max(one.version for one in known)\n",
        new="    newest_begun = min(one.version for one in known)\n",
        tests=TESTS,
    ),
    Mutation(
        name="place: gradients are held only by who has seen the vote succeed",
        file=PLACE,
        old="            self._num_left += 1\n            self._gradients = []\n",
        new="            self._num_left += 1\n",
        also=(
            ("        self._gradients = [None if param.grad", "        gradients = [None if param.grad"),
            (
                "        # From here on the step is finished, never undone.\n",
                "        self._gradients = gradients\n",
            ),
        ),
        tests=TESTS,
    ),
    Mutation(
        name="place: a step begins without a vote",
        file=PLACE,
        old='        self._barrier("agreeing',
        new='        str("agreeing',
        tests=TESTS,
    ),
    Mutation(
        name="place: what is not in place any more is not copied before it is stepped",
        file=PLACE,
        old="            self._leave()\n            self._journal.void()\n",
        new="            self._journal.void()\n",
        tests=TESTS,
    ),
    Mutation(
        name="place: the edges of a piece are brought back after it is marked as done",
        file=PLACE,
        old="        for one in slices:\n            one.live.store()\n        is_kept",
        new="        is_kept",
        also=(
            (
                "            journal.done(number)\n",
                "            journal.done(number)\n            for one in slices:\n                one.live.store()\n",
            ),
        ),
        tests=TESTS,
    ),
    Mutation(
        name="place: state that the optimizer replaced stays where it made it",
        file=PLACE,
        old="            self.state[name] = mine.copy_(theirs)\n",
        new="            return True\n",
        tests=TESTS,
    ),
    Mutation(
        name="place: states that were all loaded anew count as those in place",
        file=PLACE,
        old="        return states.get(self.live.tensor) is self.state and self._names",
        new="        return self._names",
        tests=TESTS,
    ),
    Mutation(
        name="place: parameters that were given other memory count as in place",
        file=PLACE,
        old="        return is_held and not any(storage.has_moved for storage in self._storages)\n",
        new="        return is_held\n",
        tests=TESTS,
    ),
    Mutation(
        name="place: a second step since the commit counts as the first",
        file=PLACE,
        old="            self._journal.void()\n            self.has_stepped = False\n            return\n",
        new="            return\n",
        tests=TESTS,
    ),
    Mutation(
        name="place: a rank goes on before all have given out their parameters",
        file=PLACE,
        old='        self._barrier("waiting until all ranks have stepped, and given out their parameters")\n',
        new="",
        tests=TESTS,
    ),
    Mutation(
        name="place: parameters are given out before their piece is marked as done",
        file=PLACE,
        old="        # Before the mark: from there on nobody computes these again.\n",
        new="        torch._foreach_copy_(*self._outgoing[number])\n",
        tests=TESTS,
    ),
    Mutation(
        name="place: a refusal of another rank is not heard",
        file=PLACE,
        old="        if not can_step or self._votes.has_refused(self.version + 1):\n",
        new="        if not can_step:\n",
        tests=TESTS,
    ),
    Mutation(
        name="journal: a refusal counts for every step that follows",
        file=JOURNAL,
        old="REFUSAL_AT)) == (version,) for head",
        new="REFUSAL_AT)) != (-1,) for head",
        tests=TESTS,
    ),
    Mutation(
        name="replay: of a torn piece the state is put back, and not the parameters",
        file=REPLAY,
        old="                self._put_back_params(torn)\n",
        new="",
        tests=TESTS,
    ),
    Mutation(
        name="replay: a rank puts back the parameters of its own torn piece from themselves",
        file=REPLAY,
        old="if holders[new] == rank and not progress[rank].is_logged]",
        new="if holders[new] == rank]",
        tests=TESTS,
    ),
    Mutation(
        name="replay: counts of steps are those of the time when the state was moved",
        file=REPLAY,
        old='            _read_numbers(text.texts[label]["states"], view)\n',
        new="",
        tests=TESTS,
    ),
    Mutation(
        name="in place: lines of the script after step() are taken to be of no importance",
        file=IN_PLACE,
        old="        if self._transaction.has_moving_extra:\n            return False\n",
        new="",
        tests=RUNS,
    ),
    Mutation(
        name="training: a step that others have finished is made again",
        file=TRAINING,
        old="            self._complete(reports)\n            # At once",
        new="            # At once",
        tests=RUNS,
    ),
)
