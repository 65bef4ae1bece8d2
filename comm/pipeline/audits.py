"""Audits of next peers' answers: another holder of the same layers recomputes unusual answers, and some at random.

    an answer comes --by chance, or if it is unusual--> ForwardRequest with the same activations to another peer
    it answers            --> compare both gradients
    the gradients agree   --> both answers were right
    the gradients differ  --> a third peer is asked; if two answers agree, the other answer was wrong (`Reputations`)
                              no two answers agree, or no peer is left to ask --> no peer is blamed

Start with `RouteAudits.gave_back`, which decides whether an answer is audited.

A peer cannot distinguish an audit from normal work. An answer is chosen for an audit only after it has come. The
requests to other peers name the micro-batch by its twin (`twin`): a number that its origin peer never uses, so only a
peer that has seen both numbers can recognise an audit. The executions of an audit are aborted.

An audit costs the passes through all later layers. An aborted execution costs its passes once more with exact
gradients, and else all of its gradient sum (comm/pipeline/ledger.py). Each micro-batch that a peer sends on adds
AUDIT_SHARE of this peer's own passes to its budget for audits, so the audits of all peers along a route cost that share
of its passes, however many peers there are. For a new peer or a liar the budget may be overdrawn by OPENING_AUDITS
requests, but by one for each OPENING_EVERY answers at most. Every right answer in a row halves the first of these
bounds, so that a peer that is trusted is audited only from what the budget holds. An audit that finds a wrong answer is
not charged, since liars could use up the budget under ever new names.

An answer is unusual if the loss or the norm of the gradient is far from those of earlier answers for the same layers
(`Usual`; the idea of SENTINEL, arXiv 2603.03592). It is audited at once, however much its peer is trusted.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from decentral.comm.pipeline.execution import NextHop, Sent, StageExecution
from decentral.comm.pipeline.forwarding import Forwarding
from decentral.comm.pipeline.next_peer import HOP_DEADLINE_FLOOR_S, NEWEST_WEIGHT, ROUTE_SLACK
from decentral.comm.pipeline.tags import AuditTag
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import MAX_ROUTE_S, BackwardResponse, ExecutionId, ForwardRequest
from decentral.comm.wire.transport import Answered, Ask, AskFailed, Effect
from decentral.core.ids import PeerId
from decentral.core.jobs import Compare, Compared, Likeness
from decentral.core.journal.events import AuditLine
from decentral.core.journal.field_kinds import Verdict
from decentral.core.machine import Log
from decentral.core.units import Seconds

AUDIT_SHARE = 0.003  # a micro-batch that a peer sends on adds this part of the peer's passes to its budget for audits
LEAST_OWN = 0.1  # a peer's passes count as at least this part of the model's, so that one with few layers audits, too
STEADY = 0.75  # this part of AUDIT_SHARE is for peers with many right answers, the rest for new peers and known liars
OPENING_AUDITS = 8  # the budget may be overdrawn by this many requests to audit a new peer's first answers
OPENING_EVERY = 8  # of these requests on credit, at most one is sent for this many answers
OPEN_AUDITS = 4  # at most this many audits run at a time: each keeps a micro-batch's activations in memory
MOST_ASKED = 6  # an audit asks at most this many peers, including the audited peer and peers that refuse as busy
OPINIONS = 3  # an audit needs at most this many answers: two that agree outvote the third
LEAST_BLAME = 0.25  # a wrong answer counts at least this much, even if its peer names many hops to share the blame with

# Two answers agree if they are within these limits. Honest replicas differ by less (docs/results/security.md).
LEAST_COSINE = 0.5  # the cosine of the two gradients must be at least this
MOST_RATIO = 2.0  # neither gradient's L2 norm may be more than this many times the other's
MOST_LOSS_RATIO = 1.5  # neither loss may be more than this many times the other
UNUSUAL_AUDITS = 4  # the budget may be overdrawn by this many more requests to audit unusual answers
UNUSUAL_AFTER = 8  # answers for the same layers, before one can be unusual


def twin(number: int) -> int:
    """Return the number by which audits name micro-batch `number`.

    Numbers form pairs (2k, 2k + 1). The origin peer takes one number of a pair at random, and never uses the other.
    """
    return number ^ 1


@dataclass(slots=True)
class Usual:
    """The usual size of a measured quantity: a running geometric mean, which one measurement changes little."""

    log: float = 0.0
    seen: int = 0

    def differs(self, number: float, most_ratio: float) -> bool:
        """Return whether a number is more than `most_ratio` times as large, or as small, as usual; count it, too."""
        if not 0 < number < math.inf:
            return self.seen >= UNUSUAL_AFTER
        limit, offset = math.log(most_ratio), math.log(number) - self.log
        far = self.seen >= UNUSUAL_AFTER and abs(offset) > limit
        bounded = max(-limit, min(limit, offset)) if self.seen else offset
        self.seen += 1
        self.log += max(NEWEST_WEIGHT, 1 / self.seen) * bounded
        return far


@dataclass(frozen=True, slots=True)
class Opinion:
    """One peer's answer in an audit: the gradient that the peer returned for the micro-batch."""

    peer: PeerId
    response: BackwardResponse
    blob: bytes

    def shares_hops(self, other: "Opinion") -> bool:
        """Return whether a peer took part in both answers: it is among the hops of both."""
        return bool({hop.peer for hop in self.response.hops} & {hop.peer for hop in other.response.hops})


