"""Mistakes in how failures and differences between ranks are found out."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

BUFFERS = "tests/ddp/test_buffers.py"

MUTATIONS = (
    Mutation(
        name="crossed: groups of the same members are not compared",
        file="src/phalanx/comm/crossed.py",
        old="    if theirs != mine:\n",
        new="    if theirs != mine and False:\n",
        tests="tests/comm/test_crossed.py",
    ),
    Mutation(
        name="static graph: set on one rank it is compared with nobody",
        file="src/phalanx/ddp/torch_names.py",
        old='        compare(ddp.reducer, {"static_graph": "set by _set_static_graph()"})\n',
        new="",
        tests="tests/mismatch/test_mismatch.py",
    ),
    Mutation(
        name="clipping: limits of whole gradients are not compared",
        file="src/phalanx/zero/clipping.py",
        old="    _refuse_other_limits(everyone.view(collectives.world, -1), collectives)\n",
        new="",
        tests="tests/mismatch/test_mismatch.py",
    ),
    Mutation(
        name="signals: one that another thread takes comes in the midst of a start",
        file="src/phalanx/launch/start/starter.py",
        old="                if callable(signal.getsignal(number)):\n",
        new="                if False:\n",
        tests="tests/launch/test_supervise.py::test_a_signal_that_another_thread_takes_waits_for_the_end_of_the_block_too",
    ),
    Mutation(
        name="gloo's threads: a loop that is at work has no connections",
        file="src/phalanx/comm/failure/gloo_threads.py",
        old="            if loops.keys() <= seen or time.monotonic() > deadline:\n",
        new="            if True:\n",
        tests="tests/processes/test_starts.py::test_connections_are_found_while_their_loop_is_at_work",
    ),
    Mutation(
        name="answering: each purpose waits for a silent store by itself",
        file="src/phalanx/comm/failure/answering.py",
        old="        store._silent = self._silent\n",
        new="",
        tests="tests/comm/failure/test_answering.py",
    ),
    Mutation(
        name="agreement: who has ended is waited for until the time limit",
        file="src/phalanx/comm/failure/agreement.py",
        old="            self._look_for_ended(keys, where, fail)\n",
        new="",
        tests="tests/comm/failure/test_processes.py",
    ),
    Mutation(
        name="processes: one that was not reaped counts as alive",
        file="src/phalanx/comm/failure/processes.py",
        old='    return "" if fields[0] in "ZX" else fields[19]\n',
        new="    return fields[19]\n",
        tests="tests/comm/failure/test_processes.py",
    ),
    Mutation(
        name="worker: a rank that parts tells nobody, by its word or by its connections",
        file="src/phalanx/launch/worker.py",
        old="            gloo_threads.cut()\n",
        new="",
        also=(("            _say_that_it_leaves()\n", ""),),
        tests="tests/elastic/test_group.py",
    ),
    Mutation(
        name="left over: what a backward left that raised is kept",
        file="src/phalanx/comm/memory/left_over.py",
        old="        torch.zeros((), requires_grad=True).clone().backward()\n",
        new="        torch.zeros((), requires_grad=True).clone()\n",
        tests="tests/comm/memory/test_left_over.py",
    ),
    Mutation(
        name="replicate: what came is not compared with what is expected",
        file="src/phalanx/comm/replicate.py",
        old="                if not torch.equal(said, mine):\n",
        new="                if said.shape != mine.shape:\n",
        tests=BUFFERS,
    ),
    Mutation(
        name="buffers: they travel in the order in which this rank registered them",
        file="src/phalanx/ddp/features/buffers.py",
        old="        return [named[name] for name in sorted(named)]\n",
        new="        return list(named.values())\n",
        tests=BUFFERS,
    ),
    Mutation(
        name="hooks: the group of a hook's state is not looked at",
        file="src/phalanx/comm/hooks/state.py",
        old="        check_group(process_group)\n",
        new="",
        tests="tests/bad_calls/test_bad_calls.py::test_a_wrong_argument_is_one_clear_error",
    ),
    Mutation(
        name="topk: nothing is a share as well",
        file="src/phalanx/comm/hooks/compress/topk.py",
        old="        if not ratio:\n",
        new="        if False:\n",
        tests="tests/bad_calls/test_bad_calls.py::test_a_wrong_argument_is_one_clear_error",
    ),
    Mutation(
        name="elastic: what is no model is found when the function is called",
        file="src/phalanx/elastic/training.py",
        old="    refuse_arguments(model, on_event)\n",
        new="",
        tests="tests/bad_calls/test_bad_calls.py::test_a_wrong_argument_is_one_clear_error",
    ),
    Mutation(
        name="explain: what is no model is described",
        file="src/phalanx/compile/explain.py",
        old="    if not isinstance(model, torch.nn.Module):\n",
        new="    if False:\n",
        tests="tests/bad_calls/test_bad_calls.py::test_a_wrong_argument_is_one_clear_error",
    ),
    Mutation(
        name="interfaces: a number is the name of one",
        file="src/phalanx/remote/interfaces.py",
        old="    if not isinstance(wanted, str):\n",
        new="    if False:\n",
        tests="tests/bad_calls/test_bad_calls.py::test_a_wrong_argument_is_one_clear_error",
    ),
    Mutation(
        name="install: libraries that are not here are named in vain",
        file="src/phalanx/swap/install.py",
        old="    _check_libraries(rebound)\n",
        new="",
        tests="tests/bad_calls/test_bad_calls.py::test_a_wrong_argument_is_one_clear_error",
    ),
    Mutation(
        name="board: a note that cannot be read ends who reads it",
        file="src/phalanx/comm/failure/board.py",
        old="    except (ValueError, TypeError, LookupError, RecursionError):\n",
        new="    except RecursionError:\n",
        tests="tests/comm/failure/test_board.py::test_a_note_that_cannot_be_read_tells_that_its_rank_has_failed",
    ),
    Mutation(
        name="last words: an exit by a text is told as what came before it",
        file="src/phalanx/comm/failure/last_words.py",
        old="    tell(error if cause is None else cause)\n",
        new="    if cause is not None:\n        tell(cause)\n",
        tests="tests/comm/failure/test_last_words.py::test_the_text_of_an_exit_is_told_and_a_peaceful_one_is_not",
    ),
)
