"""Compute the loss of a run over tokens and time from its peers' journals, and draw it as a small picture in text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from decentral.core.units import Seconds
from decentral.scheduler.topology.arrays import Floats
from decentral.view.run_history import Column, PeerHistory, RunHistory

SPARK_BARS = "▁▂▃▄▅▆▇█"
LEAST_AXIS_SHARE = 0.01  # a common axis begins no earlier than at this share of its end
MOST_TRAINING_POINTS = 60  # a curve of training losses has at most this many points, each the mean of several losses
Axis = Literal["tokens", "seconds"]
LossKind = Literal["held-out", "training"]


@dataclass(frozen=True, slots=True)
class LossCurve:
    """The loss of a run over time and tokens. Each point is the mean of the last losses of the peers that ran then."""

    kind: LossKind
    seconds: Floats  # (points,) seconds in which peers ran, without pauses of all peers
    tokens: Floats  # (points,) number of tokens on which all peers together had trained
    loss: Floats  # (points,) nats per token

    @classmethod
    def of(cls, run: RunHistory, kind: LossKind = "held-out") -> "LossCurve":
        """Return the curve of a run's losses of this kind; it has no points if no peer measured such a loss."""
        columns = [(peer, peer.held_out if kind == "held-out" else peer.losses) for peer in run.peers]
        known = [(peer, column) for peer, column in columns if column.t]
        if not known:
            nothing = np.zeros(0)
            return cls(kind, nothing, nothing, nothing)
        times = np.unique(np.concatenate([np.asarray(column.t) for _, column in known]))
        loss = np.nanmean(np.array([_held(peer, column, times) for peer, column in known]), axis=0)
        if kind == "training":
            parts = min(MOST_TRAINING_POINTS, len(times))
            times, loss = (np.array([part.mean() for part in np.array_split(one, parts)]) for one in (times, loss))
        return cls(kind, run.ran_s(times), run.tokens_at(times), loss)

    def at(self, axis: Axis, places: Floats) -> Floats:
        """Return the losses (places,), interpolated at these numbers of tokens or seconds; NaN outside the curve."""
        if not len(self.loss):
            return np.full(len(places), np.nan)
        known: Floats = getattr(self, axis)
        return np.asarray(np.interp(places, known, self.loss, left=np.nan, right=np.nan))


def common(curves: Sequence[LossCurve], axis: Axis, points: int) -> Floats:
    """Return coordinates (points,) on an axis, in equal ratios, in the range that all curves cover.

    The result is empty if the curves have no range in common.
    """
    ranges = [getattr(curve, axis) for curve in curves]
    if not all(map(len, ranges)):
        return np.zeros(0)
    end = min(float(one[-1]) for one in ranges)
    begin = max([LEAST_AXIS_SHARE * end, *(float(one[0]) for one in ranges)])
    return np.geomspace(begin, end, points) if 0 < begin < end else np.zeros(0)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a line of at most `width` bars. Each bar is the mean of some consecutive values; NaN is ignored."""
    known = [value for value in values if np.isfinite(value)]
    if not known:
        return ""
    means = [float(np.mean(part)) for part in np.array_split(known, min(width, len(known)))]
    low, high = min(means), max(means)
    scale = (len(SPARK_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARK_BARS[round((mean - low) * scale)] for mean in means)


def _held(peer: PeerHistory, column: Column, times: Floats) -> Floats:
    """Return a peer's last value at each of `times`, (times,); NaN before its first value and after its end."""
    t, value = np.asarray(column.t), np.asarray(column.value)
    at = np.searchsorted(t, times, side="right") - 1
    ended: Seconds = peer.last
    return np.where((at >= 0) & (times <= ended), value[np.maximum(at, 0)], np.nan)
