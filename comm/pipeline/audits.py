"""Audits by recomputation: now and then another holder of the same layers computes again what a peer gave back.

    an answer comes --by chance--> ForwardRequest with the same activations to another peer --> the two are compared
    they agree   --> both were right
    they do not  --> a third peer is asked; who is alone against two that agree was wrong (comm/pipeline/next_peer.py)
                     nobody is left to ask, or no two agree --> nobody is blamed

For those who are asked, an audit is a ForwardRequest like any other. The audited peer had computed before anybody drew
its answer; and the request to the others names the micro-batch's twin (`twin`), a number that its origin peer never
gives out, and that only those tell from a number of its own who have seen both. Its gradients are aborted.

What that costs: the passes through the layers behind this peer, and the sums that the aborted executions are in. Of
what it sends on, a peer spends AUDIT_SHARE on audits, and OPENING_AUDITS of them once: a new peer's first answers are
audited one by one, and as long as they are right, ever fewer of the later ones. Audits that find a wrong answer cost
nothing of that: each saves more than it takes, and there is no end of names for liars.
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

AUDIT_SHARE = 0.01  # of the micro-batches that are sent on, what audits may cost, the sums that they spoil included
STEADY = 0.5  # of that, what peers without a wrong answer are audited for; the rest is left for those with one
OPENING_AUDITS = 8  # requests of audits that are paid for later
OPEN_AUDITS = 4  # audits at a time: each keeps a micro-batch's activations
MOST_ASKED = 6  # peers that are asked in one audit, those that were busy included
OPINIONS = 3
LEAST_BLAME = 0.25  # of a wrong answer, however many hops its peer names: they may be made up

# What honest replicas' answers differ by, and a margin: docs/results/security.md has the measurements.
LEAST_COSINE = 0.5
MOST_RATIO = 2.0  # of two gradients' lengths
MOST_LOSS_RATIO = 1.5


def twin(number: int) -> int:
    """The number that names a micro-batch's audits. Each origin peer uses one number of each pair, by chance."""
    return number ^ 1


@dataclass(frozen=True, slots=True)
class Opinion:
    """What one peer says the micro-batch's gradient is."""

    peer: PeerId
    response: BackwardResponse
    blob: bytes

    def shares_hops(self, other: "Opinion") -> bool:
        """Whether some peer was on both routes, by what the two say."""
        return bool({hop.peer for hop in self.response.hops} & {hop.peer for hop in other.response.hops})


@dataclass(slots=True, kw_only=True)
class Audit:
    """One micro-batch that is computed again from layer `id.first` on."""

    token: int
    id: ExecutionId  # that of the request to the others
    of: int  # the micro-batch's own number
    hop: NextHop  # what was sent on, and who was asked
    sequences: int
    patience_s: Seconds
    hold_s: Seconds
    deadline_s: Seconds  # after which another peer is asked: whoever never answers must not keep audits from others
    age_s: Seconds  # of the micro-batch when it was sent on
    opinions: list[Opinion]
    likeness: dict[tuple[int, int], Likeness] = field(default_factory=dict)  # of pairs of opinions
    costs: list[float] = field(default_factory=list)  # of those that were asked and took part, in micro-batches

    def agree(self, one: int, other: int) -> bool:
        """Whether two opinions are as like as those of honest replicas."""
        found = self.likeness[one, other]
        losses = [self.opinions[at].response.loss for at in (one, other)]
        return (
            found.cosine >= LEAST_COSINE
            and 1 / MOST_RATIO <= found.ratio <= MOST_RATIO
            and max(losses) <= MOST_LOSS_RATIO * min(losses)
        )

    def alone(self) -> int | None:
        """Of three opinions, the one that is against two which agree, without a peer in common."""
        for one, two, other in ((0, 1, 2), (0, 2, 1), (1, 2, 0)):
            against = not any(self.agree(min(each, other), max(each, other)) for each in (one, two))
            if against and self.agree(one, two) and not self.opinions[one].shares_hops(self.opinions[two]):
                return other
        return None