@dataclass(slots=True, kw_only=True)
class Audit:
    """An audit in progress: other peers compute a micro-batch again, from layer `id.first` to the model's end."""

    local_id: int
    id: ExecutionId  # id under which the audit requests the execution (see `twin`)
    of: int  # number that the origin peer gave the micro-batch
    hop: NextHop
    cost: float  # of one request, in passes of a micro-batch through the whole model
    sequences: int
    patience_s: Seconds  # the time that the audited peer was given for its answer
    hold_s: Seconds  # the time for which the audited peer was asked to hold its gradients, for the origin's decision
    deadline_s: Seconds  # we wait at most this long for one peer, so that a silent peer does not block other audits
    age_s: Seconds  # how old the micro-batch was when this peer sent it to the audited peer
    opinions: list[Opinion]
    # Similarity of two opinions; the key is their indices in `opinions`.
    likeness: dict[tuple[int, int], Likeness] = field(default_factory=dict)
    costs: list[float] = field(default_factory=list)  # cost of each request that has not failed

    def agree(self, one: int, other: int) -> bool:
        """Return whether two opinions are as similar as the answers of honest replicas; `one` is the lower index."""
        found = self.likeness[one, other]
        losses = [self.opinions[at].response.loss for at in (one, other)]
        return (
            found.cosine >= LEAST_COSINE
            and 1 / MOST_RATIO <= found.ratio <= MOST_RATIO
            and max(losses) <= MOST_LOSS_RATIO * min(losses)
        )

    def alone(self) -> int | None:
        """Return the index of the opinion that differs from two agreeing opinions; None if there is no such opinion.

        Two opinions do not count as agreeing if their routes have a peer in common.
        """
        for one, two, other in ((0, 1, 2), (0, 2, 1), (1, 2, 0)):
            against = not any(self.agree(min(each, other), max(each, other)) for each in (one, two))
            if against and self.agree(one, two) and not self.opinions[one].shares_hops(self.opinions[two]):
                return other
        return None


