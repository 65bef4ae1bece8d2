"""A newcomer's start: it fetches the state of every fragment from several donors at once (peers/joining/fetch.py).

    WAITING --roster known--> FETCHING --all pieces here--> IMPORTING --StateImported--> DONE

A peer with a checkpoint that is ahead of its donors keeps its own state, and so does a whole swarm that starts again.
A peer without weights of its own asks its donors until one answers, however long they are silent: initial weights
beside a swarm that has trained would be worth nothing, and no other peer could tell.
The donors' side is peers/joining/donor.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from random import Random
from typing import Protocol

from decentral.comm.wire.transport import Answered, AskFailed, Effect, Event
from decentral.core.fragments import Fragment, Layout
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import ImportState, Start, StateImported
from decentral.core.journal.events import ErrorLine
from decentral.core.machine import Log, Woke
from decentral.core.units import Seconds
from decentral.peers.joining.fetch import Fetch, FetchTag, Incoming

ROSTER_S = 4.0  # longest wait for the roster
JOIN_RETRY_S = 2.0
MOST_PATIENT = 2  # how many JOIN_RETRY_S longer a newcomer waits between two tries, where all donors are busy
GIVE_UP_S = 12.0  # without a donor that answers, after which a peer goes on with its own weights, or says that it waits
CLOCK_TIMES, CLOCK_MORE = 2, 1000  # donors may be so far ahead of the roster's median step: records are not new
DONORS_COMPARED = 3  # so many donors, if there are, say which step they are at before we keep our own checkpoint
HOLDER_RETRIES = 5  # tries to find a fragment's holder again whose record has expired: after a pause all records have


class JoinPhase(Enum):
    WAITING = auto()
    FETCHING = auto()
    IMPORTING = auto()
    DONE = auto()


@dataclass(frozen=True, slots=True)
class JoinTag(FetchTag):
    """StateRequest of a newcomer."""


class JoinView(Protocol):
    """What a newcomer needs to know of the swarm; peers/runtime/peer_selection.py has it from the roster."""

    def donates(self, peer: PeerId, fragment: Fragment) -> bool:
        """Whether this peer may be asked for the fragment, by its record."""

    def newest_retained(self, fragment: int) -> tuple[int, Sequence[PeerId]]:
        """Return the step of the newest state of this fragment on other peers' disks, and the peers that have it."""

    def swarm_step(self) -> int | None:
        """Return the median step of the peers that train; None where too few are known."""


