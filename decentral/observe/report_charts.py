"""The charts of a run's report, each made of a RunHistory: decentral/observe/report_page.py puts them on a page."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from decentral.core.units import Seconds, readable_bytes, readable_number
from decentral.observe.run_history import OUTCOMES, Column, Life, PeerHistory, RunHistory
from decentral.observe.svg_chart import BOTTOM, LEFT, TOP, Chart, Ink, Line, Point, limits
from decentral.scheduler.shared.arrays import Floats

POINTS = 200  # of a line
TOKEN_PLACES = 2000  # times at which the tokens of all peers are added up; between them lines are straight
BARS = 60  # over time
LEAST_BAR_S = 1.0
MOST_PEER_ROWS = 120  # of peers, in one chart
ROW_HEIGHT = 17  # height of a peer's row
MANY = 24  # peers; more lines than this cannot be told apart, and have one colour


@dataclass(frozen=True, slots=True)
class RunCharts:
    """What the charts of one run share: its peers' colours and its time."""

    run: RunHistory

    @property
    def seconds(self) -> Seconds:
        return max(1e-3, self.run.last - self.run.began)

    def ink(self, number: int) -> Ink:
        """The colour of the peer of this number: hues as far apart as so many peers allow."""
        count = len(self.run.peers)
        return Ink("series", 211 + 360 * number / count) if count <= MANY else Ink("crowd")

    def inks(self) -> list[tuple[PeerHistory, Ink]]:
        return [(peer, self.ink(number)) for number, peer in enumerate(self.run.peers)]

    def over_time(self, y: tuple[float, float], y_text: Callable[[float], str], height: int = 240) -> Chart:
        unit, name = time_unit(self.seconds)

        def text(seconds: float) -> str:
            return f"{seconds / unit:g}"

        return Chart((0, self.seconds), y, height, text, unit, y_text, f"{name} since the run began")

    def loss_over_time(self) -> str:
        lines = self._loss_lines(lambda times: times - self.run.began)
        chart = self.over_time(_loss_limits(lines), lambda loss: f"{loss:.3g}")
        chart.lines(lines)
        return chart.svg("loss over time")

    def loss_over_tokens(self) -> str:
        """The same losses over the tokens that all peers together had trained by then."""
        times = np.linspace(self.run.began, self.run.last, TOKEN_PLACES)
        tokens = self.run.tokens_at(times)
        lines = self._loss_lines(lambda when: np.interp(when, times, tokens))
        chart = Chart((0, self.run.tokens or 1.0), _loss_limits(lines), 240, readable_number)
        chart.y_text = "{:.3g}".format
        chart.x_name = "tokens that the swarm had trained"
        chart.lines(lines)
        return chart.svg("loss over tokens")

    def _loss_lines(self, across: Callable[[Floats], Floats]) -> list[Line]:
        lines = []
        for peer, ink in self.inks():
            training = [_thinned(peer.losses, life, across) for life in peer.lives]
            held_out = [_thinned(peer.held_out, life, across) for life in peer.lives]
            lines.append(Line(peer.name, ink, [one for one in training if one]))
            if any(held_out):
                heldout_ink = Ink(f"{ink.name} held-out", ink.hue)
                lines.append(Line(f"{peer.name} held-out", heldout_ink, [one for one in held_out if one], marked=True))
        return lines

    def throughput(self) -> str:
        """Tokens/s of all peers on top of one another."""
        edges, rates = self._rates(lambda peer: peer.tokens)
        together = np.sum([rate for *_, rate in rates], axis=0)
        chart = self.over_time(limits(together, from_zero=True), readable_number)
        if len(rates) > MANY:
            rates = [("all peers", Ink("crowd"), together)]
        times = list(itertools.chain.from_iterable(itertools.pairwise(edges)))  # each bar's two ends
        chart.areas(times, [(name, ink, [v for v in rate for _ in (0, 1)]) for name, ink, rate in rates])
        return chart.svg("tokens per second")

    def traffic(self) -> str:
        """Bytes/s that the peers sent, and what they received, all together."""
        lines, highest = [], [0.0]
        for name, column in (("sent", lambda peer: peer.sent), ("received", lambda peer: peer.received)):
            edges, rates = self._rates(column)
            together = np.sum([rate for *_, rate in rates], axis=0)
            middles = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
            lines.append(Line(name, Ink(name), [list(zip(middles, together.tolist(), strict=True))]))
            highest += together.tolist()
        chart = self.over_time(limits(highest, from_zero=True), lambda rate: f"{readable_bytes(rate)}/s", 180)
        chart.lines(lines)
        return chart.svg("bytes per second")

    def _rates(self, column: Callable[[PeerHistory], Column]) -> tuple[list[float], list[tuple[str, Ink, Floats]]]:
        """The ends of all bars, in seconds since the run began, and each peer's mean rate in every bar."""
        edges = self._edges()
        found = [
            (peer.name, ink, np.diff(column(peer).at(edges + self.run.began)) / np.diff(edges))
            for peer, ink in self.inks()
        ]
        return edges.tolist(), found

    def _edges(self) -> Floats:
        return np.linspace(0.0, self.seconds, 1 + max(1, min(BARS, int(self.seconds / LEAST_BAR_S))))

    def exchanges(self) -> str:
        """Exchanges in each stretch of time, by how they ended."""
        edges = self._edges()
        layers = []
        for outcome in OUTCOMES:
            at = np.concatenate([np.asarray(peer.exchanges[outcome]) for peer in self.run.peers]) - self.run.began
            layers.append((outcome, np.histogram(at, edges)[0].astype(float)))
        chart = self.over_time(
            limits(np.sum([counts for _, counts in layers], axis=0), from_zero=True), readable_number, 180
        )
        for number, (left, right) in enumerate(itertools.pairwise(edges.tolist())):
            low = 0.0
            for outcome, counts in layers:
                high = low + counts[number]
                if high > low:
                    chart.bar((left, right), (low, high), Ink(outcome), f"{counts[number]:.0f} {outcome}")
                low = high
        return chart.svg("exchanges over time")

    def account_of_time(self) -> str:
        """Of each peer, what its training thread spent its time on."""
        chart = Chart((0, 1), (0, 1), 0, lambda part: f"{part:.0%}", x_name="of the training thread's time")
        rows = _Rows(chart, len(self.run.peers))
        for peer, row in zip(self.run.peers, rows.places(), strict=False):
            rows.name(row, peer.name)
            left = 0.0
            for kind, share in peer.shares().items():
                if share > 0:
                    chart.bar((left, left + share), row, Ink(kind), f"{peer.name}: {kind} {share:.1%}")
                left += share
            if left:
                rows.note(row, f"{peer.shares()['training']:.1%}")
        return chart.svg("account of time", levels=False)

    def presence(self) -> str:
        """Who was there when: a bar for each life, paler until the peer had joined; a cross where it was killed."""
        chart = self.over_time((0, 1), str, 0)
        rows = _Rows(chart, len(self.run.peers))
        for (peer, ink), row in zip(self.inks(), rows.places(), strict=False):
            rows.name(row, peer.name)
            for number, life in enumerate(peer.lives):
                self._draw_life(chart, life, row, ink, number + 1 == len(peer.lives))
        return chart.svg("who was there when", levels=False)

    def _draw_life(self, chart: Chart, life: Life, row: tuple[float, float], ink: Ink, is_last: bool) -> None:
        began, last = life.began - self.run.began, life.last - self.run.began
        joined = last if life.joined is None else life.joined - self.run.began
        end = life.ended or ("its journal ends here" if is_last else "killed")
        chart.bar((began, joined), row, Ink(f"{ink.name} joining", ink.hue), f"joining, {joined - began:.0f} s")
        chart.bar((joined, last), row, ink, f"trained for {last - joined:.0f} s, then: {end}")
        if not life.ended and not is_last:
            x, y = chart.at(last, sum(row) / 2)
            chart.text(x, y + 5, "✕", "middle")


