"""Starts the ranks of an island (decentral/train/island.py), and starts all of them again when one dies.

    --device cuda:0,cuda:1     this command becomes torch's elastic launcher, and runs itself once for each device
    torchrun ... -m decentral.peer     torchrun is the launcher; each rank finds its place in the environment

All devices are of one type. Ctrl-C goes to every rank: rank 0 saves, leaves the swarm and lets the others finish.
"""

import ctypes
import logging
import os
import signal
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from decentral.core import config
from decentral.core.errors import UserError
from decentral.train import measure, memory
from decentral.train.island import BUCKET_BYTES, Island, follow

RESTARTS = 100  # of an island; a device that fails every time must end it some day
LEAVE_S = 150  # after Ctrl-C; longer than peers/hosts/host.py waits for the last checkpoint
EXIT_CODE = "DECENTRAL_EXIT_CODE"  # names the file in which a rank tells the launcher not to start it again
PR_SET_PDEATHSIG = 1  # Linux's name for it, in sys/prctl.h


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place in its island, as torch's launchers name it in the environment."""

    rank: int
    local_rank: int  # on this machine
    local_size: int
    restarts: int

    @classmethod
    def here(cls) -> "Place | None":
        """None: no launcher has started this process, or it started nothing else."""
        if int(os.environ.get("WORLD_SIZE", 1)) < 2:
            return None
        names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
        return cls(*(int(os.environ.get(name, 0)) for name in names))


def devices(wanted: str, place: Place | None) -> list[str]:
    """The devices of `--device`, one for each rank on this machine. Raises UserError unless they make one peer."""
    names = wanted.split(",")
    found = [measure.choose(name, "auto", 1.0, 0.0).device for name in names]
    if len({device.type for device in found}) > 1:
        raise UserError(f"--device {wanted}: the devices of one peer are of one type; start a peer for each type")
    ranks = len(names) if place is None else place.local_size
    if place is not None and len(names) == 1 and wanted in ("auto", "cpu", "cuda"):
        names = [f"cuda:{rank}" if found[0].type == "cuda" else "cpu" for rank in range(ranks)]
        found = [measure.choose(name, "auto", 1.0, 0.0).device for name in names]
    if len(names) != ranks:
        raise UserError(f"--device {wanted}: {ranks} ranks need a device each; name as many, or --device cuda")
    if found[0].type == "cuda" and len({device.index or 0 for device in found}) < len(found):
        raise UserError(f"--device {wanted} names a device twice; each rank needs its own")
    return names


def island(arguments: Sequence[str], flags: Namespace, names: Sequence[str]) -> int:
    """Runs this command as one rank for each device until it ends. Returns its exit code."""
    for logger in ("agent.server.api", "multiprocessing.api"):  # they warn of every process that ends with Ctrl-C
        logging.getLogger(f"torch.distributed.elastic.{logger}").setLevel(logging.ERROR)
    if measure.choose(names[0], "auto", 1.0, 0.0).device.type == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // len(names))))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=len(names),
        run_id=f"island-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=RESTARTS,
        signals_to_handle="SIGTERM,SIGINT,SIGHUP",
        shutdown_timeout=LEAVE_S,
    )
    with tempfile.NamedTemporaryFile(prefix="decentral-") as told:
        os.environ[EXIT_CODE] = told.name
        command = ["-m", "decentral.peer", *arguments, "--state-dir", flags.state_dir, "--device", ",".join(names)]
        try:
            elastic_launch(settings, sys.executable)(*command)
        except SignalException:
            return 0
        except ChildFailedError as error:
            print(f"error: this peer's ranks failed {RESTARTS + 1} times: {error}", file=sys.stderr)
            return 1
        finally:
            del os.environ[EXIT_CODE]
        return int(Path(told.name).read_text() or 0)


def settle(code: int) -> int:
    """The exit code for a rank's launcher, which starts all ranks again unless it is 0: a user error is no reason."""
    told = os.environ.get(EXIT_CODE)
    if told is None or code != 2:
        return code
    Path(told).write_text(str(code))
    return 0


def rank(flags: Namespace, place: Place, lead: Callable[[Island], None]) -> None:
    """Takes this process's place in its island: rank 0 leads, as the peer, and the others follow."""
    _end_with_launcher()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a rank that waits for the others does so where Python cannot act
    island = Island(measure.choose(flags.device, "auto", 1.0, 0.0).device)
    if place.rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            lead(island)
        finally:
            island.close()
        return
    for each in (signal.SIGINT, signal.SIGTERM):  # rank 0 gets it as well, and tells the others when to finish
        signal.signal(each, signal.SIG_IGN)
    try:
        _follow(flags, island)
    except (RuntimeError, UserError) as error:
        print(f"error: rank {place.rank} ends: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(1) from None


def _follow(flags: Namespace, island: Island) -> None:
    assignment = island.assignment()
    if assignment is not None:
        train = config.from_canonical(assignment.config).train
        device = measure.choose(flags.device, train.dtype, flags.throttle, train.emulated_micro_batch_s)
        follow(island, assignment, replace(device, ranks=island))
    island.close()


def _end_with_launcher() -> None:
    """Makes the system send this process Ctrl-C when its launcher dies, where it can (Linux)."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGINT))


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
