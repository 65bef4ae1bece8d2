"""Predict what gossip sends: the length and code of windows, and bytes/s between each two peers. Start at `traffic`.

It is the steady state of `gossip.algorithm: pull`, after `gossip.start_steps`. Each peer's window follows from its
uplink and its processor by the rules of running peers (peers/runtime/window_lengths.py), with the same constants. A
partner's answer is as large as its encoded window; one of them also has slices of slow weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from decentral.comm.codecs import blockwise
from decentral.comm.gossip.exchange import whole_every
from decentral.comm.gossip.gossip_cost import FASTEST_BYTES_PER_S, IDLE_SHARE, Stretch
from decentral.comm.gossip.outer_kernels import ONE_BIT_CODEC, PSEUDO_GRADIENT_CODEC, SLOW_WEIGHTS_CODEC
from decentral.comm.wire.meter import LOCAL_S, WARM_UP_BYTES
from decentral.comm.wire.slow_start import transfer_s
from decentral.core.config import GossipConfig
from decentral.core.fragments import Fragment
from decentral.peers.membership.link_probes import LONG_PROBE_BYTES, LONG_PROBE_S, PROBE_BYTES, longest_pause_s
from decentral.peers.runtime.peer_selection import WEIGHT_FLOOR
from decentral.peers.runtime.window_lengths import THIN_PARTNERS, THIN_UNTIL, common_need_s, most_windows
from decentral.scheduler.topology.arrays import Flags, Floats
from decentral.scheduler.topology.topology import Topology, sites_of

# A pull of 0 bytes takes this many core-seconds, at the peer that asks and the peer that answers together. Each byte
# takes 1 / FASTEST_BYTES_PER_S more, so a pull of 200 kB takes 4.7 core-milliseconds (docs/results/benchmarks.md).
PULL_S = 2e-3
# How many numbers a core handles per second when it closes a window, merges a partner's window, encodes slow weights.
NUMBERS_PER_S = (708e6, 618e6, 704e6)
# How many numbers a core copies per second, from the weights when a window closes, and when it adds the correction.
COPIED_NUMBERS_PER_S = 700e6
# Core-seconds for each parameter of a window that is closed and merged with one partner's window, at these rates.
NUMBER_S = 1 / NUMBERS_PER_S[0] + 1 / NUMBERS_PER_S[1] + 2 / COPIED_NUMBERS_PER_S
LOOPBACK_RATE = 180e6  # bytes/s of a stream between two processes of one machine (docs/results/benchmarks.md)
ROUNDS = 4  # windows that depend on other peers' windows, and rates on shared links, are computed in so many iterations


@dataclass(frozen=True, slots=True)
class Gossiper:
    """A peer's step time and processor. The peer's gossip depends on them and on its links."""

    step_s: float
    cores: float | None  # number of cores that training keeps busy; None: the processor does not limit gossip
    idle_cores: float = 0.0
    slower: float = 1.0  # a window's kernels and copies take this many times NUMBER_S for each parameter


@dataclass(frozen=True, slots=True, eq=False)
class PredictedGossip:
    """How often N peers are predicted to gossip, why no more often, and the traffic between them."""

    period_s: Floats  # (N,) for each peer: seconds from one window of a fragment to the next
    cycle_s: Floats  # (N,) for each peer: the shortest time between windows that its steps and transfers allow, seconds
    cores_s: Floats  # (N,) seconds between two windows if only the peer's processor limited them
    bound: tuple[str, ...]  # what lengthens each peer's windows: link, cores, swarm or steps; "" if nothing does
    codes: tuple[str, ...]  # by peer: the code of its windows
    sent_NN: Floats  # bytes/s from the row's peer to the column's peer


@dataclass(frozen=True, slots=True)
class _Windows:
    """The window lengths that one peer needs (multiples of `gossip.window_s`), its partners, and what bounds it."""

    own: int
    dense_link: int  # the length that the link would need with the dense code
    cores: int
    partners: int
    bound: str


def traffic(
    topology: Topology, gossip: GossipConfig, fragments: Sequence[Fragment], spans: Sequence[tuple[int, int]],
    peers: Sequence[Gossiper], ease: float = 1.0,
) -> PredictedGossip:  # fmt: skip
    """Predict the gossip of peers that hold these layers.

    Args:
        topology: The peers and their links.
        gossip: The section `gossip` of the config, with algorithm pull.
        fragments: All fragments of the model.
        spans: Layers [first, last) of each peer.
        peers: Each peer's step and processor.
        ease: Factor by which links and cores are faster than assumed when the peers choose their windows.
    """
    held_NF = np.array([[first <= one.first and one.last <= last for one in fragments] for first, last in spans])
    up_N, numbers = ease * _typical_up(topology), range(len(peers))
    held = [[cut for cut, holds in zip(fragments, held_F, strict=True) if holds] for held_F in held_NF]
    thin, periods_s, needs_s = [False] * len(peers), [0.0] * len(peers), [0.0] * len(peers)
    found = [_windows(gossip, held[i], held_NF, up_N[i], thin[i], peers[i], ease) for i in numbers]
    for _ in range(ROUNDS):
        needs_s = [one.own * gossip.window_s for one in found]
        common_s = [_common(needs_s, held_NF, i) for i in numbers]
        thin = [
            gossip.code == "auto" and one.dense_link > one.cores and one.dense_link * gossip.window_s >= common
            for one, common in zip(found, common_s, strict=True)
        ]
        periods_s = [max(need, common) for need, common in zip(needs_s, common_s, strict=True)]
        found = [_windows(gossip, held[i], held_NF, up_N[i], thin[i], peers[i], ease) for i in numbers]
    bound = ["swarm" if p > n else one.bound for p, n, one in zip(periods_s, needs_s, found, strict=True)]
    codes = [_code(gossip, one) for one in thin]
    sent_NN, cycle_N = _sent(topology, fragments, held_NF, found, codes, np.array(periods_s), peers)
    slow = cycle_N > np.array(periods_s) * 1.01
    why = tuple("steps" if late else why for late, why in zip(slow, bound, strict=True))
    cores_N = np.array([one.cores * gossip.window_s for one in found])
    return PredictedGossip(np.maximum(periods_s, cycle_N), cycle_N, cores_N, why, tuple(codes), sent_NN)


def _code(gossip: GossipConfig, thin: bool) -> str:
    if gossip.code != "auto":
        return gossip.code
    return ONE_BIT_CODEC if thin else PSEUDO_GRADIENT_CODEC


def _typical_up(topology: Topology) -> Floats:
    """Return (N,) bytes/s: the mean rate at which each peer sends to another, as its `Meter.typical_up` measures it."""
    rate_NN = np.minimum(LOOPBACK_RATE, np.minimum(topology.bandwidth, np.minimum.outer(topology.up, topology.down)))
    np.fill_diagonal(rate_NN, 0.0)
    near_NN = topology.delay_s + topology.delay_s.T < LOCAL_S
    best_NN = np.zeros_like(rate_NN)
    for alike_NN in (near_NN, ~near_NN):
        best_NN[alike_NN] = np.broadcast_to((rate_NN * alike_NN).max(axis=1, keepdims=True), rate_NN.shape)[alike_NN]
    np.fill_diagonal(best_NN, np.inf)
    typical_N: Floats = (len(rate_NN) - 1) / (1 / best_NN).sum(axis=1)
    return typical_N


def _windows(
    gossip: GossipConfig, held: Sequence[Fragment], held_NF: Flags, up: float, thin: bool, one: Gossiper, ease: float
) -> _Windows:
    """Return the window lengths that one peer needs, by the rules of `WindowLengths`, and its number of partners."""
    if not held:
        return _Windows(1, 1, 1, 0, "")
    first = held[0]
    holders = int(held_NF[:, first.index].sum()) - 1
    served = max(1, min(gossip.partners, len(held_NF) - 1))
    whole = sum(cut.parameters for cut in held) / first.parameters
    share_s = gossip.link_share * gossip.window_s

    def link(code: str, partners: int, pulled: int) -> float:
        """Return the window length that the uplink needs. One of `pulled` partners also sends slow weights."""
        return partners * whole * _answer_bytes(code, first.parameters, pulled, holders) / up / share_s

    code = _code(gossip, thin)
    partners = served if Stretch().fit(link(code, served, served)) == 1 else min(THIN_PARTNERS, served)
    size = link(code, partners, min(partners, max(1, holders)))
    dense = _code(gossip, False)
    # A link counts as thin at first: peers that start together measure each other's probes, and thin links stay thin.
    # Where links are faster than assumed, it does not.
    as_thin = Stretch(1 if ease > 1 else 2, THIN_UNTIL)
    link_times, dense_times = Stretch().fit(size), as_thin.fit(link(dense, served, min(partners, max(1, holders))))
    cores_times = _cores_times(gossip, held, one, code, min(partners, holders), holders, ease) if holders else 1
    most = most_windows(gossip.window_s)
    own = max(1, min(most, max(link_times, cores_times)))
    bound = "link" if link_times > cores_times else "cores" if cores_times > 1 else ""
    return _Windows(own, dense_times, cores_times, partners, bound)


def _cores_times(
    gossip: GossipConfig, held: Sequence[Fragment], peer: Gossiper, code: str, partners: int, holders: int, ease: float
) -> int:
    """Return the window length at which gossip's processor time is within its share, by `GossipCost.windows`' rule."""
    if peer.cores is None:
        return 1
    cost_s = sum(_window_cost_s(cut.parameters, code, partners, holders, peer.slower) for cut in held)
    cores = gossip.core_share * peer.cores + IDLE_SHARE * peer.idle_cores
    return Stretch().fit(cost_s / (ease * cores * gossip.window_s))


def _window_cost_s(parameters: int, code: str, partners: int, holders: int, slower: float) -> float:
    """Return the core-seconds of one window of a fragment: kernels, copies, and pulls from `partners` partners.

    Kernels and copies take `slower` times as long as at the rates above.

    The peer also answers as many pulls as it sends. PULL_S includes both sides of a pull.
    """
    close, merge, encode = NUMBERS_PER_S
    whole = 1 / _every(code, parameters, partners, holders)
    kernels_s = parameters * (1 / close + partners / merge + whole / encode + 2 / COPIED_NUMBERS_PER_S)
    pull_s = PULL_S + _answer_bytes(code, parameters, partners, holders) / FASTEST_BYTES_PER_S
    return slower * kernels_s + partners * pull_s


def _every(code: str, parameters: int, partners: int, holders: int) -> int:
    """Return N: each of a fragment's windows pulls an N-th of the slow weights."""
    slow = blockwise.size(SLOW_WEIGHTS_CODEC, parameters)
    return whole_every(partners, holders, blockwise.size(code, parameters), slow)


