"""Types of the fields of messages and records, with the bounds that are checked when a message is decoded."""

from typing import Annotated

from pydantic import Field, Strict

from decentral.comm.wire.identity import MAX_PEER_RECORD_BYTES, MAX_RECORD_BYTES
from decentral.comm.wire.invitations import MAX_RUN_CHARS, MAX_SEAL_BYTES
from decentral.core.fragments import Layout

MOST_SECTIONS = 40  # a layout, or the names of sections in a question, has at most this many entries
NAME = r"^[A-Za-z0-9._-]*$"  # names and reasons are printed on terminals: no control characters are allowed
Run = Annotated[str, Strict(), Field(max_length=MAX_RUN_CHARS, pattern=NAME)]
Sequences = Annotated[int, Strict(), Field(gt=0, lt=1 << 20)]
Peer = Annotated[str, Strict(), Field(max_length=64, pattern=NAME)]
Word = Annotated[str, Strict(), Field(min_length=1, max_length=32, pattern=NAME)]
Count = Annotated[int, Strict(), Field(ge=0, lt=1 << 62)]
Index = Annotated[int, Strict(), Field(ge=0, lt=1 << 20)]
Digest = Annotated[bytes, Strict(), Field(min_length=16, max_length=16)]
SealedRecord = Annotated[bytes, Strict(), Field(max_length=MAX_PEER_RECORD_BYTES + MAX_SEAL_BYTES)]
SealedPlan = Annotated[bytes, Strict(), Field(max_length=MAX_RECORD_BYTES + MAX_SEAL_BYTES)]
ShortHash = Annotated[bytes, Strict(), Field(min_length=8, max_length=8)]
UnixTime = Annotated[float, Strict(), Field(ge=0, lt=1e11, allow_inf_nan=False)]
Sections = Annotated[Layout, Field(max_length=MOST_SECTIONS)]