@dataclass(slots=True)
class Join:
    run: RunId
    fragments: Sequence[Fragment]
    layouts: Sequence[Layout]  # sections of each fragment's state
    contacts: tuple[PeerId, ...]  # peers that have answered our Hello
    own_step: int  # learning-rate step of our checkpoint; 0 without one
    restored: bool  # whether there is a checkpoint
    chance: Random
    view: JoinView = field(repr=False, compare=False)
    exact: bool = False  # whether all pieces of a fragment have to be of one version
    has_weights: bool = False  # whether this peer can train without a donor: from a checkpoint, or from before
    waits: str = ""  # why there are no weights yet, for the user; "": they come, or are here
    phase: JoinPhase = JoinPhase.WAITING
    imported: bool = False
    wake_at: Seconds | None = 0.0
    began_at: Seconds = 0.0
    fetch: Fetch = field(init=False)

    def __post_init__(self) -> None:
        self.fetch = Fetch(self.run, JoinTag, self.chance, self, self.exact)

    @property
    def has_state(self) -> bool:
        """Whether this peer's weights are worth keeping: its own, its donors', or those that it begins the run with."""
        return self.has_weights or self.phase is JoinPhase.DONE or not self.contacts

    def taken(self) -> dict[int, tuple[int, bytes]]:
        """Step and version of each fragment that came from donors."""
        return {index: (one.step, one.version) for index, one in self.fetch.incoming.items() if self.imported}

    def begin(self, now: Seconds) -> None:
        self.began_at = now
        self.wake_at = now + ROSTER_S if self.contacts else now
        self.fetch.begin(self._all_fragments(), now)

    def handle(self, event: Event, now: Seconds, live: Sequence[PeerId]) -> list[Effect]:
        """`live`: the peers that may be asked for a state."""
        match event:
            case Woke() if self.wake_at is not None and now >= self.wake_at:
                return self._find_donors(now, live)
            case Answered(tag=JoinTag()) | AskFailed(tag=JoinTag()) if self.phase is JoinPhase.FETCHING:
                return self._answered(event, now)
            case StateImported(accepted, reason) if self.phase is JoinPhase.IMPORTING:
                return self._finish("swarm") if accepted else self._start_over(reason, now)
        return []

    def roster_known(self, now: Seconds, live: Sequence[PeerId]) -> list[Effect]:
        """The DHT has been read for the first time: there is no need to wait longer."""
        if self.phase is not JoinPhase.WAITING or (self.contacts and not live):
            return []
        return self._find_donors(now, live)

    def _find_donors(self, now: Seconds, live: Sequence[PeerId]) -> list[Effect]:
        """Chooses donors and asks them; where there are none, starts from what is here."""
        known = sorted({*live, *self.contacts})
        self._prefer_retained(known)
        missing, said = self.fetch.missing(), list[Effect]()
        self.fetch.choose([peer for peer in known if any(self.can_donate(peer, one.fragment) for one in missing)])
        if not self.fetch.donors and (not known or now > self.fetch.last_piece_at + GIVE_UP_S):
            if not self._waits_for_silent_holders(known):
                self.fetch.keep_complete()
                return self._start_from_what_is_here()
            said = self._say_that_it_waits()
        if not self.fetch.donors:
            self.fetch.failures.clear()
        incoming = self.fetch.incoming.values()
        known_donor = any(self.can_donate(peer, one.fragment) for peer in known for one in incoming)
        if known and not live and not known_donor and not (self.has_weights and now >= self.began_at + GIVE_UP_S):
            self.wake_at = now + JOIN_RETRY_S  # contacts are there, but their records, with their spans, are not yet
            return said
        said += self._skip_fragments_without_holder(known)
        if self.fetch.complete:
            return said + self._start_from_what_is_here()
        self.phase, self.wake_at = JoinPhase.FETCHING, now + JOIN_RETRY_S * (1 + min(self.fetch.busy, MOST_PATIENT))
        return said + self.fetch.ask()

    def _waits_for_silent_holders(self, known: Sequence[PeerId]) -> bool:
        """Return whether this peer has no weights and a peer that is silent now may have them.

        Peers that say that they have none yet are not waited for: a whole swarm may be at its beginning.
        """
        silent = {peer for peer in (*known, *self.fetch.unready) if not self.fetch.unready.get(peer)}
        if self.has_weights or not silent:
            return False
        incoming = self.fetch.incoming.values()
        if any(self.can_donate(peer, one.fragment) for peer in silent for one in self.fetch.missing()):
            return True
        return any(one.had_holder for one in incoming) and not any(one.complete() for one in incoming)

    def _say_that_it_waits(self) -> list[Effect]:
        if self.waits:
            return []
        self.waits = "no peer has sent the run's weights yet; this peer keeps asking and does not train until one does"
        return [Log(ErrorLine(reason=self.waits))]

    def _prefer_retained(self, known: Sequence[PeerId]) -> None:
        """Fetches a retained state of fragments that nobody holds, unless our checkpoint has a newer one."""
        for index, one in self.fetch.incoming.items():
            if not one.pieces:
                held = any(self.view.donates(peer, one.fragment) for peer in known)
                one.fetch_retained(not held and self._should_fetch_retained(index))

    def _should_fetch_retained(self, fragment: int) -> bool:
        step, retainers = self.view.newest_retained(fragment)
        return bool(retainers) and (not self.restored or step > self.own_step)

    def _start_from_what_is_here(self) -> list[Effect]:
        return self._import() if self.fetch.incoming else self._finish("checkpoint" if self.restored else "alone")

    def can_donate(self, peer: PeerId, fragment: Fragment) -> bool:
        """Whether it holds the fragment, or, where we fetch a retained state, whether it has the newest one."""
        incoming = self.fetch.incoming.get(fragment.index)
        if incoming is None or not incoming.retained:
            return self.view.donates(peer, fragment)
        return peer in self.view.newest_retained(fragment.index)[1]

    def _skip_fragments_without_holder(self, known: Sequence[PeerId]) -> list[Effect]:
        """Fragments that no other peer holds keep our checkpoint's weights, or the initial ones.

        A holder that has gone before we had all of its fragment may come back, and a peer without a checkpoint waits.
        It waits for ever while it has no fragment at all; a part of them is of use to the others.
        """
        effects, some_are_here = list[Effect](), any(one.complete() for one in self.fetch.incoming.values())
        for index, one in list(self.fetch.incoming.items()):
            has_holder = any(self.can_donate(peer, one.fragment) for peer in known)
            one.looked_for_holder(has_holder)
            if has_holder:
                continue
            may_wait = one.had_holder and not self.has_weights
            if one.complete() or (may_wait and (one.holder_misses <= HOLDER_RETRIES or not some_are_here)):
                continue
            if may_wait:
                layers = f"layers {one.fragment.first} to {one.fragment.last - 1}"
                lost = "their last holder is gone, and with it what was trained in them"
                remedy = "to keep that, start a peer that has them first"
                reason = f"{layers} start from the run's initial weights: {lost}; {remedy}"
                effects.append(Log(ErrorLine(reason=reason)))
            del self.fetch.incoming[index]
        return effects

    def _answered(self, event: Answered | AskFailed, now: Seconds) -> list[Effect]:
        effects = self.fetch.handle(event, now)
        if self.fetch.last_piece_at == now:
            self.waits = ""
        if self.restored and self._swarm_is_behind():
            return self._finish("checkpoint")  # exchanges will reconcile the two
        return self._import() if self.fetch.complete else effects

    def _swarm_is_behind(self) -> bool:
        """Whether our checkpoint is ahead of the donors: of the lower median of a few, as one of them may name any."""
        enough = self.fetch.complete or len(self.fetch.steps) >= min(DONORS_COMPARED, len(self.fetch.donors))
        return bool(self.fetch.steps) and enough and self.fetch.step < self.own_step

    def _import(self) -> list[Effect]:
        if self.exact and self.fetch.fetch_again():
            return self.fetch.ask()
        self.phase, self.wake_at = JoinPhase.IMPORTING, None
        return [ImportState(self.fetch.donated(), self._first_step())]

    def _first_step(self) -> int:
        """The learning-rate step to begin with, by the donors, unless the records of the others contradict them."""
        known = None if self.exact else self.view.swarm_step()
        return self.fetch.step if known is None else min(self.fetch.step, CLOCK_TIMES * known + CLOCK_MORE)

    def _start_over(self, reason: str, now: Seconds) -> list[Effect]:
        """What the donors sent is no state of this model: the newcomer asks again, after a pause."""
        self.phase, self.wake_at = JoinPhase.WAITING, now + JOIN_RETRY_S
        self.fetch.failures.update(dict.fromkeys(self.fetch.used, 1))
        self.fetch.begin(self._all_fragments(), self.fetch.last_piece_at)
        return [Log(ErrorLine(reason=f"the donated state was refused: {reason}"))]

    def _all_fragments(self) -> list[Incoming]:
        return [Incoming(fragment, layout) for fragment, layout in zip(self.fragments, self.layouts, strict=True)]

    def _finish(self, source: str) -> list[Effect]:
        self.phase, self.wake_at, self.imported = JoinPhase.DONE, None, source == "swarm"
        return [Start(newcomer=source == "swarm" and not self.restored)]
