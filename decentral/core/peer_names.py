"""The names that users give their peers with `--name`, and how a peer is written for people. Start at `titled`.

A name is text that another peer chose: it is bounded, may be false, and two peers may have the same one. So a peer's id
stands before its name.
"""

import platform

from decentral.core.ids import PeerId, short
from decentral.core.plain_text import plain_text

PEER_NAME_CHARS = 32  # longer names leave no columns for numbers in a table of 80 columns


def machine_name() -> str:
    """Return this machine's host name without its domain, printable and cut to PEER_NAME_CHARS; "" without a name."""
    return plain_text(platform.node().partition(".")[0].strip(), PEER_NAME_CHARS)


def name_of_several(number: int) -> str:
    """Return the name of one of several peers that a command starts on this machine, such as `laptop-2`."""
    return f"{machine_name()[: PEER_NAME_CHARS - 3] or 'peer'}-{number}"


def departed(reason: str) -> str:
    """Return what people read about a peer that is no longer there: `left`, or `is lost (REASON)`."""
    return "left" if reason == "left" else f"is lost ({reason})"


def titled(peer: PeerId, name: str) -> str:
    """Return the end of a peer's id and, if the peer has a name, the name: `x3kPq2 (ann-laptop)`.

    Id and name come from another peer. The result has only printable characters, and no square brackets.
    """
    shown = plain_text(name, PEER_NAME_CHARS)
    return plain_text(short(peer)) + (f" ({shown})" if shown else "")
