"""python -m decentral.simulate: simulate a swarm of up to thousands of peers, which run the real code in virtual time.

    python -m decentral.simulate --peers 50 --seconds 600 --faults "crash 3 at 60; restart 3 at 90"
    python -m decentral.simulate --peers 1000 --seconds 3600 --set gossip.window_s=60 --step-seconds 2
    python -m decentral.simulate m.yaml --topology t.yaml --plan plan.json     what a plan of decentral.plan reaches
    python -m decentral.simulate --sweep 300                      300 small swarms with random faults
    python -m decentral.simulate --sweep 1 --seed 42 --shrink     one of these swarms again, with the fewest faults

Without `--gradients` nothing is trained: a few numbers stand for the model, but peers exchange them as usual. An audit
(decentral/sim/invariants/audit.py) checks every event. A violation ends the run with exit code 1, and prints the seed,
the time, the latest events of the peer that broke the rule, and the command that replays the run.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from decentral.commands import shared
from decentral.commands.shared import finite
from decentral.core import config, quantities
from decentral.core.errors import UserError
from decentral.sim import faults
from decentral.view.page.address import add_dashboard_flag


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 1 after a violation."""
    return shared.run(lambda: _main(parse(argv)))


def _main(flags: argparse.Namespace) -> None:
    config.load(flags.config, flags.set)  # here too, so that a wrong config is refused before torch is loaded
    with shared.loading():
        from decentral.commands import simulation
    simulation.simulate(flags)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command's flags, or raise UserError if they are not valid."""
    about = "Simulate a swarm in virtual time."
    parser = shared.Parser(prog="python -m decentral.simulate", description=about)
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file, or the name of a shipped one")
    parser.add_argument("--peers", type=int, default=8, metavar="N", help="number of peers; default 8")
    lasts = "virtual time, such as 10m; default 600 s"
    parser.add_argument("--seconds", type=quantities.duration_s, default=600.0, metavar="TIME", help=lasts)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all random choices; default 0")
    shared.add_set_flag(parser)
    step = "time of a step; default 0.5 s"
    parser.add_argument("--step-seconds", type=quantities.duration_s, default=0.5, metavar="TIME", help=step)
    parser.add_argument("--noise", type=finite, default=0.05, metavar="F", help="random share of a step's time")
    factors = "each peer's slowness; repeated if there are more peers"
    parser.add_argument("--throttle", type=_factors, default=(1.0,), metavar="F,F,...", help=factors)
    sizes = "each peer's memory for the model; repeated if there are more peers"
    parser.add_argument("--memory", type=quantities.memories_bytes, default=(), metavar="BYTES,...", help=sizes)
    parser.add_argument("--tokens-per-step", type=int, default=1024, metavar="N", help="default 1024")
    parser.add_argument("--gradients", action="store_true", help="really train the model of CONFIG; for small models")
    links = "topology file of decentral.plan for links; repeated if there are more peers"
    parser.add_argument("--topology", metavar="FILE", help=links)
    plan = "play this plan of decentral.plan --json on --topology, for the model of CONFIG; compare promise and result"
    parser.add_argument("--plan", metavar="FILE", help=plan)
    parser.add_argument("--delay-ms", type=finite, default=30.0, metavar="MS", help="one-way delay; default 30")
    parser.add_argument("--up-mbps", type=finite, default=20.0, metavar="MBPS", help="a peer's uplink; default 20")
    parser.add_argument(
        "--down-mbps", type=finite, default=100.0, metavar="MBPS", help="a peer's downlink; default 100"
    )
    spec = "faults, such as 'crash 2 at 20; restart 2 at 30'; decentral/sim/faults.py lists them"
    parser.add_argument("--faults", type=faults.parse, default=[], metavar="SPEC", help=spec)
    parser.add_argument("--trace", metavar="FILE", help="churn from a CSV with the columns time, peer, up/down")
    parser.add_argument("--random-faults", type=int, default=0, metavar="N", help="number of random faults")
    swarms = "simulate N small swarms with random faults, one for each seed from --seed on"
    parser.add_argument("--sweep", type=int, default=0, metavar="N", help=swarms)
    only = "with --sweep: only seeds with machine faults (hosts), lying peers (liars) or hostile DHT nodes (eclipses)"
    parser.add_argument("--only", type=_besides, default=(), metavar="KINDS", help=only)
    ends = "with --sweep: end after so long"
    parser.add_argument("--for-seconds", type=quantities.duration_s, default=0.0, metavar="TIME", help=ends)
    parser.add_argument("--report", metavar="FILE", help="with --sweep: write a JSON report of seeds and violations")
    processes = "with --sweep: number of processes; default: one for each core"
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N", help=processes)
    parser.add_argument("--shrink", action="store_true", help="find the fewest faults that still cause a violation")
    picture = "draw tokens/s, loss, spread, peers and faults over time"
    parser.add_argument("--plot", metavar="FILE", help=picture)
    parser.add_argument("--journals", metavar="DIR", help="keep the peers' journals, for decentral.report and audit")
    add_dashboard_flag(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(typed=list(sys.argv[1:] if argv is None else argv))
    flags = parser.parse_args(argv)
    for name, least in (("peers", 1), ("seconds", 1.0), ("step_seconds", 1e-3), ("sweep", 0), ("processes", 1)):
        if getattr(flags, name) < least:
            raise UserError(f"--{name.replace('_', '-')} expects at least {least:g}; got {getattr(flags, name):g}")
    for name, given in (("throttle", flags.throttle), ("memory", flags.memory)):
        if len(given) > flags.peers:
            raise UserError(f"--{name} expects at most {flags.peers} values, one for each peer; got {len(given)}")
    if flags.plan and not flags.topology:
        raise UserError("--plan needs --topology: the topology for which the plan was made")
    return flags


def _besides(text: str) -> tuple[str, ...]:
    return tuple(shared.names_of(text, faults.BESIDES))


def _factors(text: str) -> tuple[float, ...]:
    factors = shared.several(text, finite)
    if not factors or min(factors) <= 0:
        raise argparse.ArgumentTypeError(f"expected factors such as 1,1,1,10; got {text!r}")
    return tuple(factors)


if __name__ == "__main__":
    sys.exit(main())
