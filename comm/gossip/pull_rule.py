"""Pull, the default: one-sided outer steps on slow weights, for which nobody waits.

A window publishes its pseudo-gradient and, to those who ask, the slow weights phi; partners pull what they want of
them. The formulas, their sources and what they conserve are in comm/gossip/outer_kernels.py.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from decentral.comm.codecs.sections import Codecs, Packer, split
from decentral.comm.gossip import influence
from decentral.comm.gossip.outer_kernels import (
    ONE_BIT_CODEC,
    PSEUDO_GRADIENT_CODEC,
    SLOW_WEIGHTS_CODEC,
    OuterVectors,
    Weighted,
    rho_of,
)
from decentral.comm.gossip.trust import PartnerHistory, PulledWindow, WindowSample
from decentral.comm.gossip.update_rules import Correction, Parts, RuleTools, UpdateRule, Window
from decentral.core.config import GossipConfig
from decentral.core.ids import PeerId
from decentral.core.jobs import Contribution
from decentral.engine.fragment import Live

PSEUDO_GRADIENT = "pseudo_gradient"  # the section's name on the wire
ROUNDING = 1e-6  # a shorter correction, relative to the slow weights, is only what additions have rounded


class PullRule(UpdateRule):
    """Closes and merges with the kernels of comm/gossip/outer_kernels.py.

    Besides the slow state there is one spare vector: it takes the copy of theta, which the close makes the baseline;
    the old baseline is the spare then, and takes the correction.

    A rule that begins with certain weights owes nothing, and its baseline is phi: neither is written before the first
    window, so that a newcomer need not wait for their memory before its first step.
    """

    on_request: Mapping[str, str] = {"phi": SLOW_WEIGHTS_CODEC}
    donated: Mapping[str, str] = {"phi": "fp32"}
    donates_live = False

    def __init__(self, gossip: GossipConfig, theta: Tensor, peer: PeerId, tools: RuleTools) -> None:
        super().__init__(gossip, theta, peer, tools)
        self.sections = {PSEUDO_GRADIENT: PSEUDO_GRADIENT_CODEC if gossip.code == "auto" else gossip.code}
        self.sparse = {PSEUDO_GRADIENT: ONE_BIT_CODEC} if gossip.code == "auto" else {}
        self.phi, self._baseline, self._residual, self.spare = (tools.vector(self.elements) for _ in range(4))
        self.ready = False
        self.history = PartnerHistory()
        self.sample: WindowSample | None = None  # drawn when the first window is merged, from what is secret then
        self.closed: tuple[Window, bytes] | None = None  # the window that waits for its merge, and what it published
        if not theta.is_meta:
            self.load(theta, {})

    @property
    def baseline(self) -> Tensor:
        """The weights at the last window's end, corrections since then included."""
        self._settle()
        return self._baseline

    @property
    def residual(self) -> Tensor:
        """What quantisation has kept back so far."""
        self._settle()
        return self._residual

    def make_ready(self) -> None:
        self._settle()
        self.spare.zero_()

    def _settle(self) -> None:
        """Writes what `_begin` has put off."""
        if not self.ready:
            self._baseline.copy_(self.phi)
            self._residual.zero_()
            self.ready = True

    def buffer(self) -> Tensor:
        return self.spare

    def close(self, theta: Tensor, window: Window, packer: Packer) -> None:
        self._end_unmerged()
        kernels, codes = self.tools.kernels, self.sparse if self.sparsely else self.sections
        code = codes[PSEUDO_GRADIENT]
        blob, length = kernels.close(theta, self.baseline, self.residual, code)
        self.history.experience.closed(length)
        self._baseline, self.spare = theta, self.baseline
        sent = kernels.narrow(blob, self.elements) if code == ONE_BIT_CODEC else blob
        packer.add_encoded(PSEUDO_GRADIENT, code, self.elements, sent)
        self.closed = window, blob

    def encode(self, packer: Packer) -> None:
        packer.add("phi", SLOW_WEIGHTS_CODEC, self.phi)

    def read(self, one: Contribution) -> PulledWindow:
        parts, kernels = split(one.layout, one.blob), self.tools.kernels
        pseudo_gradient = parts[PSEUDO_GRADIENT]
        if any(section.name == PSEUDO_GRADIENT and section.codec == ONE_BIT_CODEC for section in one.layout):
            pseudo_gradient = kernels.widen(pseudo_gradient, self.elements)
        length = kernels.length(pseudo_gradient, self.elements)
        phi = parts.get("phi")
        distance = 0.0 if phi is None else kernels.distance(self.phi, phi)
        return PulledWindow(one.peer, one.tokens, one.lr_sum, {}, pseudo_gradient, length, phi, distance)

    def merge(self, parts: Sequence[Parts], steps: int) -> Correction:
        assert self.closed is not None, "merge without a close"
        own, blob = self.closed
        experience, outliers = self.history.experience, self.history.outliers
        partners = [part for part in parts if isinstance(part, PulledWindow)]
        possible = [one for one in partners if experience.possible(one.length)]
        progress = experience.usual_progress([(one.peer, one.length) for one in possible])
        if self.sample is None:
            self.sample = WindowSample.drawn(self.elements, self.residual)
        apart = _differences(self.sample, self.tools.codecs, self.phi, partners)
        lengths = [min(one.length, progress) for one in partners if one.phi is not None]
        among = dict(zip(apart, outliers.trust([*apart.items()], lengths), strict=True))
        read = partial(self.sample.read, PSEUDO_GRADIENT_CODEC, self.tools.codecs)
        claims, trust = self.history.believed(self.closed, partners, progress, read)
        self.left_out = tuple(one.peer for one, counts in zip(partners, trust, strict=True) if not counts)
        shares = influence.token_shares(own.tokens, claims, trust)
        near = experience.usual_distance([(one.peer, one.distance) for one in possible if one.phi is not None])
        steps_taken, slow_weights = [Weighted(1.0 - sum(shares), blob)], []
        for share, one in zip(shares, partners, strict=True):
            steps_taken.append(Weighted(share * influence.scale(one.length, progress), one.pseudo_gradient))
            if one.phi is not None:
                weight = share * among[one.peer] * influence.scale(one.distance, near)
                slow_weights.append(Weighted(weight, one.phi))
                outliers.moved(weight * apart[one.peer])
        vectors, rho = (
            OuterVectors(self.phi, self.baseline, self.spare),
            rho_of(steps - own.steps, self.tools.optimizer),
        )
        self.tools.kernels.merge(vectors, steps_taken, slow_weights, rho)
        self.closed = None  # not before: where memory is too small for the step, the last checkpoint still has it
        return Correction(self.spare)

    def fold(self, theta: Tensor) -> Correction | None:
        """A solo step with all that is owed, without quantisation: nobody reads it.

        A correction is due once, when the fragment begins to rest apart from the slow weights.
        """
        if theta is self.baseline:  # a change of span that failed has folded since the copy, into the same vector
            return None
        self._end_unmerged()
        owed = self.residual.add_(self.baseline).sub_(theta)
        self._baseline, self.spare = theta, self.baseline
        self.phi.sub_(owed)
        self.residual.zero_()
        torch.sub(self.phi, self.baseline, out=self.spare)
        if float(torch.linalg.vector_norm(self.spare)) <= ROUNDING * float(torch.linalg.vector_norm(self.phi)):
            return None  # theta is where the slow weights are; what it lacks by rounding stays owed
        self.baseline.add_(self.spare)
        return Correction(self.spare)

    def _end_unmerged(self) -> None:
        """A solo step for a window whose exchange has ended before its merge, with a change of span that failed."""
        if self.closed is not None:
            self.phi.sub_(self._read(self.closed[1]))
            self.closed = None

    def published(self) -> Tensor | None:
        """The pseudo-gradient of the window that waits for its merge, as partners read it."""
        return None if self.closed is None else self._read(self.closed[1])

    def _read(self, blob: bytes) -> Tensor:
        """What partners read of a window of ours, whose q4 bytes these are."""
        return self.tools.codecs.decode(PSEUDO_GRADIENT_CODEC, blob, self.elements)

    def kept(self) -> Mapping[str, int]:
        return dict.fromkeys(("phi", "owed"), self.elements)

    def state(self, theta: Tensor) -> dict[str, Tensor]:
        """`owed` is the progress that no window has published yet. One that was closed and not yet merged becomes a
        solo step: nobody will send us its partners after a restart."""
        phi = self.phi if self.closed is None else self.phi - self._read(self.closed[1])
        return {"phi": phi, "owed": self.residual + (self.baseline - theta)}

    def load(self, theta: Tensor, state: dict[str, Tensor]) -> None:
        self.closed = None
        self.history.outliers.forget()
        if "phi" in state:
            self.phi.copy_(state["phi"])
            self.baseline.copy_(theta)
            self.residual.copy_(state["owed"])
        else:
            self._begin(theta)

    def _begin(self, theta: Tensor) -> None:
        """With slow weights that are the weights, and nothing owed."""
        if theta is not self.phi:
            self.phi.copy_(theta)
        self.ready = False

    def donate(self, live: Live, packer: Packer) -> None:
        packer.add("phi", self.donated["phi"], self.phi)

    def adopt(self, live: Live, donated: Mapping[str, Tensor]) -> None:
        live.theta.copy_(donated["phi"])
        if live.theta.dtype == self.phi.dtype and not self.tools.pinned:
            self.phi = donated["phi"]
            self.load(self.phi, {})
        else:
            self.load(live.theta, {})


def _differences(
    sample: WindowSample, codecs: Codecs, phi: Tensor, partners: Sequence[PulledWindow]
) -> dict[PeerId, Tensor]:
    """How the slow weights of those of whom they were pulled differ from phi, by this sample."""
    known = {one.peer: one.phi for one in partners if one.phi is not None}
    ours = sample.take(phi) if known else phi
    return {peer: sample.read(SLOW_WEIGHTS_CODEC, codecs, theirs) - ours for peer, theirs in known.items()}
