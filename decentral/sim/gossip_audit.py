"""The rules of gossip, checked at every close, merge and push: what is merged is whole, fresh, and counted once.

whole     what is merged is, byte for byte, what its partner published, or a whole section of it
once      no peer merges the same window of a partner twice, restarts from a checkpoint included
baseline  after a close the baseline is the live weights: no progress is left to be counted again
timely    slow weights that a partner gets are encoded before their window's merge, which changes them
folded    what was trained while a fragment rested is in its slow weights when its next window has been closed
fresh     no window is taken for a merge that was published longer ago than `max_age_s`, clocks aside
mass      push-sum: a peer's weight is what it had, less what it gave away, plus what came to it; no mass of a
          push comes to two peers (Kempe, Dobra and Gehrke, 2003)
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from decentral.algorithms.pull import PullRule
from decentral.algorithms.push_sum import LEAST_MASS, MOST_OWN_MASS, PushSumRule
from decentral.comm.gossip.pull import ENOUGH_PERIODS, PullExchange
from decentral.core import jobs
from decentral.core.ids import PeerId
from decentral.core.synthetic import joined
from decentral.core.units import Seconds
from decentral.sim.evidence import SLACK_S, Evidence, slowest_step_s
from decentral.sim.fault_injector import fingerprint
from decentral.sim.virtual_host import VirtualHost

PUBLISHED = 512  # blobs and sections of a peer's fragment that are remembered
MASS_ERROR = 1e-3  # the relative error of a push-sum weight that rounding explains
LEAST_WEIGHT_ERROR = 1e-6  # and that of one which was near one before: fp32 has 6e-8 there
FOLD_ERROR = 1e-5  # the difference of folded slow weights, relative to their length, that rounding explains

Window = tuple[int, int]
"""The life of the peer that published the window, and the window's number."""

Publication = tuple[Window, Seconds]
"""A blob's window, and when it was closed. A peer that made no step publishes the same blob in several windows."""

Push = tuple[PeerId, int, Window]
"""The peer that pushed, the fragment, and the window."""


@dataclass(slots=True)
class MergeHistory:
    """What has gone into one peer's weights. A restart from a checkpoint goes back to what the checkpoint has."""

    merged: dict[tuple[PeerId, int], Window] = field(default_factory=dict)  # the newest, by partner and fragment
    saved: dict[tuple[PeerId, int], Window] = field(default_factory=dict)  # `merged`, as the checkpoint has it
    absorbed: set[Push] = field(default_factory=set)
    weights: dict[int, float] = field(default_factory=dict)  # push-sum: the weight that each fragment must have
    wrong: dict[int, float] = field(default_factory=dict)  # the fragments whose weight was wrong at the last check


