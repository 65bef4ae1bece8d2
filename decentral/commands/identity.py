"""python -m decentral.identity: the id of a peer that has not started yet.

Whoever starts several peers at once has to tell them the first one's address, which ends in its id. The id is that of
the key in its state folder, so the key is made first, and goes, as a secret, where the peer will run.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from decentral.comm.wire.identity import Identity
from decentral.commands import shared


def main(argv: Sequence[str] | None = None) -> int:
    return shared.run(lambda: _main(parse(argv)))


def _main(flags: argparse.Namespace) -> None:
    own = Identity.load_or_create(Path(flags.state_dir) / "identity.key")
    print(f"{flags.address.rstrip('/')}/p2p/{own.peer}" if flags.address else own.peer)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    does = "A peer's id, or the whole address that others join with. Makes the peer's key where there is none."
    parser = shared.Parser(prog="python -m decentral.identity", description=does)
    parser.add_argument("--state-dir", required=True, metavar="DIR", help="the peer's state folder")
    parser.add_argument("--address", metavar="MULTIADDR", help="where the peer will be: print what others join with")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