@dataclass(slots=True)
class RouteAudits:
    """Chooses answers of next peers to audit, asks other peers to recompute them, and judges the opinions."""

    forwarding: Forwarding
    chance: Random | None  # secret, so that no peer can predict which of its answers is audited; None: no audits
    answers: int = 0  # number of gradients that came back
    owed: float = 0.0  # cost of audits, in passes through the whole model, that the budget has not covered yet
    open: dict[int, Audit] = field(default_factory=dict)
    _in_sum: float = field(init=False)  # average number of micro-batches in a gradient sum; an abort may drop them all
    # For each first layer of next peers: the usual loss of a token, and the usual norm of a gradient.
    _usual: dict[int, tuple[Usual, Usual]] = field(default_factory=dict)
    _ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        """Estimate the size of gradient sums from the stage's config, until the first sums are complete."""
        self._in_sum = self.forwarding.stage.micro_batches_per_step + 1.0

    @property
    def times(self) -> float:
        """Return how many times an audit costs the passes that it repeats: once, and once more for its abort.

        An abort takes the gradient out of its sum by computing it again, or else drops the whole sum.
        """
        return 2.0 if self.forwarding.stage.undoes else 1.0 + self._in_sum

    def price(self, first: int, last: int) -> tuple[float, float]:
        """Return what an answer adds to the budget and what its audit costs, in passes through the whole model.

        Args:
            first: The first layer of this peer's execution.
            last: The first layer of the next peer's execution.
        """
        load = self.forwarding.load
        allowed = AUDIT_SHARE * max(LEAST_OWN, load.share(first, last))
        return allowed, self.times * load.share(last, load.stage.layers)

    def sum_complete(self, micro_batches: int) -> None:
        """Update the average number of micro-batches in a gradient sum: a sum of `micro_batches` is complete."""
        self._in_sum += NEWEST_WEIGHT * (micro_batches - self._in_sum)

    def gave_back(self, execution: StageExecution, given_norm: float | None, now: Seconds) -> list[Effect]:
        """Audit a next peer's answer if it is unusual, or by chance, as the peer's reputation and the budget allow.

        The caller must pass every gradient after its backward pass, since each gradient adds to the budget.

        Args:
            execution: The execution that got the gradient.
            given_norm: L2 norm of the gradient; None if it was not measured.
            now: Present time.

        Returns:
            The request to another peer; no effects if the answer is not audited.
        """
        hop, id, chance, known = execution.sent, execution.next_id, self.chance, self.forwarding
        assert isinstance(hop.place, Sent)
        assert hop.response is not None
        peer, sent_at, unusual = hop.place.to, hop.place.at, self._is_unusual(execution, hop.response, given_norm)
        allowed, cost = self.price(execution.id.first, execution.last)
        self.answers += 1
        self.owed = max(0.0, self.owed - allowed)
        if chance is None or known.stage.synchronous or len(self.open) >= OPEN_AUDITS:
            return []
        interval, seldom = known.trust.interval(peer), cost / (STEADY * allowed)
        credit = min(OPENING_AUDITS - 1, self.answers // OPENING_EVERY) // interval + UNUSUAL_AUDITS * unusual
        often = 1.0 if unusual else 1 / max(1.0, min(seldom, interval))
        if self.owed > credit * cost or chance.random() >= often:
            return []
        audit = Audit(
            local_id=next(self._ids),
            id=ExecutionId(id.origin, twin(id.number), id.first),
            of=id.number,
            hop=NextHop(hop.tokens, hop.layout, hop.payload, hop.gradients, tried=[peer]),
            cost=cost,
            sequences=execution.sequences,
            patience_s=min(MAX_ROUTE_S, execution.deadline() - sent_at),
            hold_s=min(MAX_ROUTE_S, execution.until - sent_at),
            deadline_s=max(HOP_DEADLINE_FLOOR_S, ROUTE_SLACK * hop.took_s),
            age_s=sent_at - execution.drawn,
            opinions=[Opinion(peer, hop.response, hop.gradient)],
        )
        return self._ask(audit, now, chance)

    def _is_unusual(self, execution: StageExecution, response: BackwardResponse, given_norm: float | None) -> bool:
        """Return whether an answer's loss or gradient differs from earlier answers for the same layers."""
        tokens = max(1, execution.sent.tokens)
        loss, norm = self._usual.setdefault(execution.last, (Usual(), Usual()))
        found = loss.differs(response.loss / tokens, MOST_LOSS_RATIO)
        if given_norm is not None:
            found |= norm.differs(given_norm / math.sqrt(tokens), MOST_RATIO)
        return found

    def _ask(self, audit: Audit, now: Seconds, chance: Random) -> list[Effect]:
        """Ask one more random peer, or end the audit if no peer is left to ask.

        Peers on the routes of earlier opinions are asked last, as their opinions are not independent.
        """
        hop, id, known = audit.hop, audit.id, self.forwarding
        holders = [peer for peer in known.view.successors(id.first) if known.trust.weight(peer, now) > 0]
        others = [peer for peer in holders if peer not in hop.tried and peer != id.origin]
        heard = {one.peer for opinion in audit.opinions for one in opinion.response.hops}
        new = [peer for peer in others if peer not in heard] or others
        if not new or len(hop.tried) >= MOST_ASKED:
            return self._end(audit, "undecided" if len(audit.opinions) > 1 else None, now)
        to = chance.choice(new)
        hop.send(Sent(to, now, math.inf, math.inf))
        self.open[audit.local_id] = audit
        audit.costs.append(audit.cost)
        self.owed += audit.costs[-1]
        run, sequences, drawn = known.stage.run, audit.sequences, max(0.0, now - audit.age_s)
        request = ForwardRequest(
            run, id.origin, id.number, id.first, sequences, audit.patience_s, audit.hold_s, hop.layout, drawn=drawn
        )
        tag = AuditTag(audit.local_id, hop.attempts)
        patience_s = min(audit.patience_s, audit.deadline_s)
        return [Ask(tag, to, Envelope(request, hop.payload), patience_s, hop.most_bytes)]

    def answered(self, event: Answered | AskFailed, now: Seconds) -> list[Effect]:
        """Handle the outcome of an audit request: compare the new opinion, or ask another peer if no opinion came."""
        assert isinstance(event.tag, AuditTag)
        audit = self.open.get(event.tag.local_id)
        if audit is None or audit.hop.to != event.peer or audit.hop.attempts != event.tag.attempt:
            return []
        audit.hop.pause(now)
        self.forwarding.table.commits.abort(event.peer, audit.id)
        if isinstance(event, Answered) and isinstance(response := event.envelope.message, BackwardResponse):
            blob = event.envelope.blob
            if self.forwarding.fits(audit.hop, audit.id.first, event.peer, response, blob):
                audit.opinions.append(Opinion(event.peer, response, blob))
                gradients = tuple((one.response.layout, one.blob) for one in audit.opinions)
                return [Compare(audit.local_id, audit.sequences, audit.id.first, gradients)]
        self.owed -= audit.costs.pop()  # a request that brought no opinion is not charged to the budget
        return self._ask(audit, now, self._drawing)

    def compared(self, event: Compared, now: Seconds) -> list[Effect]:
        """Judge an audit after its newest opinion was compared with each earlier one, or ask for a third opinion."""
        audit = self.open[event.local_id]
        newest = len(audit.opinions) - 1
        audit.likeness |= {(earlier, newest): found for earlier, found in enumerate(event.likeness)}
        if newest == 1 and audit.agree(0, 1):
            for opinion in audit.opinions:
                self.forwarding.trust.was_right(opinion.peer)
            return self._end(audit, "agreed", now)
        if newest + 1 < OPINIONS:
            return self._ask(audit, now, self._drawing)
        alone = audit.alone()
        if alone is None:
            return self._end(audit, "undecided", now)
        for at, opinion in enumerate(audit.opinions):
            if at == alone:
                self.forwarding.trust.was_wrong(opinion.peer, max(LEAST_BLAME, 1 / len(opinion.response.hops)), now)
            else:
                self.forwarding.trust.was_right(opinion.peer)
        self.owed -= sum(audit.costs)  # do not charge this audit, or one liar with many names could use up the budget
        return self._end(audit, "wrong", now, audit.opinions[alone].peer)

    @property
    def _drawing(self) -> Random:
        assert self.chance is not None, "audits begin only where there is a source of chance"
        return self.chance

    def _end(self, audit: Audit, verdict: Verdict | None, now: Seconds, wrong: PeerId | None = None) -> list[Effect]:
        """Close an audit, and log its verdict unless it is None; `wrong` is the peer that gave the wrong answer."""
        self.open.pop(audit.local_id, None)
        if verdict is None:
            return []
        line = AuditLine(
            verdict=verdict,
            wrong=wrong,
            left=None if wrong is None else round(self.forwarding.trust.weight(wrong, now), 3),
            of=(audit.id.origin, audit.of, audit.id.first),
            peers=tuple(opinion.peer for opinion in audit.opinions),
            cosine=tuple(round(found.cosine, 4) for found in audit.likeness.values()),
            ratio=tuple(round(found.ratio, 4) for found in audit.likeness.values()),
            loss=tuple(round(opinion.response.loss / audit.hop.tokens, 4) for opinion in audit.opinions),
        )
        return [Log(line)]
