"""Run the scenario, or the sweep of random scenarios, that the flags of decentral.simulate describe."""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from decentral.commands import shared
from decentral.commands.progress_bar import progress_bar
from decentral.core import config, rng, strict_json
from decentral.core.choices import ALGORITHMS
from decentral.core.errors import ExitCode, UserError, writing
from decentral.core.journal.field_kinds import OUTCOMES
from decentral.core.plain_text import plain_text
from decentral.core.temporary import temporary_folder
from decentral.core.units import plural, readable_bytes
from decentral.engine import memory
from decentral.scheduler.topology import topology
from decentral.sim import faults, planned, sweep
from decentral.sim.host import Pace
from decentral.sim.invariants.evidence import Violation
from decentral.sim.journals import SimulatedJournals
from decentral.sim.network.geography import TypicalLink
from decentral.sim.real_training import real_gradients
from decentral.sim.report import RouteReport, RunReport
from decentral.sim.run import Scenario, Watch, run, shrink
from decentral.sim.swarm import SwarmSettings
from decentral.view.page.child import dashboard
from decentral.view.page.simulated import SimulatedPage
from decentral.view.run_picture import draw_run

ROWS = 32  # a table of peers has at most this many rows
MOST_AUDITED = 200  # a simulation with more peers leaves out quantisation, audits of events and moves of layers


def simulate(flags: argparse.Namespace) -> None:
    """Run the scenario, or the sweep of random scenarios, that the flags describe, and print the report.

    Raises:
        UserError: If the flags do not describe a valid scenario.
        SystemExit: With code 1 after a violation.
    """
    torch.set_num_threads(1)
    if flags.sweep:
        _sweep(flags)
        return
    if flags.plan:
        _play(flags)
        return
    with temporary_folder() as folder:
        _simulate(flags, scenario_of(flags, folder))


def _play(flags: argparse.Namespace) -> None:
    """Play the plan in the file --plan on the topology, and print what it promised and reached."""
    plan, where = planned.read(Path(flags.plan)), topology.load(flags.topology)
    run_config = config.load(flags.config, flags.set)
    scenario = planned.scenario_of(plan, where, run_config, flags.seconds, flags.seed, flags.noise)
    played = planned.PlayedPlan(plan, scenario)
    _run(flags, scenario, [played])
    result = played.result()
    share = result.reached / result.promised
    if flags.json:
        print(strict_json.dumps(result))
        return
    console = shared.result_console()
    table = Table("peer", "layers", "busy", title=f"after {planned.WARM_UP * scenario.seconds:.0f} virtual seconds")
    for peer, (first, last) in list(plan.spans.items())[:ROWS]:
        table.add_row(plain_text(peer), f"{first}-{last - 1}", f"{result.busy[peer]:.0%}")
    console.print(table)
    console.print(
        f"promised {result.promised:.4g} tokens/s, reached {result.reached:.4g} ({share:.1%})\n"
        f"stage executions of routes: {result.executions} counted, {result.dropped} dropped; "
        f"{plural(result.abandoned, 'micro-batch')} given up\n"
        f"busiest link: {plain_text(result.busiest_link)}, {result.busiest_share:.1%}",
        soft_wrap=True,
    )
    for what, waited in sorted(result.waits.items(), key=lambda one: -one[1]):
        console.print(f"the mean device waits for {what}: {waited:.1%} of the time", soft_wrap=True)


def _simulate(flags: argparse.Namespace, scenario: Scenario) -> None:
    with dashboard(flags.dashboard, waits=True) as page:
        if page:
            print(f"the page: {page.url}", file=sys.stderr, flush=True)
        watches: list[Watch] = [SimulatedPage(page)] if page else []
        if flags.journals:
            watches.append(SimulatedJournals(Path(flags.journals)))
        report = _run(flags, scenario, watches)
        if flags.plot:
            draw_run(report, scenario.faults, Path(flags.plot))
        print(strict_json.dumps(report.to_json())) if flags.json else _show(report, shared.result_console())
        if page:
            print("the page is served until Ctrl-C", file=sys.stderr, flush=True)
            page.process.wait()


