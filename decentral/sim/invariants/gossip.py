"""Check the rules of gossip at every close of a window and every merge.

    whole     the bytes that a peer merges are bytes that its partner published, section by section
    once      no peer merges the same window of a partner twice, even if the peer restarts from a checkpoint
    baseline  after a window is closed, the baseline equals the live weights, so that no progress is published twice
    timely    slow weights for a partner are encoded before the window is merged, because a merge changes slow weights
    folded    training during a rest (a time without windows) is added to the slow weights by the first window after it
    fresh     a window is merged at most `SwarmTimes.max_age_s` after it was closed, plus the error of the peers' clocks

A window is a fragment's training between two publications; when a peer closes the window, it publishes the change.
Live weights are those that each training step changes. Start reading at `GossipAudit`.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decentral.comm.codecs.sections import split
from decentral.comm.gossip.exchange import ENOUGH_PERIODS
from decentral.comm.gossip.pull_rule import PullRule
from decentral.core import jobs
from decentral.core.ids import PeerId
from decentral.core.units import Seconds
from decentral.sim.fault_injector import fingerprint
from decentral.sim.host import VirtualHost
from decentral.sim.invariants.evidence import SLACK_S, Evidence, slowest_step_s

PUBLISHED = 1024  # the audit stores at most this many latest sections of each fragment of each peer
FOLD_ERROR = 1e-5  # the audit accepts a difference of slow and live weights up to this share of their norm as rounding

Window = tuple[int, int]
"""A published window: the number of its peer's life, and the window's own number."""

Publication = tuple[Window, Seconds]
"""A published window, and the virtual time at which it was closed."""


@dataclass(frozen=True, slots=True)
class MergeHistory:
    """The newest window of each partner that one peer has merged into its weights, now and at its last checkpoint."""

    merged: dict[tuple[PeerId, int], Window] = field(default_factory=dict)  # newest window, by (partner, fragment)
    saved: dict[tuple[PeerId, int], Window] = field(default_factory=dict)  # `merged` at the last checkpoint


@dataclass(slots=True)
class GossipAudit:
    """The audit of gossip: it compares what peers merge with what their partners published, and raises Violation."""

    evidence: Evidence
    # (peer, fragment) -> fingerprint of a section -> the windows with it; windows without a step share their sections.
    published: dict[tuple[PeerId, int], dict[bytes, list[Publication]]] = field(default_factory=dict)
    histories: dict[PeerId, MergeHistory] = field(default_factory=lambda: defaultdict(MergeHistory))
    resting: set[tuple[PeerId, int]] = field(default_factory=set)  # (peer, fragment) that publishes no windows now

    def closed(self, host: VirtualHost, closed: jobs.WindowClosed) -> None:
        """Check the rules "baseline" and "folded" for a window that has closed, and store its sections."""
        for section in split(closed.layout, closed.blob).values():
            self._publish(host, closed.fragment, closed.seq, section)
        gossiped = host.training.gossip.of(closed.fragment)
        if isinstance(gossiped.rule, PullRule) and not torch.equal(gossiped.rule.baseline, gossiped.live.theta):
            self.evidence.violated("baseline", "after a close the baseline differs from the live weights", host)
        if (host.peer, closed.fragment) in self.resting:
            self.resting.discard((host.peer, closed.fragment))
            if isinstance(gossiped.rule, PullRule) and not _folded(gossiped.rule.phi, gossiped.live.theta):
                detail = f"fragment {closed.fragment}: its slow weights lack what was trained while it rested"
                self.evidence.violated("folded", detail, host)

    def encoded(self, host: VirtualHost, done: jobs.SectionsEncoded) -> None:
        """Check the rule "timely" for sections that a peer encoded on request, and store them."""
        rule = host.training.gossip.of(done.fragment).rule
        if isinstance(rule, PullRule) and rule.closed is None:
            self.evidence.violated("timely", f"fragment {done.fragment} was encoded after its merge", host)
        for section in split(done.layout, done.blob).values():
            self._publish(host, done.fragment, done.seq, section)

    def _publish(self, host: VirtualHost, fragment: int, seq: int, blob: bytes | memoryview) -> None:
        held = self.published.setdefault((host.peer, fragment), {})
        found = fingerprint(blob)
        windows = held.pop(found, [])[-PUBLISHED:]  # re-inserted below, since the loop deletes the oldest first
        held[found] = [*windows, ((self.evidence.life(host.peer), seq), host.agenda.now)]
        while len(held) > PUBLISHED:
            del held[next(iter(held))]

    def taken_for_merge(self, host: VirtualHost, fragment: int, contributions: Sequence[jobs.Contribution]) -> None:
        """Check the rule "fresh" for the contributions that a peer is about to merge.

        All-reduce has no age limit, because all peers of a round wait for the slowest peer.
        """
        node = host.node
        exchange = node.gossip.running.get(fragment)
        if exchange is None or exchange.blocking:
            return
        period_s = exchange.context.period_s(exchange.usual_answer_bytes)
        limit_s = node.setup.start.times.max_age_s + ENOUGH_PERIODS * period_s
        limit_s += self.evidence.skew_s() + SLACK_S + slowest_step_s(host)
        for one in contributions:
            found = self._publications(one, fragment)
            if found and (age_s := host.agenda.now - found[-1][1]) > limit_s:
                self.evidence.violated("fresh", f"window {found[-1][0]} of {one.peer} was {age_s:.0f} s old", host)

    def merged(self, host: VirtualHost, fragment: int, one: jobs.Contribution) -> None:
        """Check the rules "whole" and "once" for a contribution that was merged."""
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
        """Record that the peer's checkpoint contains all windows merged so far."""
        merged = self.histories[host.peer].merged
        self.histories[host.peer] = MergeHistory(merged, dict(merged))

    def joined(self, host: VirtualHost, from_donors: bool) -> None:
        """Begin the history of a peer that joins: its checkpoint's history, or none if it gets weights from donors."""
        saved = self.histories[host.peer].saved
        self.resting = {name for name in self.resting if name[0] != host.peer}
        resumed = host.node.setup.restored_step is not None and not from_donors
        self.histories[host.peer] = MergeHistory(dict(saved) if resumed else {}, saved)

    def moved(self, host: VirtualHost) -> None:
        """Forget the history of fragments that a peer has gained, because their weights come from a donor."""
        history, before = self.histories[host.peer], {one.index for one in host.node.setup.fragments}
        gained = {held.live.fragment.index for held in host.training.gossip.fragments} - before
        merged = {name: window for name, window in history.merged.items() if name[1] not in gained}
        self.histories[host.peer] = MergeHistory(merged, history.saved)
        self.resting -= {(host.peer, index) for index in gained}

    def _publications(self, one: jobs.Contribution, fragment: int) -> list[Publication]:
        """Return all windows that the partner published with these sections, and when; [] if the blob is false."""
        if self.evidence.has_forged(one.peer, one.blob):
            return []
        held = self.published.get((one.peer, fragment), {})
        first, *others = (held.get(fingerprint(part), []) for part in split(one.layout, one.blob).values())
        windows = [{window for window, _ in published} for published in others]
        return [found for found in first if all(found[0] in known for known in windows)]


def _folded(phi: Tensor, theta: Tensor) -> bool:
    """Return whether the norm of `phi - theta`, slow less live weights, is small enough to be a rounding error.

    Single elements are not compared, because rounding may change an element near zero by many times its value.
    """
    return float(torch.linalg.vector_norm(phi - theta)) <= FOLD_ERROR * float(torch.linalg.vector_norm(phi))
