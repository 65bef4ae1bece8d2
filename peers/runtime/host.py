"""Drive a node with an event loop, a network, a journal and compute threads. Start at `Host.run`.

Messages of other peers, timers and outcomes of jobs become events for the node, one at a time, in the event loop's
thread. The host carries out each effect that the node returns. Compute threads get jobs by `submit`, and report
outcomes with `call_soon_threadsafe`.

Every failure of this machine is reported. If training and gossip can go on, the peer goes on: on a full disk, it loses
journal lines and the newest checkpoint, and `troubles` reports the full disk. Otherwise the peer saves what it can, and
`run` returns a reason that begins with `error`. An exception in the node also ends the peer, since the node's state may
then be inconsistent.
"""

import asyncio
import os
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, assert_never

from decentral.comm.gossip.gossip_cost import CoresUsed
from decentral.comm.wire import transport as wire
from decentral.comm.wire.codec import Envelope
from decentral.core import jobs
from decentral.core.ids import PeerId
from decentral.core.journal.events import REPEAT_S, ClockLine, ErrorLine, RefusedLine, StoppedLine, SuspendedLine
from decentral.core.journal.file import Journal
from decentral.core.machine import Log, Woke
from decentral.core.reasons import Reason
from decentral.core.units import Seconds
from decentral.peers.membership.address_book import AddressBook
from decentral.peers.membership.revocation_watch import Exclude, MembershipOver
from decentral.peers.membership.roster import Learn
from decentral.peers.runtime.clock import CLOCKS_AGREE_S, difference
from decentral.peers.runtime.handlers import PeerEffect, PeerEvent
from decentral.peers.runtime.node import Node
from decentral.peers.runtime.progress import Stop
from decentral.scheduler.placement.evaluate import EvaluatePlans, evaluate_plans

NOTHING_TO_SAVE = "no peer has given this one the run's weights yet"
FAREWELL_S = 5.0  # a leaving peer waits at most this long for the DHT to store its last record, in phase "leaving"
CORES_S = 5.0
CLOCK_S = 5.0  # the machine's clock is compared with the swarm's at this interval
SUSPENDED_S = 15.0  # if the event loop wakes later than planned by more than this, the process was suspended
REFUSED_S = 10.0
SAID = 300  # longest text of a network error in the journal, in characters
FINISH_S = 120.0  # a leaving peer waits at most this long for its last step and checkpoint


@dataclass(slots=True)
class Trouble:
    """The latest occurrence of one kind of trouble, and when the journal last got a line about this kind (`said_at`).

    `unsaid` is the number of occurrences since that line.
    """

    text: str
    last_at: Seconds
    said_at: Seconds
    unsaid: int = 0


@dataclass(slots=True)
class HostWatch:
    """The table of one machine's troubles, such as a full disk, with one entry per kind.

    The journal gets a line when a trouble begins. Repetitions are counted, and their number is written at most once in
    REPEAT_S. A trouble that has not occurred for REPEAT_S is over.
    """

    journal: Journal
    now: Callable[[], Seconds]
    _noted: dict[str, Trouble] = field(default_factory=dict)

    def note(self, kind: str, text: str) -> None:
        """Record that a trouble occurs now; write it to the journal if its last line there is at least REPEAT_S old.

        Args:
            kind: Names the trouble; calls with the same `kind` count as repetitions of one trouble.
            text: Describes the trouble for the user.
        """
        now, known = self.now(), self._noted.get(kind)
        if known is None or now > known.last_at + REPEAT_S:
            self._noted[kind] = Trouble(text, now, now)
            self.journal.write(ErrorLine(reason=text))
            return
        known.text, known.last_at, known.unsaid = text, now, known.unsaid + 1
        if now >= known.said_at + REPEAT_S:
            self.journal.write(ErrorLine(reason=text, times=known.unsaid))
            known.said_at, known.unsaid = now, 0

    def present(self) -> list[str]:
        """Return the latest text of each trouble that has occurred within REPEAT_S."""
        now = self.now()
        return [trouble.text for trouble in self._noted.values() if now <= trouble.last_at + REPEAT_S]