def _answer_bytes(code: str, parameters: int, partners: int, holders: int) -> float:
    """Return the mean bytes of an answer about a fragment: one of `partners` also sends slices of slow weights."""
    slow = blockwise.size(SLOW_WEIGHTS_CODEC, parameters) / (
        _every(code, parameters, partners, holders) * max(1, partners)
    )
    return blockwise.size(code, parameters) + slow


def _common(needs_s: Sequence[float], held_NF: Flags, peer: int) -> float:
    """Return the window length in seconds that suits a peer and all other peers with some of its fragments."""
    others = [need for j, need in enumerate(needs_s) if j != peer and bool((held_NF[j] & held_NF[peer]).any())]
    return common_need_s(needs_s[peer], sorted(others))


def _sent(
    topology: Topology, fragments: Sequence[Fragment], held_NF: Flags, found: Sequence[_Windows], codes: Sequence[str],
    period_N: Floats, peers: Sequence[Gossiper],
) -> tuple[Floats, Floats]:  # fmt: skip
    """Return the bytes/s from each peer to each other peer, and the shortest time between two windows of each peer.

    This shortest time, in seconds, is what the peer's steps and transfers allow. The bytes/s are those of windows of
    `period_N`, or of the shortest time if it is longer.
    """
    count = len(topology)
    # In the next matrices, a row is the peer that pulls, and a column is the peer that sends.
    rate_NN = np.minimum(topology.bandwidth, np.minimum.outer(topology.up, topology.down)).T
    step_N = np.array([one.step_s for one in peers])
    per_window_NN, pulls_NN = np.zeros((count, count)), np.zeros((count, count))
    slowest_N = np.zeros(count)
    for cut in fragments:
        holders = np.flatnonzero(held_NF[:, cut.index]).tolist()
        if len(holders) < 2:
            continue
        grid = np.ix_(holders, holders)
        partners = np.array([min(found[i].partners, len(holders) - 1) for i in holders])
        drawn = _drawn(rate_NN[grid], partners)
        size = np.array(
            [[_answer_bytes(codes[j], cut.parameters, int(k), len(holders) - 1) for j in holders] for k in partners]
        )
        per_window_NN[grid] += drawn * size
        pulls_NN[grid] = drawn
        took_HH = _transfers_s(2 * topology.delay_s[grid], size, rate_NN[grid] / partners[:, None])
        mean_H = (drawn * took_HH).sum(axis=1) / np.maximum(drawn.sum(axis=1), 1e-9)
        slowest_N[holders] = np.maximum(slowest_N[holders], mean_H)
    cycle_N = step_N * (1 + np.ceil(np.maximum(slowest_N, 1e-9) / np.maximum(step_N, 1e-9)))
    period_N = np.maximum(period_N, cycle_N)
    asked_NN = per_window_NN / period_N[:, None]  # bytes/s that the row's peer pulls from the column's peer
    asked_NN *= _fresh(pulls_NN, period_N)
    return within_links(topology, asked_NN.T + _probes(_typical_up(topology), period_N)), cycle_N


