"""The charts of a run's report, each drawn from a RunHistory by matplotlib: report.py puts them on a page."""

from collections import Counter
from collections.abc import Callable
from colorsys import hls_to_rgb
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from decentral.core.journal.field_kinds import OUTCOMES, Outcome
from decentral.core.journal.peer_totals import ExchangeTotals, Life
from decentral.core.plain_text import printable
from decentral.core.units import Seconds, readable_bytes, readable_number
from decentral.scheduler.topology.arrays import Floats
from decentral.view.canvas import DIM, svg_text
from decentral.view.run_history import Column, PeerHistory, RunHistory

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 200  # of a line
TOKEN_PLACES = 2000  # times at which the tokens of all peers are added up; between them lines are straight
BARS = 60  # over time
LEAST_BAR_S = 1.0
MOST_PEER_ROWS = 120  # of peers, in one chart
ROW_IN = 0.2  # height of a peer's row
MANY = 24  # peers; more lines than this cannot be told apart, and have one colour
LEGEND_LINES = 12  # lines that a legend names
CROWD = "#2f6fb3"
COLOURS = {  # of outcomes, kinds of time, and directions
    "done": "#2f7d5b",
    "solo": "#c58a00",
    "failed": "#c2403a",
    "training": "#2f7d5b",
    "gossip": "#2f6fb3",
    "checkpoint": "#7a52b3",
    "evaluation": "#c58a00",
    "state": "#1c2430",
    "waiting": "#9aa3af",
    "sent": "#2f6fb3",
    "received": "#7a52b3",
}


