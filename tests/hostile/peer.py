"""python -m tests.hostile.peer [--lie KIND] [--calm] [--eclipse KEYS] [--credulous] FLAGS...: not as it should be.

    --lie KIND      it sends lies of this kind (decentral/sim/liars.py), and floods its partners
    --calm          it does not flood
    --eclipse KEYS  it owns the nodes next to these keys of the DHT (eclipse.py), such as peers,revoked
    --credulous     it has no defences against others' lies

FLAGS are those of `decentral.peer`. For tests and benchmarks only.
"""

import argparse
import sys

from decentral.commands import peer
from decentral.peers.startup import start_peer
from tests.hostile.credulous import without_defences
from tests.hostile.eclipse import eclipsing
from tests.hostile.liar import lying


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--lie", default="")
    parser.add_argument("--calm", action="store_true")
    parser.add_argument("--eclipse", default="")
    parser.add_argument("--credulous", action="store_true")
    flags, others = parser.parse_known_args()
    if flags.credulous:
        without_defences(setattr)
    if flags.lie:
        start_peer.LOADED_NETWORK = lying(flags.lie, not flags.calm)
    if flags.eclipse:
        start_peer.LOADED_NETWORK = eclipsing(flags.eclipse.split(","))
    return peer.main(others)


if __name__ == "__main__":
    sys.exit(main())
