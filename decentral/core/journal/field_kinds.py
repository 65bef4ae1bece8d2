"""What a field of a journal's line may hold: its kind and its size, which lines.py checks by pydantic.

A number is finite and of a size that a peer can mean; a text and a name are as long as such are. A field that a line
lacks has the default that stands here, because earlier versions wrote fewer fields; a kind without one must be there.
"""

from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple, get_args

from pydantic import Field, Strict

from decentral.core.ids import PeerId, RunId

MOST_NUMBER = 10**18  # bytes of an exabyte, tokens of all that was ever written
MOST_LAYERS = 4096  # more than a config allows
WORD_CHARS = 256  # of a peer, a run, a device, a region
TEXT_CHARS = 1 << 16  # of a reason, which may quote an error of a library

Outcome = Literal["done", "solo", "failed"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)  # of an exchange
Verdict = Literal["agreed", "wrong", "undecided"]  # of an audit

GivenCount = Annotated[int, Strict(), Field(ge=0, lt=MOST_NUMBER)]
GivenLayer = Annotated[int, Strict(), Field(ge=0, le=MOST_LAYERS)]
GivenNumber = Annotated[float, Strict(), Field(gt=-MOST_NUMBER, lt=MOST_NUMBER)]
GivenAmount = Annotated[float, Strict(), Field(ge=0, lt=MOST_NUMBER)]
GivenWord = Annotated[str, Strict(), Field(max_length=WORD_CHARS)]
GivenPeer = Annotated[PeerId, Strict(), Field(max_length=WORD_CHARS)]

Count = Annotated[GivenCount, Field(default=0)]
Layer = Annotated[GivenLayer, Field(default=0)]
Number = Annotated[GivenNumber, Field(default=0.0)]
Word = Annotated[GivenWord, Field(default="")]
Peer = Annotated[GivenPeer, Field(default="")]
Run = Annotated[RunId, Strict(), Field(default="", max_length=WORD_CHARS)]
Text = Annotated[str, Strict(), Field(default="", max_length=TEXT_CHARS)]
MaybeNumber = Annotated[GivenNumber | None, Field(default=None)]  # None: not known, or not finite
MaybeCount = Annotated[GivenCount | None, Field(default=None)]
MaybePeer = Annotated[GivenPeer | None, Field(default=None)]
Words = Annotated[tuple[GivenWord, ...], Field(default=())]
Peers = Annotated[tuple[GivenPeer, ...], Field(default=())]
Numbers = Annotated[tuple[GivenNumber, ...], Field(default=())]
NumberByName = Annotated[Mapping[GivenWord, GivenNumber], Field(default={})]
CountByName = Annotated[Mapping[GivenWord, GivenCount], Field(default={})]


class CountedExecution(NamedTuple):
    """A stage execution: the micro-batch, by its origin peer and number, through layers [first, last)."""

    origin: GivenWord
    number: GivenCount
    first: GivenLayer
    last: GivenLayer
    tokens: GivenCount


class MeasuredLink(NamedTuple):
    """A peer's measurement of one link; a number is 0 where nothing was measured."""

    partner: GivenWord  # the end of its id
    bytes_per_s: GivenAmount  # from the partner
    round_trip_s: GivenAmount


MeasuredLinks = Annotated[tuple[MeasuredLink, ...], Field(default=())]
Facts = Annotated[tuple[Mapping[GivenWord, GivenCount | GivenWord], ...], Field(default=())]  # by their names