@dataclass(slots=True)
class GossipAudit:
    """Compares what peers merge with what their partners published."""

    evidence: Evidence
    published: dict[tuple[PeerId, int], dict[bytes, list[Publication]]] = field(default_factory=dict)
    histories: dict[PeerId, MergeHistory] = field(default_factory=lambda: defaultdict(MergeHistory))
    taken: dict[Push, PeerId] = field(default_factory=dict)  # the peer that has the mass of each push
    resting: set[tuple[PeerId, int]] = field(default_factory=set)  # the fragments of which no window is closed

    # What happens to a peer's weights

    def closed(self, host: VirtualHost, closed: jobs.WindowClosed) -> None:
        self._publish(host, closed.fragment, closed.seq, closed.blob)
        gossiped = host.training.gossip.of(closed.fragment)
        if isinstance(gossiped.rule, PushSumRule):
            weights = self.histories[host.peer].weights
            held = max(2 * LEAST_MASS, weights.get(closed.fragment, 1.0))
            weights[closed.fragment] = held - _weight_of(closed.layout, closed.blob)
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
        assert isinstance(exchange, PullExchange)
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

        The other algorithms have no limit: an all-reduce round is as old as its slowest peer, and the two sides of a
        symmetric exchange merge it both or not at all.
        """
        node = host.node
        exchange = node.gossip.running.get(fragment)
        if not isinstance(exchange, PullExchange) or exchange.blocking:
            return
        period_s = exchange.context.period_s(exchange.size)
        limit_s = node.setup.config.gossip.max_age_s + ENOUGH_PERIODS * period_s
        limit_s += self.evidence.skew_s() + SLACK_S + slowest_step_s(host)
        for one in contributions:
            found = self._publications(one, fragment)
            if found and (age_s := host.agenda.now - found[-1][1]) > limit_s:
                self.evidence.violated("fresh", f"window {found[-1][0]} of {one.peer} was {age_s:.0f} s old", host)

    def merged(self, host: VirtualHost, fragment: int, one: jobs.Contribution) -> None:
        merged = self.histories[host.peer].merged
        last = merged.get((one.peer, fragment), (0, 0))
        if not (found := self._checked_publications(host, one, fragment)):
            return
        newer = [window for window, _ in found if window > last]
        if not newer:
            detail = f"window {found[-1][0]} of {one.peer}, fragment {fragment}, was merged again"
            self.evidence.violated("once", detail, host)
        merged[one.peer, fragment] = newer[0]

    def absorbed(self, host: VirtualHost, fragment: int, one: jobs.Contribution) -> None:
        found = self._checked_publications(host, one, fragment)
        if not found:
            return
        history, pushes = self.histories[host.peer], [(one.peer, fragment, window) for window, _ in found]
        free = [name for name in pushes if name not in history.absorbed and self.taken.get(name) in (None, host.peer)]
        push = [*pushes, *free][-1]  # windows without a step between them have the same blob: a free one is meant
        if push in history.absorbed:
            self.evidence.violated("once", f"push {push[-1]} of {one.peer} was added again", host)
        history.absorbed.add(push)
        owner = self.taken.setdefault(push, host.peer)
        if owner != host.peer:
            detail = f"push {push[-1]} of {one.peer} went to {owner} and to {host.peer}"
            self.evidence.violated("mass", detail, host)
        held = history.weights.get(fragment, 1.0) + _weight_of(one.layout, one.blob)
        history.weights[fragment] = min(MOST_OWN_MASS, held)

    def saved(self, host: VirtualHost) -> None:
        self.histories[host.peer].saved = dict(self.histories[host.peer].merged)

    def joined(self, host: VirtualHost, from_donors: bool) -> None:
        """A new life has the weight of its checkpoint. The mass that only its last life had taken is nobody's."""
        history = self.histories[host.peer]
        history.weights = _weights(host)
        self.resting = {name for name in self.resting if name[0] != host.peer}
        self.taken = {push: owner for push, owner in self.taken.items() if owner != host.peer}
        resumed = host.node.setup.restored_step is not None and not from_donors
        history.merged = dict(history.saved) if resumed else {}

    def moved(self, host: VirtualHost) -> None:
        """A fragment that was gained begins with a donor's state, though the peer may have held it before.

        The mass of one that was given up is nobody's: a push that was being added then goes back to its sender.
        """
        history, before = self.histories[host.peer], {one.index for one in host.node.setup.fragments}
        holds = {held.live.fragment.index for held in host.training.gossip.fragments}
        gained, given_up = holds - before, before - holds
        self.taken = {
            push: owner for push, owner in self.taken.items() if owner != host.peer or push[1] not in given_up
        }
        history.merged = {name: window for name, window in history.merged.items() if name[1] not in gained}
        self.resting -= {(host.peer, index) for index in gained}
        history.absorbed = {push for push in history.absorbed if push[1] not in gained}
        history.weights = {index: weight for index, weight in history.weights.items() if index not in gained}

    # Now and then

    def check_mass(self) -> None:
        """A weight is wrong if it is so at two checks in a row; between a job and its report it tells nothing."""
        for member in self.evidence.swarm.living:
            assert member.host is not None
            if not member.training or member.frozen or member.host.engine.doing:
                continue
            history, wrong = self.histories[member.peer], dict[int, float]()
            for fragment, weight in _weights(member.host).items():
                due = history.weights.get(fragment, 1.0)
                if weight <= 0 or abs(weight - due) > MASS_ERROR * max(weight, due) + LEAST_WEIGHT_ERROR:
                    wrong[fragment] = due
                    if history.wrong.get(fragment) == due:
                        detail = f"{member.peer} weighs {weight:g} instead of {due:g}"
                        self.evidence.violated("mass", detail, member.host)
            history.wrong = wrong

    def _checked_publications(self, host: VirtualHost, one: jobs.Contribution, fragment: int) -> list[Publication]:
        found = self._publications(one, fragment)
        if not found and not self.evidence.has_forged(one.peer, one.blob):
            detail = f"{one.peer} never published what was merged of fragment {fragment}"
            self.evidence.violated("whole", detail, host)
        return found

    def _publications(self, one: jobs.Contribution, fragment: int) -> list[Publication]:
        """The windows that the contribution may be. A forged blob is none of them, even if one looks like it later."""
        if self.evidence.has_forged(one.peer, one.blob):
            return []
        return self.published.get((one.peer, fragment), {}).get(fingerprint(one.blob), [])


def _folded(phi: Tensor, theta: Tensor) -> bool:
    """By length: an element near zero differs by the rounding of what it was before, which may be many times itself."""
    return float(torch.linalg.vector_norm(phi - theta)) <= FOLD_ERROR * float(torch.linalg.vector_norm(phi))


def _weights(host: VirtualHost) -> dict[int, float]:
    """The push-sum weight of each fragment; 1 where the algorithm has none."""
    rules = {held.live.fragment.index: held.rule for held in host.training.gossip.fragments}
    return {index: float(rule.weight) if isinstance(rule, PushSumRule) else 1.0 for index, rule in rules.items()}


def _weight_of(layout: jobs.Layout, blob: bytes) -> float:
    """The push-sum weight that a pushed blob carries."""
    content = next(content for name, content in _sections(layout, blob) if name == "weight")
    return float(np.frombuffer(memoryview(content), dtype=np.float32)[0])


def _sections(layout: jobs.Layout, blob: bytes) -> Iterator[tuple[str, bytes]]:
    start = 0
    for section in layout:
        yield section.name, blob[start : start + section.size]
        start += section.size
