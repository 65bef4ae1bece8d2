"""Compare runs by their journals and configs: losses by tokens and by time, settings, and who trained what.

Start reading at `RunComparison.of`; `text_of` writes a comparison for a terminal of 80 columns.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from decentral.core import strict_json
from decentral.core.plain_text import plain_text
from decentral.core.strict_json import Json, JsonObject
from decentral.core.times import duration, precise
from decentral.core.units import Seconds, readable_number
from decentral.view.loss_curve import Axis, LossCurve, LossKind, common, sparkline
from decentral.view.run_history import PeerHistory, RunHistory

COMPARED_POINTS = 8  # number of points on the axis of tokens or time at which losses are compared
CURVE_POINTS = 200  # a curve in JSON has at most this many points
COMPARISON_COLUMNS = 80
MOST_COMPARED = 6  # at most this many runs are compared, because more do not fit into COMPARISON_COLUMNS
HOUR_S = 3600.0
NOT_MEASURED = "-"
BY_JOURNALS = "By each peer's own journal; `decentral ledger` has what other peers measured."


@dataclass(frozen=True, slots=True)
class TrainedShare:
    """How much one peer trained in a run."""

    peer: str  # end of the peer's id, and its name
    device: str
    layers: tuple[int, int]  # layers [first, last) at the peer's last start
    tokens: int
    share: float  # the peer's share of the run's tokens, 0 to 1
    hours: float  # hours for which the peer's process ran

    @classmethod
    def of(cls, peer: PeerHistory, tokens: int) -> "TrainedShare":
        """Return the share of a peer in a run that trained `tokens` tokens."""
        facts, own = peer.facts, peer.totals.tokens
        layers = (facts.first, facts.last)
        hours = round(peer.lived_s / HOUR_S, 4)
        return cls(peer.name, plain_text(facts.device), layers, own, round(own / max(1, tokens), 6), hours)


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One of the compared runs: its folder, totals, peers, loss curve and settings."""

    folder: str
    run: str
    tokens: int
    seconds: Seconds  # time in which at least one peer ran; pauses of all peers are left out
    loss: float | None  # last loss of the curve, nats per token; None if the curve has no points
    peers: Sequence[TrainedShare]
    curve: LossCurve
    settings: Mapping[str, Json]  # key, such as `train.optimizer` -> value; {} if the folder has no config

    @classmethod
    def of(cls, folder: str, history: RunHistory, canonical: str, kind: LossKind) -> "ComparedRun":
        """Return a run's totals, peers, loss curve and settings.

        Args:
            folder: The folder that the user named.
            history: The history of the run from its journals.
            canonical: The run's config as peers share it; "" if it is not known.
            kind: The kind of losses in the curve.
        """
        curve, tokens = LossCurve.of(history, kind), history.tokens
        run = next((peer.facts.run for peer in history.peers if peer.facts.run), "")
        shares = [TrainedShare.of(peer, tokens) for peer in history.peers]
        loss = float(curve.loss[-1]) if len(curve.loss) else None
        settings = dict(flat(strict_json.loads(canonical))) if canonical else {}
        seconds = round(float(history.ran_s(np.array([history.last]))[0]), 3)
        return cls(folder, plain_text(run), tokens, seconds, loss, shares, curve, settings)

    def fields(self) -> JsonObject:
        """Return the run as JSON, with at most CURVE_POINTS points of the curve."""
        curve, step = self.curve, -(-len(self.curve.loss) // CURVE_POINTS) or 1
        points = zip(curve.seconds[::step], curve.tokens[::step], curve.loss[::step], strict=True)
        kept = {"folder": self.folder, "run": self.run, "tokens": self.tokens, "seconds": self.seconds}
        rows = [[round(float(value), 6) for value in point] for point in points]
        described = {"loss": self.loss, "loss_kind": curve.kind, "curve": rows}
        return {**kept, **described, "peers": [asdict(one) for one in self.peers]}


@dataclass(frozen=True, slots=True)
class RunComparison:
    """The compared runs, and the losses of all runs at the same numbers of tokens and after the same times."""

    runs: Sequence[ComparedRun]
    at_tokens: Sequence[Sequence[float]]  # rows: tokens, then the loss of each run
    at_seconds: Sequence[Sequence[float]]  # rows: seconds, then the loss of each run
    settings: Mapping[str, Sequence[Json]]  # key whose values differ -> its value in each run; None: not known

    @classmethod
    def of(cls, runs: Sequence[ComparedRun]) -> "RunComparison":
        """Return the comparison of these runs."""
        keys = dict.fromkeys(key for run in runs for key in run.settings)
        values = {key: [run.settings.get(key) for run in runs] for key in keys}
        differ = {key: found for key, found in values.items() if any(one != found[0] for one in found)}
        curves = [run.curve for run in runs]
        return cls(runs, _rows(curves, "tokens"), _rows(curves, "seconds"), differ)

    def fields(self) -> JsonObject:
        """Return the comparison as JSON; rows of at_tokens and at_seconds have the place on the axis, then losses."""
        return {
            "runs": [run.fields() for run in self.runs],
            "at_tokens": self.at_tokens,
            "at_seconds": self.at_seconds,
            "settings": self.settings,
        }


def kind_for(histories: Sequence[RunHistory]) -> LossKind:
    """Return which losses to compare: held-out losses if each run has COMPARED_POINTS or more, else training losses."""
    counts = [sum(len(peer.held_out.t) for peer in history.peers) for history in histories]
    return "held-out" if min(counts) >= COMPARED_POINTS else "training"


def flat(tree: JsonObject, prefix: str = "") -> list[tuple[str, Json]]:
    """Return (key, value) for each value in a tree of settings; a key is a path such as `train.optimizer`."""
    found: list[tuple[str, Json]] = []
    for key, value in tree.items():
        found += flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return found


def text_of(found: RunComparison) -> str:
    """Return a comparison as text with lines of at most COMPARISON_COLUMNS columns."""
    names = [chr(ord("A") + number) for number in range(len(found.runs))]
    kind = found.runs[0].curve.kind
    parts = [
        _table(("", "folder", "run", "peers", "tokens", "time", "tokens/s", "loss"), _sums(names, found.runs), 26),
        "\n".join(_curves(names, found.runs, kind)),
        _losses(f"{kind} loss at tokens", names, found.at_tokens, readable_number),
        _losses(f"{kind} loss after", names, found.at_seconds, precise),
        _settings(names, found),
        _table(("", "who trained", "tokens", "share", "hours", "layers", "device"), _shares(names, found.runs), 24),
        "\n".join([BY_JOURNALS, *_parts_of_one_run(names, found.runs)]),
    ]
    lines = "\n\n".join(part for part in parts if part).splitlines()
    return "\n".join(line[:COMPARISON_COLUMNS].rstrip() for line in lines)


def _rows(curves: Sequence[LossCurve], axis: Axis) -> list[list[float]]:
    places = common(curves, axis, COMPARED_POINTS)
    table = np.column_stack([places, *(curve.at(axis, places) for curve in curves)])
    return [[round(float(value), 6) for value in row] for row in table]


def _sums(names: Sequence[str], runs: Sequence[ComparedRun]) -> list[tuple[str, ...]]:
    return [
        (
            name,
            plain_text(run.folder)[-20:],
            run.run or NOT_MEASURED,
            str(len(run.peers)),
            readable_number(run.tokens),
            duration(run.seconds),
            readable_number(run.tokens / run.seconds) if run.seconds else NOT_MEASURED,
            NOT_MEASURED if run.loss is None else f"{run.loss:.3f}",
        )
        for name, run in zip(names, runs, strict=True)
    ]


def _curves(names: Sequence[str], runs: Sequence[ComparedRun], kind: str) -> list[str]:
    lines = [f"{kind} loss over tokens"]
    for name, run in zip(names, runs, strict=True):
        loss = run.curve.loss
        if len(loss):
            lines.append(f"{name}  {sparkline(loss.tolist(), 48)}  {loss[0]:.3f} to {loss[-1]:.3f}")
    return lines


def _losses(title: str, names: Sequence[str], rows: Sequence[Sequence[float]], shown: Callable[[float], str]) -> str:
    if not rows:
        return f"{title}: these runs have no range in common"
    cells = [(shown(place), *(_loss(one) for one in losses)) for place, *losses in rows]
    return _table((title, *names), cells, 30)


def _loss(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else NOT_MEASURED


def _settings(names: Sequence[str], found: RunComparison) -> str:
    unknown = [name for name, run in zip(names, found.runs, strict=True) if not run.settings]
    if unknown:
        return f"settings of {', '.join(unknown)} are not known: no run.json there"
    if not found.settings:
        return "all settings are equal"
    width = max(8, (COMPARISON_COLUMNS - 32) // len(names) - 2)
    rows = [(key, *(plain_text(_value(one), width) for one in values)) for key, values in found.settings.items()]
    return _table(("settings that differ", *names), rows, 30)


def _value(value: Json) -> str:
    return value if isinstance(value, str) else strict_json.dumps(value)


def _shares(names: Sequence[str], runs: Sequence[ComparedRun]) -> list[tuple[str, ...]]:
    return [
        (
            name,
            one.peer,
            readable_number(one.tokens),
            f"{one.share:.1%}",
            f"{one.hours:.2f}",
            f"{one.layers[0]}-{one.layers[1] - 1}" if one.layers[1] else NOT_MEASURED,
            one.device,
        )
        for name, run in zip(names, runs, strict=True)
        for one in sorted(run.peers, key=lambda one: -one.tokens)
    ]


def _parts_of_one_run(names: Sequence[str], runs: Sequence[ComparedRun]) -> list[str]:
    """Return a line for each run that the user gave in several folders, such as one for each of its peers."""
    by_run = Counter(run.run for run in runs if run.run)
    several = [
        [name for name, run in zip(names, runs, strict=True) if run.run == one] for one in by_run if by_run[one] > 1
    ]
    return [f"{', '.join(folders)} are of one run; each share is of the peers of one folder." for folders in several]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], most: int) -> str:
    """Return a table as text. Cells are cut to `most` characters, except the cells of the last column."""
    lines = [[*(cell[:most] for cell in line[:-1]), line[-1]] for line in (columns, *rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
