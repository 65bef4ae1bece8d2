"""Answers the CollectRequests of others: our own report and sums, and what we have heard from other members.

A question for what is not there yet waits for it, up to the patience that it names.
"""

from dataclasses import dataclass, field

from decentral.comm.rounds.round_state import Round, own_fragments
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import CollectRequest, Refused
from decentral.comm.wire.transport import Reply
from decentral.core.ids import PeerId
from decentral.core.jobs import WindowClosed
from decentral.core.machine import Effect
from decentral.core.reasons import Reason
from decentral.core.units import Seconds

MAX_WAITING_COLLECTS = 256


@dataclass(frozen=True, slots=True)
class WaitingCollect:
    """A question that may wait for its answer `until` then."""

    request: int
    sender: PeerId
    collect: CollectRequest
    until: Seconds


@dataclass(slots=True)
class CollectAnswers:
    waiting: list[WaitingCollect] = field(default_factory=list)

    def add(self, request: int, sender: PeerId, collect: CollectRequest, now: Seconds) -> None:
        self.waiting.append(WaitingCollect(request, sender, collect, now + collect.patience_s))

    def answer(self, now_in: Round | None, before: Round | None, now: Seconds) -> list[Effect]:
        """Replies to each question that has an answer or can wait no longer. `before` is the round before `now_in`."""
        waiting, self.waiting = self.waiting, []
        effects: list[Effect] = []
        for one in waiting:
            answer = answer_to(one.sender, one.collect, now_in, before)
            if answer is None and now < one.until and len(self.waiting) < MAX_WAITING_COLLECTS:
                self.waiting.append(one)
                continue
            nothing = Refused(Reason.NOTHING_NEWER, str(now_in.number if now_in else 0))
            effects.append(Reply(one.request, answer or Envelope(nothing)))
        return effects


def answer_to(sender: PeerId, collect: CollectRequest, now_in: Round | None, before: Round | None) -> Envelope | None:
    """None: there is no answer yet."""
    if now_in is None:
        return Envelope(Refused(Reason.GONE))
    if collect.round > now_in.number:
        return None
    round = now_in if collect.round == now_in.number else before
    if round is None or round.number != collect.round:
        return Envelope(Refused(Reason.LATE))
    if collect.member and sender not in round.peers:
        return Envelope(Refused(Reason.EXPELLED))
    if collect.origin == round.stage.peer:
        return _own_answer(round, collect.fragment)
    answer = round.collection.answer_for(PeerId(collect.origin), collect.fragment)
    return Envelope(Refused(Reason.WITHOUT)) if answer is None and round is before else answer


def _own_answer(round: Round, fragment: int | None) -> Envelope | None:
    if not round.acting:
        return Envelope(Refused(Reason.GONE))  # we acted in this round before we restarted, and know nothing of it
    if fragment is None:
        return Envelope(round.report) if round.report else None
    if fragment not in {cut.index for cut in own_fragments(round.stage)}:
        return Envelope(Refused(Reason.FRAGMENT))
    if round.sums is None:
        return None
    return round.sums.get(fragment) or round.sum_message(WindowClosed(fragment, round.number, 0, 0.0, (), b""))
