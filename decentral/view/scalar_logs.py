"""A peer's curves for TensorBoard and for Weights & Biases: `python -m decentral.peer --log tensorboard,wandb`.

Both read the peer's own journal, every FOLLOW_S, and write below its state folder: `tensorboard/` and `wandb/`. Nothing
leaves the machine. W&B runs offline; `wandb sync DIR` is the user's to type. A kill loses the last FOLLOW_S at most.
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
CLOSE_S = 30.0  # for the last lines


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a log says of the peer and its run."""

    peer: str
    run: str
    device: str
    started: Seconds  # Unix time of this start of the peer


class ScalarLog(Protocol):
    """Keeps named numbers by step and time."""

    def write(self, step: int, at: Seconds, values: Mapping[str, float]) -> None:
        """`at`: Unix time."""

    def close(self) -> None: ...


class TensorBoardLog:
    """Event files as torch writes them, a folder for each start of the peer."""

    def __init__(self, folder: Path, run: RunFacts) -> None:
        from torch.utils.tensorboard import SummaryWriter

        place = folder / "tensorboard" / f"{run.started:.0f}"
        self._writer: Any = SummaryWriter(str(place), flush_secs=int(FOLLOW_S))

    def write(self, step: int, at: Seconds, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=at)

    def close(self) -> None:
        self._writer.close()


class OfflineWandb:
    """A run of W&B in a folder, which its own command may upload later. It asks for no key and for no network."""

    def __init__(self, folder: Path, run: RunFacts) -> None:
        import wandb

        quiet = wandb.Settings(
            mode="offline", console="off", silent=True, disable_code=True, disable_git=True, x_disable_stats=True
        )
        self._run: Any = wandb.init(project=run.run, name=run.peer, dir=folder, config=asdict(run), settings=quiet)
        self._service: Any = wandb
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, at: Seconds, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, "at": at, **values})

    def close(self) -> None:
        self._run.finish()
        self._service.teardown()  # waits until all is in the file


LOGS: Mapping[str, type[TensorBoardLog] | type[OfflineWandb]] = {"tensorboard": TensorBoardLog, "wandb": OfflineWandb}


class JournalScalars:
    """Makes scalars of a journal's events, one after the other."""

    def __init__(self) -> None:
        self.work = WorkDone()  # since the first event; other events are of the step that was taken last
        self._peers = 0

    def of(self, t: Seconds, event: events.JournalEvent | None) -> dict[str, float]:
        """The numbers of this event by name; none if it has none to draw."""
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
    """Gives the lines that a journal gets from now on to logs, until `over` is set; then closes the logs.

    `trouble` is told why, in the follower's thread, where a log cannot go on. Then the peer trains on without logs.
    """

    def __init__(self, names: Sequence[str], journal: Path, run: RunFacts, trouble: Callable[[str], None]) -> None:
        super().__init__(name="scalar logs", daemon=True)
        self.over = threading.Event()
        self._names, self._run, self._trouble = names, run, trouble
        self._folder, self._tail, self._scalars = journal.parent, Tail(journal), JournalScalars()
        self._tail.skip()

    def run(self) -> None:
        try:
            logs: list[ScalarLog] = [LOGS[name](self._folder, self._run) for name in self._names]
            while not self.over.wait(FOLLOW_S):
                self._take(logs)
            self._take(logs)
            for one in logs:
                one.close()
        except Exception as error:  # of a library or a full disk
            self._trouble(f"--log {','.join(self._names)} has ended: {type(error).__name__}: {error}")

    def _take(self, logs: Sequence[ScalarLog]) -> None:
        for line in recorded(self._tail.new()):
            if values := self._scalars.of(line.t, line.event):
                for one in logs:
                    one.write(self._scalars.work.step, line.t, values)


@asynccontextmanager
async def scalars_logged(names: Sequence[str], host: Host) -> AsyncIterator[None]:
    """Logs what the host's journal gets until the block ends, below its state folder."""
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
