"""Mistakes in dealing out data, in what counts, and in values that ranks put together."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

DEAL = "src/phalanx/data/deal.py"
ORDER = "src/phalanx/data/order.py"
SOURCES = "src/phalanx/data/sources.py"
LOADER = "src/phalanx/data/loader.py"
STREAM = "src/phalanx/data/stream.py"
VALUES = "src/phalanx/data/values.py"

MUTATIONS = (
    Mutation(
        name="data: the rest of an epoch is not divided evenly",
        file=DEAL,
        old="    return start, start + size + (rank < more)\n",
        new="    return start, start + size + (rank == world - 1) * more\n",
        tests="tests/data/test_deal.py",
    ),
    Mutation(
        name="data: somebody gets a single sample of the rest, which BatchNorm refuses",
        file=DEAL,
        old="    return max(1, min(world, size // least))\n",
        new="    return max(1, min(world, size))\n",
        tests="tests/data/test_deal.py",
    ),
    Mutation(
        name="data: a stand-in counts",
        file=LOADER,
        old="            self.count = 0.0\n",
        new="            self.count = 1.0\n",
        tests="tests/data/test_loader.py",
    ),
    Mutation(
        name="data: uneven batches of samples are not weighed",
        file=LOADER,
        old="        if batch.is_even and self._count_of is None and not self._source.steps_differ:\n",
        new="        if self._count_of is None:\n",
        tests="tests/data/test_loader.py",
    ),
    Mutation(
        name="data: ranks keep orders of their own",
        file=ORDER,
        old="            order = self._exchange.from_first(order)\n",
        new="            pass\n",
        tests="tests/data/test_loader.py",
    ),
    Mutation(
        name="data: every epoch has the same order",
        file=ORDER,
        old='    text = f"{seed}/{epoch}/{rank}".encode()\n',
        new='    text = f"{seed}/{rank}".encode()\n',
        tests="tests/data/test_loader.py",
    ),
    Mutation(
        name="data: the script's random numbers are used up",
        file=ORDER,
        old="    with torch.random.fork_rng(devices=[]):\n",
        new="    if True:\n",
        tests="tests/data/test_loader.py",
    ),
    Mutation(
        name="data: a resumed stream begins again",
        file=SOURCES,
        old="itertools.islice(enumerate(batches, 1), position, None):\n",
        new="itertools.islice(enumerate(batches, 1), 0, None):\n",
        tests="tests/data/test_loader.py",
    ),
    Mutation(
        name="data: a stream's rank without samples stops",
        file=STREAM,
        old='        if start == stop and self.__ending == "weight":\n',
        new="        if False:\n",
        tests="tests/data/test_loader.py",
    ),
    Mutation(
        name="data: what a worker_init_fn sets stays with the part of the stream",
        file=STREAM,
        old="            setattr(self.__stream, name, value)\n",
        new="            super().__setattr__(name, value)\n",
        tests="tests/data/test_epochs.py",
    ),
    Mutation(
        name="data: a place in a stream is one for steps of any size",
        file=LOADER,
        old='        if state["position"] and steps != self._source.steps:\n',
        new="        if False:\n",
        tests="tests/data/test_resuming.py",
    ),
    Mutation(
        name="values: a rank that counts nothing spoils the mean",
        file=VALUES,
        old="[torch.where(share > 0, one * share, 0.0) for one in flat]",
        new="[one * share for one in flat]",
        tests="tests/data/test_values.py",
    ),
    Mutation(
        name="values: rank 0's failure is its own",
        file=VALUES,
        old="        if error is None and told is not None:\n",
        new="        if False:\n",
        tests="tests/data/test_values.py",
    ),
    Mutation(
        name="data: two loops take up what the other has left",
        file=LOADER,
        old="        if mine != self._num_loops:\n            raise",
        new="        if False:\n            raise",
        tests="tests/data/test_epochs.py",
    ),
    Mutation(
        name="data: processes outlive their epoch",
        file=SOURCES,
        old='kept["persistent_workers"] and not _outlives_epochs(self._given)\n',
        new='kept["persistent_workers"]\n',
        tests="tests/data/test_epochs.py",
    ),
    Mutation(
        name="data: the sampler inside a batch sampler does not hear of the epoch",
        file=SOURCES,
        old="        set_epoch(number, given.dataset, *parts[1:])\n",
        new="        set_epoch(number, given.dataset, *parts[1:3])\n",
        tests="tests/data/test_epochs.py",
    ),
    Mutation(
        name="values: a dict's values are put together in the order of each rank",
        file=VALUES,
        old="for key in sorted(value, key=repr)}\n        return {key: changed",
        new="for key in value}\n        return {key: changed",
        tests="tests/data/test_values.py",
    ),
    Mutation(
        name="values: a mean of different keys is taken",
        file=VALUES,
        old="        if bool(agrees.all()):\n            return means\n",
        new="        if True:\n            return means\n",
        tests="tests/data/test_values.py",
    ),
)
