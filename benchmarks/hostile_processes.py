"""Four honest peers and a hostile one as processes over libp2p on loopback, for benchmarks/hostile.py --real.

The hostile peer (tests/hostile/peer.py) is a real one whose transport lies and floods. It joins last. All train until
each honest peer has taken so many steps from when the last one has joined. Steps are emulated (STEP_S each), so that
two cores have time for five peers and for the flood; what the flood costs is the honest peers' share of training.
"""

import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.kill import trouble
from decentral.commands.local import LocalSwarm
from decentral.commands.local import parse as parse_local
from decentral.core.journal.file import read
from decentral.core.journal.peer_totals import PeerTotals
from decentral.core.strict_json import JsonObject
from decentral.peers.startup.state import StateFolder
from decentral.serving import replicas

HONEST = 4
STEP_S = 0.2
WINDOW_STEPS = 5
POLL_S = 0.5


class HostileSwarm(LocalSwarm):
    """Peer HONEST, where there is one, lies in this way."""

    lie = ""
    credulous = False

    def spawn(self, number: int, arguments: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
        flags = ["--credulous"] if self.credulous else []
        if number == HONEST:
            flags = ["--lie", self.lie] if self.lie != "honest" else []
        return super().spawn(number, hostile(arguments, flags) if flags else arguments, **options)


def hostile(arguments: Sequence[str], flags: Sequence[str]) -> list[str]:
    """The command line of a peer, made that of one which is not as it should be."""
    place = list(arguments).index("decentral.peer")
    return [*arguments[:place], "tests.hostile.peer", *flags, *arguments[place + 1 :]]


def run(lie: str, settings: Sequence[str], steps: int, credulous: bool) -> dict[str, Any]:
    """One swarm with this lie (`none`: without a fifth peer; `honest`: it tells the truth), and what became of it."""
    peers = HONEST + (lie != "none")
    timed = [f"train.emulated_micro_batch_s={STEP_S}", f"gossip.window_s={WINDOW_STEPS * STEP_S:g}"]
    asked = [*settings, *timed, f"gossip.start_window_s={STEP_S:g}", f"train.total_steps={steps}"]
    flags = parse_local(["--peers", str(peers), "--stop-after", "1e6s", *(p for one in asked for p in ("--set", one))])
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        swarm = HostileSwarm(flags, Path(folder))
        swarm.lie, swarm.credulous = lie, credulous
        try:
            swarm.begin(peers)
            honest = swarm.members[:HONEST]
            while any(_steps(journal_of(member.folder), swarm.joined_at) < steps for member in honest):
                if dead := [one.number for one in honest if one.process.poll() is not None]:
                    raise SystemExit(f"honest peers {dead} have ended")
                time.sleep(POLL_S)
            swarm.stop()
            return _result(swarm, [member.folder for member in honest])
        finally:
            swarm.kill()


def journal_of(folder: Path) -> list[JsonObject]:
    return list(read(folder / "journal.jsonl"))


def _steps(lines: Sequence[JsonObject], since: float) -> int:
    found = [line["step"] for line in lines if line["event"] == "step" and line["t"] >= since]
    return found[-1] - found[0] if found else 0


def _result(swarm: HostileSwarm, folders: Sequence[Path]) -> dict[str, Any]:
    """The held-out loss of the honest peers' mean, and what they refused."""
    weights = [own for own in map(replicas.read, folders) if own is not None]
    run_of = StateFolder(folders[0]).read_run()
    assert run_of is not None
    journals = [journal_of(folder) for folder in folders]
    shares = [PeerTotals.of(one).whole.spent.shares() for one in journals]
    failed = Counter(
        line["reason"]
        for journal in journals
        for line in journal
        if line["event"] == "exchange" and line["outcome"] == "failed"
    )
    return {
        "loss": round(replicas.held_out_loss(run_of[1], replicas.average(weights)), 4),
        "training_share": round(mean(one["training"] for one in shares), 4),
        "done": sum(line["event"] == "exchange" and line["outcome"] == "done" for one in journals for line in one),
        "failed": failed,
        "trouble": trouble(swarm.members[:HONEST]),
    }
