"""The default update rule, `pull`: asynchronous outer steps on slow weights phi. Start at `PullRule`.

A closed window publishes its pseudo-gradient and, on request, the slow weights; partners pull both at any time.
comm/gossip/outer_kernels.py has the formulas and their sources.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from math import sqrt

import torch
from torch import Tensor

from decentral.comm.codecs.sections import Codecs, Packer, split
from decentral.comm.gossip import influence
from decentral.comm.gossip.outer_kernels import (
    ONE_BIT_CODEC,
    PSEUDO_GRADIENT_CODEC,
    SLOW_WEIGHTS_CODEC,
    SPARSE_CODEC,
    OuterVectors,
    Weighted,
    rho_of,
)
from decentral.comm.gossip.trust import PartnerHistory, WindowSample
from decentral.comm.gossip.update_rules import (
    Correction,
    PartnerWindow,
    PulledWindow,
    RuleTools,
    UpdateRule,
    Window,
    sliced,
)
from decentral.core.choices import OPTIMIZERS
from decentral.core.config import GossipConfig
from decentral.core.fragments import LARGE_ELEMENTS, Section
from decentral.core.ids import PeerId
from decentral.core.jobs import Contribution, PartnerWork
from decentral.engine.fragment import Live

PSEUDO_GRADIENT = "pseudo_gradient"
# A correction in `fold` is dropped as rounding error if its L2 norm is at most this fraction of the slow weights' norm.
ROUNDING = 1e-6
# After a merge, the live weights keep this share of what a sparse window has not sent (docs/results/convergence.md).
UNSENT_KEPT = 0.25


STATE_VECTORS = "phi", "owed"  # the vectors of `PullRule.state`


def codecs_of(gossip: GossipConfig) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return a window's sections with their codecs: the usual ones, and those for a thin link."""
    automatic = gossip.code == "auto"
    usual = {PSEUDO_GRADIENT: PSEUDO_GRADIENT_CODEC if automatic else gossip.code}
    return usual, {PSEUDO_GRADIENT: ONE_BIT_CODEC} if automatic else {}


def slices_of(elements: int, codecs: Codecs) -> dict[Section, slice]:
    """Return the sections of slow weights with this number of elements, which are sent on request."""
    return sliced("phi", SLOW_WEIGHTS_CODEC, elements, codecs)


