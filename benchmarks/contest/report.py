"""The report: all runs as JSON, tables and verdicts in docs/BENCHMARKS.md, and a plot of loss over time per scenario.

What people have written in docs/BENCHMARKS.md stays: only what stands between the two marks is replaced. The target of
a world is the held-out loss that its fastest peer alone has at the end of its run (the median over repetitions), so the
time to it says how much sooner one has, with the others, what one would have had without them.
"""

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.contest import scenarios
from benchmarks.contest.figures import Point, Spread, loss_at, sooner, spread, time_to_loss

BEGIN, END = "<!-- tables: written by make benchmark -->", "<!-- end of the tables -->"
OURS, ALONE = "ours", "alone"
GOAL = 2.0  # times sooner than everybody where peers differ or die
EQUAL_FAULTS = ("equal",)  # where as soon is enough
DOC, JSON_FILE = "BENCHMARKS.md", "results/contest.json"
Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """A contestant in a scenario, over its repetitions."""

    name: str
    repetitions: int
    seconds: float
    reach: Spread  # seconds until the target
    from_command: Spread  # the same, from when its first process was started
    loss: Spread  # at the end
    smoothed: Spread  # at the end, of the mean of the last saved weights
    at_tokens: Spread  # the loss when all peers had as many tokens as the slowest contestant at its end
    tokens_per_s: float
    training: float
    bytes_per_token: float
    all_train: Spread  # seconds until all peers of the beginning had reported a step
    survival: str
    errors: tuple[str, ...]  # what it could not begin for
    broken: tuple[str, ...]  # peers that ended by themselves, with their last lines


def write(runs: Sequence[Line], docs: Path) -> None:
    """Writes the JSON, the plots, and what stands between the marks of BENCHMARKS.md."""
    parts = [_machine(runs)]
    for name in sorted({run["scenario"] for run in runs}, key=_order):
        own = [run for run in runs if run["scenario"] == name]
        target = target_of(runs, name)
        rows = rows_of(own, target)
        image = f"images/contest-{name.replace('/', '-')}.svg"
        plot(own, target, docs / image)
        parts += [
            _heading(name, own, target),
            table(rows),
            *verdicts(rows, name),
            f"![Held-out loss over time]({image})",
        ]
    (docs / JSON_FILE).write_text(json.dumps({"machine": machine(), "runs": list(runs)}, indent=None) + "\n")
    file = docs / DOC
    file.write_text(replaced(file.read_text(), "\n\n".join(parts)))


def replaced(document: str, tables: str) -> str:
    """The document with other tables between its marks."""
    head, _, rest = document.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{tables}\n\n{END}{tail}"


def curve_of(run: Line) -> list[Point]:
    """Empty where the contestant could not begin."""
    return [Point(one["seconds"], one["tokens"], one["loss"]) for one in run.get("curve", ())]


def target_of(runs: Sequence[Line], name: str) -> float | None:
    """The loss of the fastest peer alone at its end, in the same world with equal devices. None: it has not run."""
    equal = f"{name.partition('/')[0]}/equal"
    alone = [curve_of(run) for run in runs if (run["contestant"], run["scenario"]) == (ALONE, equal)]
    ends = [curve[-1].loss for curve in alone if curve]
    return median(ends) if ends else None


def rows_of(runs: Sequence[Line], target: float | None) -> list[Row]:
    """A row for each contestant, ours first, then by the loss at the end."""
    names = list(dict.fromkeys(run["contestant"] for run in runs))
    own = {name: [run for run in runs if run["contestant"] == name] for name in names}
    began = [run for run in runs if run.get("curve")]
    ends = [median(curve_of(r)[-1].tokens for r in began if r["contestant"] == name) for name in _swarms(began)]
    tokens = min(ends, default=0.0)
    rows = [_row(name, own[name], target, tokens) for name in names]
    return sorted(rows, key=lambda row: (row.name != OURS, row.loss.middle or 99.0))


def _swarms(runs: Sequence[Line]) -> set[str]:
    return {run["contestant"] for run in runs if run["contestant"] != ALONE}