@dataclass(frozen=True, slots=True)
class RunCharts:
    """The charts of one run as SVG text. What they share is the colours of its peers, and its time."""

    run: RunHistory

    @property
    def seconds(self) -> Seconds:
        return max(1e-3, self.run.last - self.run.began)

    def colours(self) -> list[str]:
        """Return the colour of each peer: hues as far apart as so many peers allow."""
        count = len(self.run.peers)
        if count > MANY:
            return [CROWD] * count
        rgb = (hls_to_rgb((0.586 + number / count) % 1.0, 0.42, 0.68) for number in range(count))
        return ["#" + "".join(f"{round(255 * part):02x}" for part in one) for one in rgb]

    def _over_time(self, axes: "Axes") -> float:
        """Write the time at the bottom; return the seconds of its unit."""
        unit, name = time_unit(self.seconds)
        axes.set_xlim(0, self.seconds / unit)
        axes.set_xlabel(f"{name} since the run began")
        return unit

    def loss_over_time(self) -> str:
        def draw(axes: "Axes") -> None:
            unit = self._over_time(axes)
            self._draw_losses(axes, lambda times: (times - self.run.began) / unit)

        return svg_text(draw)

    def loss_over_tokens(self) -> str:
        """The same losses over the tokens that all peers together had trained by then."""
        times = np.linspace(self.run.began, self.run.last, TOKEN_PLACES)
        tokens = self.run.tokens_at(times)

        def draw(axes: "Axes") -> None:
            self._draw_losses(axes, lambda when: np.asarray(np.interp(when, times, tokens)))
            axes.set_xlim(0, self.run.tokens or 1.0)
            axes.set_xlabel("tokens that the swarm had trained")
            axes.xaxis.set_major_formatter(_number)

        return svg_text(draw)

    def _draw_losses(self, axes: "Axes", across: Callable[[Floats], Floats]) -> None:
        alpha = 0.35 if len(self.run.peers) > MANY else 1.0
        for peer, colour in zip(self.run.peers, self.colours(), strict=True):
            when, losses = _thinned(peer.losses, peer.lives, across)
            axes.plot(when, losses, color=colour, label=_shown(peer.name), alpha=alpha)
            when, held_out = _thinned(peer.held_out, peer.lives, across)
            axes.plot(when, held_out, color=colour, linestyle=":", marker="o", markersize=3, alpha=alpha)
        if 0 < len(self.run.peers) <= LEGEND_LINES:
            axes.legend(loc="upper right")

    def throughput(self) -> str:
        """Tokens/s of all peers on top of one another."""
        edges, rates = self._rates(lambda peer: peer.tokens)
        colours = self.colours()
        if len(rates) > MANY:
            rates, colours = [np.sum(rates, axis=0)], [CROWD]

        def draw(axes: "Axes") -> None:
            times = np.repeat(edges, 2)[1:-1] / self._over_time(axes)  # each bar's two ends
            axes.stackplot(times, *(np.repeat(rate, 2) for rate in rates), colors=colours)
            axes.yaxis.set_major_formatter(_number)

        return svg_text(draw)

    def traffic(self) -> str:
        """Bytes/s that the peers sent, and what they received, all together."""

        def draw(axes: "Axes") -> None:
            unit = self._over_time(axes)
            for name, column in (("sent", lambda peer: peer.sent), ("received", lambda peer: peer.received)):
                edges, rates = self._rates(column)
                middles = (edges[:-1] + edges[1:]) / 2 / unit
                axes.plot(middles, np.sum(rates, axis=0), color=COLOURS[name], label=name)
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter(lambda rate, _: f"{readable_bytes(rate)}/s")
            axes.legend(loc="upper right")

        return svg_text(draw, 2.2)

    def _rates(self, column: Callable[[PeerHistory], Column]) -> tuple[Floats, list[Floats]]:
        """Return the ends of all bars, in seconds since the run began, and each peer's mean rate in every bar."""
        edges = self._edges()
        return edges, [np.diff(column(one).at(edges + self.run.began)) / np.diff(edges) for one in self.run.peers]

    def _edges(self) -> Floats:
        return np.linspace(0.0, self.seconds, 1 + max(1, min(BARS, int(self.seconds / LEAST_BAR_S))))

    def exchanges(self) -> str:
        """Exchanges in each stretch of time, by how they ended."""
        edges = self._edges()

        def draw(axes: "Axes") -> None:
            ends, below = edges / self._over_time(axes), np.zeros(len(edges) - 1)
            for outcome in OUTCOMES:
                at = np.concatenate([np.asarray(peer.exchanges[outcome]) for peer in self.run.peers]) - self.run.began
                counts = np.histogram(at, edges)[0]
                axes.bar(ends[:-1], counts, np.diff(ends), below, align="edge", color=COLOURS[outcome])
                below += counts
            axes.yaxis.set_major_formatter(_number)

        return svg_text(draw, 2.2)

    def account_of_time(self) -> str:
        """Of each peer, what its training thread spent its time on."""

        def draw(axes: "Axes") -> None:
            for row, peer in enumerate(self._rows(axes)):
                left = 0.0
                shares = peer.totals.whole.spent.shares()
                for kind, share in shares.items():
                    axes.barh(row, share, 0.7, left, color=COLOURS[kind])
                    left += share
                axes.text(1.01, row, f"{shares['training']:.1%}" if left else "", va="center", color=DIM)
            axes.set_xlim(0, 1)
            axes.set_xlabel("of the training thread's time")
            axes.xaxis.set_major_formatter(lambda part, _: f"{part:.0%}")

        return svg_text(draw, self._height_in)

    def presence(self) -> str:
        """Who was there when: a bar for each life, paler until the peer had joined; a cross where it was killed."""

        def draw(axes: "Axes") -> None:
            unit = self._over_time(axes)
            for row, (peer, colour) in enumerate(zip(self._rows(axes), self.colours(), strict=False)):
                for number, life in enumerate(peer.lives):
                    began, last = ((at - self.run.began) / unit for at in (life.began, life.last))
                    joined = last if life.joined is None else (life.joined - self.run.began) / unit
                    axes.barh(row, joined - began, 0.7, began, color=colour, alpha=0.35)
                    axes.barh(row, last - joined, 0.7, joined, color=colour)
                    if not life.ended and number + 1 < len(peer.lives):
                        axes.text(last, row, "✕", ha="center", va="center")

        return svg_text(draw, self._height_in)

    @property
    def _height_in(self) -> float:
        return 0.7 + ROW_IN * min(len(self.run.peers), MOST_PEER_ROWS)

    def _rows(self, axes: "Axes") -> list[PeerHistory]:
        """Name a row for each of the first peers, from above; return these."""
        shown = list(self.run.peers[:MOST_PEER_ROWS])
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.set_yticks(range(len(shown)), [_shown(peer.name) for peer in shown])
        axes.grid(visible=False)
        if len(shown) < len(self.run.peers):
            axes.set_title(f"and {len(self.run.peers) - len(shown)} more peers", fontsize=8)
        return shown


def reasons_of(run: RunHistory) -> Counter[tuple[Outcome, str]]:
    """Exchanges of all peers by outcome and reason."""
    return sum((peer.totals.whole.exchanges for peer in run.peers), ExchangeTotals()).ended


def time_unit(seconds: Seconds) -> tuple[float, str]:
    """In which unit so long a time is read, in seconds, and what it is called."""
    units = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))
    return next(((unit, name) for unit, name in units if seconds >= 3 * unit), (1.0, "seconds"))


def _number(value: float, _: float) -> str:
    return readable_number(value)


def _shown(name: str) -> str:
    """A peer's name as a label: a leading underscore would hide it."""
    return printable(name, 24).lstrip("_") or "?"


def _thinned(column: Column, lives: list[Life], across: Callable[[Floats], Floats]) -> tuple[Floats, Floats]:
    """Return x and y of a line: in each life the means over POINTS stretches of equal count, with a gap behind."""
    times, values, x, y = np.asarray(column.t), np.asarray(column.value), list[float](), list[float]()
    for life in lives:
        begin, end = np.searchsorted(times, life.began, "left"), np.searchsorted(times, life.last, "right")
        groups = np.array_split(np.arange(begin, end), min(POINTS, int(end - begin))) if end > begin else []
        x += [*across(np.array([times[group].mean() for group in groups])), np.nan]
        y += [*(values[group].mean() for group in groups), np.nan]
    return np.array(x), np.array(y)