class Computing(Protocol):
    """Interface through which the host uses the compute threads; engine/compute.py implements it."""

    def submit(self, job: jobs.Job) -> None:
        """Queue a job for the compute threads."""

    def training_s(self) -> Seconds:
        """Return the processor seconds of training so far; on a GPU, elapsed seconds * number of cores."""

    def run(self, report: Callable[[jobs.Outcome], None]) -> None:
        """Train and carry out submitted jobs until a Finish job comes; call `report` with the outcome of each job."""


@dataclass(slots=True)
class Host:
    """One peer's node with its network, compute threads and journal; `run` drives it in an asyncio event loop."""

    node: Node
    transport: wire.Transport
    directory: wire.Directory
    compute: Computing
    journal: Journal
    book: AddressBook
    now: Callable[[], Seconds]  # the swarm's clock, unix seconds
    wall: Callable[[], Seconds] = time.time  # the machine's clock, unix seconds
    keep_revocations: Callable[[bytes], None] = lambda packed: None
    unsaved: str = ""  # why the last checkpoint failed, or "" if it succeeded
    watch: HostWatch = field(init=False)
    _save_failed: jobs.SaveFailed | None = None  # the latest one
    # Number of another peer's request -> the future that receives our answer to it.
    _requests: dict[int, asyncio.Future[Envelope]] = field(default_factory=dict)
    _tasks: set[asyncio.Task[object]] = field(default_factory=set)
    _last_request: int = 0
    _timer: asyncio.TimerHandle | None = None
    _timer_at: Seconds = 0.0  # time at which `_timer` fires; it may be earlier than the node's `wake_at`, never later
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _reason: str = ""

    def __post_init__(self) -> None:
        """Make `watch`, the table of this machine's troubles."""
        self.watch = HostWatch(self.journal, self.now)

    async def run(self) -> str:
        """Train until something stops the peer, write a checkpoint, leave the swarm, and return the reason."""
        loop = asyncio.get_running_loop()
        thread = threading.Thread(target=self._compute, args=(loop,), name="compute", daemon=True)
        thread.start()
        self.transport.pace(self.node.meter.pace)
        self.node.meter.follow(self.transport.take_sent)
        await self.transport.serve(self._answer, self.node.answers.blob_bound, self.node.answers.knows)
        self._carry_all(self.node.begin(self.now()))
        self._spawn(self._report_refusals())
        self._spawn(self._report_cores())
        self._spawn(self._report_clock())
        await self._stopping.wait()
        await self._leave(self._reason, thread)
        return self._reason

    def troubles(self) -> list[str]:
        """Return the present problems for the user, one line each: of this machine, and of this peer's training.

        While the peer stops, an earlier failed checkpoint is left out, since the last checkpoint may still succeed.
        """
        failed = self.unsaved and not self._stopping.is_set()
        unsaved = f"no checkpoint could be written, {self._save_failed.said}" if failed and self._save_failed else ""
        ahead_s = self.wall() - self.now()
        clock = f"this machine's clock is {difference(ahead_s)} the swarm's, which this peer uses; fix the wrong one"
        of_clock = [clock] if abs(ahead_s) > CLOCKS_AGREE_S else []
        unheld = self.node.route_planner.unheld if self.node.route_planner else ""
        progress, roster = self.node.progress, self.node.roster
        of_node = (self.node.join.waits, unheld, progress.divergence.trouble, roster.copy_warning(self.now()))
        return [one for one in (self.journal.trouble, unsaved, *of_node, *of_clock, *self.watch.present()) if one]

    def stop(self, reason: str) -> None:
        """Make `run` save a checkpoint, leave the swarm and return `reason`; only the first call has an effect.

        Call it in the event loop's thread; it may be called before `run`.
        """
        if not self._stopping.is_set():
            self._reason = reason
            self._stopping.set()

    def _deliver(self, event: PeerEvent) -> None:
        match event:
            case jobs.Saved():
                self.unsaved = ""
            case jobs.SaveFailed(reason):
                self.unsaved, self._save_failed = reason, event
        try:
            self._carry_all(self.node.handle(event, self.now()))
        except Exception as error:  # a bug in the node: stop the peer
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Stop the peer because of a bug, and write the error and its place in the code to the journal."""
        place = traceback.extract_tb(error.__traceback__)[-1:]
        where = "".join(f" ({Path(one.filename).name}:{one.lineno})" for one in place)
        reason = f"{type(error).__name__}: {error}{where}"
        self.journal.write(ErrorLine(reason=reason))
        self.stop(f"error: {reason}")

    async def _answer(self, sender: PeerId, envelope: Envelope) -> Envelope:
        self._last_request += 1
        number = self._last_request
        future: asyncio.Future[Envelope] = asyncio.get_running_loop().create_future()
        self._requests[number] = future
        try:
            self._deliver(wire.Asked(number, sender, envelope))
            return await future
        finally:
            self._requests.pop(number, None)

    def _wake(self) -> None:
        self._timer = None
        wake_at = self.node.wake_at
        if wake_at is not None and wake_at <= self.now():
            self._deliver(Woke())
        else:
            self._arm()

    def _compute(self, loop: asyncio.AbstractEventLoop) -> None:
        def report(outcome: jobs.Outcome) -> None:
            loop.call_soon_threadsafe(self._report, outcome, self.now())

        try:
            self.compute.run(report)
        except Exception as error:  # a bug or a lost device: stop the peer with this reason
            with suppress(RuntimeError):  # the event loop is closed, so nobody needs the report
                report(jobs.JobFailed("training", f"{type(error).__name__}: {error}"))

    def _report(self, outcome: jobs.Outcome, at: Seconds) -> None:
        """Pass the outcome of a job that ended at `at` to the node; a WindowClosed also gets the seconds since `at`."""
        self._deliver(outcome.reported(self.now() - at) if isinstance(outcome, jobs.WindowClosed) else outcome)

    def _carry_all(self, effects: list[PeerEffect]) -> None:
        for effect in effects:
            self._carry(effect)
        self._arm()

    def _carry(self, effect: PeerEffect) -> None:
        match effect:
            case wire.Ask():
                self._spawn(self._ask(effect))
            case wire.Reply(request, envelope):
                future = self._requests.get(request)
                if future is not None and not future.done():
                    future.set_result(envelope)
            case Log(event):
                self.journal.write(event)
            case wire.Announce():
                self._spawn(self._announce(effect), name="announce")
            case wire.Lookup(key):
                self._spawn(self._lookup(key))
            case Learn(peer, addresses):
                self.transport.learn(peer, addresses)
                self.book.learn(peer, addresses)
            case Exclude(peers, revocations):
                self.keep_revocations(revocations)
                for peer in peers:
                    self._spawn(self.transport.drop(peer))
            case EvaluatePlans():
                self._spawn(self._evaluate(effect))
            case Stop(reason) | MembershipOver(reason):
                self.stop(reason)
            case _:
                if not isinstance(effect, jobs.Job):
                    assert_never(effect)
                self.compute.submit(effect)

    def _arm(self) -> None:
        """Set the timer to the node's `wake_at`, unless it already fires sooner.

        Most events move `wake_at` to a later time. A timer that fires too early is then set again, which costs less
        than setting the timer at each event.
        """
        wake_at = self.node.wake_at
        if wake_at is None or (self._timer is not None and self._timer_at <= wake_at):
            return
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0.0, wake_at - self.now())
        self._timer, self._timer_at = asyncio.get_running_loop().call_later(delay_s, self._wake), wake_at

    def _spawn(self, work: Coroutine[object, None, object], name: str | None = None) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _ask(self, ask: wire.Ask) -> None:
        began = self.now()
        try:
            answer = await self.transport.ask(ask.to, ask.envelope, ask.deadline_s, ask.max_blob_bytes)
        except wire.AskError as error:
            if error.reason == Reason.RESOURCES:
                self.watch.note(error.reason, str(error))
            self._deliver(wire.AskFailed(ask.tag, ask.to, error.reason, self.now() - began))
            return
        except Exception as error:  # a bug in the transport: tell the node that the request failed
            self._note(error)
            self._deliver(wire.AskFailed(ask.tag, ask.to, Reason.UNREACHABLE, self.now() - began))
            return
        self._deliver(answer.to(ask))

    async def _evaluate(self, asked: EvaluatePlans) -> None:
        """Evaluate plans in another thread, since this may take seconds, and deliver the result."""
        self._deliver(await asyncio.to_thread(evaluate_plans, asked))

    async def _announce(self, record: wire.Announce) -> None:
        try:
            await self.directory.store(record.key, record.subkey, record.value, record.expires)
        except Exception as error:  # a bug or fault of the DHT: the node announces the record again later
            self._note(error)

    async def _lookup(self, key: str) -> None:
        try:
            found = await self.directory.fetch(key)
        except Exception as error:  # a bug or fault of the DHT: the node looks the key up again later
            self._note(error)
            return
        self._deliver(wire.Found(key, found))

    def _note(self, error: Exception) -> None:
        """Record an error of the network code as a trouble of this machine; the peer goes on."""
        self.watch.note(type(error).__name__, f"{type(error).__name__}: {error}"[:SAID])

    async def _report_refusals(self) -> None:
        """Until cancelled, write new totals of refused requests and refused records to the journal, every REFUSED_S."""
        known: dict[str, int] = {}
        while True:
            await asyncio.sleep(REFUSED_S)
            counts = {**self.transport.refused, **{f"record-{k}": n for k, n in self.node.roster.refused.items()}}
            if counts != known:
                known = dict(counts)
                self.journal.write(RefusedLine(by_reason=known))

    async def _report_cores(self) -> None:
        """Until cancelled, report the processor time of training and network to the node, every CORES_S."""
        known = self._processor()
        while True:
            await asyncio.sleep(CORES_S)
            now = self._processor()
            self._deliver(now.since(known))
            known = now

    async def _report_clock(self) -> None:
        """Until cancelled, write a journal line whenever the machine's clock jumps, or this process was suspended."""
        ahead_s = self.wall() - self.now()
        while True:
            began = self.now()
            await asyncio.sleep(CLOCK_S)
            late_s, jumped_s = self.now() - began - CLOCK_S, self.wall() - self.now() - ahead_s
            if late_s > SUSPENDED_S:
                self.journal.write(SuspendedLine(seconds=round(late_s, 1)))
            if abs(jumped_s) > CLOCKS_AGREE_S:
                self.journal.write(ClockLine(jumped_s=round(jumped_s, 1)))
                ahead_s += jumped_s

    def _processor(self) -> CoresUsed:
        """Return the processor time so far of training, and of the network together with the event loop's thread."""
        network_s = time.thread_time() + self.transport.processor_s()
        return CoresUsed(time.monotonic(), self.compute.training_s(), network_s, _idle_s())

    async def _leave(self, reason: str, thread: threading.Thread) -> None:
        try:
            self._carry_all(self.node.leave(reason, self.now()))
        except Exception as error:
            self._fail(error)
        self.unsaved = "the thread that computes has ended" if not thread.is_alive() else "it took too long"
        if diverged := self.node.progress.divergence.trouble:
            self.unsaved = diverged
        elif not self.node.join.has_state:
            self.unsaved = NOTHING_TO_SAVE
        else:
            self.compute.submit(jobs.Save())
        self.compute.submit(jobs.Finish())
        farewell = [task for task in self._tasks if task.get_name() == "announce" and not task.done()]
        if farewell:
            await asyncio.wait(farewell, timeout=FAREWELL_S)
        await asyncio.get_running_loop().run_in_executor(None, thread.join, FINISH_S)
        await asyncio.sleep(0)  # let the event loop deliver the last outcomes
        for task in list(self._tasks):
            task.cancel()
        self.journal.write(StoppedLine(reason=reason, unsaved=self.unsaved))


def _idle_s() -> Seconds:
    """Return the idle seconds since the machine started, summed over its cores; 0.0 if the system is not Linux."""
    try:
        fields = Path("/proc/stat").read_text().split(maxsplit=5)  # the line "cpu": ticks of user, nice, system, idle
        return int(fields[4]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0
