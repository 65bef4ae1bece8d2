"""python -m decentral.simulate: what would this swarm do? The real peers, thousands if need be, in virtual time.

    python -m decentral.simulate --peers 50 --seconds 600 --faults "crash 3 at 60; restart 3 at 90"
    python -m decentral.simulate --peers 1000 --seconds 3600 --set gossip.window_s=60 --step-seconds 2
    python -m decentral.simulate --sweep 300                      300 small swarms with faults by chance
    python -m decentral.simulate --sweep 1 --seed 42 --shrink     one of them again, with as few faults as will do

Nothing is trained unless `--gradients` asks for it: a few numbers stand for the model, and their gossip is the real
one. The audit checks all that happens (decentral/sim/audit.py). A violation ends the run with exit code 1, and tells
the seed, the time, what the peer did last, and the command that replays it.
"""

import argparse
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from decentral import command
from decentral.core import config, rng, strict_json
from decentral.core.errors import UserError
from decentral.core.journal import OUTCOMES
from decentral.core.units import readable_bytes
from decentral.dashboard.address import add_dashboard_flag
from decentral.dashboard.child import dashboard
from decentral.dashboard.simulated import SimulatedPage
from decentral.pictures.run_picture import draw_run
from decentral.scheduler.shared import topology
from decentral.sim import faults, sweep
from decentral.sim.evidence import Violation
from decentral.sim.geography import TypicalLink
from decentral.sim.gradients import real_gradients
from decentral.sim.journals import SimulatedJournals
from decentral.sim.report import RouteReport, RunReport
from decentral.sim.run import OnProgress, Scenario, Watch, run, shrink
from decentral.sim.swarm import SwarmSettings
from decentral.sim.virtual_host import Pace
from decentral.train import memory

MOST_AUDITED = 200  # peers; in larger swarms nothing is quantised and not every event is audited


def main(argv: Sequence[str] | None = None) -> int:
    return command.run(lambda: _main(parse(argv)))


