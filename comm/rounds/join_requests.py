"""Choose the newcomers that this peer's report admits to the next round: first come, first served.

Start at `JoinRequests`. All members wait for each member's report. So an admitted newcomer that never reports delays
the round until the other members give it up. Therefore only a newcomer that has published its peer record is admitted.
A newcomer that was admitted and did not report must wait before it is admitted again, each time twice as long. An
attacker can use many peer ids. So after such a round, all newcomers that have never reported must wait
COMMON_REST_TIMES times as long as the round took. With this rule an attacker delays the members for at most a fixed
share of the time, however many peer ids it uses.
"""

from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass, field

from decentral.comm.wire.messages import RoundMember
from decentral.comm.wire.transport import Knows, knows_all
from decentral.core.ids import PeerId
from decentral.core.latest import keep_latest
from decentral.core.units import Seconds

LET_IN_EACH = 4  # one member's report admits at most this many newcomers to the next round
MAX_WAITING_NEWCOMERS = 64  # while this many newcomers wait to be admitted, requests of further newcomers are ignored
WAITING_STRANGERS = 16  # at most this many waiting newcomers may be peers whose DHT record has not been read yet
STILL_ASKS_S = 15.0  # a waiting newcomer that has not repeated its request for this many seconds is dropped
# A newcomer that was admitted but does not report must wait: FIRST_REST_S at first, then twice as long each time, up to
# LONGEST_REST_S.
FIRST_REST_S, LONGEST_REST_S = 10.0, 600.0
# After an admitted newcomer fails to report, no peer that has never reported is admitted for this many times the length
# of that round.
COMMON_REST_TIMES = 4
LONGEST_COMMON_REST_S = 120.0  # peers that have never reported must wait for at most this long after such a round
MOST_REMEMBERED = 1024  # we store the waits of this many newcomers, and the ids of this many peers that have reported


@dataclass(slots=True)
class JoinRequests:
    """The queue of newcomers that ask to become members, and how long newcomers that did not report must wait."""

    knows: Knows = knows_all  # returns whether a peer's record in the DHT has been read
    waiting: dict[PeerId, RoundMember] = field(default_factory=dict)
    round_began: Seconds = 0.0
    _asked_at: dict[PeerId, Seconds] = field(default_factory=dict)
    _rests: dict[PeerId, tuple[Seconds, Seconds]] = field(default_factory=dict)  # newcomer -> its wait: (end, length)
    _reported: dict[PeerId, bool] = field(default_factory=dict)  # the keys are the peers that have ever reported
    _common_rest_until: Seconds = 0.0  # before this time, peers that have never reported are not admitted

    @property
    def next_at(self) -> Seconds | None:
        """Return when the first of the waiting newcomers may be admitted; None if none of them has a peer record."""
        return min(map(self._ready_at, filter(self.knows, self.waiting)), default=None)

    def round_begins(self, peers: Container[PeerId], now: Seconds) -> None:
        """Record that a round with the members `peers` begins at `now`; these peers no longer wait as newcomers."""
        self._keep(peer for peer in self.waiting if peer not in peers)
        self.round_began = now

    def ask(self, member: RoundMember, now: Seconds) -> None:
        """Add the newcomer `member` to the queue; a newcomer that is already in the queue keeps its place.

        A request is ignored if MAX_WAITING_NEWCOMERS wait. A request of a newcomer whose peer record has not arrived
        yet is also ignored if WAITING_STRANGERS such newcomers wait.
        """
        peer = PeerId(member.peer)
        self._forget_silent(now)
        strangers = sum(not self.knows(one) for one in self.waiting)
        room = len(self.waiting) < MAX_WAITING_NEWCOMERS and (self.knows(peer) or strangers < WAITING_STRANGERS)
        if room or peer in self.waiting:
            self.waiting[peer], self._asked_at[peer] = member, now

    def to_let_in(self, now: Seconds) -> tuple[RoundMember, ...]:
        """Return the newcomers that a report written at `now` admits: the first LET_IN_EACH that may join."""
        self._forget_silent(now)
        ready = [one for peer, one in self.waiting.items() if self.knows(peer) and self._ready_at(peer) <= now]
        return tuple(ready[:LET_IN_EACH])

    def round_over(self, let_in: Iterable[PeerId], reported: Collection[PeerId], now: Seconds) -> None:
        """Record the end of a round: impose a wait on admitted newcomers that did not report.

        Args:
            let_in: The newcomers that were admitted to this round.
            reported: Members whose reports this peer has. If any of them still has to wait, its wait is cancelled.
            now: The time.
        """
        for peer in reported:
            keep_latest(self._reported, peer, True, MOST_REMEMBERED)
            self._rests.pop(peer, None)
        for peer in (one for one in let_in if one not in reported):
            _, before_s = self._rests.get(peer, (0.0, FIRST_REST_S / 2))
            rest_s = min(2 * before_s, LONGEST_REST_S)
            keep_latest(self._rests, peer, (now + rest_s, rest_s), MOST_REMEMBERED)
            if peer not in self._reported:
                common_s = min(COMMON_REST_TIMES * (now - self.round_began), LONGEST_COMMON_REST_S)
                self._common_rest_until = max(self._common_rest_until, now + common_s)

    def _ready_at(self, peer: PeerId) -> Seconds:
        until, _ = self._rests.get(peer, (0.0, 0.0))
        return until if peer in self._reported else max(until, self._common_rest_until)

    def _forget_silent(self, now: Seconds) -> None:
        self._keep(peer for peer in self.waiting if now <= self._asked_at[peer] + STILL_ASKS_S)

    def _keep(self, peers: Iterable[PeerId]) -> None:
        self.waiting = {peer: self.waiting[peer] for peer in peers}
        self._asked_at = {peer: self._asked_at[peer] for peer in self.waiting}
