"""The update rule `pull` in an island that shards: its vectors are divided over the ranks like the weights.

When a window closes or a merge begins, rank 0 gathers the vectors of one fragment that it needs, lets `PullRule`
compute, and scatters those that have changed. At other times no rank has a whole vector. So gossip costs memory for one
fragment, and traffic between the ranks of at most 32 bytes a parameter in each window. A close gathers the snapshot
and the baseline, and scatters the residual. A merge gathers and scatters phi and the baseline, and scatters the
correction. Rank 0's own parts stay where they are. As in `PullRule`, the residual of a large fragment is kept in int8
or bf16, and its baseline is not stored if merges are applied in full: each rank computes its part when rank 0 asks.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from decentral.comm.codecs.sections import Packer
from decentral.comm.gossip.pull_rule import PullRule
from decentral.comm.gossip.trust import WindowSample
from decentral.comm.gossip.update_rules import Correction, PartnerWindow, PulledWindow, RuleTools, UpdateRule, Window
from decentral.core.choices import OPTIMIZERS
from decentral.core.config import GossipConfig
from decentral.core.errors import ProtocolError
from decentral.core.ids import PeerId
from decentral.core.jobs import Contribution
from decentral.engine.fragment import Live
from decentral.engine.gossip_jobs import FragmentGossip
from decentral.engine.sharded import THETA, ShardedLive
from decentral.engine.shards import Slot


class ShardedGossip(FragmentGossip):
    """The gossip of fragments that are divided over the ranks of an island. Only rank 0 has it."""

    def _rule(self, live: Live, drawn: bool) -> UpdateRule:
        assert isinstance(live, ShardedLive), "an island that shards has only parts of fragments"
        return ShardedPullRule(self.gossip, live, self.peer, self.tools)


class ShardedPullRule(PullRule):
    """`PullRule` whose vectors are whole on rank 0 only while a method needs them."""

    rounds_residual = False  # the ranks round their parts

    def __init__(self, gossip: GossipConfig, live: ShardedLive, peer: PeerId, tools: RuleTools) -> None:
        """Begin with phi = theta on all ranks."""
        self.live, self.shards, self.index = live, live.ranks.shards, live.fragment.index
        self._stored = False  # whether the ranks store the baseline
        absent = torch.empty(live.fragment.parameters, device="meta")
        super().__init__(gossip, absent, peer, replace(tools, pinned=False))
        self.tools, self._absent = tools, absent
        self._leave()
        self.load(absent, {})

    def _leave(self) -> None:
        """Drop the whole vectors, so that only the ranks' parts remain."""
        self.phi = self.baseline = self._absent
        self.residual = None

    @contextmanager
    def _at_hand(self, slots: Sequence[Slot], changed: Sequence[Slot] = ()) -> Iterator[None]:
        """Gather the vectors of these slots; afterwards scatter those that have changed, and drop all."""
        self._gather(slots)
        try:
            yield
        except BaseException:
            self._leave()
            raise
        self._scatter(changed)

    def _scatter(self, changed: Sequence[Slot]) -> None:
        """Scatter the vectors of these slots, and drop all whole vectors."""
        vectors = {Slot.PHI: self.phi, Slot.BASELINE: self.baseline, Slot.RESIDUAL: self.residual}
        for slot in changed:
            whole = vectors[slot]
            assert whole is not None, "a vector that has changed is at hand"
            into = slot
            if slot is Slot.RESIDUAL and self.is_large:
                into = Slot.INT8_RESIDUAL if self.may_round else Slot.BF16_RESIDUAL
            self.shards.scatter(self.index, into, whole)
        self._leave()

    def _gather(self, slots: Sequence[Slot]) -> None:
        """Gather the vectors of these slots that are not whole here yet."""
        if Slot.PHI in slots and self.phi.is_meta:
            self.phi = self.shards.gather(self.index, Slot.PHI)
        if Slot.BASELINE in slots and self.baseline.is_meta:
            self.baseline = self._gathered_baseline()
        if Slot.RESIDUAL in slots and self.residual is None:
            self.residual = self.shards.gather(self.index, Slot.RESIDUAL)

    def _gathered_baseline(self) -> Tensor:
        """Return the baseline (`PullRule.baseline`), gathered from the ranks."""
        if self._stored:
            return self.shards.gather(self.index, Slot.BASELINE)
        if self.closed is None:
            return self.shards.gather(self.index, Slot.PHI_AND_RESIDUAL)
        return self.shards.gather(self.index, Slot.PHI_AND_CHANGE).sub_(self._read(self.closed[1]))

    def close(self, theta: Tensor, window: Window, packer: Packer) -> None:
        """Pack the window's pseudo-gradient. If the ranks store the baseline, it is then their snapshot of theta.

        Raises:
            ProtocolError: If a number is not finite.
        """
        self._end_unmerged()
        with self._at_hand((Slot.BASELINE,), changed=(Slot.RESIDUAL,)):
            try:
                super().close(theta, window, packer)
            except ProtocolError:
                self.shards.drop(self.index, Slot.SNAPSHOT)
                raise
            self._stored = self._stored or not self.is_large
            if self._stored:
                self.shards.rename(self.index, Slot.SNAPSHOT, Slot.BASELINE)
            else:
                self.shards.rename(self.index, Slot.RESIDUAL, Slot.EARLIER)
                self.shards.drop(self.index, Slot.SNAPSHOT)

    def encode(self, packer: Packer, names: Sequence[str]) -> None:
        """Pack these slices of the slow weights phi."""
        with self._at_hand((Slot.PHI,)):
            super().encode(packer, names)

    def partner_window(self, one: Contribution) -> PulledWindow:
        """Check a partner's window, and return it with its sections still encoded.

        If the window has slow weights, phi stays whole here until `merge`, which must follow.

        Raises:
            ProtocolError: If a codec refuses a section.
        """
        if any(section.name in self.slices for section in one.layout):
            self._gather((Slot.PHI,))
        return super().partner_window(one)

    def merge(self, partners: Sequence[PartnerWindow], steps: int) -> Correction:
        """Take the outer step with partners' windows, and return the correction of the weights."""
        if self.sample is None:
            own = self.shards.host.get(self.index, Slot.RESIDUAL, take=False)
            self.sample = WindowSample.drawn(self.elements, own)
        self._gather((Slot.PHI, Slot.BASELINE, *((Slot.RESIDUAL,) if self.unsent_kept else ())))
        correction = super().merge(partners, steps)
        if self._stored:
            self._scatter((Slot.PHI, Slot.BASELINE))
            self.shards.add(self.index, Slot.RESIDUAL, Slot.BASELINE)
        else:
            self._scatter((Slot.PHI, Slot.RESIDUAL) if self.unsent_kept else (Slot.PHI,))
            self.shards.drop(self.index, Slot.BASELINE)
        self.shards.drop(self.index, Slot.EARLIER)
        return correction

    def _end_window(self, rho: float = 0.0) -> None:
        """Forget the closed window. `rho`: share of the correction applied."""
        self.closed, self._stored = None, not (self.is_large and rho == 1.0)
        if self.unsent_kept and not self._stored:
            self.residual = self._error() * (1.0 - self.unsent_kept)

    def _end_unmerged(self) -> None:
        """Apply the closed window to phi if no merge has done so."""
        if self.closed is None:
            return
        with self._at_hand((Slot.PHI,), changed=(Slot.PHI,)):
            self.phi.sub_(self._read(self.closed[1]))
        self.closed = None
        if self._stored:
            self.shards.add(self.index, Slot.RESIDUAL, Slot.BASELINE)
        else:
            self.shards.rename(self.index, Slot.EARLIER, Slot.RESIDUAL)

    def fold(self, theta: Tensor) -> Correction | None:
        """Add all unpublished training to phi, unquantised and without partners. Then `theta` is the new baseline."""
        self._end_unmerged()
        changed = (Slot.PHI,) if self.is_large else (Slot.PHI, Slot.BASELINE)
        with self._at_hand((Slot.PHI, Slot.BASELINE), changed=changed):
            self._stored = not self.is_large
            for slot in (Slot.SNAPSHOT, Slot.BASELINE, Slot.RESIDUAL):
                self.shards.drop(self.index, slot)
            return super().fold(theta)

    def state(self, theta: Tensor) -> dict[str, Tensor]:
        """Return phi and `owed`, the training that no window has published yet, given the weights `theta`."""
        residual = () if self.closed is None else (Slot.RESIDUAL,)
        with self._at_hand((Slot.BASELINE, *residual)):
            owed = self.baseline.sub_(theta)
            if self.residual is not None:
                owed.add_(self.residual)
        with self._at_hand((Slot.PHI,)):
            published = self.published()
            return {"phi": self.phi if published is None else self.phi.sub_(published), "owed": owed}

    def load(self, theta: Tensor, state: dict[str, Tensor]) -> None:
        """Set the gossip state from all ranks' weights and a checkpoint's `state`. Without `state`, set phi = theta."""
        self.closed, self._stored = None, False
        self.history.outliers.forget()
        for slot in (Slot.BASELINE, Slot.RESIDUAL, Slot.EARLIER):
            self.shards.drop(self.index, slot)
        self.live.snapshot()
        if "phi" not in state:
            self.shards.rename(self.index, Slot.SNAPSHOT, Slot.PHI)
            return
        baseline = self.shards.gather(self.index, Slot.SNAPSHOT).add_(state["owed"])
        self.shards.drop(self.index, Slot.SNAPSHOT)
        self.shards.scatter(self.index, Slot.PHI, state["phi"])
        if self.is_large and OPTIMIZERS[self.tools.optimizer].takes_all:
            self.may_round = False  # bf16 loses less of it
            self.residual = baseline.sub_(state["phi"])
            self._scatter((Slot.RESIDUAL,))
        else:
            self._stored, self.baseline = True, baseline
            self._scatter((Slot.BASELINE,))

    def donate(self, live: Live, packer: Packer) -> None:
        """Pack the slow weights, from which a newcomer starts."""
        with self._at_hand((Slot.PHI,)):
            super().donate(live, packer)

    def adopt(self, live: Live, donated: Mapping[str, Tensor]) -> None:
        """Start with a donor's slow weights, and overwrite the live weights with them."""
        live.load({THETA: donated["phi"]})
        self.load(self._absent, {})
