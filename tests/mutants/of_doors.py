"""Mistakes that open a door: code, files and connections of others that are taken for one's own."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

ORDER = "src/phalanx/launch/start/order.py"
RUNDIR = "src/phalanx/launch/rundir.py"
DOOR = "src/phalanx/launch/hosts/door.py"
FINDINGS = "src/phalanx/observe/figures/findings.py"
HISTORY = "src/phalanx/launch/elastic/history.py"
DISK = "src/phalanx/checkpoint/storage/disk.py"
SOURCE = "src/phalanx/checkpoint/source.py"

RUNS = "src/phalanx/launch/records/runs.py"

MUTATIONS = (
    Mutation(
        name="doors: all of every run's record is kept for a list of runs",
        file=RUNS,
        old="RunInfo(record.parent, _listed(facts), record.stat().st_mtime)",
        new="RunInfo(record.parent, facts, record.stat().st_mtime)",
        tests="tests/security/test_folders.py::test_long_records_of_many_runs_do_not_fill_the_memory_together",
    ),
    Mutation(
        name="doors: workers look for modules in the working directory first",
        file=ORDER,
        old="here = [] if sys.flags.safe_path else [sys.path.pop(0)]\n",
        new="here = []\n",
        tests="tests/security/test_working_directory.py::test_workers_take_no_module_from_the_working_directory[1]",
    ),
    Mutation(
        name="doors: nobody looks behind a link to where runs are kept",
        file=RUNDIR,
        old="        if step.is_symlink() and num_links < _MOST_LINKS:\n",
        new="        if False:\n",
        tests="tests/security/test_files.py::test_what_lies_behind_a_link_is_looked_at_as_well",
    ),
    Mutation(
        name="doors: strangers who say nothing keep their places",
        file=DOOR,
        old="                        self._unproven[0].shutdown(socket.SHUT_RDWR)\n",
        new="                        connection.shutdown(socket.SHUT_RDWR)\n",
        tests="tests/security/test_hosts.py::test_many_silent_strangers_do_not_keep_a_host_out",
    ),
    Mutation(
        name="doors: all ranks of a world that a trace speaks of are listed",
        file=FINDINGS,
        old="list(islice((rank for rank in range(world) if rank not in known), 9))",
        new="sorted(set(range(world)) - known)",
        tests="tests/security/test_reports.py::test_a_world_that_fits_in_no_memory_is_told_of",
    ),
    Mutation(
        name="doors: one endless moment in a record ends the listing of all runs",
        file=HISTORY,
        old="AttributeError, ArithmeticError, RecursionError",
        new="AttributeError, RecursionError",
        tests="tests/security/test_folders.py::test_nor_does_a_number_that_is_none",
    ),
    Mutation(
        name="doors: a commit that is all holes is read into memory",
        file=DISK,
        old="            if os.fstat(file.fileno()).st_size > LONGEST_BYTES:\n",
        new="            if False:\n",
        tests="tests/security/test_checkpoints.py::test_a_text_that_is_all_holes_is_not_read_into_memory",
    ),
    Mutation(
        name="doors: a packed file of torch.save is unpacked whatever its size",
        file=SOURCE,
        old='            _check_room(size, _unpacked_bytes(file), "files in it")\n',
        new="",
        tests="tests/security/test_checkpoints.py::test_a_small_file_that_would_fill_the_memory_is_refused",
    ),
    Mutation(
        name="doors: a tensor that repeats its elements is written out whatever its size",
        file=SOURCE,
        old='        _check_room(size, sum(one.numel() * one.itemsize for one in _tensors(loaded)), "tensors")\n',
        new="",
        tests="tests/security/test_checkpoints.py::test_a_small_file_that_would_fill_the_memory_is_refused",
    ),
    Mutation(
        name="doors: one thread that cannot be had shuts the door for good",
        file=DOOR,
        old="            except RuntimeError:\n",
        new="            except ZeroDivisionError:\n",
        tests="tests/security/test_hosts.py::test_a_thread_that_cannot_be_had_does_not_close_the_door",
    ),
    Mutation(
        name="doors: a manifest may have one place of its file read any number of times",
        file="src/phalanx/checkpoint/storage/manifest.py",
        old="        if used > self.num_bytes:\n",
        new="        if False:\n",
        tests="tests/security/test_checkpoints.py::test_a_forged_checkpoint_is_refused_in_words",
    ),
    Mutation(
        name="doors: a forged state of an optimizer is found out when the model is loaded",
        file="src/phalanx/checkpoint/optimizers.py",
        old='            rebuild(tree, torch.device("cpu"), lambda leaf: _NOTHING)',
        new="            pass",
        tests="tests/security/test_checkpoints.py",
    ),
    Mutation(
        name="doors: a file that has become a pipe since it was looked at is waited for",
        file=RUNDIR,
        old="        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)\n",
        new="        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)\n",
        tests="tests/security/test_folders.py::test_what_was_a_file_a_moment_ago_is_not_waited_for",
    ),
    Mutation(
        name="doors: a run listens on every interface if they are named in another way",
        file="src/phalanx/launch/hosts/meeting.py",
        old="    if ipaddress.ip_address(address).is_unspecified:\n",
        new="    if False:\n",
        tests="tests/security/test_hosts.py::test_nor_under_another_name",
    ),
    Mutation(
        name="doors: all that comes over a channel is kept before any of it is looked at",
        file="src/phalanx/launch/hosts/channel.py",
        old="        while len(self._unread) < _LENGTH.size + _PROOF_BYTES + _MAX_FRAME_BYTES:\n",
        new="        while True:\n",
        tests="tests/security/test_hosts.py::test_bytes_that_come_without_end_are_not_kept",
    ),
    Mutation(
        name="doors: a page in somebody else's folder can be read by them",
        file="src/phalanx/observe/made.py",
        old="    mode = 0o600 if is_inside else 0o666\n",
        new="    mode = 0o666\n",
        tests="tests/security/test_reports.py::test_a_page_tells_the_owner_of_the_folder_nothing_of_ours",
    ),
    Mutation(
        name="doors: a rank's folder may be a link to somebody's output",
        file="src/phalanx/observe/figures/tails.py",
        old="os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK",
        new="os.O_RDONLY | os.O_NONBLOCK",
        tests="tests/security/test_reports.py::test_a_page_tells_the_owner_of_the_folder_nothing_of_ours",
    ),
    Mutation(
        name="doors: the name of a metric is markup",
        file="src/phalanx/cli/checkpoints.py",
        old="Text(visible(metrics))",
        new="visible(metrics)",
        tests="tests/security/test_checkpoints.py::test_the_name_of_a_metric_is_shown_and_not_obeyed",
    ),
    Mutation(
        name="doors: compiled code is taken from a folder that another user made",
        file="src/phalanx/launch/start/caches.py",
        old="        if status.st_uid not in (os.geteuid(), 0):\n",
        new="        if False:\n",
        tests="tests/security/test_caches.py::test_a_folder_of_another_user_is_not",
    ),
    Mutation(
        name="doors: a worker does not make the folder for compiled code before torch does",
        file="src/phalanx/launch/bootstrap.py",
        old="    guard_cache()\n",
        new="",
        tests="tests/security/test_caches.py::test_a_worker_makes_it_before_torch_uses_it",
    ),
)
