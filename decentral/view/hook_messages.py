"""The messages that hooks get about events of the journal, in the form of JSON and as sentences for people.

`hook_kind` tells which events concern people. Start reading at `Messages`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime

from decentral.core import strict_json
from decentral.core.errors import UserError
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import DIVERGED
from decentral.core.journal import events
from decentral.core.journal.events import BAD, GOOD, PLAIN, WARNING, JournalEvent
from decentral.core.journal.lines import JOURNAL_LINES
from decentral.core.journal.peer_totals import NO_FACTS
from decentral.core.latest import keep_latest
from decentral.core.near_names import did_you_mean
from decentral.core.peer_names import departed, titled
from decentral.core.plain_text import printable
from decentral.core.strict_json import JsonObject
from decentral.core.units import KiB, Seconds, readable_bytes

HOOK_KINDS = (
    *("started", "training", "finished", "stopped", "diverged", "trouble", "checkpoint", "plan_adopted", "moved"),
    *("peer_joined", "peer_left", "peer_lost", "layers_lost", "layers_back", "wrong_gradient", "revoked"),
)
MESSAGE_BYTES = 32 * KiB  # a message that would be longer is sent without `details`
NAMES_KEPT = 4096  # the names of at most this many other peers are remembered, for messages about these peers
MESSAGE_CHARS = 1000


@dataclass(frozen=True, slots=True)
class HookMessage:
    """A message to a hook about one event. All texts are printable; `details` has the fields of the journal's line."""

    event: str  # one of HOOK_KINDS
    time: str  # ISO 8601, UTC
    level: str  # good, plain, warning or bad
    text: str  # one sentence for people
    run: str
    peer: str  # id of the peer that sends the message; "" if the page watches a swarm without being a peer
    name: str  # name of this peer; "" if it has none
    details: JsonObject

    def packed(self) -> bytes:
        """Return the message as JSON; without details if it would have more than MESSAGE_BYTES."""
        body = strict_json.dumps(asdict(self)).encode()
        return body if len(body) <= MESSAGE_BYTES else strict_json.dumps(asdict(self) | {"details": {}}).encode()

    def sentence(self) -> str:
        """Return a sentence for a chat: the peer that sends the message, if any, its run, and `text`."""
        return (f"{titled(PeerId(self.peer), self.name)}, " if self.peer else "") + f"run {self.run}: {self.text}"


def hook_kind(event: JournalEvent) -> str | None:
    """Return the kind of a journal event, one of HOOK_KINDS; None if hooks get no message about the event."""
    match event:
        case events.StoppedLine(reason=reason):
            if reason.startswith(DIVERGED):
                return "diverged"
            return "finished" if reason.startswith("--stop-after") else "stopped"
        case events.ErrorLine(reason=reason):
            return "diverged" if reason.startswith(DIVERGED) else "trouble"
        case events.PeerLeftLine(reason=reason):
            return "peer_left" if reason == "left" else "peer_lost"
        case events.AuditLine(verdict=verdict):
            return "wrong_gradient" if verdict == "wrong" else None
        case events.SuspendedLine() | events.LostLine() | events.BehindLine() | events.UploadLine(outcome="failed"):
            return "trouble"
    return _KIND_BY_LINE.get(type(event))


_KIND_BY_LINE: Mapping[type[JournalEvent], str] = {
    events.StartedLine: "started",
    events.DonorFailedLine: "trouble",
    events.ClockLine: "trouble",
    events.JoinedLine: "training",
    events.CheckpointLine: "checkpoint",
    events.PlanLine: "plan_adopted",
    events.MoveLine: "moved",
    events.PeerJoinedLine: "peer_joined",
    events.GoodbyeLine: "peer_left",
    events.UnheldLine: "layers_lost",
    events.HeldLine: "layers_back",
    events.RevokedLine: "revoked",
}


@dataclass(slots=True)
class Messages:
    """The maker of messages from events of one or more peers. It remembers the names of peers that have joined."""

    _facts: dict[str, events.PeerFacts] = field(default_factory=dict)  # by id of the peer with the journal
    _names: dict[PeerId, str] = field(default_factory=dict)

    def watch(self, run: str) -> None:
        """Allow messages about this run from a program that is not a peer, such as the page."""
        keep_latest(self._facts, "", replace(NO_FACTS, run=RunId(run)), NAMES_KEPT)

    def learn(self, event: JournalEvent, peer: str = "") -> None:
        """Remember what later messages need of an event in the journal of `peer`, which is "" if there is only one."""
        match event:
            case events.PeerFacts():
                keep_latest(self._facts, peer, event, NAMES_KEPT)
            case events.PeerJoinedLine():
                keep_latest(self._names, event.peer, event.name, NAMES_KEPT)

    def of(self, t: Seconds, event: JournalEvent, peer: str = "") -> HookMessage | None:
        """Return the message about an event at Unix time `t`; None if hooks get no message about it.

        `peer` is the id of the peer whose journal has the event, as in `learn`.
        """
        self.learn(event, peer)
        kind, own = hook_kind(event), self._facts.get(peer)
        if kind is None or own is None:
            return None
        level, words = self._told(event)
        at = datetime.fromtimestamp(t, UTC).isoformat(timespec="milliseconds")
        details = JOURNAL_LINES.fields(event)
        return HookMessage(kind, at, level, printable(words, MESSAGE_CHARS), own.run, own.peer, own.name, details)

    def _told(self, event: JournalEvent) -> tuple[str, str]:
        """Return an event's severity and one sentence about it."""
        match event:
            case events.CheckpointLine():
                return PLAIN, f"checkpoint of learning-rate step {event.step:,} written ({readable_bytes(event.bytes)})"
            case events.PeerJoinedLine():
                return GOOD, f"peer {titled(event.peer, event.name)} joined"
            case events.GoodbyeLine():
                return PLAIN, f"peer {self._titled(event.peer)} left"
            case events.PeerLeftLine(reason=reason):
                return PLAIN if reason == "left" else BAD, f"peer {self._titled(event.peer)} {departed(reason)}"
        return events.told(event) or (WARNING, JOURNAL_LINES.name(event))

    def _titled(self, peer: PeerId) -> str:
        return titled(peer, self._names.get(peer, ""))


def kinds_of(text: str | None) -> tuple[str, ...]:
    """Return the kinds of event in a comma-separated text; all HOOK_KINDS if the text is None.

    Raises:
        UserError: If the text has a word that is not in HOOK_KINDS.
    """
    named = tuple(text.split(",")) if text is not None else HOOK_KINDS
    for one in named:
        if one not in HOOK_KINDS:
            raise UserError(
                f"--events expects kinds of {', '.join(HOOK_KINDS)}; got {one!r}{did_you_mean(one, HOOK_KINDS)}"
            )
    return named
