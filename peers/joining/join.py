"""How a newcomer gets its state: it fetches every fragment from several donors at once. Start at `Join`.

    WAITING --roster known--> FETCHING --all pieces arrived--> IMPORTING --StateImported--> DONE

Pieces are requested by peers/joining/fetch.py and sent by peers/joining/donor.py. A peer whose checkpoint is ahead of
its donors' state keeps the checkpoint, as all peers do when a whole swarm restarts. A peer without a checkpoint
keeps asking until a donor answers. It does not start from initial weights, because gossip would mix them into the
trained weights of the other peers.
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
from decentral.core.journal.events import REPEAT_S, ErrorLine
from decentral.core.machine import Log, Woke
from decentral.core.units import Seconds
from decentral.peers.joining.fetch import Fetch, FetchTag, Incoming

ROSTER_S = 4.0  # a newcomer waits at most this long for other peers' records before it chooses donors
JOIN_RETRY_S = 2.0  # a newcomer without all pieces chooses donors again after this time
MOST_PATIENT = 2  # busy donors delay the next choice of donors by at most this many times JOIN_RETRY_S
GIVE_UP_S = 12.0  # a peer that gets no piece for this time starts from its own weights, or warns if it has no weights
CLOCK_TIMES, CLOCK_MORE = 2, 1000  # a newcomer's first learning-rate step is at most 2 * (median of other peers) + 1000
DONORS_COMPARED = 3  # a checkpoint's step is compared with the donors' steps once this many donors have answered
HOLDER_RETRIES = 5  # if a fragment's holders are lost, this many searches look for one: a suspended machine may return


class JoinPhase(Enum):
    """The phases of a join; the module's docstring shows the transitions."""

    WAITING = auto()
    FETCHING = auto()
    IMPORTING = auto()
    DONE = auto()


@dataclass(frozen=True, slots=True)
class JoinTag(FetchTag):
    """The tag of a newcomer's StateRequest; the node passes answers with this tag to `Join`."""


class JoinView(Protocol):
    """Interface through which a newcomer sees the swarm; peers/runtime/peer_selection.py implements it."""

    def donates(self, peer: PeerId, fragment: Fragment) -> bool:
        """Return whether this peer can send the fragment to a newcomer, according to the peer's record."""

    def newest_retained(self, fragment: int) -> tuple[int, Sequence[PeerId]]:
        """Return the learning-rate step of the fragment's newest state on other peers' disks, and the peers with it."""

    def swarm_step(self) -> int | None:
        """Return the median learning-rate step of the peers that train; None if too few are known."""


