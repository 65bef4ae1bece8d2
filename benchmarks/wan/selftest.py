"""Does the lab do what it was asked? Measures each pair's round trip and rates from inside, one pair after the other.

The round trip is that of small UDP packets, the rate the payload of several TCP connections, in both directions at once. Headers take 3.5% of what a link carries, so a perfect link shows a ratio of 0.965.
"""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks.wan.description import Description
from benchmarks.wan.lab import Lab, Traffic
from decentral.core.errors import UserError

PROBE = [sys.executable, "-I", "-S", str(Path(__file__).parent / "probe.py")]
PORT = 5001
ROUND_TRIPS = 10
STREAMS = 8
LOADED_S, LOADED_ROUND_TRIPS = 6.0, 10.0  # how long a pair is loaded; probe.py takes the best 2 s
DELAY_TOLERANCE, RATE_TOLERANCE = 0.10, 0.15
LATE_MS = 5.0  # a router that is later than this for one in a hundred packets was itself the bottleneck
PAIR_S = 60.0  # the longest that one pair may take, beside the load


@dataclass(frozen=True, slots=True)
class PairResult:
    """One pair: what was asked and what was measured, in seconds and bytes/s. Rates are there and back."""

    first: str
    second: str
    round_trip_asked_s: float
    round_trip_s: float
    rate_asked: tuple[float, float]
    rate: tuple[float, float]
    late_ms: float  # by how much 99% of the packets were late at most
    router_cores: float
    dropped: int  # by the router itself, for want of room

    @property
    def delay_ratio(self) -> float:
        return self.round_trip_s / self.round_trip_asked_s

    @property
    def rate_ratios(self) -> tuple[float, float]:
        return self.rate[0] / self.rate_asked[0], self.rate[1] / self.rate_asked[1]

    def complaints(self) -> list[str]:
        """Why this pair is not as asked, or why its figures are those of the router."""
        said = []
        if abs(self.delay_ratio - 1) > DELAY_TOLERANCE:
            said.append("delay")
        if any(abs(ratio - 1) > RATE_TOLERANCE for ratio in self.rate_ratios):
            said.append("rate")
        if self.late_ms > LATE_MS or self.dropped:
            said.append("router late")
        return said


def run(description: Description) -> list[PairResult]:
    """Measures all pairs in turn, and prints a line for each."""
    pairs = list(combinations(range(len(description)), 2))
    seconds = [LOADED_S + LOADED_ROUND_TRIPS * description.round_trip_s(*pair) for pair in pairs]
    results = []
    with Lab(description, sum(seconds) + PAIR_S * len(pairs)) as lab:
        print(f"{len(description)} peers, {len(pairs)} pairs in turn; TCP {lab.congestion_control}, {STREAMS} streams")
        print(HEAD, flush=True)
        for peer in range(len(description)):
            serve(lab, peer)
        for pair, loaded_s in zip(pairs, seconds, strict=True):
            results.append(measure(lab, pair, loaded_s))
            print(line(results[-1]), flush=True)
    return results


def measure(lab: Lab, pair: tuple[int, int], seconds: float) -> PairResult:
    """One pair, while nobody else sends anything. Both peers serve. Raises UserError if a probe fails."""
    there, back, asked = pair, pair[::-1], lab.description
    round_trip_s = _output(lab.popen(there[0], _round_trip(lab, there[1]), **PIPES), PAIR_S)
    before = lab.traffic()
    pushes = [lab.popen(source, _push(lab, target, seconds), **PIPES) for source, target in (there, back)]
    rates = [_output(push, PAIR_S + seconds) for push in pushes]
    traffic = lab.traffic() - before
    return PairResult(
        first=asked.names[there[0]],
        second=asked.names[there[1]],
        round_trip_asked_s=asked.round_trip_s(*there),
        round_trip_s=round_trip_s,
        rate_asked=(asked.rate(*there), asked.rate(*back)),
        rate=(rates[0], rates[1]),
        late_ms=traffic.late_ms(0.99),
        router_cores=traffic.router_cores,
        dropped=_own_drops(traffic),
    )


PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


def serve(lab: Lab, peer: int) -> None:
    """Starts what answers the probes of others, in this peer's namespace."""
    server = lab.popen(peer, [*PROBE, "serve", str(PORT)], **PIPES)
    assert server.stdout is not None
    if server.stdout.readline().strip() != "serving":
        raise UserError(f"peer {peer} cannot listen: {server.stdout.read()[-200:]}")


def _round_trip(lab: Lab, target: int) -> list[str]:
    return [*PROBE, "round-trip", lab.address(target), str(PORT), str(ROUND_TRIPS)]


def _push(lab: Lab, target: int, seconds: float) -> list[str]:
    return [*PROBE, "push", lab.address(target), str(PORT), str(STREAMS), str(seconds)]


def _output(process: "subprocess.Popen[str]", timeout_s: float) -> float:
    """The number that a probe prints. Raises UserError with what it says instead."""
    try:
        text, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise UserError(f"a probe took longer than {timeout_s:.0f} s; is the machine loaded?") from None
    try:
        return float(text)
    except ValueError:
        raise UserError(f"a probe failed: {text.strip().splitlines()[-1:]}") from None


def _own_drops(traffic: Traffic) -> int:
    return traffic.tally["full"] + traffic.tally["refused"]


HEAD = (
    f"{'pair':26} {'round trip, ms: asked':>21} {'measured':>9} {'ratio':>6} {'Mb/s: asked':>12} "
    f"{'there':>8} {'back':>8} {'ratios':>12} {'late, ms':>9} {'router':>7}"
)


def line(one: PairResult) -> str:
    """A line of the table. `late`: by how much 99% of the packets were at most; `router`: of a core."""
    there, back = one.rate_ratios
    asked = min(one.rate_asked) * 8e-6
    return (
        f"{one.first + ' - ' + one.second:26} {one.round_trip_asked_s * 1e3:21.1f} {one.round_trip_s * 1e3:9.1f} "
        f"{one.delay_ratio:6.3f} {asked:12.1f} {one.rate[0] * 8e-6:8.1f} {one.rate[1] * 8e-6:8.1f} "
        f"{there:6.3f}{back:6.3f} {one.late_ms:9.2f} {one.router_cores:7.2f}  {', '.join(one.complaints())}"
    )


def verdict(results: Sequence[PairResult]) -> str:
    """One line that sums up all pairs."""
    delays = [one.delay_ratio for one in results]
    rates = [ratio for one in results for ratio in one.rate_ratios]
    bad = sum(bool(one.complaints()) for one in results)
    return (
        f"delays {min(delays):.3f} to {max(delays):.3f} of what was asked, rates {min(rates):.3f} to {max(rates):.3f}; "
        f"{bad} of {len(results)} pairs are off by more than {DELAY_TOLERANCE:.0%} or {RATE_TOLERANCE:.0%}, or met a "
        f"router that was late by more than {LATE_MS:g} ms"
    )


def to_json(description: Description, results: Sequence[PairResult]) -> dict[str, Any]:
    return {"peers": list(description.names), "mtu": description.mtu, "pairs": [asdict(one) for one in results]}
