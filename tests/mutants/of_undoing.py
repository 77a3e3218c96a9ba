"""Mistakes in what a loss undoes, completes and does again around a step: schedulers, teachers, extra, an epoch's end."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

TRAINING = "src/phalanx/elastic/training.py"
TRANSACTION = "src/phalanx/elastic/transaction.py"
REFUSAL = "src/phalanx/elastic/refusal.py"
RANDOM = "src/phalanx/checkpoint/randomness.py"
TESTS = "tests/elastic/test_undoing.py"

MUTATIONS = (
    Mutation(
        name="undoing: a scaler keeps the stage of a step that never was",
        file=TRANSACTION,
        old="                    target._per_optimizer_states.clear()\n",
        new="                    pass\n",
        tests=f"{TESTS}::test_a_scaler_that_was_left_inside_of_its_step_scales_the_next_one_anew",
    ),
    Mutation(
        name="undoing: what was noted when all batches were used says that the next epoch has begun",
        file=TRAINING,
        old='            kept["parts"]["loader"] = self._loader.end_state()\n',
        new="            pass\n",
        tests=f"{TESTS}::test_what_follows_the_loop_of_an_epoch_is_done_once_though_a_rank_is_lost_meanwhile",
    ),
    Mutation(
        name="undoing: lines after an epoch's loop that are done again are not committed",
        file=TRAINING,
        old="            if has_stepped or is_owed:\n",
        new="            if has_stepped:\n",
        tests=f"{TESTS}::test_a_second_loss_after_an_epochs_end_was_completed_does_not_skip_it",
    ),
    Mutation(
        name="undoing: an epoch whose loop is left early does not end",
        file=TRAINING,
        old="            self._loader.end_epoch(epoch)\n",
        new="",
        tests=f"{TESTS}::test_an_epoch_whose_loop_is_left_early_counts_as_one",
    ),
    Mutation(
        name="undoing: a completed step always steps the scheduler",
        file=TRANSACTION,
        old="        if (is_due or self.follows) and self._can_follow and not self.has_moved:\n",
        new="        if self._scheduler is not None and self._can_follow and not self.has_moved:\n",
        tests=f"{TESTS}::test_a_completed_step_steps_the_scheduler_only_where_the_program_does",
    ),
    Mutation(
        name="undoing: lines that have run are completed after a commit that failed",
        file=TRANSACTION,
        old="        if self._lines is Lines.JUDGED:\n            return\n",
        new="        if self._lines is Lines.JUDGED:\n            self._lines = Lines.DONE\n",
        tests=f"{TESTS}::test_a_loss_in_the_commit_of_the_first_irregular_step_steps_no_scheduler_again",
    ),
    Mutation(
        name="undoing: a scheduler hides what the program does to other options",
        file=TRANSACTION,
        old="            before[1], after[1] = _not_scheduled(before[1]), _not_scheduled(after[1])\n",
        new="            before[1] = after[1]\n",
        tests="tests/elastic/test_around.py",
    ),
    Mutation(
        name="undoing: a scheduler that has moved already is stepped once more",
        file=TRANSACTION,
        old="        if (is_due or self.follows) and self._can_follow and not self.has_moved:\n",
        new="        if (is_due or self.follows) and self._can_follow:\n",
        tests=f"{TESTS}::test_a_scheduler_is_stepped_once_per_step_through_two_losses_in_a_row",
    ),
    Mutation(
        name="undoing: whether a scheduler follows is forgotten with the step that is undone",
        file=TRANSACTION,
        old='        self.after_step.follows = passing["follows"]\n',
        new="        self.after_step.follows = False\n",
        tests=f"{TESTS}::test_a_scheduler_is_stepped_once_per_step_through_two_losses_in_a_row",
    ),
    Mutation(
        name="undoing: learning rates stay as the step that never was has set them",
        file=TRANSACTION,
        old='        self._give_options(passing["options"])\n',
        new="",
        tests=f"{TESTS}::test_what_follows_the_loop_of_an_epoch_is_done_once_though_a_rank_is_lost_meanwhile",
    ),
    Mutation(
        name="undoing: a scheduler that wants a number counts as one that does not",
        file=TRANSACTION,
        old="        self._can_follow = scheduler is None or known\n",
        new="        self._can_follow = True\n",
        tests=f"{TESTS}::test_a_scheduler_that_wants_a_number_is_not_stepped_without_it",
    ),
    Mutation(
        name="undoing: something extra is taken to be up to date when a step ends",
        file=TRAINING,
        old="is_whole and not self._transaction.has_moving_extra and not",
        new="is_whole and not",
        tests=f"{TESTS}::test_no_sample_is_used_twice_where_the_place_in_the_data_is_extra",
    ),
    Mutation(
        name="undoing: a generator that is drawn from after a step goes unnoticed",
        file=TRANSACTION,
        old="[*map(mark_of, self._untrained), *map(_numbers_ahead, self._generators)]",
        new="[*map(mark_of, self._untrained)]",
        tests=f"{TESTS}::test_generators_need_copies_only_if_they_are_drawn_from_after_the_step",
    ),
    Mutation(
        name="undoing: a commit inside of the loop goes on with the ranks that were",
        file=TRAINING,
        old="in_loop=self._loader is not None and self._loader.is_under_way",
        new="in_loop=False",
        tests=f"{TESTS}::test_a_commit_inside_of_the_loop_deals_what_is_left_to_other_ranks",
    ),
    Mutation(
        name="undoing: parameters that no optimizer steps are not put back",
        file=TRANSACTION,
        old='        self._untrained.give(None if own is None else own["untrained"])\n',
        new="",
        tests=f"{TESTS}::test_a_teacher_that_a_lost_step_has_moved_goes_back",
    ),
    Mutation(
        name="undoing: what is done to a parameter's data is no change of it",
        file=TRANSACTION,
        old="    return param._version, param.data_ptr(), first\n",
        new="    return param._version, param.data_ptr()\n",
        tests=f"{TESTS}::test_a_teacher_that_a_lost_step_has_moved_goes_back",
    ),
    Mutation(
        name="undoing: frozen parameters are copied at every commit",
        file=TRANSACTION,
        old="held if now == mark else param.detach().clone()",
        new="param.detach().clone()",
        tests=f"{TESTS}::test_a_teacher_that_a_lost_step_has_moved_goes_back",
    ),
    Mutation(
        name="undoing: a teacher that is moved after the step is taken to be where it was",
        file=TRANSACTION,
        old="self.is_needed or before != after or is_irregular",
        new="self.is_needed or is_irregular",
        tests=f"{TESTS}::test_a_teacher_that_the_program_moves_after_its_step_has_copies_written",
    ),
    Mutation(
        name="undoing: states of modules that are no tensors are held by nobody",
        file=TRAINING,
        old=" and not self._transaction.has_extra_state\n",
        new="\n",
        tests=f"{TESTS}::test_states_of_modules_that_are_no_tensors_are_those_of_the_last_commit",
    ),
    Mutation(
        name="undoing: states of modules that are no tensors are written as of the first commit",
        file=TRANSACTION,
        old="not same or self.has_extra_state or not",
        new="not same or not",
        tests=f"{TESTS}::test_copies_have_states_of_modules_that_are_no_tensors_as_they_are",
    ),
    Mutation(
        name="undoing: parameters with gaps are written as of the first commit",
        file=TRANSACTION,
        old="self.has_extra_state or not self._are_views:",
        new="self.has_extra_state:",
        tests=f"{TESTS}::test_copies_are_of_parameters_as_they_are_though_they_have_gaps",
    ),
    Mutation(
        name="undoing: one rank alone holds what nobody else has",
        file=TRAINING,
        old="        if formed.world == 1:\n            self._keeping = Keeping.WRITTEN\n",
        new="",
        tests=f"{TESTS}::test_one_rank_that_is_left_keeps_what_was_written_until_it_has_written_the_next",
    ),
    Mutation(
        name="undoing: a hook whose state cannot be kept is taken",
        file=REFUSAL,
        old="    _refuse_hook(subject)\n",
        new="",
        tests=f"{TESTS}::test_a_hook_whose_state_cannot_be_kept_is_refused",
    ),
    Mutation(
        name="undoing: commits without a step count as steps",
        file=TRAINING,
        old="        return self._version - self._num_idle\n",
        new="        return self._version\n",
        tests=f"{TESTS}::test_what_follows_the_loop_of_an_epoch_is_done_once_though_a_rank_is_lost_meanwhile",
    ),
    Mutation(
        name="randomness: a normal number that is left over is not noticed when it is used",
        file=RANDOM,
        old="!= raw or has_normal_left:",
        new="!= raw:",
        tests="tests/checkpoint/test_randomness.py",
    ),
    Mutation(
        name="randomness: what numpy had last is taken for what it was set to",
        file=RANDOM,
        old="        self._seen = None\n\n\n_MT",
        new="        pass\n\n\n_MT",
        tests="tests/checkpoint/test_randomness.py",
    ),
)
