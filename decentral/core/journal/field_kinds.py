"""The types of the fields of a journal's lines, with their bounds and defaults; lines.py checks them with pydantic.

Numbers are finite and bounded, and so are the lengths of texts and names. A field that a line lacks gets the default of
its type, because earlier versions wrote fewer fields. A field whose type has no default (`Given...`) must be present.
"""

from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple, get_args

from pydantic import Field, Strict

from decentral.core.ids import PeerId, RunId

MOST_NUMBER = 10**18  # larger numbers are invalid: 10**18 bytes are an exabyte, and no run trains so many tokens
MOST_LAYERS = 4096  # a larger layer index is invalid; a config allows fewer layers
WORD_CHARS = 256
TEXT_CHARS = 1 << 16  # a reason has at most this many characters; it may quote an error of a library

Outcome = Literal["done", "solo", "failed"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
Verdict = Literal["agreed", "wrong", "undecided"]

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
    """A stage execution: micro-batch `number` of the peer `origin`, with `tokens` tokens, in layers [first, last)."""

    origin: GivenWord
    number: GivenCount
    first: GivenLayer
    last: GivenLayer
    tokens: GivenCount


class MeasuredLink(NamedTuple):
    """A peer's measurement of one link."""

    partner: GivenWord
    bytes_per_s: GivenAmount  # rate from the partner to this peer; 0 if not measured
    round_trip_s: GivenAmount  # 0 if not measured


MeasuredLinks = Annotated[tuple[MeasuredLink, ...], Field(default=())]
# The rows of a table; each row maps column names to values.
Facts = Annotated[tuple[Mapping[GivenWord, GivenCount | GivenWord], ...], Field(default=())]
