"""Ask other peers' libp2p daemons how they see and reach us, for `python -m decentral.doctor`.

    `identify`   identify /ipfs/id/1.0.0        the other peer reports the address from which it sees us connect
    `dial_back`  AutoNAT /libp2p/autonat/1.0.0  the other peer opens a new connection to us, and reports the outcome

Every daemon that hivemind starts answers in both protocols. AutoNAT's rules keep it from being used for attacks: it
dials only the IP address that the sender's connection comes from, expects the sender's peer id there, dials no private
addresses, and limits how often each peer may ask (github.com/libp2p/specs, autonat/autonat-v1.md).
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
DIAL_BACK_S = 8.0  # the report on a dial-back must come within this time; a reachable peer needs a few round trips
MAX_IDENTIFY_BYTES, MAX_DIAL_BACK_BYTES = 16 * 1024, 4 * 1024
MOST_DIALLED = 16  # we ask a peer to dial at most this many of our addresses; its daemon does not dial more

# The protobuf fields in use, as (name, number, type, repeated). A type with a leading dot is a message of this table.
_MESSAGES = {
    "Identify": [("observed", 4, "bytes", False), ("protocols", 3, "string", True), ("agent", 6, "string", False)],
    "PeerInfo": [("id", 1, "bytes", False), ("addresses", 2, "bytes", True)],
    "Dial": [("peer", 1, ".PeerInfo", False)],
    "DialResponse": [("status", 1, "int32", False), ("text", 2, "string", False), ("address", 3, "bytes", False)],
    "AutoNat": [("type", 1, "int32", False), ("dial", 2, ".Dial", False), ("response", 3, ".DialResponse", False)],
}


class Caller(Protocol):
    """Interface of a network that can call another peer's daemon in any protocol of libp2p; Libp2p implements it."""

    peer: PeerId

    async def call(self, to: PeerId, protocol: str, request: bytes, most_bytes: int, deadline_s: Seconds) -> bytes:
        """Send a request to a peer in a libp2p protocol, and return the whole answer.

        Raises:
            AskError: If no whole answer comes within `deadline_s` seconds, or the answer exceeds `most_bytes` bytes.
        """


async def identify(transport: Caller, peer: PeerId) -> Identified:
    """Return our address as a connected peer sees it, the peer's software, and whether the peer dials back.

    Raises:
        AskError: If no answer comes in time.
        ProtocolError: If the answer is malformed.
    """
    return identified(await transport.call(peer, IDENTIFY, b"", MAX_IDENTIFY_BYTES, IDENTIFY_S))


async def dial_back(transport: Caller, peer: PeerId, addresses: Sequence[str]) -> DialBack:
    """Ask a connected peer to open a new connection to us, and return its report.

    Args:
        transport: Our network.
        peer: The peer to ask.
        addresses: Our multiaddrs; the first MOST_DIALLED are tried.

    Returns:
        The peer's report. If no report comes within DIAL_BACK_S, the result is DialStatus.ERROR, since a peer that is
        still dialling after that time cannot reach us.

    Raises:
        AskError: If no answer comes for a reason other than the deadline.
        ProtocolError: If the answer is malformed.
    """
    packed = [packed_address(address.partition("/p2p/")[0]) for address in addresses[:MOST_DIALLED]]
    us = {"id": packed_address(f"/p2p/{transport.peer}"), "addresses": packed}
    body = _kind("AutoNat")(type=0, dial={"peer": us}).SerializeToString()
    try:
        answer = await transport.call(peer, AUTONAT, _varint(len(body)) + body, MAX_DIAL_BACK_BYTES, DIAL_BACK_S)
    except AskError as error:
        if error.reason == Reason.DEADLINE:
            return DialBack(DialStatus.ERROR, "", f"the peer has not reached us within {DIAL_BACK_S:g} s")
        raise
    return dialled(answer)


def identified(data: bytes) -> Identified:
    """Return the content of an identify answer. Raises ProtocolError if the answer is malformed."""
    found = _unpacked("Identify", data)
    return Identified(address_text(found.observed), AUTONAT in found.protocols, found.agent)


def dialled(data: bytes) -> DialBack:
    """Return the content of an AutoNAT answer. Raises ProtocolError if the answer is malformed."""
    found = _unpacked("AutoNat", data).response
    return DialBack(found.status, address_text(found.address), found.text)


def packed_address(address: str) -> bytes:
    """Return a multiaddr in libp2p's binary form; for `/p2p/Qm...` alone, return the binary peer id.

    Raises the error of hivemind's parser if the text is malformed.
    """
    peer = address.removeprefix("/p2p/")
    return bytes(Multiaddr(address).to_bytes() if peer == address else PeerID.from_base58(peer).to_bytes())


def address_text(packed: bytes) -> str:
    """Return the text of a binary multiaddr that a peer has sent; "" if the bytes are not a multiaddr."""
    try:
        return str(Multiaddr(packed))
    except Exception:  # Multiaddr raises errors of many classes for malformed bytes
        return ""


@cache
def _kind(name: str) -> type[Message]:
    """Return the protobuf class of a message, built from its fields in `_MESSAGES`."""
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
    """Parse `data`: a message's length, then the message. Raises ProtocolError if `data` is incomplete or malformed."""
    length = next((place + 1 for place, byte in enumerate(data[:4]) if byte < 128), 0)
    if not length or _varint(len(data) - length) != data[:length]:
        raise ProtocolError(Reason.CUT, f"{len(data)} bytes are not one whole {name} message")
    found = _kind(name)()
    try:
        found.ParseFromString(data[length:])
    except (DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(Reason.GARBAGE, f"not a valid {name} message ({type(error).__name__})") from None
    return found


def _varint(value: int) -> bytes:
    """Encode a message's length as protobuf does: seven bits in each byte, the lowest bits first."""
    written = bytearray()
    while value > 127:
        written.append(value & 127 | 128)
        value >>= 7
    return bytes([*written, value])
