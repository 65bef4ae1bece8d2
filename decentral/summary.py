"""The summary of a local swarm, from its peers' journals and checkpoints: docs/PROTOCOL.md has its contract."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decentral.core.journal import read
from decentral.state import StateFolder
from decentral.train import replicas

Line = dict[str, Any]  # one line of a journal
Summary = dict[str, Any]  # the JSON object of `decentral.local --summary`


def summarise(folders: Sequence[Path], throttles: Sequence[float], seconds: float) -> Summary:
    """What `decentral.local --summary` writes. `seconds`: for how long the swarm trained."""
    journals = [_last_life(list(read(folder / "journal.jsonl"))) for folder in folders]
    peers = [_of_peer(lines, throttle) for lines, throttle in zip(journals, throttles, strict=True)]
    tokens = sum(peer["tokens"] for peer in peers)
    evals = [[line["loss"] for line in lines if line["event"] == "eval"] for lines in journals]
    lasts = [peer["loss_last"] for peer in peers if peer["loss_last"] is not None]
    heldout_loss, spread = _of_replicas(folders)
    swarm = {
        "seconds": round(seconds, 2),
        "tokens": tokens,
        "tokens_per_s": round(tokens / max(1e-9, seconds), 1),
        "loss_first": evals[0][0] if evals and evals[0] else None,
        "loss_last": sum(lasts) / len(lasts) if lasts else None,
        "heldout_loss": heldout_loss,
        "replica_spread": spread,
    }
    return {"peers": peers, "swarm": swarm}


def _last_life(lines: list[Line]) -> list[Line]:
    """The lines that a peer wrote since it was last started."""
    starts = [index for index, line in enumerate(lines) if line["event"] == "started"]
    return lines[starts[-1] :] if starts else []


def _of_peer(lines: list[Line], throttle: float) -> dict[str, Any]:
    steps = [line for line in lines if line["event"] == "step"]
    outcomes = Counter(line["outcome"] for line in lines if line["event"] == "exchange")
    traffic = [line for line in lines if line["event"] == "traffic"]
    joined_at = next((line["t"] for line in lines if line["event"] == "joined"), None)
    return {
        "peer": str(lines[0]["peer"]) if lines else "",
        "throttle": throttle,
        "micro_batches": sum(line["micro_batches"] for line in steps),
        "tokens": sum(line["tokens"] for line in steps),
        "busy_fraction": _busy_fraction(steps, joined_at),
        "exchanges": {outcome: outcomes[outcome] for outcome in ("done", "solo", "failed")},
        "sent_bytes": traffic[-1]["sent_bytes"] if traffic else 0,
        "received_bytes": traffic[-1]["received_bytes"] if traffic else 0,
        "loss_last": steps[-1]["loss"] if steps else None,
    }


def _busy_fraction(steps: Sequence[Line], joined_at: float | None) -> float:
    """The part of the time from joining to the last step in which the compute thread was computing."""
    if joined_at is None or not steps or steps[-1]["t"] <= joined_at:
        return 0.0
    busy_s = float(sum(line["seconds"] for line in steps))
    return round(min(1.0, busy_s / float(steps[-1]["t"] - joined_at)), 4)


def _of_replicas(folders: Sequence[Path]) -> tuple[float | None, float | None]:
    """The held-out loss of the average of all checkpoints, and their spread around it; None if a layer is missing."""
    weights = [found for found in map(replicas.read, folders) if found is not None]
    run = StateFolder(folders[0]).read_run()
    if not weights or run is None or replicas.missing(run[1], replicas.average(weights)):
        return None, None
    loss = replicas.held_out_loss(run[1], replicas.average(weights))
    return round(loss, 4), round(replicas.spread(weights), 5)
