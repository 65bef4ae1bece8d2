"""Run a peer on several devices, with one process (a rank) for each; together the ranks are an `Island`.

If one rank dies, its launcher starts all ranks again. There are two launchers:

    --device cuda:0,cuda:1     this command becomes torch's elastic launcher, and starts itself once for each device
    torchrun ... -m decentral.peer     torchrun is the launcher; each rank reads its number from the environment

`island` is the first launcher, and `rank` is what each process runs under either launcher. All devices are of one type.
Ctrl-C goes to every rank: rank 0 saves, leaves the swarm and orders the other ranks to finish. SIGHUP works like
Ctrl-C. Under torchrun, SIGTERM works like Ctrl-C too: torchrun passes a SIGTERM on to the ranks, and kills them after
30 s.
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

from decentral.comm.codecs import blockwise
from decentral.comm.gossip.kernel_choice import best_kernels
from decentral.commands.shared import ending_signals, one_line
from decentral.core import config
from decentral.core.choices import ALGORITHMS, OPTIMIZERS
from decentral.core.end_with_parent import end_with_parent
from decentral.core.errors import ExitCode, UserError
from decentral.core.rank_place import ATTEMPT, Place, Split
from decentral.engine import heap, measure, memory
from decentral.engine.island import BUCKET_BYTES, Island, follow
from decentral.engine.step import Device

RESTARTS = 100  # the launcher gives up after this many restarts, since a broken device may fail every time


def island(arguments: Sequence[str], state_dir: str, names: Sequence[str]) -> int:
    """Start one process of `decentral.peer` (a rank) for each device, wait until all end, and return the exit code.

    Args:
        arguments: Command-line arguments of each rank, without --state-dir and --device.
        state_dir: The peer's state folder.
        names: One device for each rank.
    """
    if names[0] == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // len(names))))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # torch must leave all other signals to `Launcher.stop`
    for logger in ("agent.server.api", "multiprocessing.api"):
        logging.getLogger(f"torch.distributed.elastic.{logger}").setLevel(logging.CRITICAL)
    command = ("-m", "decentral.peer", *arguments, "--state-dir", state_dir, "--device", ",".join(names))
    launcher = Launcher(command, len(names))
    for each in ending_signals():
        signal.signal(each, launcher.stop)
    return launcher.run()


class Launcher:
    """Starts all ranks of a peer with torch's elastic agent, and starts all of them again when one has died."""

    def __init__(self, command: Sequence[str], ranks: int) -> None:
        """Store the arguments with which `run` starts Python for each rank, and the number of ranks."""
        self.command, self.ranks = tuple(command), ranks
        self.agent: LocalElasticAgent | None = None
        self.stopping = False

    def run(self) -> int:
        """Run all ranks until they end.

        Returns:
            The exit code: DONE if all ranks have finished, or `stop` was called; MISTAKE if a rank ended so; FAILED
            after RESTARTS restarts.
        """
        for attempt in range(RESTARTS + 1):
            os.environ[ATTEMPT] = str(attempt)
            self.agent = self._new_agent()
            failures = self.agent.run().failures
            if self.stopping or not failures:
                return ExitCode.DONE
            codes = {rank: failure.exitcode for rank, failure in sorted(failures.items())}
            if ExitCode.MISTAKE in codes.values():
                return ExitCode.MISTAKE
            print(f"ranks failed (rank: exit code {codes}); starting all ranks again", file=sys.stderr)
        return ExitCode.FAILED

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Send SIGINT to all ranks, so that they finish. This is the launcher's signal handler.

        Raises:
            KeyboardInterrupt: At the second call, or if no rank has started. It ends all ranks at once.
        """
        workers = self.agent.get_worker_group().workers if self.agent else []
        pids = [worker.id for worker in workers if worker.id is not None]
        if self.stopping or not pids:
            raise KeyboardInterrupt
        self.stopping = True
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)

    def _new_agent(self) -> LocalElasticAgent:
        """Return a torch agent that starts all ranks once. It does not restart them, which it would do after Ctrl-C."""
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
        return LocalElasticAgent(spec, DefaultLogsSpecs(os.devnull))  # with os.devnull, torch makes no folder for logs


def rank(device: str, throttle: float, place: Place, lead: Callable[[Island], None]) -> None:
    """Run this process as one rank of its island until the peer stops. A rank other than 0 that fails exits with 1.

    Args:
        device: The device of this rank.
        throttle: Factor by which computing is slowed down, to imitate a slower device.
        place: The number of this rank, and the number of ranks on this machine.
        lead: Runs the peer. Only rank 0 calls it; the other ranks follow rank 0's orders.
    """
    end_with_parent(signal.SIGINT)
    for each in ending_signals():
        signal.signal(each, signal.SIG_DFL)  # end the process at once: Python handlers wait while a rank connects
    island = Island(measure.choose(device).device)
    if place.rank == 0:
        for each in notices():
            signal.signal(each, signal.default_int_handler)
        try:
            lead(island)
        finally:
            island.close()
        return
    for each in notices():
        signal.signal(each, signal.SIG_IGN)  # rank 0 gets the same signal, and orders this rank to finish
    try:
        _follow(device, throttle, island)
    except (RuntimeError, UserError) as error:
        print(f"error: rank {place.rank} ends: {one_line(error)}", file=sys.stderr, flush=True)
        os._exit(1)  # a thread may still wait for a dead rank in gloo, and Python's exit would then abort the process


def notices() -> tuple[signal.Signals, ...]:
    """Return the signals at which rank 0 saves and leaves the swarm; SIGTERM is included only under torchrun.

    `Launcher` sends SIGTERM only to end ranks before it restarts them. torchrun sends SIGTERM before a restart, and
    also when the user ends torchrun. A rank cannot distinguish these cases, so it tries to leave the swarm in both.
    """
    return tuple(each for each in ending_signals() if each != signal.SIGTERM or ATTEMPT not in os.environ)


def _follow(device: str, throttle: float, island: Island) -> None:
    assignment = island.assignment()
    if assignment is not None:
        train = assignment.run.train
        chosen = measure.choose(device, throttle, train.emulated_micro_batch_s)
        if island.sharded:
            heap.give_back_what_is_freed(island.size)
        kernels = best_kernels(chosen.device, blockwise)[0] if island.sharded else None
        follow(island, assignment, replace(chosen, ranks=island), kernels)
    island.close()


def choose_parts(
    wanted: int | None, run: config.Config, kept: tuple[int, int] | None, device: Device, split: Split
) -> tuple[Split, int]:
    """Return how the ranks divide the model, and how many bytes the model may take on each device.

    By default each rank has the whole model if that fits beside the copy of the gradients for averaging, since parts
    cost traffic between the devices in each step.

    Args:
        wanted: --memory in bytes; None: the whole memory of the smallest device.
        run: The run's config.
        kept: Layers [first, last) of the state folder's checkpoint; None: the folder has no checkpoint.
        device: Rank 0's device, with the ranks of its island.
        split: The value of --split.

    Raises:
        UserError: If not even a part of the model fits into a device, the checkpoint holds only some layers, or the run
            trains in synchronous rounds.
    """
    island = device.ranks
    assert isinstance(island, Island), "an island has several ranks"
    if run.synchronous:
        raise UserError(f"gossip.algorithm {run.gossip.algorithm} needs one device per peer; name one --device")
    needs = memory.needs_on(run, device)
    count = len(needs.fragments)
    if kept not in (None, (0, needs.fragments[-1].last)):
        layers = f"layers {kept[0]} to {kept[1] - 1}"
        whole = "a peer with several devices trains the whole model"
        raise UserError(f"the checkpoint has only {layers}, but {whole}; name one --device")
    available = wanted or island.memory_bytes
    advice = "name one --device, so that the peer may hold only some layers"
    if split in (Split.AUTO, Split.COPIES):
        buckets = BUCKET_BYTES * sum(cut.parameters for cut in needs.fragments)
        needed = needs.span_bytes(0, count) + buckets
        if needed <= available:
            return Split.COPIES, available - buckets
        reason = "--split copies" if split is Split.COPIES else _whole_only(run)
        if reason:
            why = f"with {reason} each device of a peer holds the whole model, which takes {needed} bytes"
            raise UserError(f"--memory {available}: {why}; {advice}")
    elif reason := _whole_only(run):
        raise UserError(f"--split {split}: with {reason} each device holds the whole model; use --split copies")
    if split is Split.TENSOR and (reason := _uneven(run, island.size)):
        raise UserError(f"--split tensor: {reason}; use --split parts")
    least = memory.needs_on(run, device, divided=True).span_bytes(0, count)
    if least > available:
        why = f"a part of the model on each of {island.size} devices takes {least} bytes"
        raise UserError(f"--memory {available}: {why}; {advice}")
    return Split.TENSOR if split is Split.TENSOR else Split.PARTS, available


def _whole_only(run: config.Config) -> str:
    """Return the setting because of which a model cannot be divided over devices; "" if it can be."""
    if not ALGORITHMS[run.gossip.algorithm].sharded:
        return f"gossip.algorithm {run.gossip.algorithm}"
    if run.train.moments != "float32":
        return f"train.moments {run.train.moments}"
    if not OPTIMIZERS[run.train.optimizer].divides:
        return f"train.optimizer {run.train.optimizer}"
    return "model.lora" if run.model.lora is not None else ""


def _uneven(run: config.Config, ranks: int) -> str:
    """Return why tensor parallelism cannot divide this model over `ranks` ranks; "" if it can."""
    model = run.model
    if model.layers is not None:
        return "model.layers: the matrices of a user's layers are unknown"
    if model.options.query_norm:
        return "this family normalises queries over heads of several devices"
    counts = {
        "heads": model.n_heads,
        "kv_heads": model.n_kv_heads,
        "channels": model.d_model,
        "bottleneck channels": model.bottleneck or 0,
        "hidden channels": model.d_hidden,
        "vocabulary": model.vocabulary,
    }
    uneven = [f"{count} {what}" for what, count in counts.items() if count % ranks]
    return f"{', '.join(uneven)} cannot be divided equally over {ranks} devices" if uneven else ""
