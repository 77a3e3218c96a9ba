"""Mistakes in what a gradient goes through: slots, buckets and their memory."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

SLOT = "src/phalanx/ddp/buckets/slot.py"
BUCKET = "src/phalanx/ddp/buckets/dense.py"
MEMORY = "src/phalanx/ddp/buckets/bucket.py"
SPARSE = "src/phalanx/ddp/buckets/sparse.py"
HOOKS = "src/phalanx/ddp/reducer/hooks.py"

MUTATIONS = (
    Mutation(
        name="slot: gradient that comes after packing and before launch is no late part",
        file=SLOT,
        old="    if state != LOCAL:\n        states[place] = LATE\n",
        new="    if state > TAKEN:\n        states[place] = LATE\n",
        words="reentrant again large",
        tests="tests/ddp/test_owners.py",
    ),
    Mutation(
        name="slot: a pass that begins forgets what no_sync accumulated",
        file=SLOT,
        old="_OPEN = _transition({ABSENT: ABSENT, HELD: HELD}",
        new="_OPEN = _transition({ABSENT: ABSENT, HELD: ABSENT}",
        words="no_sync unused",
        tests="tests/ddp/test_accumulation.py",
    ),
    Mutation(
        name="hooks: gradient of a backward that is not reduced is not marked as held",
        file=HOOKS,
        old="        slot.hold(bucket.states, place)\n        return\n",
        new="        return\n",
        words="no_sync unused",
        tests="tests/ddp/test_accumulation.py",
    ),
    Mutation(
        name="hooks: a gradient is packed though a user's hook is still to see it",
        file=HOOKS,
        old="        self._overtaken.append(param)\n        return False\n",
        new="        return True\n",
        words="Listen large",
        tests="tests/ddp/test_given_gradients.py",
    ),
    Mutation(
        name="bucket: a large gradient stays in .grad when it is packed",
        file=BUCKET,
        old="        self._move_in(place, grad, scale)\n        self.params[place].grad = None\n"
        "        if not self.as_views:\n",
        new="        self._move_in(place, grad, scale)\n        if not self.as_views:\n",
        words="reentrant again large",
        tests="tests/ddp/test_nested_backward.py",
    ),
    Mutation(
        name="bucket: gradients stay in .grad when the bucket is packed",
        file=BUCKET,
        old="        for place in rest:\n            params[place].grad = None\n        slot.pack_local(self.states)\n",
        new="        slot.pack_local(self.states)\n",
        words="reentrant again",
        tests="tests/ddp/test_nested_backward.py",
    ),
    Mutation(
        name="bucket: what was packed on arrival is scaled once more with the others",
        file=BUCKET,
        old="        if multiplies(scale) and len(rest) == len(params):\n            self.body.mul_(scale)\n",
        new="        if multiplies(scale) and rest:\n            self.body.mul_(scale)\n",
        words="Biased large gloo",
    ),
    Mutation(
        name="bucket: a late part that leaves with the first is not scaled",
        file=BUCKET,
        old="else view.add_(late, alpha=scale)\n",
        new="else view.add_(late)\n",
        words="reentrant again large gloo",
        tests="tests/ddp/test_owners.py",
    ),
    Mutation(
        name="bucket: a large gradient is freed though the user holds it",
        file=BUCKET,
        old="            # Freed here where it is ours, the next gradient is made in memory that is still in the cache.\n"
        "            self._free_unshared(place)\n",
        new="            # Freed here where it is ours, the next gradient is made in memory that is still in the cache.\n"
        "            self._owners[place] = None\n",
        words="Place large",
        tests="tests/ddp/test_given_gradients.py",
    ),
    Mutation(
        name="bucket: memory is used again while a lent gradient is held",
        file=BUCKET,
        old="            if self._memory.is_held:\n                self._memory = None",
        new="            if self._memory.is_held and self.as_views:\n                self._memory = None",
        words="Keep large",
        tests="tests/ddp/test_given_gradients.py",
    ),
    Mutation(
        name="bucket: a loan of the bucket's dtype for a parameter of another",
        file=BUCKET,
        old="        if self.large[place] and param.dtype == view.dtype and",
        new="        if self.large[place] and",
        words="mixed large",
    ),
    Mutation(
        name="bucket: gradient that only a no_sync backward brought counts as unused",
        file=BUCKET,
        old="        used = [int(state in (HELD, LOCAL, LATE, TAKEN)) for state in self.states]\n",
        new="        used = [int(state in (LOCAL, LATE, TAKEN)) for state in self.states]\n",
        words="no_sync unused",
        tests="tests/ddp/test_accumulation.py",
    ),
    Mutation(
        name="bucket: a gradient that no rank used is not given back",
        file=BUCKET,
        old="            self.params[place].grad = self._owners[place]\n        if self.states[place] != SCATTERED:\n",
        new="            pass\n        if self.states[place] != SCATTERED:\n",
        words="unused zeros",
        tests="tests/ddp/test_unused.py",
    ),
    Mutation(
        name="bucket: with views, an unused gradient is kept without a copy",
        file=BUCKET,
        old="            self._kept[place] = grad.detach().clone()\n",
        new="            self._kept[place] = grad.detach()\n",
        words="unused views",
        tests="tests/ddp/test_owners.py",
    ),
    Mutation(
        name="bucket: with views, what was shown before is shown again though the user moved it",
        file=BUCKET,
        old="        param.grad = self.memory.show(place)\n        slot.give(self.states, place, VIEWED)\n",
        new="        param.grad = self.memory.shown[place]\n        slot.give(self.states, place, VIEWED)\n",
        words="views Retype",
    ),
    Mutation(
        name="bucket: a pass given up does not return gradients to their owners",
        file=BUCKET,
        old="            if owner is not None and self.states[place] in slot.GONE:\n",
        new="            if owner is not None and self.states[place] == slot.REDUCED:\n",
        words="Fail",
        tests="tests/ddp/test_owners.py",
    ),
    Mutation(
        name="bucket: after a pass that failed, what was freed is not there on ranks that had come far",
        file="src/phalanx/ddp/buckets/bucket.py",
        old="        for param in self._had:\n",
        new="        for param in ():\n",
        words="Fail zeros large",
        tests="tests/ddp/test_failed_pass.py",
    ),
    Mutation(
        name="bucket: a gradient of low precision is given back to a full parameter as it is",
        file=BUCKET,
        old="owner.to(self.params[place].dtype)",
        new="owner",
        tests="tests/ddp/test_failed_pass.py",
    ),
    Mutation(
        name="bucket: a pass given up leaves the body in .grad of view mode",
        file=BUCKET,
        old="        for place, kept in self._kept.items():\n            self.params[place].grad = kept\n",
        new="        for place in self._kept:\n            self.params[place].grad = self.memory.show(place)\n",
        words="Fail views unused",
        tests="tests/ddp/test_owners.py",
    ),
    Mutation(
        name="memory: a gradient that is a view of the user's buffer counts as nobody's",
        file=MEMORY,
        old="    return _counts(held, place) == _ALONE\n",
        new="    return _counts(held, place)[:2] == _ALONE[:2]\n",
        words="Place large",
        tests="tests/ddp/test_given_gradients.py",
    ),
    Mutation(
        name="memory: one holder of a bucket's memory is overlooked",
        file=MEMORY,
        old="        return references(self.flat) > self._own_references\n",
        new="        return references(self.flat) > self._own_references + 1\n",
        words="Keep large",
        tests="tests/ddp/test_given_gradients.py",
    ),
    Mutation(
        name="sparse bucket: rows that repeat are not added up before they are sent",
        file=SPARSE,
        old="    return (grad.to_sparse(1) if grad.layout == torch.strided else grad).detach().coalesce()\n",
        new="    return (grad.to_sparse(1) if grad.layout == torch.strided else grad).detach()\n",
        words="SparseWords",
        tests="tests/ddp/test_kinds.py",
    ),
    Mutation(
        name="sparse bucket: the mean of the late rows takes the place of the first",
        file=SPARSE,
        old="        self.gradient = _sum(self.gradient.coalesce(), other.gradient.coalesce())\n",
        new="        self.gradient = other.gradient.coalesce()\n",
        words="SparseWords reentrant again",
    ),
    Mutation(
        name="sparse bucket: a gradient that no rank used becomes zero rows",
        file=SPARSE,
        old="        used = wanted is None or wanted[0]\n",
        new="        used = True\n",
        words="SparseWords unused",
        tests="tests/ddp/test_kinds.py",
    ),
    Mutation(
        name="sparse bucket: a pass given up keeps the gradient that it took",
        file=SPARSE,
        old="        if self.states[0] in slot.GONE and self._before is not None:\n"
        "            self._set_grad(self._before)\n        self._before = None\n",
        new="        self._before = None\n",
        words="SparseWords Fail",
        tests="tests/ddp/test_owners.py",
    ),
    Mutation(
        name="hooks: parameters may be swapped for others, without hooks",
        file=HOOKS,
        old="        self._unswapped.append(weakref.ref(param))\n",
        new="",
        tests="tests/ddp/test_module.py",
    ),
    Mutation(
        name="memory: a gradient that the user has conjugated is taken for what lies in the bucket",
        file=MEMORY,
        old="        and grad.is_conj() == view.is_conj()",
        new="        and True",
        tests="tests/ddp/test_kinds.py",
    ),
)
