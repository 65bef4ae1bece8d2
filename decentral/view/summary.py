"""The summary of a local swarm, from its peers' journals and checkpoints: docs/PROTOCOL.md has its contract."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from decentral.core.journal.file import OUTCOMES, read
from decentral.core.strict_json import JsonObject
from decentral.core.time_spent import TimeSpent
from decentral.peers.startup.state import StateFolder

Line = JsonObject  # one line of a journal
NO_DEATHS: Mapping[int, str] = {}
Summary = JsonObject  # the JSON object of `decentral.local --summary`


def summarise(
    folders: Sequence[Path], throttles: Sequence[float], seconds: float, deaths: Mapping[int, str] = NO_DEATHS
) -> Summary:
    """Return what `decentral.local --summary` writes.

    Args:
        folders: The peers' state folders.
        throttles: The peers' slowness, in the same order.
        seconds: For how long the swarm trained.
        deaths: How peers have died, by number. Their losses and replicas do not count, since they are of another time.
    """
    journals = [_last_life(list(read(folder / "journal.jsonl"))) for folder in folders]
    peers = [
        {**_of_peer(lines, throttle), "death": deaths.get(number, "")}
        for number, (lines, throttle) in enumerate(zip(journals, throttles, strict=True))
    ]
    running = [folder for number, folder in enumerate(folders) if number not in deaths]
    tokens = sum(peer["tokens"] for peer in peers)
    evals = [[line["loss"] for line in lines if line["event"] == "eval"] for lines in journals]
    lasts = [peer["loss_last"] for peer in peers if peer["loss_last"] is not None and not peer["death"]]
    heldout_loss, spread = _of_replicas(running)
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
    """The lines that a peer wrote since it was last started, or as many of them as its journal keeps."""
    starts = [index for index, line in enumerate(lines) if line["event"] == "started"]
    kept = [index for index, line in enumerate(lines) if line["event"] == "continued"]
    first = starts[-1] if starts else kept[0] if kept else len(lines)
    return lines[first:]


def _of_peer(lines: list[Line], throttle: float) -> JsonObject:
    steps = [line for line in lines if line["event"] == "step"]
    outcomes = Counter(line["outcome"] for line in lines if line["event"] == "exchange")
    traffic = [line for line in lines if line["event"] == "traffic"]
    shares = _time_shares(steps)
    return {
        "peer": str(lines[0]["peer"]) if lines else "",
        "throttle": throttle,
        "micro_batches": sum(line["micro_batches"] for line in steps),
        "tokens": sum(line["tokens"] for line in steps),
        "busy_fraction": shares["training"],
        "time_shares": shares,
        "exchanges": {outcome: outcomes[outcome] for outcome in OUTCOMES},
        "sent_bytes": traffic[-1]["sent_bytes"] if traffic else 0,
        "received_bytes": traffic[-1]["received_bytes"] if traffic else 0,
        "loss_last": steps[-1]["loss"] if steps else None,
    }


def _time_shares(steps: Sequence[Line]) -> dict[str, float]:
    """What the training thread spent its time on, from joining to the last step. The shares add up to one.

    `busy_fraction` is that of training: forward, backward, optimizer and throttling. `beside` is no part of the
    thread's time: the worker's processor time, in the same unit.
    """
    spent = time_spent(steps)
    shares = {**spent.shares(), "beside": spent.beside / spent.total if spent.total else 0.0}
    return {name: round(share, 4) for name, share in shares.items()}


def time_spent(steps: Iterable[Line]) -> TimeSpent:
    """What a peer's training thread did in the time of these `step` lines of its journal."""
    return sum((TimeSpent.by_kind({"training": line["seconds"], **line["aside"]}) for line in steps), TimeSpent())


def _of_replicas(folders: Sequence[Path]) -> tuple[float | None, float | None]:
    """The held-out loss of the average of all checkpoints, and their spread around it; None if a layer is missing."""
    from decentral.serving import replicas  # loads torch

    weights = [found for found in map(replicas.read, folders) if found is not None]
    run = StateFolder(folders[0]).read_run() if folders else None
    if not weights or run is None or replicas.missing(run[1], replicas.average(weights)):
        return None, None
    loss = replicas.held_out_loss(run[1], replicas.average(weights))
    return round(loss, 4), round(replicas.spread(weights), 5)
