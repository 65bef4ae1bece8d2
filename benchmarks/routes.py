"""What `kill -9` costs a swarm in which no peer holds more than half of the model.

    python -m benchmarks.routes [--kills 10] [--seconds 4] [--json FILE]

Six real peers run on loopback, as `decentral.local --memory` starts them. Peers drawn at random are killed one after
another, and restarted after `--seconds`; the next kill comes when the peer trains again. For each kill it prints the
longest time in which no micro-batch was counted anywhere, from the kill until `--seconds` after the peer came back. At
the end the journals are audited: the exit status is 1 if a layer has counted a micro-batch twice, if a layer was lost,
or if a journal tells of an error.
"""

import argparse
import json
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console

from benchmarks.kill import kill_peer, lines_of, restart, trouble
from decentral.comm.pipeline.next_peer import HOP_DEADLINE_FLOOR_S
from decentral.commands.local import LocalSwarm
from decentral.commands.local import parse as parse_local
from decentral.core.journal.file import read
from decentral.core.journal.lines import recorded
from decentral.core.journal.micro_batch_counts import audit
from decentral.serving import replicas

PEERS, MEMORY = 6, "64MB"
MODEL = ["model.depth=8", "model.width=128", "train.micro_batch=1", "swarm.checkpoint_every_s=5"]
LAYERS = 10
WARM_UP_S = 10.0


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory(prefix="routes-") as folder:
        model = [word for one in MODEL for word in ("--set", one)]
        flags = ["--peers", str(PEERS), "--memory", MEMORY, "--stop-after", "1e4s", *model]
        swarm = LocalSwarm(parse_local(flags), Path(folder))
        try:
            swarm.start(Console(file=sys.stderr, highlight=False))
            time.sleep(WARM_UP_S)
            rng = Random(args.seed)
            rows = [kill_one(swarm, rng.randrange(PEERS), args.seconds) for _ in range(args.kills)]
            swarm.stop()
            bad = conclude(swarm)
        finally:
            swarm.kill()
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if bad:
        raise SystemExit(1)


def kill_one(swarm: LocalSwarm, victim: int, seconds: float) -> dict[str, Any]:
    killed_at = time.time()
    kill_peer(swarm, victim)
    time.sleep(seconds)
    restart(swarm, [victim], time.time())
    back = lines_of(swarm, victim, "joined")[-1]["t"]
    time.sleep(seconds)
    moments = [t for t in counted(swarm) if t >= killed_at - 5]
    before = max((t for t in moments if t < killed_at), default=killed_at)
    after = [before, *(t for t in moments if t >= killed_at), time.time()]
    row = {
        "victim": victim,
        "longest_gap_s": round(max(late - early for early, late in pairwise(after)), 2),
        "two_deadlines_s": 2 * HOP_DEADLINE_FLOOR_S,
        "back_after_s": round(back - killed_at, 1),
        "counted": len(after) - 2,
    }
    print(json.dumps(row), flush=True)
    return row


def counted(swarm: LocalSwarm) -> list[float]:
    """The Unix times at which micro-batches were counted, at any peer."""
    return sorted(line["t"] for number in range(PEERS) for line in lines_of(swarm, number, "counted"))


def conclude(swarm: LocalSwarm) -> bool:
    """Prints what the journals and checkpoints say. Returns whether something is wrong."""
    found = audit((recorded(read(folder / "journal.jsonl")) for folder in swarm.folders()), LAYERS)
    print(
        f"{found.everywhere} micro-batches counted once in all layers, {found.in_part} in a part of them, "
        f"{len(found.twice)} twice; {found.dropped} executions' gradients thrown away"
    )
    held = [weights for weights in map(replicas.read, swarm.folders()) if weights is not None]
    holders = {index: sum(index in own for own in held) for index in replicas.average(held)}
    print(f"holders of each fragment at the end: {holders}")
    wrong = trouble(swarm.members)
    print("\n".join(sorted(set(wrong))) or "no exception in any output, no error in any journal")
    return bool(wrong) or not found.sound


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=4.0, help="from a kill to the restart, and watched after it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
