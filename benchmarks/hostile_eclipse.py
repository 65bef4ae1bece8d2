"""A private swarm of ten processes in which one peer eclipses keys of the DHT, for benchmarks/hostile.py --eclipse.

The founder starts first, the hostile peer second (tests/hostile/eclipse.py has what it does), and once its nodes run,
the other eight. Then one more peer joins, the founder revokes an honest member, all train for as many steps as asked,
and the founder revokes the hostile peer. Without a hostile peer the second one is honest, and all else is the same.

A roster is complete when it has all other honest peers, and a revocation is effective when all honest peers have it.
Times count from the start of the later of two peers, and from the start of the founder's command. Steps are emulated
(STEP_S each), so that two cores have time for eleven peers and for the hostile nodes.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.hostile_processes import hostile, journal_of
from benchmarks.kill import trouble
from decentral.comm.net.libp2p import Libp2p
from decentral.comm.wire.invitations import Permission
from decentral.comm.wire.private_swarm import PrivateSwarm
from decentral.commands.local import LocalSwarm
from decentral.commands.local import parse as parse_local
from decentral.commands.local_peer import LocalPeer
from decentral.core.journal.events import JoinedLine, StartedLine
from decentral.core.strict_json import JsonObject
from decentral.peers.startup.invitation_files import FounderFile
from decentral.peers.startup.state import StateFolder
from decentral.serving import replicas
from tests.hostile.eclipse import LOOPBACK, figures_of

PEERS = 10
HOSTILE, REVOKED, NEWCOMER = 1, PEERS - 1, PEERS  # numbers of peers
STEP_S = 1.0
FIRST_STEPS = 80  # the other peers start when the founder has taken so many, if it has the whole model
WINDOW_STEPS = 5
PLANNED_S = 60.0  # how long peers that hold parts plan and move, after the newcomer is known to all
LONGEST_S = 150.0  # what takes longer is not waited for
POLL_S = 1.0
ALONE = "none"  # nothing is eclipsed, and all peers are honest

Line = dict[str, Any]


class EclipsedSwarm(LocalSwarm):
    """Peer HOSTILE eclipses these keys; none: it is honest."""

    keys = ""

    def spawn(self, number: int, arguments: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
        attacks = number == HOSTILE and self.keys != ALONE
        return super().spawn(number, hostile(arguments, ["--eclipse", self.keys]) if attacks else arguments, **options)

    def add(self, number: int) -> LocalPeer:
        """Start one more peer, and return when it has joined."""
        self.launch(number, self.address)
        self.await_event(self.members[-1], JoinedLine)
        return self.members[-1]

    def begin(self, count: int) -> None:
        super().begin(1)
        self.add(HOSTILE)
        folder = self.folders()[HOSTILE]
        if self.keys != ALONE and not within(lambda: bool(figures_of(folder).get("up_at"))):
            raise SystemExit(f"the hostile nodes did not start within {LONGEST_S:g} s")
        within(lambda: bool(self.memory) or _steps(self.folders()[0], self.began) >= FIRST_STEPS)
        for number in range(HOSTILE + 1, count):
            self.launch(number, self.address)
        for member in self.members[1:]:
            self.await_event(member, JoinedLine)
        self.joined_at = self.now()

    def honest(self) -> list[LocalPeer]:
        """The honest peers that run and are not to be revoked."""
        return [one for one in self.members if one.number not in (HOSTILE, REVOKED)]


def run(keys: str, settings: Sequence[str], steps: int, memory: str = "") -> Line:
    """One swarm whose hostile peer eclipses these keys, such as `peers,revoked`, and what became of it.

    Args:
        keys: Ends of the run's keys, or ALONE.
        settings: Of the config, as of --set.
        steps: Steps of each peer that has the whole model, from when the first ten have joined.
        memory: Of each peer, such as 51MB: less than the model needs makes peers hold parts of it, by plans.
    """
    timed = [f"train.emulated_micro_batch_s={STEP_S}", f"gossip.window_s={WINDOW_STEPS * STEP_S:g}"]
    asked = [*settings, *timed, f"gossip.start_window_s={STEP_S:g}", f"train.total_steps={steps}"]
    flags = ["--private", "--peers", str(PEERS + 1), "--stop-after", "1e6s", *(["--memory", memory] if memory else [])]
    parsed = parse_local([*flags, *(part for one in asked for part in ("--set", one))])
    with tempfile.TemporaryDirectory(prefix="eclipse-") as folder:
        swarm = EclipsedSwarm(parsed, Path(folder))
        swarm.keys = keys
        try:
            result = {"eclipsed": keys, **_story(swarm, steps)}
            swarm.stop()
            return {**result, **_ended(swarm)}
        finally:
            swarm.kill()


def _story(swarm: EclipsedSwarm, steps: int) -> Line:
    swarm.begin(PEERS)
    founded = [member.folder for member in swarm.members if member.number != HOSTILE]
    within(lambda: not _missing(founded))
    rosters = {"load": load(), "roster_s": _summary(_delays(founded)), "rosters_missing": _missing(founded)}
    joined = swarm.add(NEWCOMER).folder
    everybody = [*founded, joined]
    within(lambda: not _missing(everybody))
    delays = {pair: took for pair, took in _delays(everybody).items() if joined in pair}
    newcomer = {
        "newcomer_load": load(),
        "newcomer_s": _summary({pair: took for pair, took in delays.items() if pair[0] == joined}),
        "known_to_all_s": _summary({pair: took for pair, took in delays.items() if pair[1] == joined}),
    }
    time.sleep(PLANNED_S if swarm.memory else 0.0)
    read = asyncio.run(_read(swarm))
    revoked = _revoke(swarm, REVOKED)
    trained = [member for member in swarm.honest() if member.number != NEWCOMER]
    while not swarm.memory and any(_steps(member.folder, swarm.joined_at) < steps for member in trained):
        if dead := [one.number for one in swarm.honest() if one.process.poll() is not None]:
            raise SystemExit(f"honest peers {dead} have ended")
        time.sleep(POLL_S)
    figures = figures_of(swarm.folders()[HOSTILE])
    return {
        **rosters,
        **newcomer,
        "records_read": read,
        "revoked": revoked,
        "hostile": figures,
        "hostile_revoked": _revoke(swarm, HOSTILE),
    }


def within(is_so: Callable[[], bool], longest_s: float = LONGEST_S) -> bool:
    """Wait until something is so, and return whether it was within `longest_s`."""
    end = time.monotonic() + longest_s
    while not (found := is_so()) and time.monotonic() < end:
        time.sleep(POLL_S)
    return found


def load() -> float:
    """The machine's load over the last minute: how many processes wanted one of its cores."""
    return round(os.getloadavg()[0], 1)


