"""Summarise a local swarm from its peers' journals and checkpoints, and print the summary.

docs/PROTOCOL.md defines the fields.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from decentral.core.ids import PeerId
from decentral.core.journal.field_kinds import OUTCOMES
from decentral.core.journal.file import read
from decentral.core.journal.peer_totals import PeerTotals
from decentral.core.peer_names import name_of_several, titled
from decentral.core.strict_json import JsonObject
from decentral.core.time_spent import TimeSpent
from decentral.core.times import duration
from decentral.core.units import plural, readable_bytes
from decentral.peers.startup.state import StateFolder

NO_DEATHS: Mapping[int, str] = {}
Summary = JsonObject


def summarise(
    folders: Sequence[Path], throttles: Sequence[float], seconds: float, deaths: Mapping[int, str] = NO_DEATHS
) -> Summary:
    """Return the JSON object that `decentral.local --summary` writes.

    Args:
        folders: The peers' state folders.
        throttles: For each peer, in the same order, the factor by which its training was slowed down.
        seconds: How long the swarm trained.
        deaths: For each dead peer, its index in `folders` and why it died. The losses and weights of dead peers are
            ignored, because they are out of date.
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
    """Return what a peer has done since its last start. `busy_fraction` includes the pauses of a throttled peer."""
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
    """Return how the training thread spent its time, in shares that sum to 1, rounded to 4 decimals.

    The additional key `beside` is the processor time of background work divided by the thread's total time.
    """
    shares = spent.shares() | {"beside": spent.beside / spent.total if spent.total else 0.0}
    return {name: round(share, 4) for name, share in shares.items()}


def _of_replicas(folders: Sequence[Path]) -> tuple[float | None, float | None]:
    """Return the held-out loss of the mean of all checkpoints, and the checkpoints' spread (`replicas.spread`).

    Both are None if no checkpoint exists, or a layer is in no checkpoint.
    """
    from decentral.serving import replicas  # importing it loads torch, which is slow

    weights = [found for found in map(replicas.read, folders) if found is not None]
    run = StateFolder(folders[0]).read_run() if folders else None
    if not weights or run is None or replicas.missing(run[1], replicas.average(weights)):
        return None, None
    loss = replicas.held_out_loss(run[1], replicas.average(weights))
    return round(loss, 4), round(replicas.spread(weights), 5)


def report(console: Console, result: Summary) -> None:
    """Print a summary for the user: a line for each peer, then a line for the swarm."""
    for number, peer in enumerate(result["peers"]):
        name = name_of_several(number)
        who = titled(PeerId(peer["peer"]), name) if peer["peer"] else name  # "": the peer was stopped while it started
        exchanges = "/".join(str(peer["exchanges"][outcome]) for outcome in OUTCOMES)
        console.print(
            f"peer {who}  throttle {peer['throttle']:g}  {plural(peer['micro_batches'], 'micro-batch')}  "
            f"busy {peer['busy_fraction']:.3f}  exchanges {exchanges} (done/solo/failed)  "
            f"sent {readable_bytes(peer['sent_bytes'])}  received {readable_bytes(peer['received_bytes'])}  "
            f"loss {readable(peer['loss_last'])}" + (f"  DEAD: {peer['death']}" if peer["death"] else ""),
            soft_wrap=True,
        )
    swarm = result["swarm"]
    console.print(
        f"swarm: {swarm['tokens']:,} tokens in {duration(swarm['seconds'])} ({swarm['tokens_per_s']:,.0f}/s), "
        f"loss {readable(swarm['loss_first'])} -> {readable(swarm['loss_last'])}, "
        f"held-out loss of the average {readable(swarm['heldout_loss'])}, "
        f"replica spread {readable(swarm['replica_spread'], 4)}",
        soft_wrap=True,
    )


def next_step(state_dir: str | None) -> str:
    """Return text for the user: the commands that use the peers' folders, or that the folders are removed."""
    if state_dir is None:
        return "nothing was kept; --state-dir DIR keeps the model"
    folder = shlex.quote(state_dir)
    commands = (f"generate --state-dir {folder} 'Once upon a time'", f"export --state-dir {folder} --out my-model")
    return "\n    ".join(("use the model with:", *(f"python -m decentral.{one}" for one in commands)))


def readable(value: float | None, digits: int = 3) -> str:
    """Return a number with this many decimals, as text; "-" for None."""
    return "-" if value is None else f"{value:.{digits}f}"
