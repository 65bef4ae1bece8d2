"""Tell programs and chat tools what happens to a peer: `--on-event CMD` and `--webhook URL`.

An event of the journal that concerns people becomes a message in JSON (hook_messages.py). A command gets it on
stdin: nothing that another peer sent becomes an argument, and no shell reads the command. A webhook gets the message by
POST (webhook.py).

Each hook has a thread and a bounded queue. A hook that hangs or fails costs training nothing: its messages are dropped
and counted, and `hook` lines of the journal say how many. Kinds of events take turns, so that strangers who join and
leave a thousand times displace no other kind. Start reading at `HookedJournal` and `hooks_running`.
"""

import asyncio
import os
import shlex
import shutil
import signal
import subprocess
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from decentral.core.at_once import at_once
from decentral.core.errors import UserError
from decentral.core.journal import events
from decentral.core.journal.events import JournalEvent
from decentral.core.journal.file import Journal
from decentral.core.plain_text import printable
from decentral.core.units import Seconds, plural
from decentral.view.hook_messages import HOOK_KINDS, HookMessage, Messages

HOOK_S = 10.0  # a command or a request that takes longer is ended
PAUSE_S = 1.0  # pause before the second try; the pause before the third try is four times as long
LAST_S = 5.0  # a peer that ends waits at most this long until its last messages are delivered
QUEUED_MESSAGES = 256  # at most this many messages wait for a hook; further messages are dropped
REPORTED_S = 10.0  # new failures and drops are written to the journal at this interval


class Hook(Protocol):
    """Interface of a receiver of messages; implemented by CommandHook and Webhook."""

    flag: str
    tries: int

    def deliver(self, message: HookMessage) -> None:
        """Deliver a message within about HOOK_S. Raise OSError, with the reason as its text, if that fails."""

    def end(self) -> None:
        """End the delivery that is under way, if there is one; called from another thread than `deliver`."""


class CommandHook:
    """A program that runs once for each message. It reads the message from stdin as JSON; its output is discarded."""

    flag, tries = "--on-event", 1

    def __init__(self, arguments: Sequence[str]) -> None:
        """Make the hook of a program and its arguments."""
        self._arguments = list(arguments)
        self._running: subprocess.Popen[bytes] | None = None

    @classmethod
    def parse(cls, command: str) -> "CommandHook":
        """Return the hook of a command line, which is split as a shell would split it, but runs without a shell.

        Raises:
            UserError: If the command is not well quoted, or this machine has no such program.
        """
        try:
            arguments = shlex.split(command)
        except ValueError as error:
            raise UserError(f"--on-event {command!r}: {error}") from None
        if not arguments or shutil.which(arguments[0]) is None:
            raise UserError(f"--on-event expects a program and its arguments, without a shell; got {command!r}")
        return cls(arguments)

    def deliver(self, message: HookMessage) -> None:
        """Run the program. If it takes longer than HOOK_S, kill it and all processes that it has started.

        Raises:
            OSError: If the program does not start, takes longer, or ends with an exit code other than 0.
        """
        nowhere = subprocess.DEVNULL
        process = subprocess.Popen(
            self._arguments, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True
        )
        self._running = process
        try:
            process.communicate(message.packed() + b"\n", HOOK_S)
        except subprocess.TimeoutExpired:
            self.end()
            process.wait()
            raise OSError(f"it took longer than {HOOK_S:g} s") from None
        finally:
            self._running = None
        if process.returncode:
            raise OSError(f"exit code {process.returncode}")

    def end(self) -> None:
        """Kill the program, if it runs."""
        if (process := self._running) is not None:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)


@dataclass(slots=True)
class Deliveries:
    """Counts of one hook's messages."""

    delivered: int = 0
    failed: int = 0
    dropped: int = 0  # messages lost because the queue was full, or because they still waited when the peer ended
    reason: str = ""  # why the last failed message was not delivered

    @property
    def missed(self) -> int:
        """Number of messages that were not delivered."""
        return self.failed + self.dropped

    def line(self, flag: str) -> events.HookLine:
        """Return the journal's line about the hook of this flag."""
        delivered, failed, dropped = self.delivered, self.failed, self.dropped
        return events.HookLine(hook=flag, delivered=delivered, failed=failed, dropped=dropped, reason=self.reason)

    def deliver(self) -> None:
        """Count a delivered message."""
        self.delivered += 1

    def fail(self, reason: str) -> None:
        """Count a message that was not delivered, and keep the reason."""
        self.failed, self.reason = self.failed + 1, reason

    def drop(self) -> None:
        """Count a message lost because the queue was full, or because it still waited when the peer ended."""
        self.dropped += 1
        self.reason = self.reason or f"more than {QUEUED_MESSAGES} messages waited"