def delays(journals: Mapping[Any, Sequence[JsonObject]]) -> dict[tuple[Any, Any], float | None]:
    """For each peer and other peer: seconds from the later one's start until the peer's roster had the other for good.

    None: the roster does not have it now.
    """
    started = {peer: next(line for line in lines if line["event"] == "started") for peer, lines in journals.items()}
    found = dict[tuple[Any, Any], float | None]()
    for peer, lines in journals.items():
        for other in journals.keys() - {peer}:
            name = started[other]["peer"]
            seen = [one for one in lines if one["event"] in ("peer_joined", "peer_left") and one["peer"] == name]
            has = bool(seen) and seen[-1]["event"] == "peer_joined"
            since = max(started[peer]["t"], started[other]["t"])
            found[peer, other] = round(seen[-1]["t"] - since, 1) if has else None
    return found


def plans(journals: Mapping[Any, Sequence[JsonObject]]) -> list[Line]:
    """For each plan that a peer has adopted, in order: how many did, and the seconds from the first to the last."""
    adopted = dict[str, dict[Any, float]]()
    for peer, lines in journals.items():
        for line in lines:
            if line["event"] == "plan":
                adopted.setdefault(line["digest"], {}).setdefault(peer, line["t"])
    times = sorted(([*by_peer.values()] for by_peer in adopted.values()), key=min)
    return [{"by": len(of), "of": len(journals), "last_s": round(max(of) - min(of), 1)} for of in times]