def _transfers_s(round_trip_HH: Floats, size_HH: Floats, rate_HH: Floats) -> Floats:
    """Return the seconds of each pull, a round trip and TCP's slow start included."""
    trips, sizes, rates = round_trip_HH.tolist(), size_HH.tolist(), np.minimum(rate_HH, LOOPBACK_RATE).tolist()
    return np.array(
        [
            [trip + transfer_s(int(size), rate, trip) for trip, size, rate in zip(one, two, three, strict=True)]
            for one, two, three in zip(trips, sizes, rates, strict=True)
        ]
    )


def _drawn(rate_HH: Floats, partners_H: Floats) -> Floats:
    """Return the probability that the row's peer pulls from the column's peer in a window.

    Peers choose partners at random, with weights that grow with the measured rates.
    """
    rate_HH = np.where(np.isinf(rate_HH), LOOPBACK_RATE, rate_HH)
    np.fill_diagonal(rate_HH, 0.0)
    weights_HH = np.maximum(WEIGHT_FLOOR, rate_HH / rate_HH.max(axis=1, keepdims=True))
    np.fill_diagonal(weights_HH, 0.0)
    others = len(rate_HH) - 1
    chance_HH = np.where(weights_HH > 0, 1.0, 0.0)
    for row, partners in enumerate(partners_H):
        if partners < others:
            low, high = 0.0, 1e3
            for _ in range(60):
                middle = (low + high) / 2
                drawn = (1 - np.exp(-middle * weights_HH[row])).sum()
                low, high = (middle, high) if drawn < partners else (low, middle)
            chance_HH[row] = 1 - np.exp(-low * weights_HH[row])
    return chance_HH


