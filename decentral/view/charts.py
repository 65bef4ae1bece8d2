"""Plot the charts of a run's report with matplotlib; report.py puts the charts on an HTML page."""

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

POINTS = 200  # a peer's curve has at most this many points for each run of its process
TOKEN_PLACES = 2000  # the tokens of all peers are summed at this many times; values between them are interpolated
BARS = 60  # a chart over time is divided into at most this many intervals
LEAST_BAR_S = 1.0
MOST_PEER_ROWS = 120
ROW_IN = 0.2
MANY = 24  # at most this many peers have their own colours, since more colours would look alike
LEGEND_LINES = 12  # a chart of more peers has no legend
CROWD = "#2f6fb3"  # all peers have this colour if there are more than MANY
COLOURS = {
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
    """The charts of one run as SVG text. A peer has the same colour in all charts."""

    run: RunHistory

    @property
    def seconds(self) -> Seconds:
        """Duration of the run, at least 1 ms."""
        return max(1e-3, self.run.last - self.run.began)

    def colours(self) -> list[str]:
        """Return a colour `#rrggbb` for each peer: evenly spread hues, or CROWD if there are more than MANY peers."""
        count = len(self.run.peers)
        if count > MANY:
            return [CROWD] * count
        rgb = (hls_to_rgb((0.586 + number / count) % 1.0, 0.42, 0.68) for number in range(count))
        return ["#" + "".join(f"{round(255 * part):02x}" for part in one) for one in rgb]

    def _over_time(self, axes: "Axes") -> float:
        """Label the x axis with the time since the run began; return the length of the axis's unit in seconds."""
        unit, name = time_unit(self.seconds)
        axes.set_xlim(0, self.seconds / unit)
        axes.set_xlabel(f"{name} since the run began")
        return unit

    def loss_over_time(self) -> str:
        """Plot each peer's training and held-out loss over time."""

        def draw(axes: "Axes") -> None:
            unit = self._over_time(axes)
            self._draw_losses(axes, lambda times: (times - self.run.began) / unit)

        return svg_text(draw)

    def loss_over_tokens(self) -> str:
        """Plot each peer's training and held-out loss over the number of tokens on which all peers had trained."""
        times = np.linspace(self.run.began, self.run.last, TOKEN_PLACES)
        tokens = self.run.tokens_at(times)

        def draw(axes: "Axes") -> None:
            self._draw_losses(axes, lambda when: np.asarray(np.interp(when, times, tokens)))
            axes.set_xlim(0, self.run.tokens or 1.0)
            axes.set_xlabel("tokens that the swarm had trained")
            axes.xaxis.set_major_formatter(_number)

        return svg_text(draw)

    def _draw_losses(self, axes: "Axes", across: Callable[[Floats], Floats]) -> None:
        """Plot each peer's training loss, and its held-out loss as a dotted line. `across` maps Unix times to x."""
        alpha = 0.35 if len(self.run.peers) > MANY else 1.0
        for peer, colour in zip(self.run.peers, self.colours(), strict=True):
            when, losses = _thinned(peer.losses, peer.lives, across)
            axes.plot(when, losses, color=colour, label=_shown(peer.name), alpha=alpha)
            when, held_out = _thinned(peer.held_out, peer.lives, across)
            axes.plot(when, held_out, color=colour, linestyle=":", marker="o", markersize=3, alpha=alpha)
        if 0 < len(self.run.peers) <= LEGEND_LINES:
            axes.legend(loc="upper right")

    def throughput(self) -> str:
        """Plot the tokens/s of the peers over time, stacked. Of more than MANY peers, plot only the sum."""
        edges, rates = self._rates(lambda peer: peer.tokens)
        colours = self.colours()
        if len(rates) > MANY:
            rates, colours = [np.sum(rates, axis=0)], [CROWD]

        def draw(axes: "Axes") -> None:
            times = np.repeat(edges, 2)[1:-1] / self._over_time(axes)
            axes.stackplot(times, *(np.repeat(rate, 2) for rate in rates), colors=colours)
            axes.yaxis.set_major_formatter(_number)

        return svg_text(draw)

    def traffic(self) -> str:
        """Plot the bytes/s that all peers together sent and received over time."""

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
        """Return the edges of time intervals, in seconds since the run began, and each peer's rates of `column`."""
        edges = self._edges()
        return edges, [np.diff(column(one).at(edges + self.run.began)) / np.diff(edges) for one in self.run.peers]

    def _edges(self) -> Floats:
        return np.linspace(0.0, self.seconds, 1 + max(1, min(BARS, int(self.seconds / LEAST_BAR_S))))

    def exchanges(self) -> str:
        """Plot the number of gossip exchanges in each time interval, by outcome."""
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
        """Plot for each peer the shares of the training thread's time that each kind of work took."""

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
        """Plot bars for the times at which each peer ran, paler while it was joining. A cross marks a killed peer."""

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
        """Label a row for each of the first MOST_PEER_ROWS peers, from the top; return these peers."""
        shown = list(self.run.peers[:MOST_PEER_ROWS])
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.set_yticks(range(len(shown)), [_shown(peer.name) for peer in shown])
        axes.grid(visible=False)
        if len(shown) < len(self.run.peers):
            axes.set_title(f"and {len(self.run.peers) - len(shown)} more peers", fontsize=8)
        return shown


def reasons_of(run: RunHistory) -> Counter[tuple[Outcome, str]]:
    """Return the number of gossip exchanges of all peers for each (outcome, reason)."""
    return sum((peer.totals.whole.exchanges for peer in run.peers), ExchangeTotals()).ended


def time_unit(seconds: Seconds) -> tuple[float, str]:
    """Return a readable unit for a duration: the unit's length in seconds, and its name, such as (60.0, "minutes")."""
    units = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))
    return next(((unit, name) for unit, name in units if seconds >= 3 * unit), (1.0, "seconds"))


def _number(value: float, _: float) -> str:
    return readable_number(value)


def _shown(name: str) -> str:
    """Return a peer's name without leading underscores, because matplotlib hides labels that begin with one."""
    return printable(name, 24).lstrip("_") or "?"


def _thinned(column: Column, lives: list[Life], across: Callable[[Floats], Floats]) -> tuple[Floats, Floats]:
    """Return x and y of a curve with at most POINTS points for each life (from a start of the peer to the next).

    Each point is the mean of a group of consecutive values; the groups have about equal sizes. A NaN after each life
    interrupts the curve. `across` maps Unix times to x.
    """
    times, values, x, y = np.asarray(column.t), np.asarray(column.value), list[float](), list[float]()
    for life in lives:
        begin, end = np.searchsorted(times, life.began, "left"), np.searchsorted(times, life.last, "right")
        groups = np.array_split(np.arange(begin, end), min(POINTS, int(end - begin))) if end > begin else []
        x += [*across(np.array([times[group].mean() for group in groups])), np.nan]
        y += [*(values[group].mean() for group in groups), np.nan]
    return np.array(x), np.array(y)
