"""The rules of gossip, checked at every close and merge: what is merged is whole, fresh, and counted once.

whole     what is merged is, byte for byte, what its partner published, or a whole section of it
once      no peer merges the same window of a partner twice, restarts from a checkpoint included
baseline  after a close the baseline is the live weights: no progress is left to be counted again
timely    slow weights that a partner gets are encoded before their window's merge, which changes them
folded    what was trained while a fragment rested is in its slow weights when its next window has been closed
fresh     no window is taken for a merge that was published longer ago than `SwarmTimes.max_age_s`, clocks aside
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decentral.comm.gossip.exchange import ENOUGH_PERIODS
from decentral.comm.gossip.pull_rule import PullRule
from decentral.core import jobs
from decentral.core.ids import PeerId
from decentral.core.synthetic import joined
from decentral.core.units import Seconds
from decentral.sim.fault_injector import fingerprint
from decentral.sim.host import VirtualHost
from decentral.sim.invariants.evidence import SLACK_S, Evidence, slowest_step_s

PUBLISHED = 512  # blobs and sections of a peer's fragment that are remembered
FOLD_ERROR = 1e-5  # the difference of folded slow weights, relative to their length, that rounding explains

Window = tuple[int, int]
"""The life of the peer that published the window, and the window's number."""

Publication = tuple[Window, Seconds]
"""A blob's window, and when it was closed. A peer that made no step publishes the same blob in several windows."""


@dataclass(frozen=True, slots=True)
class MergeHistory:
    """What has gone into one peer's weights. A restart from a checkpoint goes back to what the checkpoint has."""

    merged: dict[tuple[PeerId, int], Window] = field(default_factory=dict)  # the newest, by partner and fragment
    saved: dict[tuple[PeerId, int], Window] = field(default_factory=dict)  # `merged`, as the checkpoint has it


@dataclass(slots=True)
class GossipAudit:
    """Compares what peers merge with what their partners published."""

    evidence: Evidence
    published: dict[tuple[PeerId, int], dict[bytes, list[Publication]]] = field(default_factory=dict)
    histories: dict[PeerId, MergeHistory] = field(default_factory=lambda: defaultdict(MergeHistory))
    resting: set[tuple[PeerId, int]] = field(default_factory=set)  # the fragments of which no window is closed

    # What happens to a peer's weights

    def closed(self, host: VirtualHost, closed: jobs.WindowClosed) -> None:
        self._publish(host, closed.fragment, closed.seq, closed.blob)
        gossiped = host.training.gossip.of(closed.fragment)
        if isinstance(gossiped.rule, PullRule) and not torch.equal(gossiped.rule.baseline, gossiped.live.theta):
            self.evidence.violated("baseline", "progress that was published is still in the baseline", host)
        if (host.peer, closed.fragment) in self.resting:
            self.resting.discard((host.peer, closed.fragment))
            if isinstance(gossiped.rule, PullRule) and not _folded(gossiped.rule.phi, gossiped.live.theta):
                detail = f"fragment {closed.fragment}: what was trained in its rest is not in its slow weights"
                self.evidence.violated("folded", detail, host)

    def encoded(self, host: VirtualHost, done: jobs.SectionsEncoded) -> None:
        """A partner gets these sections behind those of the window."""
        rule = host.training.gossip.of(done.fragment).rule
        if isinstance(rule, PullRule) and rule.closed is None:
            self.evidence.violated("timely", f"fragment {done.fragment} was encoded after its merge", host)
        exchange = host.node.gossip.running.get(done.fragment)
        if exchange is None:
            return  # the peer has given the fragment up
        for kept in exchange.published.latest:
            if kept.snapshot.seq == done.seq:
                self._publish(host, done.fragment, done.seq, joined([kept.blob, done.blob]))

    def _publish(self, host: VirtualHost, fragment: int, seq: int, blob: bytes) -> None:
        held = self.published.setdefault((host.peer, fragment), {})
        found = fingerprint(blob)
        windows = held.pop(found, [])[-PUBLISHED:]  # re-inserted below, so the newest blob stands last
        held[found] = [*windows, ((self.evidence.life(host.peer), seq), host.agenda.now)]
        while len(held) > PUBLISHED:
            del held[next(iter(held))]

    def taken_for_merge(self, host: VirtualHost, fragment: int, contributions: Sequence[jobs.Contribution]) -> None:
        """Checks the age of contributions when the machine takes them. A process that is stopped later is excused.

        All-reduce has no limit: its round is as old as its slowest peer.
        """
        node = host.node
        exchange = node.gossip.running.get(fragment)
        if exchange is None or exchange.blocking:
            return
        period_s = exchange.context.period_s(exchange.size)
        limit_s = node.setup.start.times.max_age_s + ENOUGH_PERIODS * period_s
        limit_s += self.evidence.skew_s() + SLACK_S + slowest_step_s(host)
        for one in contributions:
            found = self._publications(one, fragment)
            if found and (age_s := host.agenda.now - found[-1][1]) > limit_s:
                self.evidence.violated("fresh", f"window {found[-1][0]} of {one.peer} was {age_s:.0f} s old", host)

    def merged(self, host: VirtualHost, fragment: int, one: jobs.Contribution) -> None:
        merged = self.histories[host.peer].merged
        last = merged.get((one.peer, fragment), (0, 0))
        if not (found := self._publications(one, fragment)):
            if not self.evidence.has_forged(one.peer, one.blob):
                detail = f"{one.peer} never published what was merged of fragment {fragment}"
                self.evidence.violated("whole", detail, host)
            return
        newer = [window for window, _ in found if window > last]
        if not newer:
            detail = f"window {found[-1][0]} of {one.peer}, fragment {fragment}, was merged again"
            self.evidence.violated("once", detail, host)
        merged[one.peer, fragment] = newer[0]

    def saved(self, host: VirtualHost) -> None:
        merged = self.histories[host.peer].merged
        self.histories[host.peer] = MergeHistory(merged, dict(merged))

    def joined(self, host: VirtualHost, from_donors: bool) -> None:
        """A new life has merged what its checkpoint has."""
        saved = self.histories[host.peer].saved
        self.resting = {name for name in self.resting if name[0] != host.peer}
        resumed = host.node.setup.restored_step is not None and not from_donors
        self.histories[host.peer] = MergeHistory(dict(saved) if resumed else {}, saved)

    def moved(self, host: VirtualHost) -> None:
        """A fragment that was gained begins with a donor's state, though the peer may have held it before."""
        history, before = self.histories[host.peer], {one.index for one in host.node.setup.fragments}
        gained = {held.live.fragment.index for held in host.training.gossip.fragments} - before
        merged = {name: window for name, window in history.merged.items() if name[1] not in gained}
        self.histories[host.peer] = MergeHistory(merged, history.saved)
        self.resting -= {(host.peer, index) for index in gained}

    def _publications(self, one: jobs.Contribution, fragment: int) -> list[Publication]:
        """The windows that the contribution may be. A forged blob is none of them, even if one looks like it later."""
        if self.evidence.has_forged(one.peer, one.blob):
            return []
        return self.published.get((one.peer, fragment), {}).get(fingerprint(one.blob), [])


def _folded(phi: Tensor, theta: Tensor) -> bool:
    """By length: an element near zero differs by the rounding of what it was before, which may be many times itself."""
    return float(torch.linalg.vector_norm(phi - theta)) <= FOLD_ERROR * float(torch.linalg.vector_norm(phi))
