"""Envelopes on a stream: whole, or refused before memory is spent on them."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decentral.comm.wire import blobs, codec
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Message, Ping, Probe
from decentral.core.errors import ProtocolError
from tests.comm.net.loopback import pipe

T = TypeVar("T")

BLOB = bytes(range(256)) * 2500  # three chunks, the last one short
PROBE = Envelope(Probe(0), BLOB)


@dataclass
class Sink:
    """A writer that keeps what is written."""

    data: bytearray = field(default_factory=bytearray)

    def write(self, data: bytes) -> None:
        self.data += data

    async def drain(self) -> None: ...


@dataclass
class Source:
    """A reader of given bytes that notes the most that was asked for at once."""

    data: bytes
    most: int = 0

    async def readexactly(self, n: int) -> bytes:
        self.most = max(self.most, n)
        if n > len(self.data):
            raise asyncio.IncompleteReadError(self.data, n)
        part, self.data = self.data[:n], self.data[n:]
        return part


def anything(message: Message) -> int:
    return 1 << 40


def done(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)


def on_the_wire(envelope: Envelope) -> bytes:
    sink = Sink()
    done(blobs.write(sink, envelope))
    return bytes(sink.data)


WIRE = on_the_wire(PROBE)


def read(data: bytes, bound: int = 1 << 40) -> Envelope:
    return done(blobs.read(Source(data), lambda _: bound))[0]


def refusal(data: bytes, bound: int = 1 << 40) -> str:
    with pytest.raises(ProtocolError) as caught:
        read(data, bound)
    return caught.value.reason


@pytest.mark.parametrize("size", [0, 1, blobs.CHUNK_BYTES - 1, blobs.CHUNK_BYTES, blobs.CHUNK_BYTES + 1, len(BLOB)])
def test_an_envelope_comes_back_as_it_was(size: int) -> None:
    async def round_trip() -> tuple[Envelope, int, int]:
        (_, writer), (reader, _) = pipe()
        written = await blobs.write(writer, Envelope(Probe(9), BLOB[:size]))
        envelope, received = await blobs.read(reader, anything)
        return envelope, written, received

    envelope, written, received = done(round_trip())
    assert envelope == Envelope(Probe(9), BLOB[:size])
    assert written == received


def test_envelopes_follow_each_other_on_one_stream() -> None:
    async def two() -> list[Envelope]:
        (_, writer), (reader, _) = pipe()
        for nonce in (1, 2):
            await blobs.write(writer, Envelope(Ping(nonce), BLOB))
        return [(await blobs.read(reader, anything))[0] for _ in range(2)]

    assert done(two()) == [Envelope(Ping(1), BLOB), Envelope(Ping(2), BLOB)]


def test_the_bytes_are_counted_with_header_and_digests() -> None:
    written = done(blobs.write(Sink(), PROBE))
    assert written == len(WIRE)
    assert done(blobs.read(Source(WIRE), anything))[1] == len(WIRE)


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_a_chunk_that_does_not_match_its_digest_is_refused(chunk: int) -> None:
    damaged = bytearray(WIRE)
    start = len(WIRE) - len(BLOB) - 3 * blobs.DIGEST_BYTES
    damaged[start + chunk * (blobs.CHUNK_BYTES + blobs.DIGEST_BYTES) + blobs.DIGEST_BYTES] ^= 1
    assert refusal(bytes(damaged)) == "digest"


def test_a_wrong_digest_is_refused() -> None:
    damaged = bytearray(WIRE)
    damaged[len(WIRE) - len(BLOB) - 3 * blobs.DIGEST_BYTES] ^= 1
    assert refusal(bytes(damaged)) == "digest"


def test_a_blob_over_the_readers_bound_is_refused_before_any_of_it_is_read() -> None:
    header = codec.encode(Probe(0), 1 << 33)
    source = Source(len(header).to_bytes(4, "big") + header + bytes(1000))
    with pytest.raises(ProtocolError, match="oversize"):
        done(blobs.read(source, lambda _: (1 << 33) - 1))
    assert source.most == len(header)
    assert len(source.data) == 1000


def test_a_large_blob_is_asked_for_in_chunks() -> None:
    source = Source(WIRE)
    done(blobs.read(source, anything))
    assert source.most == blobs.CHUNK_BYTES


def test_the_bound_may_depend_on_the_message() -> None:
    with pytest.raises(ProtocolError, match="oversize"):
        done(blobs.read(Source(WIRE), lambda message: 0 if isinstance(message, Probe) else 1 << 30))


@pytest.mark.parametrize("length", [0, codec.MAX_HEADER_BYTES + 1, (1 << 32) - 1])
def test_a_header_of_an_impossible_length_is_refused_unread(length: int) -> None:
    assert refusal(length.to_bytes(4, "big")) == "oversize"


@given(st.integers(0, len(WIRE) - 1))
def test_a_cut_stream_ends_in_eof(length: int) -> None:
    with pytest.raises(EOFError):
        read(WIRE[:length])


@given(st.binary(max_size=200))
def test_garbage_is_refused_or_ends_in_eof(data: bytes) -> None:
    with pytest.raises((ProtocolError, EOFError)):
        read(data, bound=100)


@given(st.binary(max_size=200))
def test_garbage_of_a_possible_length_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        read((len(data)).to_bytes(4, "big") + data, bound=100)