def _delays(folders: Sequence[Path]) -> dict[tuple[Any, Any], float | None]:
    return delays({folder: journal_of(folder) for folder in folders})


def _missing(folders: Sequence[Path]) -> int:
    """How many entries the rosters of these peers lack."""
    return sum(took is None for took in _delays(folders).values())


def _summary(found: Mapping[Any, float | None]) -> Line:
    """Median and worst of the seconds, of those pairs that are in a roster, and how many are not."""
    took = [one for one in found.values() if one is not None]
    return {"median": round(median(took), 1), "worst": max(took), "never": len(found) - len(took)} if took else {}


def _steps(folder: Path, since: float) -> int:
    """How many steps a peer has taken since a moment."""
    return sum(line["event"] == "step" and line["t"] >= since for line in journal_of(folder))


def _revoke(swarm: EclipsedSwarm, number: int) -> Line:
    """Have the founder revoke a member by its command, and wait until all honest peers refuse it."""
    folder, began = swarm.folders()[number], time.time()
    invitation = swarm.folder / f"{folder.name}.invite"
    command = [sys.executable, "-m", "decentral.invite", "--state-dir", str(swarm.folders()[0])]
    said = subprocess.run([*command, "--revoke", str(invitation)], capture_output=True, text=True)
    took = time.time() - began
    name = _started(folder)["peer"]
    folders = [member.folder for member in swarm.honest()]

    def heard() -> list[float]:
        lines = [[one for one in journal_of(folder) if one["event"] == "revoked"] for folder in folders]
        return [one[0]["t"] - began for one in ([line for line in of if name in line["peers"]] for of in lines) if one]

    within(lambda: len(heard()) == len(folders))
    found = sorted(heard())
    return {
        "load": load(),
        "command_s": round(took, 1),
        "said": (said.stdout + said.stderr).strip(),
        "refused_by": f"{len(found)} of {len(folders)}",
        "median_s": round(median(found), 1) if found else None,
        "worst_s": round(found[-1], 1) if found else None,
    }


def _started(folder: Path) -> JsonObject:
    return next(line for line in journal_of(folder) if line["event"] == "started")


async def _read(swarm: EclipsedSwarm) -> dict[str, int]:
    """How many records a node that joins the DHT at the founder finds under each key of the run."""
    started = swarm.members[0].happened(StartedLine, 0.0)
    run_of = StateFolder(swarm.folders()[0]).read_run()
    assert started is not None
    assert run_of is not None
    with FounderFile.open(swarm.folders()[0]) as founder:
        holding = founder.own_holding(Permission.LOOK, time.time() + 600)
    keys = [f"{run_of[0]}/{end}" for end in ("peers", "plan", "revoked")]
    with tempfile.TemporaryDirectory(prefix="eclipse-") as folder:
        transport = await Libp2p.start(Path(folder) / "identity.key", LOOPBACK, (), only_dials=True)
        try:
            await transport.enclose(PrivateSwarm(transport.peer, holding, time.time))
            known = await transport.connect(started.addresses[0])
            directory = await transport.directory(keys, [known])
            return {key.partition("/")[2]: len(await directory.fetch(key)) for key in keys}
        finally:
            await transport.close()


def _ended(swarm: EclipsedSwarm) -> Line:
    """The held-out loss of the honest peers' mean, and what went wrong at them."""
    folders = [member.folder for member in swarm.honest()]
    weights = [own for own in map(replicas.read, folders) if own is not None]
    run_of = StateFolder(folders[0]).read_run()
    assert run_of is not None
    names = {_started(folder)["peer"] for folder in folders}
    journals = [journal_of(folder) for folder in folders]
    left = [line for lines in journals for line in lines if line["event"] == "peer_left" and line["peer"] in names]
    return {
        "loss": round(replicas.held_out_loss(run_of[1], replicas.average(weights)), 4),
        "honest_dropped": sum(line["reason"] != "left" for line in left),
        "plans": plans(dict(zip(folders, journals, strict=True))),
        "moves": sum(line["event"] == "move" for lines in journals for line in lines),
        "trouble": trouble(swarm.honest()),
    }