def _main(flags: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if flags.sweep:
        _sweep(flags)
        return
    scenario = scenario_of(flags)
    with dashboard(flags.dashboard, waits=True) as page:
        if page:
            print(f"the page: {page.url}", file=sys.stderr, flush=True)
        watches: list[Watch] = [SimulatedPage(page)] if page else []
        if flags.journals:
            watches.append(SimulatedJournals(Path(flags.journals)))
        report = _run(flags, scenario, watches)
        if flags.plot:
            draw_run(report, scenario.faults, Path(flags.plot))
        print(strict_json.dumps(report.to_json())) if flags.json else _show(report, Console(highlight=False))
        if page:
            print("the page stays until Ctrl-C", file=sys.stderr, flush=True)
            page.process.wait()


def scenario_of(flags: argparse.Namespace) -> Scenario:
    """The scenario that the flags describe. Raises UserError."""
    run_config = config.load(flags.config, flags.set)
    if run_config.synchronous:
        raise UserError("gossip.algorithm synchronous is not simulated; expected pull or allreduce")
    many = flags.peers > MOST_AUDITED
    pace = Pace(flags.step_seconds, flags.noise, report_s=60.0 if many else 10.0)
    settings = SwarmSettings.of(run_config, pace, flags.throttle, flags.tokens_per_step)
    settings = replace(settings, unquantised=many, moves=not many)
    if flags.memory:
        settings = replace(settings, memory=flags.memory)
        needs = memory.needs(settings.config, settings.fragments)
        for memory_bytes in settings.memory:
            memory.check(needs, memory_bytes)
        memory.check_together(needs, len(needs.fragments), max(settings.memory))  # faults may bring more peers
    if flags.gradients:
        settings = real_gradients(settings)
    drawn = faults.parse(flags.faults) if flags.faults else []
    drawn += faults.trace(Path(flags.trace)) if flags.trace else []
    if flags.random_faults:
        drawn += faults.draw(rng.stream(flags.seed, "faults"), flags.peers, flags.seconds, flags.random_faults)
    link = TypicalLink(flags.delay_ms / 1e3, flags.up_mbps * 1e6 / 8, flags.down_mbps * 1e6 / 8)
    where = topology.load(flags.topology) if flags.topology else None
    audited = flags.peers <= MOST_AUDITED and not flags.gradients
    return Scenario(settings, flags.peers, flags.seconds, flags.seed, tuple(drawn), link, where, audited)


def _run(flags: argparse.Namespace, scenario: Scenario, watches: Sequence[Watch]) -> RunReport:
    try:
        with _progress(scenario.seconds, quiet=flags.json) as on_progress:
            return run(scenario, on_progress, watches=watches)
    except Violation as violation:
        again = f"python -m decentral.simulate {shlex.join(flags.typed)}"
        _explain(str(violation), violation.latest, scenario, again)
        if flags.shrink:
            _shrink(scenario, violation.rule)
        raise SystemExit(1) from None


def _sweep(flags: argparse.Namespace) -> None:
    """Plays the seeds from --seed on, and prints one line that counts them. Exits with 1 if any was violated."""
    began, violated, checks, played, last = time.monotonic(), list[dict[str, Any]](), 0, 0, flags.seed
    seeds = islice(sweep.seeds_from(flags.seed, flags.only), flags.sweep)

    def account() -> dict[str, Any]:
        seconds = round(time.monotonic() - began, 1)
        return {"first_seed": flags.seed, "played": played, "checks": checks, "seconds": seconds, "violated": violated}

    _write_report(flags.report, account())
    try:
        for outcome in sweep.sweep(seeds, flags.processes):
            checks, played, last = checks + outcome.checks, played + 1, outcome.seed
            if outcome.violated:
                violated.append(_report_violation(outcome, flags.shrink))
                _write_report(flags.report, account())
            if flags.for_seconds and time.monotonic() > began + flags.for_seconds:
                break
    finally:
        _write_report(flags.report, account())
    done = f"{len(violated)} violated, {checks} jobs checked, {time.monotonic() - began:.0f} s"
    of = f", {played} with {' or '.join(flags.only)}" if flags.only else ""
    print(f"seeds {flags.seed} to {last}{of}: {done}")
    if flags.json:
        print(strict_json.dumps(account()))
    if violated:
        raise SystemExit(1)


def _report_violation(outcome: sweep.SweepOutcome, shrunk: bool) -> dict[str, Any]:
    """Explains the violation that a seed found, and gives what the report of the sweep keeps of it."""
    scenario = sweep.scenario_of(outcome.seed)
    again = f"python -m decentral.simulate --sweep 1 --seed {outcome.seed}"
    _explain(outcome.said, outcome.latest, scenario, again)
    if shrunk:
        _shrink(scenario, outcome.violated)
    kept = {"seed": outcome.seed, "rule": outcome.violated, "said": outcome.said, "faults": outcome.faults}
    return kept | {"latest": outcome.latest, "again": again}


def _write_report(path: str | None, account: dict[str, Any]) -> None:
    """Writes the report as it stands, so that a sweep that is stopped leaves what it has found."""
    try:
        if path is not None:
            Path(path).write_text(strict_json.dumps(account, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"--report {path}: {error.strerror}; choose a place that can be written") from None


def _explain(said: str, latest: Sequence[str], scenario: Scenario, again: str) -> None:
    swarm = f"seed {scenario.seed}, {scenario.peers} peers, faults: {faults.text_of(scenario.faults)}"
    print("\n  ".join([f"violated: {said}", swarm, *latest, f"again: {again}"]), file=sys.stderr)


def _shrink(scenario: Scenario, rule: str) -> None:
    fewest = shrink(scenario, rule, lambda text: print(f"  {text}", file=sys.stderr))
    print(f"  fewest faults: {faults.text_of(fewest) or 'none'}", file=sys.stderr)


def _show(report: RunReport, console: Console) -> None:
    work, gossip, replicas, audit = report.throughput, report.gossip, report.replicas, report.audit
    done, solo, failed = (gossip.exchanges.get(name, 0) for name in OUTCOMES)
    why = ", ".join(f"{reason} {count}" for reason, count in sorted(gossip.failures.items()))
    console.print(
        f"{report.peers} peers, {report.seconds:g} virtual seconds, seed {report.seed}: {audit.events:,} events\n"
        f"  {work.tokens_per_s:,.0f} tokens/s, least busy peer {work.busy_fraction:.3f}\n"
        f"  exchanges {done}/{solo}/{failed} (done/solo/failed{': ' + why if why else ''}), "
        f"{gossip.exchange_s:.3f} s each; sent {readable_bytes(work.sent_bytes)}, "
        f"received {readable_bytes(work.received_bytes)}\n"
        f"{_routed(report.routes)}"
        f"  spread {replicas.spread:.4f}, loss {replicas.loss:.4f}, roster error {replicas.roster_error:.3f}\n"
        f"  {audit.checks} jobs audited; digest {audit.digest}",
        soft_wrap=True,
    )
    for fault, seconds in report.recovery_s.items():
        console.print(f"  {fault}: all well {'not again' if seconds is None else f'{seconds:.1f} s later'}")


def _routed(routes: RouteReport) -> str:
    if not routes.routed:
        return ""
    counts = routes.routed
    done, failed = (sum(n for name, n in routes.moves.items() if name.endswith(end)) for end in ("done", "failed"))
    return (
        f"  micro-batches: {counts['everywhere']} counted once in all layers ({counts['tokens']:,} tokens), "
        f"{counts['in_part']} in a part of them, {counts['twice']} twice; "
        f"{counts['thrown_away']} executions' gradients thrown away\n"
        f"  plans {routes.plans}, moves {done}/{failed} (done/failed)\n"
    )


@contextmanager
def _progress(seconds: float, quiet: bool) -> Iterator[OnProgress]:
    console = Console(file=sys.stderr)
    label = TextColumn("{task.completed:.0f} of {task.total:.0f} virtual seconds")
    columns = (label, BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("", total=seconds)
        yield lambda at: bar.update(task, completed=at)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.Parser(prog="python -m decentral.simulate", description="A swarm in virtual time.")
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
    flags = parser.parse_args(argv)
    flags.typed = list(sys.argv[1:] if argv is None else argv)
    for name, least in (("peers", 1), ("seconds", 1.0), ("step_seconds", 1e-3), ("sweep", 0), ("processes", 1)):
        if getattr(flags, name) < least:
            raise UserError(f"--{name.replace('_', '-')} expects at least {least:g}; got {getattr(flags, name):g}")
    return flags


def _besides(text: str) -> tuple[str, ...]:
    kinds = tuple(part.strip() for part in text.split(","))
    if not set(kinds) <= set(sweep.BESIDES):
        raise argparse.ArgumentTypeError(f"expected {' or '.join(sweep.BESIDES)}, or both; got {text!r}")
    return kinds


def _sizes(text: str) -> tuple[int, ...]:
    sizes = command.several(text, command.size)
    if not sizes:
        raise argparse.ArgumentTypeError(f"expected sizes such as 800MB,2GB; got {text!r}")
    return tuple(sizes)


def _factors(text: str) -> tuple[float, ...]:
    factors = command.several(text, float)
    if not factors or min(factors) <= 0:
        raise argparse.ArgumentTypeError(f"expected factors such as 1,1,1,10; got {text!r}")
    return tuple(factors)


if __name__ == "__main__":
    sys.exit(main())
