"""python -m decentral.simulate: what would this swarm do? The real peers, thousands if need be, in virtual time.

    python -m decentral.simulate --peers 50 --seconds 600 --faults "crash 3 at 60; restart 3 at 90"
    python -m decentral.simulate --peers 1000 --seconds 3600 --set gossip.window_s=60 --step-seconds 2
    python -m decentral.simulate --sweep 300                      300 small swarms with faults by chance
    python -m decentral.simulate --sweep 1 --seed 42 --shrink     one of them again, with as few faults as will do

Nothing is trained unless `--gradients` asks for it: a few numbers stand for the model, and their gossip is the real
one. The audit checks all that happens (decentral/sim/invariants/audit.py). A violation ends the run with exit code 1,
and tells the seed, the time, what the peer did last, and the command that replays it.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from decentral.commands import shared
from decentral.core.errors import UserError
from decentral.sim.faults import BESIDES
from decentral.view.page.address import add_dashboard_flag


def main(argv: Sequence[str] | None = None) -> int:
    return shared.run(lambda: _main(parse(argv)))


def _main(flags: argparse.Namespace) -> None:
    with shared.loading():
        from decentral.commands import simulation
    simulation.simulate(flags)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = shared.Parser(prog="python -m decentral.simulate", description="A swarm in virtual time.")
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file, or a shipped one's name")
    parser.add_argument("--peers", type=int, default=8, metavar="N")
    parser.add_argument("--seconds", type=float, default=600.0, metavar="S", help="of virtual time; default 600")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="all chance comes from it")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of CONFIG")
    parser.add_argument("--step-seconds", type=float, default=0.5, metavar="S", help="of a step of a peer; default 0.5")
    parser.add_argument("--noise", type=float, default=0.05, metavar="F", help="of a step, as a part of it")
    parser.add_argument("--throttle", type=_factors, default=(1.0,), metavar="F,F,...", help="slowness, peers in turn")
    parser.add_argument("--memory", type=_sizes, default=(), metavar="BYTES,...", help="for the model, peers in turn")
    parser.add_argument("--tokens-per-step", type=int, default=1024, metavar="N")
    parser.add_argument("--gradients", action="store_true", help="train the model of CONFIG for real; for small ones")
    parser.add_argument("--topology", metavar="FILE", help="links as of decentral.plan, peers in turn")
    parser.add_argument("--delay-ms", type=float, default=30.0, metavar="MS", help="one way; default 30")
    parser.add_argument("--up-mbps", type=float, default=20.0, metavar="MBPS", help="of a peer; default 20")
    parser.add_argument("--down-mbps", type=float, default=100.0, metavar="MBPS", help="of a peer; default 100")
    spec = "such as 'crash 2 at 20; restart 2 at 30': decentral/sim/faults.py"
    parser.add_argument("--faults", metavar="SPEC", help=spec)
    parser.add_argument("--trace", metavar="FILE", help="churn from a CSV with the columns time, peer, up/down")
    parser.add_argument("--random-faults", type=int, default=0, metavar="N", help="so many by chance")
    parser.add_argument("--sweep", type=int, default=0, metavar="N", help="so many small swarms with faults by chance")
    only = "of a sweep: seeds with faults of machines (hosts) or with knowing liars, such as hosts,liars"
    parser.add_argument("--only", type=_besides, default=(), metavar="KINDS", help=only)
    parser.add_argument("--for-seconds", type=float, default=0.0, metavar="S", help="end a sweep after so long")
    parser.add_argument("--report", metavar="FILE", help="JSON: what a sweep has played and found")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N", help="of a sweep")
    parser.add_argument("--shrink", action="store_true", help="of a violation, the fewest faults that still cause it")
    parser.add_argument(
        "--plot", metavar="FILE", help="picture: tokens/s, loss, spread and peers over time, and the faults"
    )
    parser.add_argument("--journals", metavar="DIR", help="keep the peers' journals, for decentral.report and audit")
    add_dashboard_flag(parser)
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    parser.set_defaults(typed=list(sys.argv[1:] if argv is None else argv))
    flags = parser.parse_args(argv)
    for name, least in (("peers", 1), ("seconds", 1.0), ("step_seconds", 1e-3), ("sweep", 0), ("processes", 1)):
        if getattr(flags, name) < least:
            raise UserError(f"--{name.replace('_', '-')} expects at least {least:g}; got {getattr(flags, name):g}")
    return flags


def _besides(text: str) -> tuple[str, ...]:
    kinds = tuple(part.strip() for part in text.split(","))
    if not set(kinds) <= set(BESIDES):
        raise argparse.ArgumentTypeError(f"expected {' or '.join(BESIDES)}, or both; got {text!r}")
    return kinds


def _sizes(text: str) -> tuple[int, ...]:
    sizes = shared.several(text, shared.size)
    if not sizes:
        raise argparse.ArgumentTypeError(f"expected sizes such as 800MB,2GB; got {text!r}")
    return tuple(sizes)


def _factors(text: str) -> tuple[float, ...]:
    factors = shared.several(text, float)
    if not factors or min(factors) <= 0:
        raise argparse.ArgumentTypeError(f"expected factors such as 1,1,1,10; got {text!r}")
    return tuple(factors)


if __name__ == "__main__":
    sys.exit(main())
