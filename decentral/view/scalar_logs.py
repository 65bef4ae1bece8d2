"""Log a peer's losses, speed and traffic to TensorBoard and W&B: `python -m decentral.peer --log tensorboard,wandb`.

Start reading at `scalars_logged`. A thread reads the peer's own journal every FOLLOW_S seconds, and writes the logs to
`tensorboard/` and `wandb/` in the peer's state folder. It sends nothing over the network: Weights & Biases runs
offline, and the user can upload its logs with `wandb sync DIR`. If the peer is killed, at most the last FOLLOW_S
seconds are missing in the logs.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from decentral.core.journal import events
from decentral.core.journal.file import Tail
from decentral.core.journal.lines import recorded
from decentral.core.journal.peer_totals import WorkDone
from decentral.core.units import Seconds
from decentral.peers.runtime.host import Host

FOLLOW_S = 5.0
CLOSE_S = 30.0  # after this time, a closing log no longer waits for the thread that writes its last lines


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Properties of the peer and its run that a log contains."""

    peer: str
    run: str
    device: str
    started: Seconds


class ScalarLog(Protocol):
    """Interface of a log of named numbers by step and time; implemented by TensorBoardLog and OfflineWandb."""

    def write(self, step: int, at: Seconds, values: Mapping[str, float]) -> None:
        """Log numbers by name, for an optimizer step and a Unix time."""

    def close(self) -> None:
        """Write all buffered numbers, and close the log."""


class TensorBoardLog:
    """A log of TensorBoard event files, in a new folder for each start of the peer."""

    def __init__(self, folder: Path, run: RunFacts) -> None:
        """Open a log below `folder`/tensorboard."""
        from torch.utils.tensorboard import SummaryWriter

        place = folder / "tensorboard" / f"{run.started:.0f}"
        self._writer: Any = SummaryWriter(str(place), flush_secs=int(FOLLOW_S))

    def write(self, step: int, at: Seconds, values: Mapping[str, float]) -> None:
        """Log numbers by name, for an optimizer step and a Unix time."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=at)

    def close(self) -> None:
        """Write all buffered numbers, and close the files."""
        self._writer.close()


class OfflineWandb:
    """A log in the form of an offline run of Weights & Biases, which needs no key and no network."""

    def __init__(self, folder: Path, run: RunFacts) -> None:
        """Open a log below `folder`/wandb."""
        import wandb

        quiet = wandb.Settings(
            mode="offline", console="off", silent=True, disable_code=True, disable_git=True, x_disable_stats=True
        )
        self._run: Any = wandb.init(project=run.run, name=run.peer, dir=folder, config=asdict(run), settings=quiet)
        self._service: Any = wandb
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, at: Seconds, values: Mapping[str, float]) -> None:
        """Log numbers by name, for an optimizer step and a Unix time."""
        self._run.log({"step": step, "at": at, **values})

    def close(self) -> None:
        """Write all buffered numbers, and end the run."""
        self._run.finish()
        self._service.teardown()  # blocks until wandb has written everything


LOGS: Mapping[str, type[TensorBoardLog] | type[OfflineWandb]] = {"tensorboard": TensorBoardLog, "wandb": OfflineWandb}


class JournalScalars:
    """Converter of journal events into named numbers. Some numbers are sums over all events so far."""

    def __init__(self) -> None:
        """Begin with all sums at zero."""
        self.work = WorkDone()
        self._peers = 0

    def of(self, t: Seconds, event: events.JournalEvent | None) -> dict[str, float]:
        """Return the numbers of the next event by name; {} if it has no numbers. `t` is the Unix time of the event."""
        self.work.take(t, event)
        match event:
            case events.StepLine():
                return self._of_steps(event)
            case events.EvalLine():
                return {"loss/held-out": event.loss}
            case events.ExchangeLine(outcome=outcome):
                return {f"exchanges/{outcome}": self.work.exchanges.outcomes[outcome]}
            case events.TrafficLine():
                return {"network/sent_bytes": event.sent_bytes, "network/received_bytes": event.received_bytes}
            case events.CheckpointLine():
                return {"checkpoint/seconds": event.seconds}
            case events.PlanLine():
                return {"plan/tokens_per_s": event.cost}
            case events.JoinedLine():
                return self._met(event.peers)
            case events.PeerJoinedLine():
                return self._met(1)
            case events.PeerLeftLine():
                return self._met(-1)
        return {}

    def _of_steps(self, line: events.StepLine) -> dict[str, float]:
        spent = {"training": line.seconds, **line.aside}
        total = sum(seconds for kind, seconds in spent.items() if kind != "beside")
        found: dict[str, float] = {"tokens": self.work.tokens}
        found |= {"loss/training": line.loss} if line.loss is not None else {}
        if total > 0:
            found["tokens_per_s"] = line.tokens / total
            found |= {f"time/{kind}": seconds / total for kind, seconds in spent.items()}
        return found

    def _met(self, more: int) -> dict[str, float]:
        self._peers += more
        return {"swarm/peers": self._peers}


class JournalFollower(threading.Thread):
    """The thread that copies a journal's new lines to logs until `over` is set, and then closes the logs.

    If a log fails, the thread ends and the peer continues to train without logs.
    """

    def __init__(self, names: Sequence[str], journal: Path, run: RunFacts, trouble: Callable[[str], None]) -> None:
        """Prepare to copy the lines that are written to a journal from now on.

        Args:
            names: Keys of LOGS.
            journal: Path of the journal; the logs are written to its folder.
            run: Properties of the peer and its run for the logs.
            trouble: Function that this thread calls with the reason if a log fails.
        """
        super().__init__(name="scalar logs", daemon=True)
        self.over = threading.Event()
        self._names, self._run, self._trouble = names, run, trouble
        self._folder, self._tail, self._scalars = journal.parent, Tail(journal), JournalScalars()
        self._tail.skip()

    def run(self) -> None:
        """Copy the journal's new lines to the logs until `over` is set."""
        try:
            logs: list[ScalarLog] = [LOGS[name](self._folder, self._run) for name in self._names]
            while not self.over.wait(FOLLOW_S):
                self._take(logs)
            self._take(logs)
            for one in logs:
                one.close()
        except Exception as error:  # a fault of the logging library, or a full disk
            self._trouble(f"--log {','.join(self._names)} has ended: {type(error).__name__}: {error}")

    def _take(self, logs: Sequence[ScalarLog]) -> None:
        for line in recorded(self._tail.new()):
            if values := self._scalars.of(line.t, line.event):
                for one in logs:
                    one.write(self._scalars.work.step, line.t, values)


@asynccontextmanager
async def scalars_logged(names: Sequence[str], host: Host) -> AsyncIterator[None]:
    """Copy the host's journal to the logs with these names (keys of LOGS) until the block ends."""
    if not names:
        yield
        return
    setup, loop = host.node.setup, asyncio.get_running_loop()
    run = RunFacts(setup.own.peer, setup.run, setup.profile.device, host.now())

    def trouble(text: str) -> None:
        loop.call_soon_threadsafe(host.watch.note, "log", text)

    follower = JournalFollower(names, host.journal.path, run, trouble)
    follower.start()
    try:
        yield
    finally:
        follower.over.set()
        await asyncio.to_thread(follower.join, CLOSE_S)
