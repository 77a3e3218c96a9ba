"""`phalanx.elastic.run`: a training loop that goes on when a rank dies, and when one comes (docs/elastic.md has one).

A step is what happens between two batches of the loader. When the next one is asked for, the step is committed. When a rank
is lost, whatever the others have done since their last common commit is undone, they form a new group, and the function is
called again: `epochs` and the loader go on where the commit was. Nothing else in the function is kept; what must be goes
into `extra`. Here is the life of a run; what is kept of it is `transaction`'s business, who takes part the launcher's.
"""

from __future__ import annotations

import functools
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from ..checkpoint.capture import Subject
from ..comm.failure.interruption import awaited
from ..data.loader import Loader
from ..errors import CollectiveTimeout, ConfigError, MismatchError, PeerFailure, StateError
from ..launch.bootstrap import is_consequence
from ..launch.elastic.heads import VOID
from ..launch.elastic.member import Formed, Member
from ..launch.worker import current_worker
from . import refusal
from .decision import LOST, Decision, Report, decide
from .hosts.between import Between
from .image import ImageSource, RankImage
from .in_place import Found, InPlace, Standing
from .keeping import Keeping, Passing, Steps, Taken, looks_closely_at
from .telling import OnEvent, Telling, warn_of_other_launcher
from .transaction import Transaction, renew, trained_of

logger = logging.getLogger("phalanx.elastic")

P = ParamSpec("P")
T = TypeVar("T")


def run(
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
    scheduler: Any = None,
    loader: Loader | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    on_event: OnEvent | None = None,
) -> Callable[[Callable[Concatenate[Training, P], T]], Callable[P, T]]:
    """A decorator for the function that trains; it is called with a `Training` first.

    `model`, `optimizer`, `scheduler`, `loader` and `extra` are all that a step changes (see `Checkpointer`, which takes the
    same). Under `phalanx run --elastic` they move together: a step is committed on every rank, or never happened.
    `on_event` is called with each `Event` of a change of the ranks (lost, abandoned, joined, …, at last formed), on every
    rank that goes on, when all can. What it raises ends the training, as what the function raises does.
    Under any other launcher the function is just called.
    """
    refusal.refuse_arguments(model, extra, on_event)

    def decorate(function: Callable[Concatenate[Training, P], T]) -> Callable[P, T]:
        @functools.wraps(refusal.checked_function(function))
        def trained(*args: P.args, **kwargs: P.kwargs) -> T:
            training = Training(model, optimizer, scheduler, loader, extra, on_event)
            return training.run(lambda training: function(training, *args, **kwargs))

        return trained

    return decorate


