"""Does the lab do what it was asked? Measures each pair's round trip and rates from inside, one pair after the other.

The round trip is that of small UDP packets, the rate that of the IP packets of several TCP connections past their slow
start, first there and then back. A router that came too late to do what was asked is said so, beside what was measured.
"""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks.wan.description import Description
from benchmarks.wan.lab import Lab
from decentral.core.errors import UserError

PROBE = [sys.executable, "-I", "-S", str(Path(__file__).parent / "probe.py")]
PORT = 5001
ROUND_TRIPS = 10
STREAMS = 8
WARM_UP_S, WARM_UP_ROUND_TRIPS, MEASURED_S = 1.5, 10.0, 3.0
DELAY_TOLERANCE, RATE_TOLERANCE = 0.10, 0.15
PROBE_S = 60.0  # the longest that a probe may take beside its load


@dataclass(frozen=True, slots=True)
class PairResult:
    """One pair: what was asked and what was measured, in seconds and bytes/s. Rates are there and back."""

    first: str
    second: str
    round_trip_asked_s: float
    round_trip_s: float
    rate_asked: tuple[float, float]
    rate: tuple[float, float]
    payload: tuple[float, float]
    late_ms: float  # by how much 99% of the packets were late at most
    router_cores: float
    router_complaints: list[str]

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
        return said + self.router_complaints


def run(description: Description) -> list[PairResult]:
    """Measures all pairs in turn, and prints a line for each."""
    pairs = list(combinations(range(len(description)), 2))
    warm_ups = [WARM_UP_S + WARM_UP_ROUND_TRIPS * description.round_trip_s(*pair) for pair in pairs]
    longest = sum(3 * PROBE_S + 2 * (warm_up_s + MEASURED_S) for warm_up_s in warm_ups)
    results = []
    with Lab(description, longest) as lab:
        print(f"{len(description)} peers, {len(pairs)} pairs in turn; TCP {lab.congestion_control}, {STREAMS} streams")
        print(HEAD, flush=True)
        for peer in range(len(description)):
            serve(lab, peer)
        for pair, warm_up_s in zip(pairs, warm_ups, strict=True):
            results.append(measure(lab, pair, warm_up_s, MEASURED_S))
            print(line(results[-1]), flush=True)
    return results


def serve(lab: Lab, peer: int) -> None:
    """Starts what answers the probes of others, in this peer's namespace."""
    server = lab.popen(peer, [*PROBE, "serve", str(PORT)], **PIPES)
    assert server.stdout is not None
    if server.stdout.readline().strip() != "serving":
        raise UserError(f"peer {peer} cannot listen: {server.stdout.read()[-200:]}")


def measure(lab: Lab, pair: tuple[int, int], warm_up_s: float, seconds: float) -> PairResult:
    """One pair, while nobody else sends anything. Both peers serve. Raises UserError if a probe fails."""
    asked, (first, second) = lab.description, pair
    (round_trip_s,) = _probe(lab, first, "round-trip", second, [ROUND_TRIPS], PROBE_S)
    before, longest = lab.traffic(), PROBE_S + warm_up_s + seconds
    load = [STREAMS, warm_up_s, seconds]
    (there, payload_there), (back, payload_back) = (
        _probe(lab, source, "push", target, load, longest) for source, target in (pair, pair[::-1])
    )
    traffic = lab.traffic() - before
    return PairResult(
        first=asked.names[first],
        second=asked.names[second],
        round_trip_asked_s=asked.round_trip_s(first, second),
        round_trip_s=round_trip_s,
        rate_asked=(asked.rate(first, second), asked.rate(second, first)),
        rate=(there, back),
        payload=(payload_there, payload_back),
        late_ms=traffic.late_ms(0.99),
        router_cores=traffic.router_cores,
        router_complaints=traffic.complaints(asked.round_trip_s(first, second)),
    )


PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


def _probe(
    lab: Lab, source: int, what: str, target: int, arguments: Sequence[float], timeout_s: float
) -> tuple[float, ...]:
    """The numbers that a probe prints. Raises UserError with what it says instead."""
    command = [*PROBE, what, lab.address(target), str(PORT), *map(str, arguments)]
    process = lab.popen(source, command, **PIPES)
    try:
        text, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise UserError(f"a probe took longer than {timeout_s:.0f} s; is the machine loaded?") from None
    try:
        return tuple(float(word) for word in text.split())
    except ValueError:
        raise UserError(f"a probe failed: {text.strip().splitlines()[-1:]}") from None


HEAD = (
    f"{'pair':24} {'round trip, ms: asked':>21} {'measured':>9} {'ratio':>6} {'Mb/s: asked':>12} "
    f"{'there':>8} {'back':>8} {'ratios':>12} {'late, ms':>9} {'router':>7}"
)


def line(one: PairResult) -> str:
    """A line of the table. `late`: by how much 99% of the packets were at most; `router`: of a core."""
    there, back = one.rate_ratios
    asked = min(one.rate_asked) * 8e-6
    return (
        f"{one.first + ' - ' + one.second:24} {one.round_trip_asked_s * 1e3:21.1f} {one.round_trip_s * 1e3:9.1f} "
        f"{one.delay_ratio:6.3f} {asked:12.1f} {one.rate[0] * 8e-6:8.1f} {one.rate[1] * 8e-6:8.1f} "
        f"{there:6.3f}{back:6.3f} {one.late_ms:9.2f} {one.router_cores:7.2f}  {', '.join(one.complaints())}"
    ).rstrip()


def verdict(results: Sequence[PairResult]) -> str:
    """One line that sums up all pairs."""
    delays = [one.delay_ratio for one in results]
    rates = [ratio for one in results for ratio in one.rate_ratios]
    bad = sum(bool(one.complaints()) for one in results)
    return (
        f"delays {min(delays):.3f} to {max(delays):.3f} of what was asked (allowed: {DELAY_TOLERANCE:.0%} off), rates "
        f"{min(rates):.3f} to {max(rates):.3f} ({RATE_TOLERANCE:.0%}); pairs with a complaint: {bad} of {len(results)}"
    )


def to_json(description: Description, results: Sequence[PairResult]) -> dict[str, Any]:
    return {"peers": list(description.names), "mtu": description.mtu, "pairs": [asdict(one) for one in results]}
