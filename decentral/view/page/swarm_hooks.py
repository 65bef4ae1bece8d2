"""Send hooks one message for each event of a swarm, although several peers report the same event.

`decentral.dashboard` and `decentral.local` use it; a peer's own hooks follow only the peer's journal
(view/event_hooks.py). Start reading at `SwarmHooks`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from decentral.core.journal import events
from decentral.core.journal.events import JournalEvent
from decentral.core.latest import keep_latest
from decentral.core.units import Seconds
from decentral.view.event_hooks import Hooks
from decentral.view.hook_messages import NAMES_KEPT
from decentral.view.page.source_lines import FactsLine, MissedLine, NowLine, PageLine, PlaceLine, RecordLine, Told

HERE, GONE = "here", "gone"
FOUND_S = 30.0  # records found in a watch's first seconds belong to peers that were in the swarm before


@dataclass(slots=True)
class SwarmHooks:
    """A filter of the page's lines: sends hooks a message about each line that reports something new."""

    hooks: Hooks
    _last: dict[str, str] = field(default_factory=dict)  # topic -> its last known value
    _since: Seconds | None = None  # time of the first record

    def take(self, peer: str, line: PageLine, new: bool) -> None:
        """Read a line, and send hooks a message if no earlier line has reported the same.

        Args:
            peer: The id of the peer whose journal has the line; "" if the source wrote the line.
            line: The line.
            new: Whether it happened just now. If False, hooks get no message.
        """
        found = self._event(line)
        if found is None:
            return
        if isinstance(line.event, RecordLine):
            self._since = line.t if self._since is None else self._since
            new = new and line.t > self._since + FOUND_S
        topic, value, is_own = _about(peer, found)
        known = self._last.get(topic)
        if topic:
            keep_latest(self._last, topic, value, NAMES_KEPT)
        if new and (is_own or value != known):
            self.hooks.tell(line.t, found, peer)
        else:
            self.hooks.learn(found, peer)

    def follow(self, lines: Iterable[Told], since: Seconds) -> list[str]:
        """Read lines, of which those since Unix time `since` are new; return warnings about hooks that now fail."""
        for peer, line in lines:
            self.take(peer, line, line.t >= since)
        return [warning for _, warning in self.hooks.news() if warning]

    def _event(self, line: PageLine) -> JournalEvent | None:
        """Return the event of a line; a line that no journal has, such as a record, is converted to an event."""
        match line.event:
            case RecordLine(peer=peer, record=record):
                self.hooks.watch(record.run)
                of = record.profile
                return events.PeerJoinedLine(peer=peer, device=of.device, region=of.region, name=of.name)
            case MissedLine(peer=peer, reason=reason):
                return events.PeerLeftLine(peer=peer, reason=reason) if self._last.get(peer) == HERE else None
            case None | NowLine() | FactsLine() | PlaceLine():
                return None
            case event:
                return event


def _about(peer: str, event: JournalEvent) -> tuple[str, str, bool]:
    """Return an event's topic, the topic's value by this event, and whether only this peer reports the topic.

    The topic is "" if no other line can report the same.
    """
    match event:
        case events.StartedLine() | events.ContinuedLine() | events.JoinedLine():
            return peer, HERE, True
        case events.StoppedLine():
            return peer, GONE, True
        case events.PeerJoinedLine(peer=other):
            return other, HERE, False
        case events.PeerLeftLine(peer=other) | events.GoodbyeLine(peer=other):
            return other, GONE, False
        case events.PlanLine(digest=digest):
            return "plan", digest, False
        case events.RevokedLine(number=number):
            return "revoked", str(number), False
        case events.UnheldLine():
            return "layers", GONE, False
        case events.HeldLine():
            return "layers", HERE, False
    return "", "", True