def scenario_of(flags: argparse.Namespace, folder: Path) -> Scenario:
    """Return the scenario that the flags describe.

    Args:
        flags: The parsed flags of decentral.simulate.
        folder: Where real training (--gradients) keeps its checkpoints.

    Raises:
        UserError: If a flag or the config is not valid, or the peers' memory cannot hold the model.
    """
    run_config = config.load(flags.config, flags.set)
    if run_config.synchronous:
        others = " or ".join(name for name, one in ALGORITHMS.items() if not one.synchronous)
        named = run_config.gossip.algorithm
        raise UserError(f"the simulator does not support gossip.algorithm {named}; set it to {others}")
    many = flags.peers > MOST_AUDITED
    pace = Pace(flags.step_seconds, flags.noise, report_s=60.0 if many else 10.0)
    settings = SwarmSettings.of(run_config, pace, flags.throttle, flags.tokens_per_step)
    settings = replace(settings, unquantised=many, moves=not many)
    if flags.memory:
        settings = replace(settings, memory=flags.memory)
        needs = memory.needs(settings.config, settings.fragments)
        for memory_bytes in settings.memory:
            memory.check(needs, memory_bytes)
        # Faults can add peers, so check with as many peers as the model has fragments.
        memory.check_together(needs, len(needs.fragments), max(settings.memory))
    if flags.gradients:
        settings = real_gradients(settings, folder)
    drawn = list(flags.faults)
    faults.require_possible(drawn, flags.peers, flags.seconds)
    drawn += faults.trace(Path(flags.trace)) if flags.trace else []
    if flags.random_faults:
        drawn += faults.draw(rng.stream(flags.seed, "faults"), flags.peers, flags.seconds, flags.random_faults)
    link = TypicalLink(flags.delay_ms / 1e3, flags.up_mbps * 1e6 / 8, flags.down_mbps * 1e6 / 8)
    where = topology.load(flags.topology) if flags.topology else None
    audited = flags.peers <= MOST_AUDITED and not flags.gradients
    return Scenario(settings, flags.peers, flags.seconds, flags.seed, tuple(drawn), link, where, audited)


def _run(flags: argparse.Namespace, scenario: Scenario, watches: Sequence[Watch]) -> RunReport:
    try:
        with progress_bar(Console(stderr=True), scenario.seconds, quiet=flags.json) as show:
            whole = f"{scenario.seconds:.0f} virtual seconds"
            return run(scenario, lambda at: show(at, f"{at:.0f} of {whole}"), watches=watches)
    except Violation as violation:
        again = f"python -m decentral.simulate {shlex.join(flags.typed)}"
        _explain(str(violation), violation.latest, scenario, again)
        if flags.shrink:
            _shrink(scenario, violation.rule)
        raise SystemExit(ExitCode.FAILED) from None


def _sweep(flags: argparse.Namespace) -> None:
    """Run --sweep scenarios, one for each seed from --seed on, and print a summary. Exit with 1 after a violation."""
    began, violated, checks, played, last = time.monotonic(), list[dict[str, object]](), 0, 0, flags.seed
    seeds = islice(sweep.seeds_from(flags.seed, flags.only), flags.sweep)

    def account() -> dict[str, object]:
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
        raise SystemExit(ExitCode.FAILED)


def _report_violation(outcome: sweep.SweepOutcome, shrunk: bool) -> dict[str, object]:
    """Print the violation that a sweep found with one seed, and return its entry for the sweep's report."""
    scenario = sweep.scenario_of(outcome.seed)
    again = f"python -m decentral.simulate --sweep 1 --seed {outcome.seed}"
    _explain(outcome.said, outcome.latest, scenario, again)
    if shrunk:
        _shrink(scenario, outcome.violated)
    kept = {"seed": outcome.seed, "rule": outcome.violated, "said": outcome.said, "faults": outcome.faults}
    return kept | {"latest": outcome.latest, "again": again}


def _write_report(path: str | None, account: dict[str, object]) -> None:
    """Write the results so far to file `path`, so that an interrupted sweep leaves a report. None: write nothing."""
    if path is not None:
        with writing("--report", path):
            Path(path).write_text(strict_json.dumps(account, indent=1) + "\n")


def _explain(said: str, latest: Sequence[str], scenario: Scenario, again: str) -> None:
    swarm = f"seed {scenario.seed}, {plural(scenario.peers, 'peer')}, faults: {faults.text_of(scenario.faults)}"
    print("\n  ".join([f"violated: {said}", swarm, *latest, f"again: {again}"]), file=sys.stderr)


def _shrink(scenario: Scenario, rule: str) -> None:
    fewest = shrink(scenario, rule, lambda text: print(f"  {text}", file=sys.stderr))
    print(f"  fewest faults: {faults.text_of(fewest) or 'none'}", file=sys.stderr)


def _show(report: RunReport, console: Console) -> None:
    work, gossip, replicas, audit = report.throughput, report.gossip, report.replicas, report.audit
    done, solo, failed = (gossip.exchanges.get(name, 0) for name in OUTCOMES)
    why = ", ".join(f"{reason} {count}" for reason, count in sorted(gossip.failures.items()))
    console.print(
        f"{plural(report.peers, 'peer')}, {report.seconds:g} virtual seconds, seed {report.seed}: "
        f"{audit.events:,} events\n"
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
        console.print(f"  {fault}: {'not all well again' if seconds is None else f'all well {seconds:.1f} s later'}")


def _routed(routes: RouteReport) -> str:
    if not routes.routed:
        return ""
    counts = routes.routed
    done, failed = (sum(n for name, n in routes.moves.items() if name.endswith(end)) for end in ("done", "failed"))
    return (
        f"  micro-batches: {counts['everywhere']} counted once in all layers ({counts['tokens']:,} tokens), "
        f"{counts['in_part']} in some of them, {counts['twice']} twice; "
        f"gradients of {plural(counts['thrown_away'], 'execution')} discarded\n"
        f"  plans {routes.plans}, moves {done}/{failed} (done/failed)\n"
    )
