"""Mistakes that open a door: code, files and connections of others that are taken for one's own."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

ORDER = "src/phalanx/launch/start/order.py"
RUNDIR = "src/phalanx/launch/rundir.py"
DOOR = "src/phalanx/launch/hosts/door.py"

MUTATIONS = (
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
)