class PullRule(UpdateRule):
    """The rule of the `pull` algorithm: slow weights phi and a baseline, each fp32 [n].

    In a new rule both are the same vector. The residual (the quantisation error that no window has published yet) is a
    vector of its own only between a close and its merge; at other times the baseline includes it. So gossip takes 8
    bytes of memory for each parameter, and 4 more for a fragment whose window waits for its merge.

    A large fragment keeps its residual in int8. After a merge with rho = 1 (always with Muon), the baseline is phi plus
    the residual and is not stored. While the next window waits for its merge, it is phi plus that residual, minus the
    pseudo-gradient, minus the new residual. So gossip takes 5 bytes a parameter, and 6 while a window waits. The
    rounding error is at most a 254th of the largest residual among 256 neighbours, and it is not lost: as the baseline
    differs by it, the next merge moves the live weights by it. The residuals of codes shorter than q4 hold most of a
    window's training, of which small numbers would be lost; they are kept in bf16, which takes a byte more for each.
    """

    donated: Mapping[str, str] = {"phi": "fp32"}
    weights_section = "phi"
    donates_live = False

    def __init__(self, gossip: GossipConfig, theta: Tensor, peer: PeerId, tools: RuleTools) -> None:
        """Create the rule with phi = theta; if theta is on the meta device, call `load` or `adopt` next."""
        super().__init__(gossip, theta, peer, tools)
        self.sections, self.thin_codecs = codecs_of(gossip)
        self.unsent_kept = 0.0  # share of the residual that the next merge leaves in the live weights
        self.phi = tools.vector(self.elements)
        slices = slices_of(self.elements, tools.codecs)
        self.on_request = tuple(slices)
        self.slices = {section.name: part for section, part in slices.items()}  # of phi, by name of the section
        self.is_large = self.elements >= LARGE_ELEMENTS
        self.may_round = False  # whether the newest window's residual may be rounded to int8
        self._baseline: Tensor | None = None  # None: the baseline is computed from phi and the residuals
        self._residual: Tensor | bytes | None = None  # bytes: in int8; None: zero, or included in the baseline
        # While a window waits for its merge and the baseline is not stored: the residual before the window's close.
        self._earlier: Tensor | bytes | None = None
        self.history = PartnerHistory()
        # The secret positions at which peers' vectors are compared; chosen at the first merge.
        self.sample: WindowSample | None = None
        self.closed: tuple[Window, bytes] | None = None  # the closed window that is not merged yet, with its q4 blob
        if not theta.is_meta:
            self.load(theta, {})

    def close(self, theta: Tensor, window: Window, packer: Packer) -> None:
        """Pack the window's pseudo-gradient; the weights `theta` become the baseline.

        If the baseline is stored, it is this tensor, which `buffer` has returned.

        Raises:
            ProtocolError: If a number is not finite.
        """
        self._end_unmerged()
        kernels, codes = self.tools.kernels, self.thin_codecs if window.thin else self.sections
        code = codes[PSEUDO_GRADIENT]
        residual, baseline = self.tools.vector(self.elements).zero_(), self.baseline
        blob, length = kernels.close(theta, baseline, residual, code)
        self.history.experience.closed(length)
        self.may_round = self.is_large and code == PSEUDO_GRADIENT_CODEC
        if self._baseline is None:
            self._earlier = self._residual
        else:
            self._baseline = theta
        self.residual = residual
        self.unsent_kept = UNSENT_KEPT if code == SPARSE_CODEC else 0.0
        sent = blob if code == PSEUDO_GRADIENT_CODEC else kernels.narrow(code, blob, self.elements)
        packer.add_encoded(PSEUDO_GRADIENT, code, self.elements, sent)
        self.closed = window, blob

    @property
    def baseline(self) -> Tensor:
        """The weights from which the next pseudo-gradient is measured, fp32 [n]; do not change it in place.

        They are theta at the last close of a window, plus all corrections since then, and plus the residual while no
        window waits for its merge.
        """
        if self._baseline is not None:
            return self._baseline
        if self._residual is None:
            return self.phi
        baseline = self.tools.vector(self.elements).copy_(self.phi)
        if self.closed is None:
            return baseline.add_(self._error())
        if self._earlier is not None:  # one vector after the other, as each takes memory while it is decoded
            baseline.add_(self._decoded(self._earlier))
        baseline.sub_(self._read(self.closed[1]))
        return baseline.sub_(self._error())

    @baseline.setter
    def baseline(self, vector: Tensor) -> None:
        self._baseline = None if self.is_large and vector is self.phi else vector

    @property
    def residual(self) -> Tensor | None:
        """The quantisation error that no window has published yet, fp32 [n], if it is kept apart; else None."""
        return None if self._residual is None else self._decoded(self._residual)

    @residual.setter
    def residual(self, vector: Tensor | None) -> None:
        if vector is None or not self.is_large:
            self._residual = vector
        elif self.may_round:
            self._residual = self.tools.codecs.encode(SLOW_WEIGHTS_CODEC, vector)
        else:
            self._residual = vector.bfloat16()

    def _decoded(self, residual: Tensor | bytes) -> Tensor:
        """Return a stored residual as fp32 [n]."""
        if isinstance(residual, bytes):
            return self.tools.codecs.decode(SLOW_WEIGHTS_CODEC, residual, self.elements)
        return residual.float()

    def encode(self, packer: Packer, names: Sequence[str]) -> None:
        """Pack these slices of the slow weights phi."""
        for name in names:
            packer.add(name, SLOW_WEIGHTS_CODEC, self.phi[self.slices[name]])

    def partner_window(self, one: Contribution) -> PulledWindow:
        """Return a partner's window with its sections still encoded, after checking them.

        Raises:
            ProtocolError: If a codec refuses a section.
        """
        parts, kernels = split(one.layout, one.blob), self.tools.kernels
        pseudo_gradient = parts[PSEUDO_GRADIENT]
        code = next(section.codec for section in one.layout if section.name == PSEUDO_GRADIENT)
        if code != PSEUDO_GRADIENT_CODEC:
            pseudo_gradient = kernels.widen(code, pseudo_gradient, self.elements)
        length = kernels.length(pseudo_gradient, self.elements)
        slow = [(self.slices[name], part) for name, part in parts.items() if name in self.slices]
        squares = sum(kernels.distance(self.phi[place], part) ** 2 for place, part in slow)
        numbers = sum(place.stop - place.start for place, _ in slow)
        distance = sqrt(squares * self.elements / numbers) if slow else 0.0
        return PulledWindow(one.peer, one.tokens, {}, pseudo_gradient, length, slow, distance)

    def merge(self, partners: Sequence[PartnerWindow], steps: int) -> Correction:
        """Take the outer step with partners' windows, weighted by trust, and return the correction of the weights."""
        assert self.closed is not None, "merge without a close"
        own, blob = self.closed
        experience, outliers = self.history.experience, self.history.outliers
        pulled = [one for one in partners if isinstance(one, PulledWindow)]
        possible = [one for one in pulled if experience.possible(one.length)]
        progress = experience.usual_progress([(one.peer, one.length) for one in possible])
        if self.sample is None:
            self.sample = WindowSample.drawn(self.elements, self._error())
        differences = _differences(self.sample, self.tools.codecs, self.phi, pulled)
        lengths = [min(one.length, progress) for one in pulled if one.slow]
        among = dict(zip(differences, outliers.trust([*differences.items()], lengths), strict=True))
        read = partial(self.sample.read, PSEUDO_GRADIENT_CODEC, self.tools.codecs)
        claims, trust, new = self.history.judged(self.closed, pulled, progress, read)
        self.left_out = tuple(one.peer for one, counts in zip(pulled, trust, strict=True) if not counts)
        self.work = _work(own, experience.lengths[-1], pulled, new)
        shares = influence.token_shares(own.tokens, claims, trust)
        near = experience.usual_distance([(one.peer, one.distance) for one in possible if one.slow])
        steps_taken = [Weighted(1.0 - sum(shares), blob)]
        self._baseline = self.baseline  # computed before phi changes
        vectors = OuterVectors(self.phi, self._baseline, self.tools.vector(self.elements))
        for share, one in zip(shares, pulled, strict=True):
            steps_taken.append(Weighted(share * influence.scale(one.length, progress), one.pseudo_gradient))
            if one.slow:
                weight = share * among[one.peer] * experience.nearness(one.distance, near)
                for place, part in one.slow:
                    self.tools.kernels.merge(vectors.of(place), [], [Weighted(weight, part)], 0.0)
                outliers.moved(weight * differences[one.peer])
        rho = rho_of(steps - own.steps, self.tools.optimizer)
        self.tools.kernels.merge(vectors, steps_taken, [], rho)
        self._keep_unsent(vectors, rho * self.unsent_kept)
        self._end_window(rho)  # only now: if the kernel runs out of memory, the final checkpoint includes the window
        return Correction(vectors.correction)

    def fold(self, theta: Tensor) -> Correction | None:
        """Add all unpublished training to phi, unquantised and without partners; `theta` becomes the baseline.

        Returns:
            The correction that moves the live weights to phi. None if the live weights already equal phi within
            rounding.
        """
        self._end_unmerged()
        owed = torch.sub(self.baseline, theta, out=self.tools.vector(self.elements))
        self.phi.sub_(owed)
        self.residual, correction = None, torch.sub(self.phi, theta, out=owed)
        # If theta equals phi up to rounding: a stored baseline keeps the tiny difference, else the next window has it.
        equal = float(torch.linalg.vector_norm(correction)) <= ROUNDING * float(torch.linalg.vector_norm(self.phi))
        self.baseline = self.phi if self.is_large else theta if equal else theta.add_(correction)
        return None if equal else Correction(correction)

    def _end_unmerged(self) -> None:
        """Apply the closed window to phi if no merge has done so, for example after a failed change of layers."""
        if self.closed is None:
            return
        self.phi.sub_(self._read(self.closed[1]))
        if self._baseline is None:  # it is then phi plus the residual before the close, as nothing else was applied
            self._residual, self.closed, self._earlier = self._earlier, None, None
        else:
            self._end_window()

    def _keep_unsent(self, vectors: OuterVectors, share: float) -> None:
        """Change a merge so that the live weights keep this share of the training that is not published yet."""
        if share:
            error = self._error()
            vectors.correction.sub_(error, alpha=share)
            vectors.baseline.sub_(error, alpha=share)

    def _error(self) -> Tensor:
        """Return the residual of the closed window."""
        residual = self.residual
        assert residual is not None, "a closed window has a residual"
        return residual

    def _end_window(self, rho: float = 0.0) -> None:
        """Let the baseline include the residual of the closed window. `rho`: share of the correction applied."""
        if self.is_large and rho == 1.0:  # the baseline is phi now, less the share that `_keep_unsent` has taken
            if self.unsent_kept:
                self.residual = self._error() * (1.0 - self.unsent_kept)
            self.baseline = self.phi
        else:
            self.baseline = self.baseline.add_(self._error())
            self.residual = None
        self.closed = self._earlier = None

    def published(self) -> Tensor | None:
        """Return the quantised pseudo-gradient, fp32 [n], of the closed window; None if it is merged already."""
        return None if self.closed is None else self._read(self.closed[1])

    def _read(self, blob: bytes) -> Tensor:
        """Return the pseudo-gradient, fp32 [n], that partners decode from our q4 bytes."""
        return self.tools.codecs.decode(PSEUDO_GRADIENT_CODEC, blob, self.elements)

    def state_lengths(self) -> Mapping[str, int]:
        """Return the name and length of each vector in `state`."""
        return dict.fromkeys(STATE_VECTORS, self.elements)

    def state(self, theta: Tensor) -> dict[str, Tensor]:
        """Return phi and `owed`, the training that no window has published yet, given the weights `theta`.

        If a window is closed but not merged, the returned phi includes this window, but no partner's window, since a
        restart loses partners' windows.
        """
        owed = self.baseline - theta
        if self.closed is None:
            return {"phi": self.phi, "owed": owed}
        owed.add_(self._error())
        return {"phi": self.phi - self._read(self.closed[1]), "owed": owed}

    def load(self, theta: Tensor, state: dict[str, Tensor]) -> None:
        """Continue with the weights `theta` and a checkpoint's `state`; with an empty state, start with phi = theta."""
        self.closed = self.residual = self._earlier = None
        self.history.outliers.forget()
        if "phi" in state:
            self.phi.copy_(state["phi"])
            baseline = self.tools.vector(self.elements).copy_(theta).add_(state["owed"])
            if self.is_large and OPTIMIZERS[self.tools.optimizer].takes_all:
                self.may_round = False  # bf16 loses less of it
                self.baseline, self.residual = self.phi, baseline.sub_(self.phi)
            else:
                self.baseline = baseline
            return
        if theta is not self.phi:
            self.phi.copy_(theta)
        self.baseline = self.phi

    def donate(self, live: Live, packer: Packer) -> None:
        """Pack the slow weights, from which a newcomer starts."""
        packer.add("phi", self.donated["phi"], self.phi)

    def adopt(self, live: Live, donated: Mapping[str, Tensor]) -> None:
        """Start with a donor's slow weights, and overwrite the live weights with them."""
        live.theta.copy_(donated["phi"])
        if live.theta.dtype == self.phi.dtype and not self.tools.pinned:
            self.phi = donated["phi"]
            self.load(self.phi, {})
        else:
            self.load(live.theta, {})


def _work(
    own: Window, own_length: float, partners: Sequence[PulledWindow], new: Sequence[float]
) -> tuple[PartnerWork, ...]:
    """Return one PartnerWork for each window with new work in a merge; () if our own window has no tokens.

    `new` has new_i (comm/gossip/trust.py) of each partner: 0 for a window that is not trusted.
    """
    return tuple(
        PartnerWork(one.peer, fresh * one.tokens, float(fresh * own.tokens), one.length, own_length)
        for one, fresh in zip(partners, new, strict=True)
        if fresh and own.tokens
    )


def _differences(
    sample: WindowSample, codecs: Codecs, phi: Tensor, partners: Sequence[PulledWindow]
) -> dict[PeerId, Tensor]:
    """Return slow weights minus phi at the sampled indices, for each partner that sent any; NaN where it sent none."""
    known = [one for one in partners if one.slow]
    ours, found = sample.take(phi) if known else phi, {}
    for one in known:
        found[one.peer] = torch.full_like(ours, torch.nan)
        for place, part in one.slow:
            within, at = sample.within(place)
            if len(at):
                found[one.peer][at] = within.read(SLOW_WEIGHTS_CODEC, codecs, part) - ours[at]
    return found
