"""Compute totals and means of the whole swarm: tokens, speed, loss, exchanges, traffic, and how time is spent."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from statistics import median, quantiles

from decentral.core.journal.field_kinds import OUTCOMES
from decentral.core.strict_json import JsonObject
from decentral.core.time_spent import KINDS
from decentral.core.units import Seconds
from decentral.view.page.peer_view import REASONS_SHOWN, PageState, PeerView

TOTAL_SERIES = {"tokens", "step", "live"}  # names of series whose timeline buckets contain the last value, not the mean
TREND_S = 60.0  # `Totals.trend` is the change of the median loss over this time


@dataclass(slots=True)
class Totals:
    """Totals and means of the whole swarm at one time, and the earlier losses that the next trend needs."""

    live: int = 0
    training: int = 0
    gone: int = 0
    tokens: int = 0
    step: int = 0  # highest step that any peer has reached
    tokens_per_s: float = 0.0
    loss: float | None = None  # median of the peers' training losses
    low: float | None = None  # 10th percentile of the peers' training losses
    high: float | None = None  # 90th percentile of the peers' training losses
    held_out: float | None = None
    evaluated: Seconds = 0.0  # when `held_out` was measured; 0.0: not known
    trend: float | None = None  # change of the median loss in the last TREND_S; -0.02: a fall of 2%; None: not known
    exchanges: list[int] = field(default_factory=lambda: [0] * len(OUTCOMES))
    reasons: dict[str, int] = field(default_factory=dict)
    shares: list[float] = field(default_factory=list)  # for each of KINDS: mean share of the training threads' time
    sent_bytes: int = 0
    received_bytes: int = 0
    forgotten_tokens: int = 0
    _losses: list[tuple[Seconds, float]] = field(default_factory=list)

    def forget(self, view: PeerView) -> None:
        """Add the tokens of a peer that is removed from the view to `forgotten_tokens`."""
        self.forgotten_tokens += view.totals.tokens

    def series(self) -> dict[str, float]:
        """Return, by name, the values that the timeline shows, without losses that are not known."""
        known = {"tokens": self.tokens, "step": self.step, "tokens_per_s": self.tokens_per_s, "live": self.live}
        losses = {"median": self.loss, "low": self.low, "high": self.high}
        return known | {name: value for name, value in losses.items() if value is not None}

    def to_json(self) -> JsonObject:
        """Return the fields as JSON, rounded to 4 decimals."""
        found = asdict(self)
        del found["_losses"]
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}


def totals_of(peers: Iterable[PeerView], before: Totals, now: Seconds) -> Totals:
    """Return the totals over all peers.

    Args:
        peers: All peers of the view.
        before: The totals of the last call, for the trend of the loss and the tokens of peers removed from the view.
        now: Unix time of the swarm's clock.
    """
    known = list(peers)
    live = [view for view in known if view.live]
    training = [view for view in live if view.state is PageState.TRAINING]
    judged = training or known  # once no peer trains, the last values of all peers are shown
    losses = sorted(view.progress.loss for view in judged if view.progress.loss is not None)
    known_losses = [view.progress for view in judged if view.progress.held_out is not None]
    evaluated = max(known_losses, key=lambda progress: progress.evaluated, default=None)
    outcomes, reasons = Counter[str](), Counter[str]()
    for view in known:
        outcomes.update(view.work.exchanges.outcomes)
        reasons.update(view.work.exchanges.reasons)
    middle = median(losses) if losses else None
    kept = [(t, loss) for t, loss in before._losses if t > now - TREND_S] + (
        [(now, middle)] if middle and training else []
    )
    tenths = quantiles(losses, n=10, method="inclusive") if len(losses) > 1 else [middle, middle]
    return Totals(
        live=len(live),
        training=len(training),
        gone=len(known) - len(live),
        tokens=before.forgotten_tokens + sum(view.totals.tokens for view in known),
        step=max((view.work.step for view in known), default=0),
        tokens_per_s=round(sum(view.progress.tokens_per_s for view in training), 1),
        loss=middle,
        low=tenths[0],
        high=tenths[-1],
        held_out=evaluated.held_out if evaluated else None,
        evaluated=evaluated.evaluated if evaluated else 0.0,
        trend=kept[-1][1] / kept[0][1] - 1 if kept and kept[-1][0] > kept[0][0] + TREND_S / 3 else None,
        exchanges=[outcomes[outcome] for outcome in OUTCOMES],
        reasons=dict(reasons.most_common(2 * REASONS_SHOWN)),
        shares=_shares(judged),
        sent_bytes=sum(view.work.sent_bytes for view in known),
        received_bytes=sum(view.work.received_bytes for view in known),
        forgotten_tokens=before.forgotten_tokens,
        _losses=kept,
    )


def _shares(peers: Iterable[PeerView]) -> list[float]:
    known = [view.work.spent.shares() for view in peers if view.work.spent.total]
    return [round(sum(shares[kind] for shares in known) / len(known), 4) for kind in KINDS] if known else []
