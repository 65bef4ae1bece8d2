"""Real processes, real libp2p and real TCP over an emulated WAN on this machine. Needs root on Linux.

    python -m benchmarks.wan --self-test eight-cities [--peers-per-region 1] [--rates 0.1] [--json FILE]
    python -m benchmarks.wan --swarm four-homes --seconds 60 [--schedule "part 0,1 at 20 for 15"] [--nat 2,3:symmetric]
                             [--json FILE] [-- --set model.depth=2 --throttle 1,1,1,4 ...]
    python -m benchmarks.wan --newcomer four-homes --seconds 30 [--json FILE] [-- --set model.width=448 ...]
    python -m benchmarks.wan --churn 24-in-ten-cities --rates 0.02 --seconds 600 [--quiet 60] [--every 20] [-- ...]

The self-test measures each pair's round trip and rates, one pair after the other, and compares them with what was
asked. A swarm is a `decentral.local` whose peers are in the lab; behind `--` stand flags of that. With --newcomer the
last peer joins when the others have trained for --seconds, and its download is what is measured. With --churn a peer
is killed and another started every so many seconds. TOPOLOGY is a file of
the planner or a shipped one's name; schedule.py has the forms of a schedule. Exit status 0: done, and all pairs as
asked; 1: a pair is off; 2: one line says what is missing.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks.wan import churn, description, namespaces, newcomer, schedule, selftest, swarm
from benchmarks.wan.lab import Lab
from decentral.commands import shared
from decentral.commands.local import PEER_LEAVE_S, PEER_START_S, LocalFlags
from decentral.commands.local import parse as parse_local
from decentral.core.errors import UserError
from decentral.scheduler.topology import topology


def main(argv: Sequence[str] | None = None) -> int:
    return shared.run(lambda: _main(_parse(argv)))


def _main(flags: argparse.Namespace) -> None:
    namespaces.require_root()
    asked = _description(flags)
    if flags.rates != 1:
        print(f"all rates times {flags.rates:g}")
    if flags.self_test:
        results = selftest.run(asked)
        print(selftest.verdict(results))
        _write(flags.json, selftest.to_json(asked, results))
        if any(one.complaints() for one in results):
            raise SystemExit(1)
    elif flags.churn:
        _churn(flags, asked)
    elif flags.newcomer:
        _newcomer(flags, asked)
    else:
        _swarm(flags, asked)


def _description(flags: argparse.Namespace) -> description.Description:
    found = topology.load(flags.self_test or flags.swarm or flags.newcomer or flags.churn)
    chosen = description.first_of_each_region(found, flags.peers_per_region)
    asked = description.from_topology(found, chosen).scaled(flags.rates)
    return replace(asked, nat=description.parse_nat(flags.nat, len(asked)), mtu=flags.mtu, seed=flags.seed)


def _swarm(flags: argparse.Namespace, asked: description.Description) -> None:
    schedule.parse(flags.schedule, len(asked))  # a mistake in it shows before anything starts
    local = _local(flags, asked, f"{flags.seconds}s")
    with _lab(asked, local, flags.seconds) as (lab, folder):
        result = swarm.train(lab, local, folder, flags.schedule, Console(highlight=False))
    print(swarm.table(result))
    _write(flags.json, result)


def _newcomer(flags: argparse.Namespace, asked: description.Description) -> None:
    local = _local(flags, asked, "1e6s")
    with _lab(asked, local, flags.seconds) as (lab, folder):
        result = newcomer.join_late(lab, local, folder, flags.seconds, Console(highlight=False))
    print(newcomer.report(result))
    _write(flags.json, result)


def _churn(flags: argparse.Namespace, asked: description.Description) -> None:
    local = _local(flags, asked, "1e6s")
    times = churn.Times(flags.seconds, flags.quiet, flags.every)
    with _lab(asked, local, flags.seconds) as (lab, folder):
        result = churn.run(lab, local, folder, times, Console(highlight=False))
    print(churn.report(result))
    _write(flags.json, result)


def _local(flags: argparse.Namespace, asked: description.Description, stop_after: str) -> LocalFlags:
    """The flags of `decentral.local`, one peer for each of the lab."""
    return parse_local(["--peers", str(len(asked)), "--stop-after", stop_after, *flags.local])


@contextmanager
def _lab(asked: description.Description, local: LocalFlags, seconds: float) -> Iterator[tuple[Lab, Path]]:
    """The lab for a swarm that trains for so long, with time to start and to leave, and the folder of its peers."""
    lasts = seconds + PEER_LEAVE_S + PEER_START_S * (len(asked) + 1)
    with tempfile.TemporaryDirectory(prefix="wan-") as folder, Lab(asked, lasts) as lab:
        yield lab, Path(local.state_dir or folder)


def _write(path: Path | None, result: object) -> None:
    if path:
        path.write_text(json.dumps(result, indent=1) + "\n")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    given = list(sys.argv[1:] if argv is None else argv)
    own, local = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    parser = shared.Parser(
        prog="python -m benchmarks.wan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--self-test", metavar="TOPOLOGY")
    what.add_argument("--swarm", metavar="TOPOLOGY")
    what.add_argument("--newcomer", metavar="TOPOLOGY")
    what.add_argument("--churn", metavar="TOPOLOGY")
    parser.add_argument("--peers-per-region", type=int, default=64, metavar="N", help="of the topology; default: all")
    parser.add_argument("--rates", type=float, default=1.0, metavar="F", help="all rates times F")
    parser.add_argument("--nat", default="", metavar="N[:KIND],...", help="peers behind a router: home or symmetric")
    parser.add_argument("--mtu", type=int, default=description.MTU, metavar="BYTES")
    parser.add_argument("--seed", type=int, default=0, help="of lost packets and of routers' ports")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a swarm, from when the last peer has joined")
    parser.add_argument("--schedule", default="", metavar="CHANGES", help="counted from when the last peer has joined")
    parser.add_argument(
        "--quiet", type=float, default=60.0, metavar="S", help="of --churn: seconds until the first kill"
    )
    parser.add_argument("--every", type=float, default=20.0, metavar="S", help="of --churn: from one kill to the next")
    parser.add_argument("--json", type=Path, metavar="FILE")
    flags = parser.parse_args(own)
    if not 0 < flags.rates <= 100 or not 576 <= flags.mtu <= 65535 or min(flags.seconds, flags.quiet, flags.every) <= 0:
        raise UserError("--rates expects 0 to 100, --mtu 576 to 65535, --seconds, --quiet, --every more than 0")
    if flags.peers_per_region < 1:
        raise UserError(f"--peers-per-region expects 1 or more; got {flags.peers_per_region}")
    flags.local = local
    return flags


if __name__ == "__main__":
    sys.exit(main())