@dataclass(frozen=True, slots=True)
class _Rows:
    """A chart of one row for each peer, the first ones of many; it gets the height that they need."""

    chart: Chart
    count: int

    def __post_init__(self) -> None:
        self.chart.y = (0, min(self.count, MOST_PEER_ROWS))
        self.chart.height = (
            TOP
            + BOTTOM
            + ROW_HEIGHT * min(self.count, MOST_PEER_ROWS)
            + (ROW_HEIGHT if self.count > MOST_PEER_ROWS else 0)
        )
        if self.count > MOST_PEER_ROWS:
            self.chart.text(LEFT, self.chart.height - BOTTOM - 3, f"and {self.count - MOST_PEER_ROWS} more peers")
            self.chart.y = (-1, MOST_PEER_ROWS)

    def places(self) -> list[tuple[float, float]]:
        """The y of each row, from above."""
        top = min(self.count, MOST_PEER_ROWS)
        return [(top - number - 0.85, top - number - 0.15) for number in range(top)]

    def name(self, row: tuple[float, float], name: str) -> None:
        _, y = self.chart.at(0, sum(row) / 2)
        self.chart.text(LEFT - 6, y + 4, name, "end")

    def note(self, row: tuple[float, float], text: str) -> None:
        x, y = self.chart.at(self.chart.x[1], sum(row) / 2)
        self.chart.text(x + 6, y + 4, text)


def reasons_of(run: RunHistory) -> Counter[tuple[str, str]]:
    """Exchanges of all peers by outcome and reason."""
    return sum((peer.reasons for peer in run.peers), Counter())


def time_unit(seconds: Seconds) -> tuple[float, str]:
    """In which unit so long a time is read, in seconds, and what it is called."""
    units = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))
    return next(((unit, name) for unit, name in units if seconds >= 3 * unit), (1.0, "seconds"))


def _thinned(column: Column, life: Life, across: Callable[[Floats], Floats]) -> list[Point]:
    """The means of a life's values over POINTS stretches of equal count, where they are drawn."""
    times, values = np.asarray(column.t), np.asarray(column.value)
    here = slice(np.searchsorted(times, life.began, "left"), np.searchsorted(times, life.last, "right"))
    times, values = times[here], values[here]
    groups = np.array_split(np.arange(len(times)), min(POINTS, len(times))) if len(times) else []
    x = across(np.array([times[group].mean() for group in groups]))
    return [(float(at), float(values[group].mean())) for at, group in zip(x, groups, strict=True)]


def _loss_limits(lines: Sequence[Line]) -> tuple[float, float]:
    return limits(y for line in lines for segment in line.segments for _, y in segment)