@dataclass(slots=True)
class RouteAudits:
    """`chance` must be secret, so that no peer can tell which of its answers is audited; None: none is."""

    forwarding: Forwarding
    chance: Random | None
    owed: float = 0.0  # micro-batches that audits have cost beyond their share
    open: dict[int, Audit] = field(default_factory=dict)
    _in_sum: float = field(
        init=False
    )  # micro-batches in a sum here, running average: as many are lost with an aborted one
    _tokens: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self._in_sum = self.forwarding.stage.micro_batches_per_step + 1.0

    @property
    def cost(self) -> float:
        """Of asking one more peer, in micro-batches."""
        return 1.0 + self._in_sum

    def stepped(self, micro_batches: int) -> None:
        """A sum of so many micro-batches was sealed here."""
        self._in_sum += NEWEST_WEIGHT * (micro_batches - self._in_sum)

    def gave_back(self, execution: StageExecution, event: Answered, now: Seconds) -> list[Effect]:
        """The next peer has answered with what may be the gradient. By chance it is audited."""
        self.owed = max(0.0, self.owed - AUDIT_SHARE)
        response, chance = event.envelope.message, self.chance
        assert isinstance(response, BackwardResponse)
        if chance is None or self.forwarding.stage.synchronous or len(self.open) >= OPEN_AUDITS:
            return []
        seldom = self.cost / (AUDIT_SHARE * STEADY)
        if (
            self.owed > (OPENING_AUDITS - 1) * self.cost
            or chance.random() * min(seldom, self.forwarding.trust.interval(event.peer)) >= 1
        ):
            return []
        hop, sent_at, id = execution.sent, now - event.seconds, execution.next_id
        audit = Audit(
            token=next(self._tokens),
            id=ExecutionId(id.origin, twin(id.number), id.first),
            of=id.number,
            hop=NextHop(hop.tokens, hop.layout, hop.payload, hop.gradients, tried=[event.peer]),
            sequences=execution.sequences,
            patience_s=min(MAX_ROUTE_S, execution.deadline() - sent_at),
            hold_s=min(MAX_ROUTE_S, execution.until - sent_at),
            deadline_s=max(HOP_DEADLINE_FLOOR_S, ROUTE_SLACK * event.seconds),
            age_s=sent_at - execution.drawn,
            opinions=[Opinion(event.peer, response, event.envelope.blob)],
        )
        return self._ask(audit, now, chance)

    def _ask(self, audit: Audit, now: Seconds, chance: Random) -> list[Effect]:
        """Asks one more peer, whichever; those on the routes so far come last, as their opinions are not new ones."""
        hop, id, known = audit.hop, audit.id, self.forwarding
        holders = [peer for peer in known.view.successors(id.first) if known.trust.weight(peer, now) > 0]
        others = [peer for peer in holders if peer not in hop.tried and peer != id.origin]
        heard = {one.peer for opinion in audit.opinions for one in opinion.response.hops}
        new = [peer for peer in others if peer not in heard] or others
        if not new or len(hop.tried) >= MOST_ASKED:
            return self._end(audit, "undecided" if len(audit.opinions) > 1 else None, now)
        to = chance.choice(new)
        hop.send(Sent(to, now, math.inf, math.inf))
        self.open[audit.token] = audit
        audit.costs.append(self.cost)
        self.owed += audit.costs[-1]
        run, sequences, drawn = known.stage.run, audit.sequences, max(0.0, now - audit.age_s)
        request = ForwardRequest(
            run, id.origin, id.number, id.first, sequences, audit.patience_s, audit.hold_s, hop.layout, drawn=drawn
        )
        tag = AuditTag(audit.token, hop.attempts)
        patience_s = min(audit.patience_s, audit.deadline_s)
        return [Ask(tag, to, Envelope(request, hop.payload), patience_s, hop.most_bytes)]

    def answered(self, event: Answered | AskFailed, now: Seconds) -> list[Effect]:
        """A peer that was asked in an audit has answered, or has not."""
        assert isinstance(event.tag, AuditTag)
        audit = self.open.get(event.tag.token)
        if audit is None or audit.hop.to != event.peer or audit.hop.attempts != event.tag.attempt:
            return []
        audit.hop.pause(now)
        self.forwarding.table.commits.abort(event.peer, audit.id)
        if isinstance(event, Answered) and isinstance(response := event.envelope.message, BackwardResponse):
            blob = event.envelope.blob
            if self.forwarding.fits(audit.hop, audit.id.first, event.peer, response, blob):
                audit.opinions.append(Opinion(event.peer, response, blob))
                gradients = tuple((one.response.layout, one.blob) for one in audit.opinions)
                return [Compare(audit.token, audit.sequences, audit.id.first, gradients)]
        self.owed -= audit.costs.pop()  # it took no part
        return self._ask(audit, now, self._drawing)

    def compared(self, event: Compared, now: Seconds) -> list[Effect]:
        """The newest opinion was compared with each one before."""
        audit = self.open[event.token]
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
        self.owed -= sum(audit.costs)  # else a liar uses up the audits of all the names that it takes after this one
        return self._end(audit, "wrong", now, audit.opinions[alone].peer)

    @property
    def _drawing(self) -> Random:
        assert self.chance is not None, "an audit was begun by chance"
        return self.chance

    def _end(self, audit: Audit, verdict: Verdict | None, now: Seconds, wrong: PeerId | None = None) -> list[Effect]:
        """The journal's line, if anybody has answered. `wrong` is the peer that was alone."""
        self.open.pop(audit.token, None)
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
