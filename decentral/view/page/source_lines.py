"""Define the lines that the page reads: the lines of journals, and lines about facts that no journal contains."""

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
    """Line that marks a simulation: times are virtual, and the time of the newest line is the present time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FactsLine:
    """Line with the run's name and settings, for a page that reads no state folder."""

    facts: Annotated[JsonObject, Field(default={})]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceLine:
    """Line with device, region and throttle of a peer whose journal has no `started` line. See DeviceView."""

    peer: Peer
    device: Word
    region: Word
    throttle: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class MissedLine:
    """Line with a report that a peer does not answer, or that its process has ended."""

    peer: Peer
    reason: Text
    certain: Annotated[bool, Strict()] = False  # whether the peer's process is known to have ended


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordLine:
    """Line with a peer's record in the DHT."""

    peer: Peer
    record: PeerRecord


SourceEvent = NowLine | FactsLine | PlaceLine | MissedLine | RecordLine
PageEvent = JournalEvent | SourceEvent
PageLine = Recorded[PageEvent]
Told = tuple[str, PageLine]
"""The id of the peer whose journal has the line ("" for a line of the source itself), and the line."""

PAGE_LINES = LineForms[PageEvent](PageEvent.__args__)
