"""An hour of real faults: peers are killed, frozen, cut off and sent away, their disks are filled, one each 20 s.

    python -m benchmarks.soak [--seconds 3600] [--quiet 300] [--every 20] [--seed N] [--places 6] [--lie KIND]
                             [--json FILE]

Real peers and real libp2p: half of them hold the whole model, the others a part, through which micro-batches travel by
routes. All train in quiet first; then the faults begin (benchmarks/soak/faults.py has the kinds), and the survivors'
training is compared with the quiet minutes. At the end the journals are audited. The exit status is 1 if anything is
violated (benchmarks/soak/judge.py), and 2 with one line for a mistake.

With root on Linux each peer has a network namespace and a disk of its own, in memory; packets stay in this machine.
Without, peers run on loopback, a full disk is a limit of the process, and nobody is cut off: the report says so.
With --lie the last peer, which holds a part of the model, is a hostile one (tests/hostile/peer.py).
Whatever ends this process ends the peers, and then no mount, namespace or device is left.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

from benchmarks.soak import faults
from benchmarks.soak.disks import Disks, LimitedFiles, MountedDisks
from benchmarks.soak.driver import Driver
from benchmarks.soak.evidence import Evidence
from benchmarks.soak.report import report, table
from benchmarks.soak.swarm import LAYERS, SoakSwarm, lab_of, local_flags, write_json
from benchmarks.wan import namespaces
from decentral.commands import shared
from decentral.commands.local import PEER_LEAVE_S, PEER_START_S
from decentral.core.errors import UserError
from decentral.sim.liars import FALSIFIED

QUIET_S = 300.0
WARM_UP_S = 20.0  # from when all have joined: windows are short, and kernels are compiled


def main(argv: Sequence[str] | None = None) -> int:
    return shared.run(lambda: _main(_parse(argv)))


def _main(flags: argparse.Namespace) -> None:
    console = Console(highlight=False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # all is taken down, as with Ctrl-C
    missing = "it was not asked for" if flags.loopback else namespaces.missing()
    kinds = [kind for kind in faults.KINDS if kind != "cut" or not missing]
    if missing:
        console.print(f"no lab ({missing}): nobody is cut off, and a full disk is a limit of the process", markup=False)
    plan = faults.draw(flags.seed, flags.seconds, flags.every, flags.places, kinds)
    whole = frozenset(range((flags.places + 1) // 2))
    found = Evidence(flags.places, whole, (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), LAYERS)
    with _swarm(flags, bool(missing), 1 + sum(one.kind == "replace" for one in plan)) as swarm:
        swarm.begin(flags.places)
        driver = Driver(swarm, found, console)
        console.print(f"{flags.places} peers train; {flags.quiet:.0f} s of quiet, then {len(plan)} faults")
        driver.quiet(WARM_UP_S)
        driver.quiet(flags.quiet)
        driver.faults(plan, flags.seconds)
        driver.end()
    result = {"seed": flags.seed, "lab": not missing, "every_s": flags.every, "lie": flags.lie, **report(found)}
    if flags.json:
        write_json(flags.json, result)
    console.print("\n".join(table(result)), markup=False, soft_wrap=True)
    if not result["passed"]:
        raise SystemExit(1)


@contextmanager
def _swarm(flags: argparse.Namespace, loopback: bool, generations: int) -> Iterator[SoakSwarm]:
    """The disks are there before the lab: its processes see no mount that comes later."""
    asked = local_flags(flags.places, (flags.places + 1) // 2)
    lasts = 2 * (flags.seconds + flags.quiet) + PEER_LEAVE_S + PEER_START_S * flags.places
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        places = [folder / f"place-{place}" for place in range(flags.places)]
        disks: Disks = LimitedFiles(places) if loopback else MountedDisks(places)
        stack.callback(disks.close)
        lab = None if loopback else stack.enter_context(lab_of(flags.places, lasts))
        swarm = SoakSwarm(asked, disks, lab, generations, flags.lie)
        stack.callback(swarm.kill)
        yield swarm


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = shared.Parser(
        prog="python -m benchmarks.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3600.0, help="with faults")
    parser.add_argument("--quiet", type=float, metavar="S", help="before them; default: as long, at most 300")
    parser.add_argument("--every", type=float, default=20.0, metavar="S", help="from one fault to the next")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the faults; default: the time")
    parser.add_argument("--places", type=int, default=6, metavar="N", help="peers at a time")
    parser.add_argument("--lie", default="", choices=["", *FALSIFIED], metavar="KIND", help=", ".join(FALSIFIED))
    parser.add_argument("--loopback", action="store_true", help="no lab, although it can run here")
    parser.add_argument("--json", type=Path, metavar="FILE")
    flags = parser.parse_args(argv)
    if not 4 <= flags.places <= 16 or min(flags.seconds, flags.every) < 10:
        raise UserError("--places expects 4 to 16, --seconds and --every 10 or more")
    flags.quiet = min(QUIET_S, flags.seconds) if flags.quiet is None else flags.quiet
    return flags


if __name__ == "__main__":
    sys.exit(main())
