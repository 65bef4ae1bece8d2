"""Journals of simulated peers on the disk, in the form of real ones, so that what reads these reads them too."""

from dataclasses import dataclass, field
from pathlib import Path

from decentral.core import strict_json
from decentral.core.errors import writing
from decentral.core.ids import PeerId
from decentral.core.journal.events import StartedLine
from decentral.core.journal.lines import JOURNAL_LINES
from decentral.core.machine import Log
from decentral.core.units import Seconds
from decentral.sim.simulated_peer import SimulatedPeer
from decentral.sim.swarm import SimulatedSwarm

MOST_LINES_WAITING = 10_000  # lines


@dataclass(slots=True)
class SimulatedJournals:
    """A Watch (run.py) that keeps the lines of all peers, and appends them to `peer-N/journal.jsonl` now and then."""

    folder: Path
    _swarm: SimulatedSwarm | None = None
    _lives: dict[PeerId, int] = field(default_factory=dict)  # whose start stands in the journal
    _lines: dict[PeerId, list[str]] = field(default_factory=dict)  # not written yet
    _waiting: int = 0  # how many these are

    def begin(self, swarm: SimulatedSwarm) -> None:
        self._swarm = swarm

    def line(self, peer: PeerId, t: Seconds, log: Log) -> None:
        assert self._swarm is not None
        member = self._swarm.by_peer[peer]
        lines = self._lines.setdefault(peer, [])
        if self._lives.get(peer) != member.lives:  # what only a real peer's command writes
            self._lives[peer] = member.lives
            lines.append(strict_json.dumps(JOURNAL_LINES.line(round(t, 3), self._started(member))))
        lines.append(strict_json.dumps(JOURNAL_LINES.line(round(t, 3), log.event)))
        self._waiting += 1
        if self._waiting >= MOST_LINES_WAITING:
            self.end()

    def _started(self, member: SimulatedPeer) -> StartedLine:
        assert self._swarm is not None
        first, last = member.span
        return StartedLine(
            peer=member.peer,
            run=self._swarm.settings.run,
            addresses=(),
            device="simulated",
            throttle=self._swarm.settings.throttle(member.number),
            kernels="",
            region=self._swarm.geography.region(member.peer),
            first=first,
            last=last,
        )

    def end(self) -> None:
        """Writes what came since the last time. Raises UserError where the folder cannot be written."""
        assert self._swarm is not None
        for peer, lines in self._lines.items():
            path = self.folder / f"peer-{self._swarm.by_peer[peer].number}" / "journal.jsonl"
            with writing("--journals", path, "folder"):
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a") as file:
                    file.write("".join(f"{line}\n" for line in lines))
        self._lines.clear()
        self._waiting = 0