def _row(name: str, runs: Sequence[Line], target: float | None, tokens: float) -> Row:
    curves = [curve_of(run) for run in runs]
    began = [run for run in runs if run.get("curve")]
    total = sum(run["tokens"] for run in began)
    seconds = sum(run["seconds"] for run in began)
    return Row(
        name=name,
        repetitions=len(runs),
        seconds=runs[0]["seconds"],
        reach=spread([time_to_loss(curve, target) if target is not None else None for curve in curves]),
        from_command=spread([_from_command(run, target) for run in runs]),
        loss=spread([curve[-1].loss if curve else None for curve in curves]),
        smoothed=spread([run.get("smoothed") for run in runs]),
        at_tokens=spread([loss_at(curve, tokens=tokens) for curve in curves]),
        tokens_per_s=total / seconds if seconds else 0.0,
        training=sum(run["training_share"] for run in began) / max(1, len(began)),
        bytes_per_token=sum(run["bytes"] for run in began) / total if total else 0.0,
        all_train=spread([run.get("all_train_s") for run in runs]),
        survival=_survival([run["survival"] for run in began]),
        errors=tuple(dict.fromkeys(run["error"] for run in runs if "error" in run)),
        broken=tuple(f"{peer} ({last})" for run in runs for peer, last in run.get("ended", {}).items()),
    )


def _from_command(run: Line, target: float | None) -> float | None:
    reached = time_to_loss(curve_of(run), target) if target is not None else None
    return None if reached is None else reached + run["start_s"]


def _survival(found: Sequence[Line]) -> str:
    """Newcomers that trained, of as many as were killed, and the longest time without training, the survivors' mean."""
    killed = sum(one["killed"] for one in found)
    gap = max((one["longest_gap_s"] for one in found), default=0.0)
    joined = f"{sum(one['newcomers_trained'] for one in found)}/{killed}, " if killed else ""
    return f"{joined}{gap:.0f} s"


COLUMNS = (
    *("contestant", "s to the target", "ours sooner", "s from the command", "loss at the end", "smoothed"),
    *("at equal tokens", "tokens/s", "training", "bytes/token", "all train after, s", "joined, longest pause"),
)


