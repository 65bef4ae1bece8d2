"""The summary of a local swarm, from its peers' journals and checkpoints: docs/PROTOCOL.md has its contract."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from decentral.core.journal.field_kinds import OUTCOMES
from decentral.core.journal.file import read
from decentral.core.journal.peer_totals import PeerTotals
from decentral.core.strict_json import JsonObject
from decentral.core.time_spent import TimeSpent
from decentral.peers.startup.state import StateFolder

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
    totals = [PeerTotals.of(read(folder / "journal.jsonl")) for folder in folders]
    peers = [
        {**_of_peer(one, throttle), "death": deaths.get(number, "")}
        for number, (one, throttle) in enumerate(zip(totals, throttles, strict=True))
    ]
    running = [folder for number, folder in enumerate(folders) if number not in deaths]
    tokens = sum(peer["tokens"] for peer in peers)
    lasts = [peer["loss_last"] for peer in peers if peer["loss_last"] is not None and not peer["death"]]
    heldout_loss, spread = _of_replicas(running)
    swarm = {
        "seconds": round(seconds, 2),
        "tokens": tokens,
        "tokens_per_s": round(tokens / max(1e-9, seconds), 1),
        "loss_first": totals[0].work.first_held_out if totals else None,
        "loss_last": sum(lasts) / len(lasts) if lasts else None,
        "heldout_loss": heldout_loss,
        "replica_spread": spread,
    }
    return {"peers": peers, "swarm": swarm}


def _of_peer(totals: PeerTotals, throttle: float) -> JsonObject:
    """What a peer did in its last life: `busy_fraction` is the share of training, throttling included."""
    work, shares = totals.work, _time_shares(totals.work.spent)
    outcomes = work.exchanges.outcomes
    return {
        "peer": totals.facts.peer,
        "throttle": throttle,
        "micro_batches": work.micro_batches,
        "tokens": work.tokens,
        "busy_fraction": shares["training"],
        "time_shares": shares,
        "exchanges": {outcome: outcomes[outcome] for outcome in OUTCOMES},
        "sent_bytes": work.sent_bytes,
        "received_bytes": work.received_bytes,
        "loss_last": work.loss,
    }


def _time_shares(spent: TimeSpent) -> dict[str, float]:
    """What the training thread spent its time on, from joining to the last step. The shares add up to one.

    `beside` is no part of the thread's time: the worker's processor time, in the same unit.
    """
    shares = spent.shares() | {"beside": spent.beside / spent.total if spent.total else 0.0}
    return {name: round(share, 4) for name, share in shares.items()}


def _of_replicas(folders: Sequence[Path]) -> tuple[float | None, float | None]:
    """The held-out loss of the average of all checkpoints, and their spread around it; None if a layer is missing."""
    from decentral.serving import replicas  # loads torch

    weights = [found for found in map(replicas.read, folders) if found is not None]
    run = StateFolder(folders[0]).read_run() if folders else None
    if not weights or run is None or replicas.missing(run[1], replicas.average(weights)):
        return None, None
    loss = replicas.held_out_loss(run[1], replicas.average(weights))
    return round(loss, 4), round(replicas.spread(weights), 5)