class Training:
    """One training run, as its ranks change. Given to the decorated function."""

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        loader: Any,
        extra: Mapping[str, Any] | None,
        on_event: OnEvent | None,
    ) -> None:
        worker = current_worker()
        if worker is None:
            raise ConfigError("call phalanx.init() before the training function: it joins the others.")
        refusal.refuse_other_loader(loader)
        self._worker, self._member = worker, worker.member
        self._loader, self._telling = loader, Telling(on_event)
        self._subject = Subject(model, optimizer, {"scheduler": scheduler, "loader": loader}, extra)
        self._transaction = Transaction(self._subject)
        self._in_place = InPlace(self._subject, worker, self._transaction)
        self._between = Between(worker)
        self._image: RankImage | None = None
        self._keeping = Keeping.WRITTEN
        self._has_entered = False  # whether this worker has, or had, a state in common with others
        self._is_uneven = False  # whether some commit had several steps of the optimizer
        self._kept: Passing = {}
        self._ends_epoch: int | None = None  # the epoch whose last commit is made by `epochs`, after its body
        self._at_end: Passing | None = None  # what passes, as it was when all batches of that epoch had been used
        # Commits; and those of them without a step, of what follows an epoch's loop where a loss came between.
        self._version = self._num_idle = 0
        if self._member is not None:
            refusal.refuse_what_cannot_change(self._subject)
        caught = refusal.CaughtLoss(self._subject, self._member)
        self._steps = Steps(self._subject.optimizers.values(), self._transaction.after_step, caught.look)

    # -- what the function uses ----------------------------------------------------------------

    @property
    def step(self) -> int:
        """How many steps have been committed."""
        return self._version - self._num_idle

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left of `count`, each the loader's own. What follows the loop over an epoch's batches, such as
        an evaluation or a scheduler's step, belongs to its last step: after a loss meanwhile it is done again."""
        if self._loader is None:
            raise ConfigError("epochs() counts the loader's epochs. Give elastic.run() the loader.")
        while (epoch := self._loader.epoch) < count:
            self._ends_epoch, before = epoch, self._version
            yield epoch
            self._ends_epoch, was_looped = None, self._loader.epoch > epoch
            self._loader.end_epoch(epoch)
            is_owed = self._kept and self._kept["parts"]["loader"].get("ended")
            has_stepped = self._steps.ended > 0 or self._at_end is not None
            if has_stepped or is_owed:
                self._num_idle += not has_stepped
                self._commit(in_loop=False)
            elif was_looped and self._version == before and self._member is not None:
                self._telling.warn_of_no_step(epoch)
        # So that nobody is a step behind when others save and end. Not for epochs that were over when this rank came.
        if self._member is not None and self._loader.epoch == count and self._loader.is_at_beginning:
            self._worker.barrier()

    def commit(self) -> None:
        """The step is done. The loader calls it before it gives the next batch; programs without one, after each step."""
        self._commit(in_loop=self._loader is not None and self._loader.is_under_way)

    def _after_batch(self) -> None:
        self._steps.look_for_loss()  # a script that steps in backward would hear of it in the next one
        # Gradients that add up over several batches are used by the last of them; before that there is no step to commit.
        if not (self._steps.ended or not self._subject.optimizers or self._transaction.has_stepped_in_backward):
            return
        if self._is_before_end:
            self._steps.end()
            self._at_end = {} if self._member is None else self._keep_passing()
        else:
            self._commit(in_loop=True)

    @property
    def _is_before_end(self) -> bool:
        """Whether all batches of an epoch are used, and what follows its loop is still to be done."""
        return self._loader is not None and self._ends_epoch == self._loader.epoch and self._loader.is_at_end

    def _keep_passing(self) -> Passing:
        # By a number that all ranks have, so that all see what is to be seen there in the same step.
        kept = {**self._transaction.keep(looks_closely_at(self._version)), "idle": self._num_idle}
        if self._loader is not None and self._is_before_end:
            kept["parts"]["loader"] = self._loader.end_state()
        return kept

    def _finish(self) -> None:
        """The function has returned, on every rank: nobody ends before all have committed their last step."""
        if self._steps.ended:
            self._commit(in_loop=False, is_last=True)
        self._worker.barrier()

    def _commit(self, in_loop: bool, is_last: bool = False) -> None:
        version = self._version + 1
        if self._member is None:
            self._version, self._at_end = version, None
            self._steps.forget()
            return
        self._steps.end()
        self._is_uneven = self._is_uneven or self._transaction.after_step.is_needed
        if self._may_hold():
            self._keep(version, Keeping.HELD)
        elif self._in_place.has_stepped and not self._is_uneven:
            self._keep(version, Keeping.IN_PLACE)
            self._in_place.committed(version)
        else:
            self._commit_written(version, self._member)
        pauses = self._member.committed(self.step) and not is_last
        self._telling.stepped(self._member, self.step)
        if pauses:
            self._telling.pauses()
            self._leave_group()
            self._meet(self._member, "asked to pause", in_loop=in_loop)
        self._telling.tell()

    def _may_hold(self) -> bool:
        """Whether the whole state is on every rank, and moves at once or not at all between two commits."""
        if self._steps.ended > 1 or self._steps.has_closure:
            # Nobody can tell how far a rank got that failed between two steps of one commit, or inside of one, where
            # its closure makes the gradients: from now on all is written.
            self._is_uneven = True
        was_held = self._keeping is Keeping.HELD
        # A commit without a step (after an evaluation, say) leaves what was learnt as it is.
        is_one_step = self._steps.ended == 1 or (self._steps.ended == 0 and was_held)
        is_whole = len(self._subject.optimizers) == 1 and not self._transaction.is_divided and self._worker.world > 1
        # What is extra may be brought up to date after the step, in lines that one rank has done and another has not.
        is_whole = is_whole and not self._transaction.has_moving_extra and not self._transaction.has_extra_state
        return is_one_step and is_whole and not self._is_uneven

    def _commit_written(self, version: int, member: Member) -> None:
        assert member.formed is not None, "it is a member of a generation"
        # In place what was learnt is on one host only: where there may be several, it is written, and mirrored.
        is_one_step = self._steps.ended == 1 and not self._is_uneven and not member.formed.hosts
        # One without a step tells nothing of how steps are made.
        is_step, was_in_place = self._steps.ended > 0, self._keeping is Keeping.IN_PLACE
        if self._keeping is Keeping.HELD:
            # All have made the step, or it is undone by those who hold the one before. Until all have written this one it
            # is held as well: some may go on before the others know.
            self._worker.barrier()
            self._keep(version, Keeping.HELD)
        self._keep(version, Keeping.WRITTEN)
        # Whoever goes on knows that all ranks have written this version: it is never undone.
        self._worker.barrier()
        self._version, self._keeping = version, Keeping.WRITTEN
        if is_step or was_in_place:
            self._in_place.settle(member.formed.images, version, is_one_step, self._copy_before_step)

    def _copy_before_step(self) -> None:
        """A step cannot be made in place, on no rank: what was learnt until now is written before it is changed."""
        assert self._image is not None, "it is a member of a generation"
        self._transaction.write(self._image, self._version, self._worker.rank, self._worker.world, self._kept)
        # Not before all have: the state in place may be changed from here on.
        self._worker.barrier()
        self._keeping = Keeping.WRITTEN

    def _keep(self, version: int, how: Keeping) -> None:
        """What there is now is the state of `version`."""
        assert self._image is not None, "it is a member of a generation"
        self._kept, self._at_end = self._keep_passing(), None
        if how is Keeping.WRITTEN:
            now = {**self._kept, "untrained": None}  # what no optimizer steps is among the pieces, as it is
            self._transaction.write(self._image, version, self._worker.rank, self._worker.world, now)
            self._between.pass_on(self._image)
        elif self._keeping is how:
            # What was written before all held it, or had it in place, is out of date. Not one commit earlier: some may not
            # hold this one yet, and would have nothing to go back to if those who do are lost.
            self._image.clear()
            self._between.clear()
        if how is not Keeping.WRITTEN:
            self._version, self._keeping = version, how
        self._steps.forget()

    # -- the life of a run ---------------------------------------------------------------------

    def run(self, function: Callable[[Training], T]) -> T:
        """Call the function, again after every loss, until it returns."""
        member = self._member
        if member is None:
            warn_of_other_launcher(self._worker.rank, self._worker.world)
            self._watch_loader()
            return function(self)
        refusal.refuse_another_training(member)
        member.leave_on_signal()
        self._enter(member)
        while True:
            try:
                self._watch_loader()
                self._telling.tell()
                result = function(self)
                self._finish()
                return result
            except Exception as error:
                if self._telling.is_of_callback(error) or not self._follows_loss(error):
                    raise
                lost = self._understand(error)
            finally:
                if self._loader is not None:
                    self._loader.after_batch = None
            self._telling.breaks()
            if self._loader is not None:
                self._loader.stay()
            # Outside of the handler: what the exception holds (graphs, the loop's iterator) is let go first.
            self._recover(member, *lost)

    def _watch_loader(self) -> None:
        self._ends_epoch = None
        if self._loader is not None:
            self._loader.after_batch = self._after_batch

    def _follows_loss(self, error: Exception) -> bool:
        """Whether this error comes of the loss of another rank, so that the step is to be made again with those left."""
        if is_consequence(error):
            return True
        if self._member is None or self._member.formed is None or not isinstance(error, (RuntimeError, OSError)):
            return False
        if isinstance(error, MismatchError) and not self._has_entered:
            return False  # it does not fit those who are there, who end the generation in order to go on without it
        # A library that lost its peer may say anything. An error of the program's own comes again, and is raised then.
        return awaited(self._member.interruption) is not None

    def _understand(self, error: Exception) -> tuple[str, tuple[int, ...]]:
        words = f"{type(error).__name__}: {error}"
        logger.info("rank %d: %s", self._worker.rank, words)
        # The loop of the function that raised may be held by a frame of it, and with it the loader's iterator.
        traceback.clear_frames(error.__traceback__)
        return words, tuple(error.ranks) if isinstance(error, CollectiveTimeout) else ()

    def _enter(self, member: Member) -> None:
        formed = member.formed
        if formed is None:
            self._recover(member, "joins", ())
            return
        # Of the first generation: everybody has made the same from the beginning.
        try:
            self._open_image(formed, member)
            self._keep(self._version, Keeping.WRITTEN)
            self._has_entered = True
            return
        except Exception as error:
            if not self._follows_loss(error):
                raise
            lost = self._understand(error)
        self._recover(member, *lost)

    def _open_image(self, formed: Formed, member: Member) -> None:
        self._image = RankImage(formed.images[formed.rank], formed.rank, formed.world)
        self._between.begin(formed, member)

    def _recover(self, member: Member, why: str, silent: tuple[int, ...]) -> None:
        """Meet and go on; again if somebody is lost meanwhile."""
        while True:
            try:
                self._leave_group()
                self._meet(member, why, silent)
                return
            except Exception as error:
                if not self._follows_loss(error):
                    raise
                why, silent = self._understand(error)

    def _leave_group(self) -> None:
        if self._image is not None:
            self._image.close()
            self._image = None
        self._between.end()
        self._worker.part()

    def _meet(self, member: Member, why: str, silent: tuple[int, ...] = (), in_loop: bool = False) -> None:
        begun = time.monotonic()
        formed = member.meet(why, silent, functools.partial(self._preserve, member.formed))
        met = time.monotonic()
        self._worker.rejoin(formed, member.interruption)
        self._go_on(formed, member, in_loop)
        times = {"paused_s": round(time.monotonic() - begun, 4), "waited_s": round(met - begun, 4)}
        self._telling.goes_on(member, formed, self.step, **times, why=why)

    def _preserve(self, last: Formed | None) -> int | None:
        """Write all that is held, which nobody else has who is left. None if it cannot be had: a step had begun there."""
        if last is None or not self._has_entered or self._keeping is not Keeping.HELD or self._steps.begun:
            return None
        self._transaction.preserve(last.images[last.rank], self._version, self._kept)
        return self._version

    def _go_on(self, formed: Formed, member: Member, in_loop: bool) -> None:
        """Bind everything to the new group, and set it back to the last common commit."""
        self._open_image(formed, member)
        at = self._version if self._has_entered else None
        holds = self._has_entered and self._keeping is Keeping.HELD
        # Looked at before anybody knows what the others say, and so before anybody finishes a step of another.
        in_place = self._in_place.look(formed), self._in_place.stand(formed, member.number)
        step = None if at is None else self.step
        mine = (self._steps.report(at), holds, self._is_uneven, in_place, self._telling.was_in_step, step)
        said = self._worker.exchange.all_objects(mine)
        self._is_uneven = any(one[2] for one in said)
        self._telling.heard([one[5] for one in said], [one[4] for one in said])
        self._transaction.give_up_pass()
        try:
            taken = self._take(formed, member, said)
            if self._loader is not None:
                self._loader.go_on(taken.passing["parts"]["loader"], in_loop)
        except MismatchError as error:
            if not self._has_entered or all(one[0].version is not None for one in said):
                raise
            # Who came has another model or other data than those who were there. It ends by this; they go on without it.
            raise PeerFailure(f"rank {formed.rank}: a worker that came does not fit: {error}", ()) from error
        # Nobody is waited for in here, so that a loss finds this worker before or after it, never between.
        self._apply(taken, formed, member)
        # Everybody has taken what it needs: from here on those who gave it may write over it, or step.
        self._worker.barrier()
        self._between.taken()
        # A rank alone holds nothing that anybody else would have if it were lost.
        if formed.world == 1:
            self._keeping = Keeping.WRITTEN
        self._keep(self._version, self._keeping)

    def _take(self, formed: Formed, member: Member, said: list[Any]) -> Taken:
        """From where to go on, as what all have said has it."""
        reports, found = [one[0] for one in said], said[0][3][0]
        if any(one[1] for one in said):
            self._renew()
            return self._take_held(formed, reports)
        if found is not None:
            return self._take_placed(formed, found, [one[3][1] for one in said], reports)
        return self._take_written(formed, member)

    def _apply(self, taken: Taken, formed: Formed, member: Member) -> None:
        if taken.source is not None:
            self._transaction.read(taken.source, formed.rank, formed.world, taken.own)
        self._transaction.forget_gradients()
        self._transaction.give(taken.passing, taken.own)
        # Last: whatever is done above may draw numbers. Who comes draws by its number, which never comes again.
        self._transaction.set_random(taken.passing, taken.own, member.number)
        self._in_place.drop()
        self._version, self._keeping, self._has_entered = taken.version, taken.keeping, True
        self._num_idle = taken.passing["idle"]
        self._steps.forget()
        self._kept, self._at_end = self._keep_passing(), None

    def _renew(self) -> None:
        # The one who has come farthest says which parameters are trained: scripts freeze some, and thaw them, on their way.
        standing = self._version + (self._steps.ended > 0) if self._has_entered else -1
        renew(self._subject, max(self._worker.exchange.all_objects((standing, trained_of(self._subject))))[1])

    def _take_written(self, formed: Formed, member: Member) -> Taken:
        """What every rank wrote."""
        formed = self._between.complete(formed)
        if formed.version == VOID:
            if formed.has_committed or self._between.has_lost_several:
                member.lost_state(self._between.absent)
                if self._between.absent:
                    # To the meeting: the launcher knows whether any of them may still come, and ends the run if not.
                    raise PeerFailure("a part of the state is kept on hosts that have no rank at the moment", ())
                raise StateError(LOST)
            mine = self._kept if self._has_entered else self._keep_passing()
            where = self._between.loaded(formed, self._transaction.holds_whole(), self._writes(0, mine))
            source = None if where is None else ImageSource([where], 0)
            if source is not None:
                self._transaction.read_options(source)
            self._renew()
            # Nobody has committed anything: all begin where the first one began, which may have taken a batch since.
            for ddp in refusal.wrappers_of(self._subject):
                ddp.replicate_module(0)
            passing: Passing = self._worker.exchange.all_objects(mine)[0]
            return Taken(0, Keeping.WRITTEN, source, passing, mine if self._has_entered else None)
        source = ImageSource(formed.before, formed.version)
        # First the options: who comes has those of the beginning, and a divided optimizer compares them.
        self._transaction.read_options(source)
        self._renew()
        there = formed.members_before
        # One who has come since, to a generation that broke before it wrote, has kept its own of that version.
        kept = self._kept if self._has_entered and self._version == source.version else None
        own = source.rest[there.index(member.number)] if member.number in there else kept
        return Taken(source.version, Keeping.WRITTEN, source, source.rest[0] if own is None else own, own)

    def _take_placed(self, formed: Formed, found: Found, said: list[Standing], reports: list[Report]) -> Taken:
        """What every rank has in place, after the step that any of them has begun is finished for all."""
        self._in_place.finish(formed, found, said)
        if self._has_entered and self._version < found.version:
            self._complete(reports)
            # At once: should somebody be lost before all is taken, it is not to be completed again.
            self._version = found.version
            self._steps.forget()
        mine = self._kept if self._has_entered else None
        source, passing, first = self._in_place.take(formed, found, mine)
        self._renew()
        if any(one.rank is None for one in said) and self._subject.ddp is not None:
            # Who comes has neither buffers nor what nobody trains; those who were there get their own back.
            self._subject.ddp.replicate_module(first)
        return Taken(found.version, Keeping.WRITTEN, source, passing if mine is None else mine, mine)

    def _take_held(self, formed: Formed, reports: list[Report]) -> Taken:
        """What some rank holds; only who has not got it takes it."""
        decision = decide(reports)
        if decision is None:
            raise StateError(LOST)
        if decision.completes and formed.rank not in decision.takers:
            self._complete(reports)
        mine = self._kept
        if decision.takers:
            version, writes = decision.version, self._writes(decision.version, mine)
            where = self._between.bring(formed, decision.source, decision.takers, version, writes)
        if formed.rank not in decision.takers:
            return Taken(decision.version, Keeping.HELD, None, mine, mine)
        source = ImageSource([where], decision.version)
        return Taken(decision.version, Keeping.HELD, source, source.rest[0], self._own(reports[formed.rank], decision))

    def _writes(self, version: int, passing: Passing) -> Callable[[], None]:
        assert self._image is not None, "it has just been made"
        return functools.partial(self._transaction.write, self._image, version, 0, 1, passing)

    def _own(self, report: Report, decision: Decision) -> Passing | None:
        """This worker's own random numbers, buffers and hook, where it takes the rest from another."""
        if report.version is None:
            return None
        # Undone: as they were. Behind: it has drawn what the step draws, in its forward.
        return self._kept if report.version == decision.version else self._transaction.keep()

    def _complete(self, reports: list[Report]) -> None:
        """The optimizer has stepped on every rank that is left; what a step does besides may not be done yet."""
        if self._at_end is None:
            self._transaction.after_step.complete(any(one.has_scheduled for one in reports))
        # What followed the loop over an epoch's batches is done again.
        self._kept = self._at_end or self._keep_passing()
