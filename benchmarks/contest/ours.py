"""Our peers in the contest: `python -m decentral.peer`, as anybody runs it, all started at once.

The first peer's key is made before, so that its address is known, and the others wait for it with --join-wait. What a
peer has saved is its checkpoint; the runner keeps each one by a hard link, as the peer replaces the file.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.contest.contestants import STEP_S
from decentral.comm.wire.identity import Identity
from decentral.core import config
from decentral.core.errors import UserError
from decentral.core.journal.file import read
from decentral.engine import memory
from decentral.engine.checkpoint import FILE

LIBP2P_PORT = 4001
JOIN_WAIT_S = 120
HEAD_START_S = 1.0  # of the first peer's process: who finds nobody at its address tries again after 3 s
POLL_S = 0.1


def prepare(first: Path) -> None:
    """Makes the key of the first peer in its folder."""
    first.mkdir(parents=True)
    Identity.load_or_create(first / "identity.key")


def command(folder: Path, place: int, life: int, leader: str, overrides: list[str], throttle: float) -> list[str]:
    """The line that starts a peer in its folder `PLACE-LIFE`."""
    own = folder / f"{place}-{life}"
    own.mkdir(exist_ok=True)
    line = [sys.executable, "-m", "decentral.peer", "--plain", "--device", "cpu", "--state-dir", str(own)]
    line += ["--listen", f"/ip4/0.0.0.0/tcp/{LIBP2P_PORT}", "--throttle", str(throttle)]
    if (place, life) == (0, 0):
        return line + [part for override in overrides for part in ("--set", override)]
    first = Identity.load_or_create(folder / "0-0" / "identity.key").peer
    join = f"/ip4/{leader}/tcp/{LIBP2P_PORT}/p2p/{first}"
    return [*line, "--join", join, "--join-wait", str(JOIN_WAIT_S)]


# Settings of the swarm whose peers hold parts of the model. A peer needs memory for one micro-batch with the whole
# model, but for two with a part. With 8 sequences in a micro-batch, one fragment would need more than the whole model.
OF_PARTS = ("train.micro_batch=4", "train.accumulate=2", f"train.emulated_micro_batch_s={STEP_S / 2}")


def half_the_memory(overrides: list[str]) -> list[str]:
    """The flag that leaves a peer memory for the largest fragment, and not for the whole model."""
    needs = memory.needs(config.load(None, overrides))
    count = len(needs.fragments)
    largest = max(needs.span_bytes(number, number + 1) for number in range(count))
    return ["--memory", str((largest + min(needs.span_bytes(0, count), 2 * largest)) // 2)]


def await_training(first: Path, timeout_s: float) -> float:
    """When (Unix time) the first peer began to train. Raises UserError if it does not."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        journal = first / "journal.jsonl"
        joined = [line["t"] for line in read(journal) if line["event"] == "joined"] if journal.exists() else []
        if joined:
            return float(joined[0])
        time.sleep(POLL_S)
    raise UserError(f"our first peer did not train within {timeout_s:g} s")


def keep(folder: Path) -> None:
    """Links each checkpoint that is new as `PLACE-LIFE-TIME.kept/`, TIME being when it was written."""
    for path in folder.glob(f"*-*/{FILE}"):
        if path.parent.suffix:
            continue
        try:
            kept = folder / f"{path.parent.name}-{path.stat().st_mtime:.3f}.kept"
            if not kept.exists():
                kept.mkdir()
                os.link(path, kept / FILE)
        except FileNotFoundError:  # it was replaced between the two
            continue


def steps(own: Path) -> list[dict[str, Any]]:
    """The journal's `step` lines in the contest's form."""
    journal = own / "journal.jsonl"
    lines = read(journal) if journal.exists() else ()
    return [
        {"t": line["t"], "tokens": line["tokens"], "loss": line["loss"], "busy_s": line["seconds"]}
        for line in lines
        if line["event"] == "step"
    ]
