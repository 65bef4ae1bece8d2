"""Write the journals of simulated peers to disk, in the format of real journals."""

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

MOST_LINES_WAITING = 10_000  # when the peers together have this many lines in memory, all lines are written to disk


@dataclass(slots=True)
class SimulatedJournals:
    """A `Watch` (run.py) that appends the lines of each peer's journal to `peer-N/journal.jsonl` in a folder."""

    folder: Path
    _swarm: SimulatedSwarm | None = None
    _lives: dict[PeerId, int] = field(default_factory=dict)  # by peer: number of the latest start with a `started` line
    _lines: dict[PeerId, list[str]] = field(default_factory=dict)
    _waiting: int = 0

    def begin(self, swarm: SimulatedSwarm) -> None:
        """Prepare to write the journals of this swarm's peers."""
        self._swarm = swarm

    def line(self, peer: PeerId, t: Seconds, log: Log) -> None:
        """Add the event of `log` to a peer's journal, as a line with time `t` of the peer's clock.

        After each start of the peer, a `started` line is added first. The lines are written to disk by `end`, or as
        soon as MOST_LINES_WAITING lines are in memory.

        Raises:
            UserError: If the folder is not writable.
        """
        assert self._swarm is not None
        member = self._swarm.by_peer[peer]
        lines = self._lines.setdefault(peer, [])
        if self._lives.get(peer) != member.lives:  # the command of a real peer writes this line; no command runs here
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
        """Append the lines in memory to the journals on disk; raise UserError if the folder is not writable."""
        assert self._swarm is not None
        for peer, lines in self._lines.items():
            path = self.folder / f"peer-{self._swarm.by_peer[peer].number}" / "journal.jsonl"
            with writing("--journals", path, "folder"):
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a") as file:
                    file.write("".join(f"{line}\n" for line in lines))
        self._lines.clear()
        self._waiting = 0
