"""Calls of hivemind's DHT as a liar makes them, in bytes: whole ones, nearly whole ones, and any bytes.

`Liars.call` says who calls what with which bytes, `Liars.answer` what a node says that ours has asked. A call is right
in all its fields first; then chance changes some of them, and then, now and then, the bytes.
"""

import math
import struct
from collections.abc import Callable, Sequence
from functools import cache
from random import Random

import msgpack
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.protobuf.message import Message
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.proto.dht_pb2 import (
    FindRequest,
    FindResponse,
    FindResult,
    NodeInfo,
    PingRequest,
    PingResponse,
    StoreRequest,
    StoreResponse,
)
from hivemind.utils import MSGPackSerializer

from decentral.comm.net.dht_calls import node_id
from decentral.comm.wire.identity import EXPONENT, KEY_BITS, Identity, Signer, _public_bytes, peer_of
from decentral.core.ids import PeerId

CALLERS = 4  # names with keys of their own; the others only have names
RECORDS_OF_A_KEY = 24  # signing one takes 1 ms
MOST_ROWS = 20_000
MOST_CALL_BYTES = 4 << 20  # hivemind's longest message
TUPLE, DICTIONARY = 0x40, 80  # msgpack extension types of hivemind
NESTED = 400  # levels; a reader that calls itself for each has no stack for so many
ODD_EXPONENTS = (3, 65539, (1 << 3071) | 1)
ODD_TIMES = (math.nan, math.inf, -math.inf, -1.0, 0.0, 5e-324, 1e308, 4e9)


@cache
def identities() -> tuple[Identity, ...]:
    keys = [rsa.generate_private_key(EXPONENT, KEY_BITS) for _ in range(CALLERS)]
    return tuple(Identity(peer_of(_public_bytes(key)), key) for key in keys)


