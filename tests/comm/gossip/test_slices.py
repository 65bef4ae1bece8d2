"""Slow weights come in slices that a thin link carries beside the windows, and a late slice costs only itself."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from decentral.comm.codecs import blockwise
from decentral.comm.codecs.sections import Packer
from decentral.comm.gossip import update_rules
from decentral.comm.gossip.exchange import PullExchange
from decentral.comm.gossip.influence import Experience, Outliers
from decentral.comm.gossip.outer_kernels import TorchKernels
from decentral.comm.gossip.pull_rule import PullRule
from decentral.comm.gossip.snapshots import FragmentContext
from decentral.comm.gossip.trust import STRETCH_NUMBERS, WindowSample
from decentral.comm.gossip.update_rules import SLICE_NUMBERS, SLICES, RuleTools, Window
from decentral.comm.wire import blobs
from decentral.comm.wire.codec import Envelope
from decentral.comm.wire.messages import Pull, Snapshot
from decentral.comm.wire.transport import Answered, Ask, AskFailed
from decentral.core.config import GossipConfig
from decentral.core.fragments import Layout, layout_bytes
from decentral.core.ids import PeerId, RunId
from decentral.core.jobs import CloseWindow, Contribution, Merge, Merged, WindowClosed
from decentral.core.machine import Woke
from tests.comm.gossip.partners import Partners

SIZE = SLICE_NUMBERS * SLICES
PERIOD_S = 10.0
TOOLS = RuleTools(blockwise, TorchKernels(blockwise), optimizer="muon")
PARTNERS = [PeerId("B"), PeerId("C"), PeerId("D")]


class SparsePeer:
    """The exchange machine of a peer whose windows are sparse, and a link that carries some bytes in a window."""

    def __init__(self, window_bytes: float) -> None:
        tools, layout = GossipConfig(code="sparse"), {"pseudo_gradient": "sparse"}
        self.slow = update_rules.rule(tools, torch.zeros(SIZE), PeerId("A"), TOOLS).on_request
        self.layout = update_rules.layout_of(layout, SIZE, blockwise)
        view = Partners(PARTNERS)
        context = FragmentContext(RunId("run"), PeerId("A"), 0, 0.0, tools, view, view)
        self.machine, self.window_bytes, self.now = PullExchange(context, PERIOD_S), window_bytes, PERIOD_S
        self.largest = 0  # bytes of an answer

    def window(self, fails: bool = False) -> list[str]:
        """One window, with a pull from each partner; returns the slices that were merged."""
        (close,) = self.machine.handle(Woke(), self.now)
        assert isinstance(close, CloseWindow)
        closed = WindowClosed(0, close.seq, 64, self.layout, bytes(layout_bytes(self.layout)), self.slow)
        asks, effects = self.machine.handle(closed, self.now), []
        for ask in (one for one in asks if isinstance(one, Ask)):
            assert isinstance(ask.envelope.message, Pull)
            layout = (*self.layout, *(one for one in self.slow if one.name in ask.envelope.message.sections))
            blob, slow = bytes(layout_bytes(layout)), len(layout) > len(self.layout)
            self.largest = max(self.largest, len(blob))
            takes_s = PERIOD_S * len(blob) / self.window_bytes
            header = Snapshot("run", 0, close.seq, 32, self.now, layout, blobs.digest(blob))
            answer = Answered(ask.tag, ask.to, Envelope(header, blob), takes_s, takes_s, 10, len(blob))
            failed = AskFailed(ask.tag, ask.to, "deadline", takes_s)
            effects = self.machine.handle(failed if fails and slow else answer, self.now + takes_s)
        (merge,) = (one for one in effects if isinstance(one, Merge))
        self.machine.handle(Merged(0, close.seq, (), ()), self.now + takes_s)
        self.now = max(self.now + PERIOD_S, self.machine.close_at)
        return [section.name for one in merge.contributions for section in one.layout if section.codec == "int8"]


def test_over_a_link_that_carries_a_tenth_of_the_weights_in_a_window_all_slices_come_and_no_window_is_missed() -> None:
    """A pull of all slow weights took ten windows; what was missed meanwhile made them due again."""
    peer = SparsePeer(window_bytes=SIZE / 10)
    peer.window()
    begun = peer.now
    came = [name for _ in range(72) for name in peer.window()]
    assert peer.now == begun + 72 * PERIOD_S
    assert peer.largest <= SIZE / 10
    assert sorted(came, key=lambda name: int(name[4:])) == [f"phi.{place}" for place in range(SLICES)]


def test_a_slice_that_fails_costs_only_itself() -> None:
    peer = SparsePeer(window_bytes=SIZE / 10)
    lost = [peer.window(fails=True) for _ in range(9)]
    assert not any(lost)
    came = [name for _ in range(72) for name in peer.window()]
    assert set(came) == {f"phi.{place}" for place in range(SLICES)}
    assert peer.largest < 2 * SIZE / 10, "and is asked for with few others"


def sent(theta: Tensor, peer: str, names: Sequence[str]) -> Contribution:
    """A window in which each weight has grown by 0.3, and these slices of the slow weights before it."""
    rule = update_rules.rule(GossipConfig(), theta.clone(), PeerId(peer), TOOLS)
    packer = Packer(blockwise)
    rule.close(theta + 0.3, Window(100, 1), packer)
    rule.encode(packer, names)
    return Contribution(PeerId(peer), 100, *packer.finish())


def test_a_slice_moves_its_part_of_the_slow_weights_and_no_other() -> None:
    ours = torch.randn(SIZE, generator=torch.Generator().manual_seed(0))
    theirs = ours + 0.1
    one = update_rules.rule(GossipConfig(), ours.clone(), PeerId("A"), TOOLS)
    assert isinstance(one, PullRule)
    one.close(ours + 0.3, Window(100, 1), Packer(blockwise))
    one.merge([one.partner_window(sent(theirs, "B", ["phi.0", "phi.5"]))], 1)
    moved = one.phi - (ours + 0.3)
    for name, part in one.slices.items():
        assert torch.allclose(moved[part], torch.tensor(0.05 if name in ("phi.0", "phi.5") else 0.0), atol=0.03), name


@pytest.mark.parametrize(
    ("times", "counts"), [(1.0, 1.0), (4.0, 1.5 / 4), (6.0, 0.5 * 1.5 / 6), (8.0, 0.0), (1e9, 0.0)]
)
def test_slices_much_farther_off_than_others_are_usually_count_for_nothing(times: float, counts: float) -> None:
    """A liar's slices of zero moved us by as much as an honest slice, until two others had sent the same slice."""
    known = Experience()
    known.closed(1.0)
    known.usual_progress([(peer, 1.0) for peer in PARTNERS])
    near = known.usual_distance([(PARTNERS[0], 2.0), (PARTNERS[1], 2.0), (PARTNERS[2], 2.0 * times)])
    assert near == 2.0
    assert known.nearness(2.0 * times, near) == pytest.approx(counts)


