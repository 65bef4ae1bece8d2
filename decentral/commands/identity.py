"""python -m decentral.identity: print the id of a peer that has not started yet.

To start several peers at once, give all of them the first peer's address. The address ends with that peer's id, a hash
of the key in its state folder. This command makes the key. Keep it secret, and copy it to the first peer's machine.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from decentral.comm.wire.identity import Identity
from decentral.commands import shared
from decentral.peers.startup.state import refuse_swarm


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return shared.run(lambda: _main(parse(argv)))


def _main(flags: argparse.Namespace) -> None:
    refuse_swarm(Path(flags.state_dir))
    own = Identity.load_or_create(Path(flags.state_dir) / "identity.key")
    print(f"{flags.address.rstrip('/')}/p2p/{own.peer}" if flags.address else own.peer)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command's flags, or raise UserError if they are not valid."""
    does = "Print a peer's id, or the address with which others join it. Makes the peer's key if there is none."
    parser = shared.Parser(prog="python -m decentral.identity", description=does)
    parser.add_argument("--state-dir", required=True, metavar="DIR", help="the peer's state folder")
    parser.add_argument("--address", metavar="MULTIADDR", help="the peer's future address; printed with its id")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
