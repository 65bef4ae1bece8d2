"""The lines of the page: those of journals, and those that only the page's sources make."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, Strict

from decentral.core.journal.events import JournalEvent
from decentral.core.journal.field_kinds import Number, Peer, Text, Word
from decentral.core.journal.lines import LineForms, Recorded
from decentral.core.strict_json import JsonObject
from decentral.peers.membership.records import PeerRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class NowLine:
    """The present of a simulation: times are virtual, and none is later than this line's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FactsLine:
    """Facts about the run, by name, for a page that has no state folder to read them from."""

    facts: Annotated[JsonObject, Field(default={})]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceLine:
    """The device, region and slowness of a peer without a `started` line."""

    peer: Peer
    device: Word
    region: Word
    throttle: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class MissedLine:
    """This peer does not answer somebody. `certain`: its process is known to have ended."""

    peer: Peer
    reason: Text
    certain: Annotated[bool, Strict()] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordLine:
    """What a peer's record in the DHT says."""

    peer: Peer
    record: PeerRecord


SourceEvent = NowLine | FactsLine | PlaceLine | MissedLine | RecordLine
PageEvent = JournalEvent | SourceEvent
PageLine = Recorded[PageEvent]
Told = tuple[str, PageLine]
"""The peer whose line it is, and the line."""

PAGE_LINES = LineForms[PageEvent](PageEvent.__args__)
