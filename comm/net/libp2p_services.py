"""What libp2p's daemons tell and do for each other beside our own protocol, for `python -m decentral.doctor`.

    identify    /ipfs/id/1.0.0          our address as the other peer sees it: the router's, if we are behind one
    AutoNAT     /libp2p/autonat/1.0.0   the other peer dials our addresses anew, and says whether it has reached us

Every daemon that hivemind starts answers both. AutoNAT's own rules keep it from being turned on others: it dials only
the IP address that the asker's connection comes from, expects the asker's peer id there, dials no private addresses,
and soon refuses an asker that wants more (github.com/libp2p/specs, autonat/autonat-v1.md).
"""

from collections.abc import Sequence
from functools import cache
from typing import Protocol

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message
from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr

from decentral.comm.wire.network import DialBack, DialStatus, Identified
from decentral.comm.wire.transport import AskError
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.core.reasons import Reason
from decentral.core.units import Seconds

IDENTIFY, AUTONAT = "/ipfs/id/1.0.0", "/libp2p/autonat/1.0.0"
IDENTIFY_S = 10.0
DIAL_BACK_S = 8.0  # a daemon gives up dialling after 15 s; who can be reached is within two or three round trips
MAX_IDENTIFY_BYTES, MAX_DIAL_BACK_BYTES = 16 * 1024, 4 * 1024
MOST_DIALLED = 16  # addresses that are named; a daemon dials no more

# The fields that are used, as (name, number, type, repeated); a type that begins with a dot is one of these messages.
_MESSAGES = {
    "Identify": [("observed", 4, "bytes", False), ("protocols", 3, "string", True), ("agent", 6, "string", False)],
    "PeerInfo": [("id", 1, "bytes", False), ("addresses", 2, "bytes", True)],
    "Dial": [("peer", 1, ".PeerInfo", False)],
    "DialResponse": [("status", 1, "int32", False), ("text", 2, "string", False), ("address", 3, "bytes", False)],
    "AutoNat": [("type", 1, "int32", False), ("dial", 2, ".Dial", False), ("response", 3, ".DialResponse", False)],
}


class Caller(Protocol):
    """What it takes to ask another peer's daemon."""

    peer: PeerId

    async def call(self, to: PeerId, protocol: str, request: bytes, most_bytes: int, deadline_s: Seconds) -> bytes:
        """Return all bytes of the answer. Raises AskError."""


async def identify(transport: Caller, peer: PeerId) -> Identified:
    """What a peer to which we have a connection says of itself and of us. Raises AskError and ProtocolError."""
    return identified(await transport.call(peer, IDENTIFY, b"", MAX_IDENTIFY_BYTES, IDENTIFY_S))


async def dial_back(transport: Caller, peer: PeerId, addresses: Sequence[str]) -> DialBack:
    """Asks a peer to which we have a connection to reach us anew, at one of these addresses.

    A peer that is still dialling at the deadline has an ERROR: packets to us are dropped on the way.
    Raises AskError and ProtocolError.
    """
    packed = [packed_address(address.partition("/p2p/")[0]) for address in addresses[:MOST_DIALLED]]
    us = {"id": packed_address(f"/p2p/{transport.peer}"), "addresses": packed}
    body = _kind("AutoNat")(type=0, dial={"peer": us}).SerializeToString()
    try:
        answer = await transport.call(peer, AUTONAT, _varint(len(body)) + body, MAX_DIAL_BACK_BYTES, DIAL_BACK_S)
    except AskError as error:
        if error.reason == Reason.DEADLINE:
            return DialBack(DialStatus.ERROR, "", f"not reached within {DIAL_BACK_S:g} s")
        raise
    return dialled(answer)


def identified(data: bytes) -> Identified:
    """Reads an answer of identify. Raises ProtocolError."""
    found = _unpacked("Identify", data)
    return Identified(address_text(found.observed), AUTONAT in found.protocols, found.agent)


def dialled(data: bytes) -> DialBack:
    """Reads an answer of AutoNAT. Raises ProtocolError."""
    found = _unpacked("AutoNat", data).response
    return DialBack(found.status, address_text(found.address), found.text)


def packed_address(address: str) -> bytes:
    """A valid address, or `/p2p/Qm...` as the peer's id alone, as libp2p's own messages have it."""
    peer = address.removeprefix("/p2p/")
    return bytes(Multiaddr(address).to_bytes() if peer == address else PeerID.from_base58(peer).to_bytes())


def address_text(packed: bytes) -> str:
    """An address that a peer has sent; "" if it is none."""
    try:
        return str(Multiaddr(packed))
    except Exception:  # multiaddr raises what its parsers raise
        return ""


@cache
def _kind(name: str) -> type[Message]:
    """The protobuf class of a message of the table."""
    file = descriptor_pb2.FileDescriptorProto(name="libp2p_services.proto", package="decentral", syntax="proto2")
    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for field, number, kind, repeated in fields:
            of_table = kind.startswith(".")
            described.field.add(
                name=field,
                number=number,
                label=3 if repeated else 1,
                type="TYPE_MESSAGE" if of_table else f"TYPE_{kind.upper()}",
                type_name=f".decentral{kind}" if of_table else None,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found: type[Message] = message_factory.GetMessageClass(pool.FindMessageTypeByName(f"decentral.{name}"))
    return found


def _unpacked(name: str, data: bytes) -> Message:
    """The message that stands behind its length. Raises ProtocolError for anything else."""
    length = next((place + 1 for place, byte in enumerate(data[:4]) if byte < 128), 0)
    if not length or _varint(len(data) - length) != data[:length]:
        raise ProtocolError(Reason.CUT, f"{len(data)} bytes of {name}")
    found = _kind(name)()
    try:
        found.ParseFromString(data[length:])
    except (DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(Reason.GARBAGE, type(error).__name__) from None
    return found


def _varint(value: int) -> bytes:
    """A length as protobuf writes it, seven bits a byte, the lowest first."""
    written = bytearray()
    while value > 127:
        written.append(value & 127 | 128)
        value >>= 7
    return bytes([*written, value])
