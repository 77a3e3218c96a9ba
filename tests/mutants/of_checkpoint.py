"""Mistakes in checkpoints: what is committed when, what is synced, what is taken from which rank."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

WRITER = "src/phalanx/checkpoint/storage/writer.py"
DISK = "src/phalanx/checkpoint/storage/disk.py"
LIBRARY = "src/phalanx/checkpoint/storage/library.py"
CAPTURE = "src/phalanx/checkpoint/capture.py"
APPLY = "src/phalanx/checkpoint/apply.py"
OPTIMIZERS = "src/phalanx/checkpoint/optimizers.py"
CHECKPOINTER = "src/phalanx/checkpoint/checkpointer.py"

FAULTS = "tests/checkpoint/test_faults.py"
RESUME = "tests/checkpoint/test_resume.py"
USAGE = "tests/checkpoint/test_usage.py"

MUTATIONS = (
    Mutation(
        name="checkpoint: the bytes are not synced before their manifest is there",
        file=WRITER,
        old="                disk.sync(handle)\n",
        new="",
        tests=FAULTS,
    ),
    Mutation(
        name="checkpoint: the name of the save's own folder is not synced",
        file=WRITER,
        old="        disk.sync_folder(self._job.folder)\n",
        new="",
        tests=FAULTS,
    ),
    Mutation(
        name="checkpoint: a renamed file may be lost in a power cut",
        file=DISK,
        old='        self.rename(draft, f"{folder}/{name}")\n        self.sync_folder(folder)\n',
        new='        self.rename(draft, f"{folder}/{name}")\n',
        tests=FAULTS,
    ),
    Mutation(
        name="checkpoint: every rank commits where writing is not atomic",
        file=WRITER,
        old="        if not (disk.renames_at_once or manifest.rank == 0):\n            return False\n",
        new="",
        tests=FAULTS,
    ),
    Mutation(
        name="checkpoint: a damaged extent is loaded",
        file=LIBRARY,
        old="        if not has_content(view[extent.offset : end], extent.digest):\n",
        new="        if False:\n",
        tests="tests/checkpoint/test_integrity.py",
    ),
    Mutation(
        name="checkpoint: running statistics are taken from whichever rank writes that part",
        file=CAPTURE,
        old="        if name in alike:\n",
        new="        if name not in own_names:\n",
        tests=RESUME,
    ),
    Mutation(
        name="checkpoint: the plan is learnt anew after a restore",
        file=APPLY,
        old='        ddp.reducer.resume(plan, PlanMemory(**saved["memory"]))\n',
        new="        del plan\n",
        tests=RESUME,
    ),
    Mutation(
        name="checkpoint: random numbers are not restored",
        file=APPLY,
        old="        self._set_randomness()\n        return self.result\n",
        new="        return self.result\n",
        tests=RESUME,
    ),
    Mutation(
        name="checkpoint: a save does not wait for the one that uses its memory",
        file=CHECKPOINTER,
        old="        self._finish()\n        found, layout",
        new="        self._writer.save = None\n        found, layout",
        tests=USAGE,
    ),
    Mutation(
        name="checkpoint: gradients in the midst of accumulation are lost",
        file=CAPTURE,
        old="        if waiting:\n",
        new="        if False:\n",
        tests=USAGE,
    ),
    Mutation(
        name="checkpoint: states are cast to the dtype of their parameter",
        file=OPTIMIZERS,
        old="            self._restore_dtypes(one, states)\n",
        new="",
        tests=USAGE,
    ),
    Mutation(
        name="apply: random numbers are looked at when the rest is loaded",
        file="src/phalanx/checkpoint/apply.py",
        old="        if self._choice.wants(RANDOM) and self.source.texts[0].get(RANDOM) is not None:\n            check",
        new="        if False:\n            check",
        tests="tests/security/test_checkpoints.py::test_forged_random_numbers_are_refused_before_anything_is_loaded",
    ),
)