def odd_key(exponent: int, modulus: int) -> bytes:
    """A public key that nobody signs with."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return rsa.RSAPublicNumbers(exponent, modulus).public_key().public_bytes(serialization.Encoding.DER, form)


class Liars:
    """All who call a node: what they know of its keys, and the records that they have signed.

    Args:
        signers: Of those with keys, by peer id; they sign what may be stored.
        hidden: The name in the DHT of each of the run's keys.
    """

    def __init__(self, chance: Random, signers: dict[PeerId, Signer], hidden: dict[str, str], now: float) -> None:
        self.chance, self.signers, self.now = chance, signers, now
        self.hidden = hidden
        self.keys = {key: bytes(DHTID.generate(source=name).to_bytes()) for key, name in hidden.items()}
        self.names = [PeerID(b"\x12\x20" + chance.randbytes(32)) for _ in range(3000)]
        self.known = [PeerID.from_base58(peer) for peer in signers]
        self._records = [self._sealed() for _ in range(RECORDS_OF_A_KEY * len(hidden))]
        modulus = (1 << 4095) | chance.getrandbits(4094) | 1
        self._odd = [odd_key(exponent, modulus) for exponent in ODD_EXPONENTS]

    def call(self) -> tuple[str, bytes, PeerID]:
        """The name of a call, its bytes, and who makes it."""
        caller = self.chance.choice(self.known if self.chance.random() < 0.7 else self.names)
        name = self.chance.choices(("ping", "store", "find"), (1, 3, 2))[0]
        return f"DHTProtocol.rpc_{name}", self.request(name, caller), caller

    def request(self, name: str, caller: PeerID) -> bytes:
        """The bytes of a call of this caller."""
        request = {"ping": self._ping, "store": self._store, "find": self._find}[name](caller)
        return self._spoilt(request, self._lies_in_call)

    def answer(self, kind: type[Message], of: PeerID) -> bytes:
        """What a node answers to a call of ours."""
        info = NodeInfo(node_id=self._node_id(of))
        if kind is FindResponse:
            answer: Message = FindResponse(peer=info, results=[self._result()])
        elif kind is StoreResponse:
            answer = StoreResponse(peer=info, store_ok=[self.chance.random() < 0.5])
        else:
            answer = PingResponse(peer=info, dht_time=self._time(self.now))
        return self._spoilt(answer, self._lies_in_answer)

    # Requests that are right

    def _ping(self, caller: PeerID) -> Message:
        return PingRequest(peer=NodeInfo(node_id=self._node_id(caller)))

    def _find(self, caller: PeerID) -> Message:
        return FindRequest(peer=NodeInfo(node_id=self._node_id(caller)), keys=[self._key()])

    def _store(self, caller: PeerID) -> Message:
        key, peer, value, expires = self._record()
        return StoreRequest(
            peer=NodeInfo(node_id=self._node_id(caller)),
            keys=[key], subkeys=[msgpack.packb(peer)], values=[value], expiration_time=[expires], in_cache=[False],
        )  # fmt: skip

    def _result(self) -> FindResult:
        """A dictionary of some records of one key, and nodes that are nearer."""
        records = [self._record() for _ in range(self.chance.choice((0, 1, 1, 3, 20)))]
        nodes = [self._name() for _ in range(self.chance.choice((0, 1, 4, 20)))]
        return FindResult(
            type=2 if records else 0,
            value=self._dictionary(records) if records else b"",
            expiration_time=max((one[3] for one in records), default=0.0),
            nearest_node_ids=[self._node_id(node) for node in nodes],
            nearest_peer_ids=[node.to_bytes() for node in nodes],
        )

    def _dictionary(self, records: Sequence[tuple[bytes, str, bytes, float]]) -> bytes:
        values = DictionaryDHTValue()
        with values.freeze():
            for _, peer, value, expires in records:
                values.store(peer, value, expires)
        packed: bytes = MSGPackSerializer.dumps(values)
        return packed

    # Parts, most of them right

    def _name(self) -> PeerID:
        return self.chance.choice(self.names if self.chance.random() < 0.5 else self.known)

    def _node_id(self, caller: PeerID) -> bytes:
        drawn = self.chance.random()
        right = bytes(node_id(caller if drawn < 0.9 else self._name()).to_bytes())
        return right if drawn < 0.96 else self.chance.choice((b"", right[:-1], right + b"\0", self._key()))

    def _key(self) -> bytes:
        drawn = self.chance.random()
        if drawn < 0.9:
            return self.chance.choice(list(self.keys.values()))
        return self.chance.choice((DHTID.generate(source="other-000000/peers").to_bytes(), self.chance.randbytes(20)))

    def _record(self) -> tuple[bytes, str, bytes, float]:
        """A key, a peer, a value and when it expires; one in three of them is not as it was signed."""
        key, peer, sealed, expires = self.chance.choice(self._records)
        if self.chance.random() < 0.03:
            self._records[self.chance.randrange(len(self._records))] = self._sealed()
        value = msgpack.packb(sealed)
        match self.chance.randrange(12):
            case 0:
                value = msgpack.packb(self._resealed(sealed))
            case 1:
                value = self._packed(sealed)
            case 2:
                expires = self._time(expires)
            case 3:
                key, peer = self._key(), self.chance.choice(("", "x" * 200, self._name().to_base58(), peer[:-1]))
        return key, peer, value, expires

    def _sealed(self) -> tuple[bytes, str, bytes, float]:
        key = self.chance.choice(list(self.hidden))
        peer, signer = self.chance.choice(list(self.signers.items()))
        body = self.chance.randbytes(self.chance.choice((0, 100, 300, 15_000)))
        expires = self._time(self.now + self.chance.choice((60.0, 600.0, 7000.0))) + self.chance.random()
        return self.keys[key], peer, signer.seal(key, body, expires), expires

    def _resealed(self, sealed: bytes) -> bytes:
        """A record whose parts are not those that were signed."""
        try:
            parts = msgpack.unpackb(sealed)
        except (ValueError, msgpack.UnpackException):  # it is encrypted
            return self._bent(sealed)
        if isinstance(parts, list) and len(parts) == 4:
            public = self.chance.choice([parts[2], *self._odd, b"", parts[2][:-1], self.chance.randbytes(300)])
            lies: tuple[object, ...] = (b"", public, b"\0" * 256, self._time(self.now), [], None, "x" * 300)
            parts[self.chance.randrange(4)] = self.chance.choice(lies)
            parts = parts[: self.chance.choice((4, 4, 4, 3, 0))]
        packed: bytes = msgpack.packb(parts)
        return packed

    def _time(self, right: float) -> float:
        return right if self.chance.random() < 0.9 else self.chance.choice(ODD_TIMES)

    def _packed(self, content: bytes) -> bytes:
        """Any msgpack in the place of bytes: other types, extension types, and what is nested deeply."""
        depth = self.chance.choice((1, 5, 40, NESTED, NESTED))
        kinds: tuple[Callable[[], bytes], ...] = (
            lambda: msgpack.packb(self.chance.choice((None, True, -1, 1.5, "text", [content], {"a": content}))),
            lambda: msgpack.packb(msgpack.ExtType(self.chance.randrange(128), content[:500])),
            lambda: nested(b"\x90", depth, TUPLE),
            lambda: nested(b"\x90", depth, DICTIONARY),
            lambda: nested(MSGPackSerializer.dumps((1, content)), depth, TUPLE),
            lambda: b"\x91" * depth + b"\xc0",
            lambda: b"\xdd\x00\x00\x3f\xff" * depth + content[:10_000],  # arrays that claim 16,383 entries each
            lambda: struct.pack(">BI", 0xC6, (1 << 32) - 1) + content,
            lambda: self._dictionary([self.chance.choice(self._records) for _ in range(3)]),
            lambda: msgpack.packb(msgpack.ExtType(DICTIONARY, msgpack.packb(self._row()))),
        )
        return self.chance.choice(kinds)()

    def _row(self) -> object:
        """What may stand in the place of a dictionary: its greatest size, its latest expiry, and its entries."""
        odd: tuple[object, ...] = (None, 0, -1, 1 << 63, "x", [], math.nan, math.inf, b"")
        entries: list[list[object]] = [
            [self.chance.choice((*odd, {})), self.chance.choice(odd), self._time(self.now)] for _ in range(3)
        ]
        return self.chance.choice(
            ([None, self.now, entries], [self.chance.choice(odd), self.chance.choice(odd), entries])
        )

    # What is wrong with whole messages

    def _spoilt(self, message: Message, lies: Callable[[Message], None]) -> bytes:
        drawn = self.chance.random()
        if drawn < 0.35:
            lies(message)
        data: bytes = message.SerializeToString()
        if drawn > 0.95:
            data = self._bent(data)
        elif drawn > 0.94:
            data = self.chance.randbytes(self.chance.choice((0, 1, 30, 1000)))
        return data[:MOST_CALL_BYTES]

    def _lies_in_call(self, request: Message) -> None:
        lists = {field.name: value for field, value in request.ListFields() if hasattr(value, "extend")}
        if isinstance(request, PingRequest) or not lists:
            request.validate = self.chance.random() < 0.5 if isinstance(request, PingRequest) else False
            return
        for name in self.chance.sample(sorted(lists), self.chance.randint(1, len(lists))):
            self._change(lists[name])

    def _change(self, row: object) -> None:
        """Changes a repeated field: its length, or what is in it."""
        assert hasattr(row, "extend")
        found = list(row)  # type: ignore[call-overload]
        match self.chance.randrange(4):
            case 0:
                del row[:]  # type: ignore[attr-defined]
            case 1:
                size = max(8, *(len(one) if isinstance(one, bytes) else 8 for one in found))
                times = self.chance.choice((1, 3, 100 if self.chance.random() < 0.9 else MOST_ROWS))
                row.extend(found * min(times, 1 + MOST_CALL_BYTES // (size * len(found))))
            case _:
                row[0] = self._instead_of(found[0])  # type: ignore[index]

    def _instead_of(self, one: object) -> bytes | float | bool:
        if isinstance(one, bool):
            return not one
        if isinstance(one, float):
            return self.chance.choice(ODD_TIMES)
        assert isinstance(one, bytes)
        few = self.chance.random() < 0.98
        long = self.chance.randbytes(1000 if few else 100_000)
        return self.chance.choice((b"", b"\xc0", self._bent(one), self._packed(one), long))

    def _lies_in_answer(self, answer: Message) -> None:
        if not isinstance(answer, FindResponse):
            return
        result = answer.results[0]
        match self.chance.randrange(6):
            case 0:
                result.value = self._packed(result.value)
            case 1:
                result.type = self.chance.randrange(5)
            case 2:
                result.expiration_time = self.chance.choice(ODD_TIMES)
            case 3:
                self._change(self.chance.choice((result.nearest_node_ids, result.nearest_peer_ids))) if (
                    result.nearest_node_ids
                ) else None
            case 4:
                answer.results.extend([result] * self.chance.choice((1, 50)))
            case _:
                del answer.results[:]

    def _bent(self, data: bytes) -> bytes:
        """The bytes, cut, turned, or doubled somewhere."""
        at, to = sorted(self.chance.randint(0, len(data)) for _ in range(2))
        turned = bytes([self.chance.randrange(256)])
        return self.chance.choice((data[:at], data[:at] + turned + data[at + 1 :], data[:to] + data[at:], data[at:]))


def nested(inner: bytes, depth: int, code: int) -> bytes:
    """An extension type within an extension type, and so on."""
    for _ in range(depth):
        inner = struct.pack(">BIB", 0xC9, len(inner), code) + inner
    return inner