def table(rows: Sequence[Row]) -> str:
    """Medians, with least and most in brackets."""
    ours = next((row.reach.middle for row in rows if row.name == OURS), None)
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        cells = [
            f"**{row.name}**" if row.name == OURS else row.name,
            _spread(row.reach, 1) + (f", {row.reach.missing} of {row.repetitions} not" if row.reach.missing else ""),
            "" if row.name == OURS else _sooner(ours, row),
            _middle(row.from_command, 1),
            _spread(row.loss, 3),
            _middle(row.smoothed, 3),
            _middle(row.at_tokens, 3),
            f"{row.tokens_per_s:,.0f}",
            f"{row.training:.2f}",
            f"{row.bytes_per_token:,.0f}",
            _middle(row.all_train, 1),
            row.survival,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [f"\n{row.name} could not begin: {error}" for row in rows for error in row.errors]
    lines += [f"\nA peer of {row.name} ended by itself: {one}" for row in rows for one in row.broken]
    return "\n".join(lines)


def verdicts(rows: Sequence[Row], name: str) -> list[str]:
    """Return what the table says of the goal, and each measure in which some contestant is better than ours."""
    ours = next((row for row in rows if row.name == OURS), None)
    others = [row for row in rows if not row.name.startswith(OURS)]
    if ours is None or not others:
        return []
    goal = 1.0 if name.partition("/")[2] in EQUAL_FAULTS else GOAL
    found = ["ours never reached the target"] if ours.reach.middle is None else []
    too_short = []
    for row in others:
        ratio, _ = sooner(ours.reach.middle, row.reach.middle, row.seconds)
        if ratio is None or ratio >= goal:
            continue
        if row.reach.middle is not None:
            found.append(f"{row.name}: ours {ratio:.2f} times as soon")
        else:
            too_short.append(row.name)
    aim = "at least as soon as" if goal == 1.0 else f"at least {goal:g} times sooner than"
    verdict = f"Goal, ours {aim} everybody: " + ("**not met**" if found or too_short else "**met**")
    verdict += (f": {'; '.join(found)}" if found else "") + "."
    if too_short:
        verdict += f" The run was too short to show it against those that never got there: {'; '.join(too_short)}."
    wins = _wins(ours, others)
    return [
        verdict,
        "Better than ours" + (f" in {'. In '.join(wins)}." if wins else ": nobody, in time, loss or bytes."),
    ]


def _wins(ours: Row, others: Sequence[Row]) -> list[str]:
    """Return a text for each measure in which others are better: ours, and theirs."""
    measures: tuple[tuple[str, Callable[[Row], float | None], int], ...] = (
        ("time to the target", lambda row: row.reach.middle, 1),
        ("time from the command", lambda row: row.from_command.middle, 1),
        ("time until all train", lambda row: row.all_train.middle, 1),
        ("loss at the end", lambda row: row.loss.middle, 3),
        ("smoothed loss", lambda row: row.smoothed.middle, 3),
        ("loss at equal tokens", lambda row: row.at_tokens.middle, 3),
        ("bytes/token", lambda row: row.bytes_per_token or None, 0),
    )
    texts = []
    for what, figure, digits in measures:
        own = figure(ours)
        better = [
            f"{row.name} {theirs:.{digits}f}"
            for row in others
            if (theirs := figure(row)) is not None and (own is None or theirs < own)
        ]
        if better:
            texts.append(f"{what} (ours {'never' if own is None else f'{own:.{digits}f}'}): {'; '.join(better)}")
    return texts


def plot(runs: Sequence[Line], target: float | None, path: Path) -> None:
    """The median loss over time of each contestant, with least and most as a band."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = path.name  # the same runs give the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for row in rows_of(runs, target):
        curves = [curve for run in runs if run["contestant"] == row.name and (curve := curve_of(run))]
        if not curves:
            continue
        moments = sorted({round(point.seconds, 1) for curve in curves for point in curve})
        shown = [(at, found) for at in moments if len(found := _losses_at(curves, at)) == len(curves)]
        seconds = [at for at, _ in shown]
        (line,) = axes.plot(
            seconds, [median(found) for _, found in shown], label=row.name, linewidth=2.5 if row.name == OURS else 1.2
        )
        least, most = [min(found) for _, found in shown], [max(found) for _, found in shown]
        axes.fill_between(seconds, least, most, color=line.get_color(), alpha=0.12, linewidth=0)
    if target is not None:
        axes.axhline(target, color="grey", linestyle=":", linewidth=1)
    axes.set(xlabel="seconds", ylabel="held-out loss, nats per byte")
    axes.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)


def _losses_at(curves: Sequence[Sequence[Point]], seconds: float) -> list[float]:
    found = [loss_at(curve, seconds=seconds) for curve in curves]
    return [loss for loss in found if loss is not None]


def _sooner(ours: float | None, row: Row) -> str:
    ratio, bound = sooner(ours, row.reach.middle, row.seconds)
    return "-" if ratio is None else f"{'> ' if bound else ''}{ratio:.2f}"


def _spread(found: Spread, digits: int) -> str:
    if found.least is None or found.most is None:
        return "never" if digits == 1 else "-"
    middle = "never" if found.middle is None else f"{found.middle:.{digits}f}"
    return f"{middle} ({found.least:.{digits}f}-{found.most:.{digits}f})"


def _middle(found: Spread, digits: int) -> str:
    return "-" if found.middle is None else f"{found.middle:.{digits}f}"


def _heading(name: str, runs: Sequence[Line], target: float | None) -> str:
    found, count = scenarios.scenario(name), 1 + max(run["repetition"] for run in runs)
    aim = "" if target is None else f" Target: a loss of {target:.3f}."
    return (
        f"### {name}\n\n{found.world.note[0].upper()}{found.world.note[1:]}; {found.fault.note}. "
        f"{max(run['seconds'] for run in runs):g} s, {count} repetition{'s' * (count > 1)}.{aim}"
    )


def machine() -> Mapping[str, Any]:
    """What the runs were made on."""
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = model[0].partition(":")[2].strip() if model else platform.machine()
    return {"cpu": name, "cores": os.cpu_count(), "python": platform.python_version()}


def _machine(runs: Sequence[Line]) -> str:
    loads = [run["load"][1] for run in runs if "load" in run]
    late = sorted({run["scenario"] for run in runs if run.get("complaints")})
    found = machine()
    text = f"{len(runs)} runs on {found['cores']} cores of {found['cpu']}"
    if loads:
        text += f", load at the end of a run {median(loads):.1f} in the median and {max(loads):.1f} at most"
    return text + (f"; the lab's router was late in some run of {', '.join(late)}" if late else "") + "."


def _order(name: str) -> tuple[int, int]:
    place, _, fault = name.partition("/")
    return scenarios.WORLDS.index(place), list(scenarios.FAULTS).index(fault)
