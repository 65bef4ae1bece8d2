"""Draw a simulated run over virtual time: throughput, loss, distance of replicas, number of peers, and faults.

The faults are drawn above the curves: a red bar shows how long a fault lasts, and a green bar how long the swarm then
needs to recover. The background of the curves is red while a fault lasts. Start reading at `draw_run`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from decentral.core.journal.field_kinds import OUTCOMES
from decentral.core.units import Seconds
from decentral.sim.faults import Fault
from decentral.sim.report import RunReport
from decentral.view.canvas import DIM, INK, RED, USED, heading, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_FAULTS = 14
SMOOTHED = 10  # the throughput is averaged over this many measurements
WELL = "#2f7d5b"


def draw_run(report: RunReport, faults: Sequence[Fault], path: Path) -> None:
    """Draw a run and its faults into a file.

    Raises:
        UserError: If matplotlib is not installed, or the file cannot be written.
    """
    shown = sorted(faults, key=lambda fault: fault.at)[:MOST_FAULTS]
    strip_in = 0.3 + 0.2 * len(shown) if shown else 0.0
    height = 7.6 + strip_in
    with picture(path, 10.5, height) as figure:
        work = report.throughput
        text = f"{report.peers} peers trained {work.tokens_per_s:,.0f} tokens/s over {report.seconds:g} virtual seconds"
        more = f"; {len(shown)} of {len(faults)} faults are shown" if len(shown) < len(faults) else ""
        top = heading(figure, text, f"seed {report.seed}; exchanges {_exchanges(report)}{more}") + 0.2 / height
        low, left, wide = 0.55 / height, 0.085, 0.885
        if shown:
            strip = figure.add_axes((left, top - strip_in / height, wide, strip_in / height))
            _draw_faults(strip, report, shown)
            top -= (strip_in + 0.1) / height
        each = (top - low) / 4
        for number, draw in enumerate((_throughput, _loss, _spread, _peers)):
            axes = figure.add_axes((left, top - each * (number + 1) + 0.02, wide, each - 0.035))
            draw(axes, report)
            axes.set_xlim(0, report.seconds)
            for begin, end in faulty(shown, 0.002 * report.seconds):
                axes.axvspan(begin, end, color=RED, alpha=0.13, linewidth=0)
            axes.tick_params(labelsize=8, labelbottom=number == 3)
            axes.grid(axis="y", color="#e6e9ee", linewidth=0.7)
        axes.set_xlabel("virtual seconds", fontsize=9)


def faulty(faults: Sequence[Fault], least_s: Seconds) -> list[tuple[Seconds, Seconds]]:
    """Return the disjoint intervals (begin, end) in which at least one fault lasts, in virtual seconds and in order.

    An interval lasts at least `least_s`, even if its fault is shorter.
    """
    found: list[tuple[Seconds, Seconds]] = []
    for fault in sorted(faults, key=lambda fault: fault.at):
        begin, end = fault.at, fault.at + max(fault.lasts, least_s)
        if found and begin <= found[-1][1]:
            begin, end = found[-1][0], max(end, found.pop()[1])
        found.append((begin, end))
    return found


def _exchanges(report: RunReport) -> str:
    counts = report.gossip.exchanges
    return ", ".join(f"{counts.get(outcome, 0):,} {outcome}" for outcome in OUTCOMES)


def _draw_faults(axes: "Axes", report: RunReport, faults: Sequence[Fault]) -> None:
    """Draw a row for each fault, with the first fault at the top."""
    for row, fault in enumerate(faults):
        over, well_s = fault.at + fault.lasts, report.recovery_s.get(str(fault))
        axes.barh(row, max(fault.lasts, 0.004 * report.seconds), 0.6, fault.at, color=RED)
        end = over if well_s is None else over + well_s
        axes.barh(row, end - over, 0.2, over, color=WELL)
        after = "no recovery" if well_s is None else f"recovered {well_s:.3g} s later"
        late = end > 0.6 * report.seconds
        x, side = (fault.at, "right") if late else (max(end, over), "left")
        text = f"  {fault}: {after}  "
        axes.text(x, row, text, ha=side, va="center", fontsize=8, color=INK if well_s is not None else RED)
    axes.set(xlim=(0, report.seconds), ylim=(len(faults) - 0.4, -0.6))
    axes.set_axis_off()


def _throughput(axes: "Axes", report: RunReport) -> None:
    made, times = [0, *(one.tokens for one in report.samples)], [0.0, *(one.at for one in report.samples)]
    ago = [max(0, number - SMOOTHED) for number in range(1, len(made))]
    rates = [(made[n + 1] - made[m]) / (times[n + 1] - times[m]) for n, m in enumerate(ago)]
    axes.plot(times[1:], rates, color=USED)
    axes.set_ylim(0, 1.1 * max(rates, default=1.0) or 1.0)
    axes.set_ylabel("tokens/s", fontsize=9)


def _loss(axes: "Axes", report: RunReport) -> None:
    """Plot the median training loss of the peers, on a logarithmic axis if it varies by a factor of more than 20."""
    at, losses = (
        [one.at for one in report.samples],
        [np.nan if one.loss is None else one.loss for one in report.samples],
    )
    axes.plot(at, losses, color=USED)
    if np.nanmin(losses, initial=np.inf) > 0 and np.nanmax(losses, initial=0) > 20 * np.nanmin(losses, initial=np.inf):
        _logarithmic(axes)
    axes.set_ylabel("training loss", fontsize=9)


def _logarithmic(axes: "Axes") -> None:
    """Make the y axis logarithmic. Its labels are plain numbers, because parse_math is off in all pictures."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: "")


def _spread(axes: "Axes", report: RunReport) -> None:
    axes.plot([one.at for one in report.samples], [one.spread or np.nan for one in report.samples], color=USED)
    if any(one.spread for one in report.samples):
        _logarithmic(axes)
    axes.set_ylabel("distance of\nreplicas", fontsize=9)


def _peers(axes: "Axes", report: RunReport) -> None:
    at = [one.at for one in report.samples]
    axes.step(at, [one.live for one in report.samples], where="post", color=DIM, linestyle=":")
    axes.step(at, [one.training for one in report.samples], where="post", color=USED)
    axes.set_ylim(0, 1.25 * max((one.live for one in report.samples), default=1))
    axes.set_ylabel("peers: alive\n(dotted), training", fontsize=9)
