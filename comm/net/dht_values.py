"""Check the msgpack values of hivemind's DHT before hivemind reads them.

Use `plain` for the values that other nodes store at ours, and `require_records` for the values in their answers.

hivemind's reader calls itself for each extension type inside another. So 1.2 kB from any peer, stored at our node or in
the answer to its lookup, would use up the stack and end the process.
"""

import math

import msgpack
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils import MSGPackSerializer

from decentral.comm.net.stored_records import MOST_STORED, PEERS_KEY_BYTES, counted_bytes
from decentral.comm.wire.unpacking import read_msgpack
from decentral.core.units import KiB

DICTIONARY = MSGPackSerializer._ext_types[DictionaryDHTValue]  # msgpack's extension type of a dictionary of records
# An honest node answers with at most a key's limit plus one record. Verifying so many records takes up to 0.3 s.
MOST_ANSWERED_BYTES = PEERS_KEY_BYTES + 128 * KiB


def plain(packed: bytes) -> object:
    """Return a msgpack value that contains no other values, such as bytes or a string.

    Raises:
        Exception: An error of one of msgpack's many classes, if the value is malformed, an array or a map.
    """
    return read_msgpack(packed, max_array_len=0, max_map_len=0)


def require_records(packed: bytes, expires: float) -> None:
    """Raise an error of any class unless an answer is what our own node could find: a dictionary of peers' records.

    hivemind uses the dictionary's own size and expiry without a check: a size of the wrong type ends our search in an
    error, and an infinite expiry ends our search before any other node is asked.

    Args:
        packed: The dictionary. It must have at least one record, and at most MOST_ANSWERED_BYTES of records.
        expires: The answer's expiry, which must be that of its latest record.
    """
    value = msgpack.unpackb(packed, raw=False, max_array_len=0, max_map_len=0)
    if not isinstance(value, msgpack.ExtType) or value.code != DICTIONARY:
        raise TypeError("expected a dictionary of records")
    most, latest, rows = read_msgpack(value.data, max_array_len=MOST_STORED, max_map_len=0)
    for peer, record, until in rows:
        if (type(peer), type(record), type(until)) != (str, bytes, float) or not math.isfinite(until):
            raise TypeError("expected a peer id, a record and its expiry")
    if most not in (None, math.inf) or type(latest) is not float:
        raise TypeError("expected a dictionary without a limit, and its expiry")
    if not latest == expires == max(until for *_, until in rows):
        raise ValueError("an answer must expire with its latest record")
    if sum(counted_bytes(len(record)) for _, record, _ in rows) > MOST_ANSWERED_BYTES:
        raise ValueError(f"an answer must have at most {MOST_ANSWERED_BYTES} bytes of records")