def test_of_two_peers_that_have_drifted_apart_each_goes_towards_the_other() -> None:
    alone = Experience()
    alone.closed(1.0)
    alone.usual_progress([(PARTNERS[0], 1.0)])
    near = alone.usual_distance([(PARTNERS[0], 30.0)])
    assert alone.nearness(30.0, near) == pytest.approx(1.5 / 30.0)


def layout_of(parameters: int) -> Layout:
    return update_rules.rule(GossipConfig(), torch.zeros(parameters), PeerId("A"), TOOLS).on_request


def test_slices_are_few_and_small_fragments_have_fewer() -> None:
    lengths = {1: 1, SLICE_NUMBERS: 1, SLICE_NUMBERS + 1: 2, 1 << 20: SLICES, (1 << 20) + 1: SLICES}
    assert {numbers: len(layout_of(numbers)) for numbers in lengths} == lengths
    assert sum(section.elements for section in layout_of((1 << 20) + 1)) == (1 << 20) + 1


def test_the_sample_of_a_slice_is_that_part_of_the_whole_sample() -> None:
    whole = torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    sample, blob = WindowSample.drawn(SIZE, whole), blockwise.encode("int8", whole)
    expected, found = (
        sample.read("int8", blockwise, blob),
        torch.full((len(sample.begins) * STRETCH_NUMBERS,), torch.nan),
    )
    for part in update_rules.sliced("phi", "int8", SIZE, blockwise).values():
        within, at = sample.within(part)
        if len(at):
            found[at] = within.read("int8", blockwise, blockwise.encode("int8", whole[part]))
    assert torch.equal(found, expected)


def test_a_partner_is_judged_by_the_slices_that_others_have_sent_too() -> None:
    """One slice of a partner that is far off says nothing while nobody else has sent it, and enough once two have."""
    outliers, generator = Outliers(), torch.Generator().manual_seed(2)

    def near(first: int) -> Tensor:
        vector = torch.full((400,), torch.nan)
        vector[first : first + 100] = torch.randn(100, generator=generator)
        return vector

    def trust(peer: str, vector: Tensor) -> float:
        return outliers.trust([(PeerId(peer), vector)], [1.0])[0]

    assert trust("L", near(0) + 1e6) == 1.0
    assert [trust(peer, near(first)) for peer in "ABC" for first in (100, 200, 0, 300)] == [1.0] * 12
    assert trust("L", near(0) + 1e6) == 0.0
    assert outliers.is_far(PeerId("L"))
    assert trust("L", near(100)) == 0.0, "what it sends of other slices counts for nothing either"
