"""Journals of simulated peers on the disk, in the form of real ones, so that what reads these reads them too."""

from collections.abc import Callable
from pathlib import Path

from decentral.core import strict_json
from decentral.core.errors import UserError
from decentral.core.ids import PeerId
from decentral.core.machine import Log
from decentral.core.units import Seconds
from decentral.sim.swarm import SimulatedSwarm

JournalLine = Callable[[PeerId, Seconds, Log], None]


class SimulatedJournals:
    """Keeps the lines of all peers, and appends them to `peer-N/journal.jsonl` when it is told to."""

    def __init__(self, swarm: SimulatedSwarm, folder: Path) -> None:
        self._swarm, self._folder = swarm, folder
        self._lives: dict[PeerId, int] = {}  # whose start stands in the journal
        self._lines: dict[PeerId, list[str]] = {}  # since the last flush

    def tee(self, other: JournalLine) -> JournalLine:
        """Takes each line, and hands it on."""

        def both(peer: PeerId, t: Seconds, line: Log) -> None:
            self._take(peer, t, line)
            other(peer, t, line)

        return both

    def _take(self, peer: PeerId, t: Seconds, line: Log) -> None:
        member = self._swarm.by_peer[peer]
        lines = self._lines.setdefault(peer, [])
        if self._lives.get(peer) != member.lives:  # what only a real peer's command writes
            self._lives[peer] = member.lives
            facts = {"peer": peer, "run": "simulated", "addresses": [], "device": "simulated", "kernels": ""}
            throttle = self._swarm.settings.throttles[member.number % len(self._swarm.settings.throttles)]
            lines.append(strict_json.dumps({"t": t, "event": "started", **facts, "throttle": throttle}))
        lines.append(strict_json.dumps({"t": round(t, 3), "event": line.event, **line.fields}))

    def flush(self) -> None:
        """Writes what came since the last time. Raises UserError where the folder cannot be written."""
        for peer, lines in self._lines.items():
            path = self._folder / f"peer-{self._swarm.by_peer[peer].number}" / "journal.jsonl"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a") as file:
                    file.write("".join(f"{line}\n" for line in lines))
            except OSError as error:
                raise UserError(f"--journals {path}: {error.strerror}; choose a folder that can be written") from None
        self._lines.clear()