class HookThread(threading.Thread):
    """The thread that delivers one hook's messages, one at a time. Kinds of events take turns, each in its order."""

    def __init__(self, hook: Hook) -> None:
        """Prepare to deliver messages; they wait until `start`."""
        super().__init__(name=hook.flag, daemon=True)
        self.hook, self.counts = hook, Deliveries()
        self._waiting: dict[str, deque[HookMessage]] = {}  # kind -> its messages; kinds take turns, in the dict's order
        self._changed, self._over = threading.Condition(), threading.Event()

    def tell(self, message: HookMessage) -> None:
        """Queue a message, or count it as dropped if no more messages of its kind may wait. Returns at once.

        A kind must not have more waiting messages than there are free slots in the queue (the rule of `FairShare`), so
        that one kind takes at most half of the queue.
        """
        with self._changed:
            alike = self._waiting.get(message.event) or deque()
            if len(alike) >= QUEUED_MESSAGES - sum(map(len, self._waiting.values())):
                self.counts.drop()
                return
            alike.append(message)
            self._waiting[message.event] = alike
            self._changed.notify()

    def run(self) -> None:
        """Deliver messages until `close` is called, and then the messages that still wait."""
        while (message := self._next()) is not None:
            self._deliver(message)

    def _next(self) -> HookMessage | None:
        """Wait for a message, and return it; None after `close`, once no message waits."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._over.is_set())
            if not self._waiting:
                return None
            kind = next(iter(self._waiting))
            alike = self._waiting.pop(kind)
            message = alike.popleft()
            if alike:
                self._waiting[kind] = alike  # its next turn comes after those of all other kinds
            return message

    def _deliver(self, message: HookMessage) -> None:
        reason = ""
        for number in range(self.hook.tries):
            try:
                self.hook.deliver(message)
            except OSError as error:
                reason = printable(error.strerror or str(error) or type(error).__name__)
            else:
                self.counts.deliver()
                return
            if number + 1 < self.hook.tries and self._over.wait(PAUSE_S * 4**number):
                break
        self.counts.fail(reason)

    def close(self) -> None:
        """Wait at most LAST_S until the waiting messages are delivered; then drop the messages that still wait."""
        self._over.set()
        with self._changed:
            self._changed.notify()
        self.join(LAST_S)
        with self._changed:
            for _ in range(sum(map(len, self._waiting.values()))):
                self.counts.drop()
            self._waiting.clear()
        self.hook.end()


class Hooks:
    """All hooks of a peer, and the kinds of event about which the hooks get messages."""

    def __init__(self, hooks: Sequence[Hook], kinds: Sequence[str] = HOOK_KINDS) -> None:
        """Make a thread for each hook; messages wait until `hooks_running` starts the threads."""
        self.threads = [HookThread(hook) for hook in hooks]
        self._kinds, self._messages = frozenset(kinds), Messages()
        self._missed: dict[str, int] = {}  # by flag: messages missed when `news` was last called

    def tell(self, t: Seconds, event: JournalEvent, peer: str = "") -> None:
        """Queue the message about an event at Unix time `t`, if there is one. Returns at once and raises nothing.

        `peer` is the id of the peer whose journal has the event; "" if all events are of one peer.
        """
        message = self._messages.of(t, event, peer) if self.threads else None
        if message is not None and message.event in self._kinds:
            for thread in self.threads:
                thread.tell(message)

    def watch(self, run: str) -> None:
        """Allow messages about this run from a program that is not a peer; its peer id is ""."""
        self._messages.watch(run)

    def learn(self, event: JournalEvent, peer: str) -> None:
        """Remember what later messages need of an event, without a message about the event."""
        self._messages.learn(event, peer)

    def start(self) -> None:
        """Start to deliver messages."""
        for thread in self.threads:
            thread.start()

    def news(self) -> list[tuple[events.HookLine, str]]:
        """Return a journal line about each hook with newly missed messages, and a warning ("" if not its first)."""
        found = []
        for thread in self.threads:
            flag, counts = thread.hook.flag, thread.counts
            known = self._missed.get(flag, 0)
            if counts.missed > known:
                warning = "" if known else f"warning: {flag} failed: {counts.reason}; training goes on"
                found.append((counts.line(flag), warning))
                self._missed[flag] = counts.missed
        return found

    def close(self) -> None:
        """Wait until the last messages are delivered, for about LAST_S at most."""
        for thread in self.threads:
            thread.close()

    def missed(self) -> list[str]:
        """Return a warning about each hook that has missed messages."""
        return [
            f"warning: {one.hook.flag} did not get {plural(one.counts.missed, 'message')}: {one.counts.reason}"
            for one in self.threads
            if one.counts.missed
        ]


class HookedJournal(Journal):
    """A journal that also tells hooks of each event, even if the disk refuses the event's line."""

    def __init__(self, path: Path, clock: Callable[[], Seconds], hooks: Hooks) -> None:
        """Open the journal at `path`, as Journal does, for these hooks."""
        super().__init__(path, clock)
        self._hooks, self._now = hooks, clock

    def write(self, event: JournalEvent) -> None:
        """Append the line of an event, and tell the hooks."""
        super().write(event)
        self._hooks.tell(self._now(), event)


@asynccontextmanager
async def hooks_running(hooks: Hooks, journal: Journal | None, say: Callable[[str], None]) -> AsyncIterator[None]:
    """Deliver the messages of these hooks until the block ends, and report what was not delivered.

    Args:
        hooks: The hooks; their threads are started.
        journal: Gets a `hook` line about each hook with new failures or drops, at most once in REPORTED_S; None: no
            lines are written.
        say: Prints a line for the user, at a hook's first failure.
    """
    hooks.start()
    reporting = asyncio.create_task(_report(hooks, journal, say))
    try:
        yield
    finally:
        reporting.cancel()
        await at_once(asyncio.to_thread(thread.close) for thread in hooks.threads)
        for warning in hooks.missed():
            say(warning)


async def _report(hooks: Hooks, journal: Journal | None, say: Callable[[str], None]) -> None:
    while True:
        await asyncio.sleep(REPORTED_S)
        for line, warning in hooks.news():
            if warning:
                say(warning)
            if journal is not None:
                journal.write(line)