@dataclass(slots=True)
class Join:
    """The state machine that gets a newcomer's weights from donors, or starts the peer from its own weights."""

    run: RunId
    fragments: Sequence[Fragment]
    layouts: Sequence[Layout]
    contacts: tuple[PeerId, ...]  # peers that answered when this process started
    own_step: int  # learning-rate step of the own checkpoint; 0 without one
    restored: bool
    chance: Random
    view: JoinView = field(repr=False, compare=False)
    synchronous: bool = False  # if True, all pieces of a fragment must have one version
    has_weights: bool = False  # whether the peer can train without donors: it has a checkpoint, or joins again
    waits: str = ""  # what the user is told while this peer waits for the first piece from a donor; else ""
    phase: JoinPhase = JoinPhase.WAITING
    imported: bool = False
    wake_at: Seconds | None = 0.0
    began_at: Seconds = 0.0
    _waits_logged_at: Seconds = 0.0
    fetch: Fetch = field(init=False)

    def __post_init__(self) -> None:
        """Create `self.fetch`, the machine that requests pieces from donors."""
        self.fetch = Fetch(self.run, JoinTag, self.chance, self, self.synchronous)

    @property
    def has_state(self) -> bool:
        """Return whether the weights are worth saving; False while this peer waits for weights from donors."""
        return self.has_weights or self.phase is JoinPhase.DONE or not self.contacts

    def taken(self) -> dict[int, tuple[int, bytes]]:
        """Return the step and version of each fragment that was imported from donors; {} before an import."""
        return {index: (one.step, one.version) for index, one in self.fetch.incoming.items() if self.imported}

    def begin(self, now: Seconds) -> None:
        """Begin to join. With contacts, wait up to ROSTER_S for the first records; without contacts, do not wait."""
        self.began_at = now
        self.wake_at = now + ROSTER_S if self.contacts else now
        self.fetch.begin(self._all_fragments(), now)

    def handle(self, event: Event, now: Seconds, live: Sequence[PeerId]) -> list[Effect]:
        """Return the effects of a wake-up, a donor's answer, or the worker's result of the import; ignore other events.

        Args:
            event: What has happened.
            now: Present time.
            live: The reachable peers in the roster; donors are chosen among them and `contacts`.
        """
        match event:
            case Woke() if self.wake_at is not None and now >= self.wake_at:
                return self._find_donors(now, live)
            case Answered(tag=JoinTag()) | AskFailed(tag=JoinTag()) if self.phase is JoinPhase.FETCHING:
                return self._answered(event, now)
            case StateImported(accepted, reason) if self.phase is JoinPhase.IMPORTING:
                return self._finish("swarm") if accepted else self._start_over(reason, now)
        return []

    def roster_known(self, now: Seconds, live: Sequence[PeerId]) -> list[Effect]:
        """Choose donors, because the first records have been read; do nothing if the phase is not WAITING."""
        if self.phase is not JoinPhase.WAITING or (self.contacts and not live):
            return []
        return self._find_donors(now, live)

    def _find_donors(self, now: Seconds, live: Sequence[PeerId]) -> list[Effect]:
        """Choose donors and request pieces; if there is no donor, wait, or start from this peer's own weights."""
        known = sorted({*live, *self.contacts})
        self._prefer_retained(known)
        missing, said = self.fetch.missing(), list[Effect]()
        self.fetch.choose([peer for peer in known if any(self.can_donate(peer, one.fragment) for one in missing)])
        if not self.fetch.donors and (not known or now > self.fetch.last_piece_at + GIVE_UP_S):
            if not self._waits_for_silent_holders(known):
                self.fetch.keep_complete()
                return self._start_from_what_is_here()
            said = self._say_that_it_waits(now)
        if not self.fetch.donors:
            self.fetch.failures.clear()
        incoming = self.fetch.incoming.values()
        known_donor = any(self.can_donate(peer, one.fragment) for peer in known for one in incoming)
        if known and not live and not known_donor and not (self.has_weights and now >= self.began_at + GIVE_UP_S):
            self.wake_at = now + JOIN_RETRY_S  # wait, because without records of the contacts their layers are unknown
            return said
        said += self._skip_fragments_without_holder(known)
        if self.fetch.complete:
            return said + self._start_from_what_is_here()
        self.phase, self.wake_at = JoinPhase.FETCHING, now + JOIN_RETRY_S * (1 + min(self.fetch.busy, MOST_PATIENT))
        return said + self.fetch.ask()

    def _waits_for_silent_holders(self, known: Sequence[PeerId]) -> bool:
        """Return whether this peer has no weights, but a peer that has not answered yet may send them.

        A peer that answered NOT_READY does not count, since all peers of a new swarm may be starting together.
        """
        silent = {peer for peer in (*known, *self.fetch.unready) if not self.fetch.unready.get(peer)}
        if self.has_weights or not silent:
            return False
        incoming = self.fetch.incoming.values()
        if any(self.can_donate(peer, one.fragment) for peer in silent for one in self.fetch.missing()):
            return True
        return any(one.had_holder for one in incoming) and not any(one.complete() for one in incoming)

    def _say_that_it_waits(self, now: Seconds) -> list[Effect]:
        if self.waits and now < self._waits_logged_at + REPEAT_S:
            return []
        self._waits_logged_at = now
        self.waits = "no peer has sent the run's weights yet; this peer keeps asking and does not train until one does"
        return [Log(ErrorLine(reason=self.waits))]

    def _prefer_retained(self, known: Sequence[PeerId]) -> None:
        """If no peer holds a fragment, fetch its state from other peers' disks, unless our checkpoint is newer."""
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
        """Return whether a peer can send the fragment's state.

        If the state is fetched from disks of peers that do not hold the fragment, only the peers with its newest
        version can send it.
        """
        incoming = self.fetch.incoming.get(fragment.index)
        if incoming is None or not incoming.retained:
            return self.view.donates(peer, fragment)
        return peer in self.view.newest_retained(fragment.index)[1]

    def _skip_fragments_without_holder(self, known: Sequence[PeerId]) -> list[Effect]:
        """Stop fetching fragments that no other peer holds; they start from our checkpoint or from initial weights.

        A holder that was lost before it had sent the whole fragment may return. So a peer without weights gives up the
        fragment only after HOLDER_RETRIES searches, and only if another fragment is complete.
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
                lost = "their last holder is gone, and its training of these layers is lost"
                remedy = "to keep that training, start a peer whose checkpoint has these layers before this one"
                reason = f"{layers} start from the run's initial weights: {lost}; {remedy}"
                effects.append(Log(ErrorLine(reason=reason)))
            del self.fetch.incoming[index]
        return effects

    def _answered(self, event: Answered | AskFailed, now: Seconds) -> list[Effect]:
        effects = self.fetch.handle(event, now)
        if self.fetch.last_piece_at == now:
            self.waits = ""
        if self.restored and self._swarm_is_behind():
            return self._finish("checkpoint")  # gossip then averages this peer's weights with the swarm's
        return self._import() if self.fetch.complete else effects

    def _swarm_is_behind(self) -> bool:
        """Return whether the learning-rate step of our checkpoint is above the lower median of the donors' steps."""
        enough = self.fetch.complete or len(self.fetch.steps) >= min(DONORS_COMPARED, len(self.fetch.donors))
        return bool(self.fetch.steps) and enough and self.fetch.step < self.own_step

    def _import(self) -> list[Effect]:
        if self.synchronous and self.fetch.fetch_again():
            return self.fetch.ask()
        self.phase, self.wake_at = JoinPhase.IMPORTING, None
        return [ImportState(self.fetch.donated(), self._first_step())]

    def _first_step(self) -> int:
        """Return the learning-rate step at which this peer begins to train: the step of its donors.

        In an asynchronous run, the result is at most CLOCK_TIMES * (median step of the swarm) + CLOCK_MORE.
        """
        known = None if self.synchronous else self.view.swarm_step()
        return self.fetch.step if known is None else min(self.fetch.step, CLOCK_TIMES * known + CLOCK_MORE)

    def _start_over(self, reason: str, now: Seconds) -> list[Effect]:
        """Discard the donated state, which the worker refused for this reason, and fetch again after JOIN_RETRY_S."""
        self.phase, self.wake_at = JoinPhase.WAITING, now + JOIN_RETRY_S
        self.fetch.failures.update(dict.fromkeys(self.fetch.used, 1))
        self.fetch.begin(self._all_fragments(), self.fetch.last_piece_at)
        return [Log(ErrorLine(reason=f"the donated state was refused: {reason}"))]

    def _all_fragments(self) -> list[Incoming]:
        return [Incoming(fragment, layout) for fragment, layout in zip(self.fragments, self.layouts, strict=True)]

    def _finish(self, source: str) -> list[Effect]:
        self.phase, self.wake_at, self.imported = JoinPhase.DONE, None, source == "swarm"
        return [Start(newcomer=source == "swarm" and not self.restored)]
