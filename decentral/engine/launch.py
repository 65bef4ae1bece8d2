"""Starts the ranks of an island (decentral/engine/island.py), and starts all of them again when one dies.

    --device cuda:0,cuda:1     this command becomes torch's elastic launcher, and runs itself once for each device
    torchrun ... -m decentral.peer     torchrun is the launcher; each rank finds its place in the environment

All devices are of one type. Ctrl-C goes to every rank: rank 0 saves, leaves the swarm and lets the others finish. So do
SIGHUP and, under torchrun, SIGTERM: torchrun passes the one that it gets on to the ranks, and kills them after 30 s.
"""

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from types import FrameType

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from decentral.commands.shared import ending_signals, one_line
from decentral.core import config
from decentral.core.end_with_parent import end_with_parent
from decentral.core.errors import UserError
from decentral.core.rank_place import ATTEMPT, Place
from decentral.engine import measure, memory
from decentral.engine.island import BUCKET_BYTES, Island, follow

RESTARTS = 100  # of an island; a device that fails every time must end it some day


def island(arguments: Sequence[str], state_dir: str, names: Sequence[str]) -> int:
    """Runs this command as one rank for each device until it ends. Returns its exit code."""
    if names[0] == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // len(names))))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # the others are this file's
    for logger in ("agent.server.api", "multiprocessing.api"):
        logging.getLogger(f"torch.distributed.elastic.{logger}").setLevel(logging.CRITICAL)
    command = ("-m", "decentral.peer", *arguments, "--state-dir", state_dir, "--device", ",".join(names))
    launcher = Launcher(command, len(names))
    for each in ending_signals():
        signal.signal(each, launcher.stop)
    return launcher.run()


class Launcher:
    """Starts all ranks with torch's elastic agent, and again when one of them has died."""

    def __init__(self, command: Sequence[str], ranks: int) -> None:
        self.command, self.ranks = tuple(command), ranks
        self.agent: LocalElasticAgent | None = None
        self.stopping = False

    def run(self) -> int:
        """Returns the exit code: 0 done, also after `stop`; 2 if rank 0 has said what the user should mend."""
        for attempt in range(RESTARTS + 1):
            os.environ[ATTEMPT] = str(attempt)
            self.agent = self._new_agent()
            failures = self.agent.run().failures
            if self.stopping or not failures:
                return 0
            codes = {rank: failure.exitcode for rank, failure in sorted(failures.items())}
            if 2 in codes.values():
                return 2
            print(f"ranks ended by themselves (rank: exit code {codes}); starting all again", file=sys.stderr)
        return 1

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Sends Ctrl-C to all ranks. The second time, or before they are there, it ends them at once."""
        workers = self.agent.get_worker_group().workers if self.agent else []
        pids = [worker.id for worker in workers if worker.id is not None]
        if self.stopping or not pids:
            raise KeyboardInterrupt
        self.stopping = True
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)

    def _new_agent(self) -> LocalElasticAgent:
        """The agent of one attempt. Its restarts are ours: it would also restart after Ctrl-C and user errors."""
        name = f"island-{os.getpid()}-{os.environ[ATTEMPT]}"
        place = RendezvousParameters("c10d", "127.0.0.1:0", name, min_nodes=1, max_nodes=1, local_addr="127.0.0.1")
        spec = WorkerSpec(
            role="peer",
            local_world_size=self.ranks,
            rdzv_handler=get_rendezvous_handler(place),
            entrypoint=sys.executable,
            args=self.command,
            max_restarts=0,
            local_addr="127.0.0.1",
        )
        return LocalElasticAgent(spec, DefaultLogsSpecs(os.devnull))  # else it leaves a temporary folder


def rank(device: str, throttle: float, place: Place, lead: Callable[[Island], None]) -> None:
    """Takes this process's place in its island: rank 0 leads, as the peer, and the others follow."""
    end_with_parent(signal.SIGINT)
    for each in ending_signals():
        signal.signal(each, signal.SIG_DFL)  # a rank that waits for the others does so where Python cannot act
    island = Island(measure.choose(device, "auto", 1.0, 0.0).device)
    if place.rank == 0:
        for each in notices():
            signal.signal(each, signal.default_int_handler)
        try:
            lead(island)
        finally:
            island.close()
        return
    for each in notices():
        signal.signal(each, signal.SIG_IGN)  # rank 0 gets it as well, and tells the others when to finish
    try:
        _follow(device, throttle, island)
    except (RuntimeError, UserError) as error:
        print(f"error: rank {place.rank} ends: {one_line(error)}", file=sys.stderr)
        raise SystemExit(1) from None


def notices() -> tuple[signal.Signals, ...]:
    """Return the signals that tell a rank to leave in order: those that end a command, but SIGTERM only of torchrun.

    This file's launcher sends SIGTERM only to ranks that start again because one of them has died. torchrun sends it to
    those as well, and nothing tells the ranks why; they leave then as far as they can without the dead one.
    """
    return tuple(each for each in ending_signals() if each != signal.SIGTERM or ATTEMPT not in os.environ)


def _follow(device: str, throttle: float, island: Island) -> None:
    assignment = island.assignment()
    if assignment is not None:
        train = assignment.run.train
        chosen = measure.choose(device, train.dtype, throttle, train.emulated_micro_batch_s)
        follow(island, assignment, replace(chosen, ranks=island))
    island.close()


def model_bytes(wanted: int | None, run: config.Config, kept: tuple[int, int] | None, island: Island) -> int:
    """The bytes of each device that the model may take beside the buckets. Raises UserError if the model is too large.

    `wanted` is --memory, `kept` the layers of the folder's checkpoint.
    """
    if run.synchronous:
        raise UserError(f"gossip.algorithm {run.gossip.algorithm} takes no peers of several devices; name one --device")
    needs = memory.needs(run)
    if kept not in (None, (0, needs.fragments[-1].last)):
        raise UserError(f"this folder's checkpoint holds layers {kept[0]} to {kept[1] - 1} only; name one --device")
    available = wanted or island.memory_bytes
    buckets = BUCKET_BYTES * sum(cut.parameters for cut in needs.fragments)
    needed = needs.span_bytes(0, len(needs.fragments)) + buckets
    if needed > available:
        each = "each device of a peer with several holds the whole model"
        raise UserError(f"--memory {available}: {each}, {needed} bytes; name one --device, and it holds a part")
    return available - buckets