def _fresh(pulls_NN: Floats, period_N: Floats) -> Floats:
    """Return the share of the row peer's pulls that find a new window, given the window periods of both peers."""
    windows_NN = np.maximum(1.0, period_N[None, :] / period_N[:, None])  # number of row's windows in one of column's
    seen_NN = 1 - (1 - np.minimum(pulls_NN, 1.0)) ** windows_NN
    share: Floats = np.where(pulls_NN > 0, seen_NN / np.maximum(pulls_NN * windows_NN, 1e-12), 0.0)
    return np.minimum(share, 1.0)


def within_links(topology: Topology, sent_NN: Floats) -> Floats:
    """Return bytes/s scaled down where a peer's links or a site's link carry less than is asked of them."""
    site_N = sites_of(topology)
    for _ in range(ROUNDS):
        sent_NN = sent_NN * np.minimum(1.0, topology.up / np.maximum(sent_NN.sum(axis=1), 1e-9))[:, None]
        sent_NN = sent_NN * np.minimum(1.0, topology.down / np.maximum(sent_NN.sum(axis=0), 1e-9))[None, :]
        for number, site in enumerate(topology.sites):
            leaves = np.outer(site_N == number, site_N != number)
            for crossing, rate in ((leaves, site.up), (leaves.T, site.down)):
                asked = float(sent_NN[crossing].sum())
                sent_NN = np.where(crossing & (asked > rate), sent_NN * (rate / max(asked, rate)), sent_NN)
    return sent_NN


def _probes(up_N: Floats, period_N: Floats) -> Floats:
    """Return the bytes/s of probes between each two peers, given their uplinks' bytes/s and their windows' seconds."""
    sent_N = np.where(up_N * LONG_PROBE_S >= LONG_PROBE_BYTES, LONG_PROBE_BYTES, PROBE_BYTES)
    sent_N = (sent_N + WARM_UP_BYTES) / [longest_pause_s(one) for one in period_N.tolist()]
    found = np.repeat(sent_N[:, None] / max(1, len(up_N) - 1), len(up_N), axis=1)
    np.fill_diagonal(found, 0.0)
    return found
