"""Check this machine's clock against those of other peers."""

from collections.abc import Sequence
from statistics import median

from decentral.commands.checks.finding import Finding, ok, unknown, warn, wrong
from decentral.core.units import Seconds
from decentral.peers.runtime.clock import CLOCKS_AGREE_S, MOST_AHEAD_S, difference

RECORD_S = 60.0  # a record in the DHT expires after this; if clocks differ by more, peers ignore new records
SET_CLOCK = "set this machine's clock: timedatectl set-ntp true (Linux), or start chronyd or ntpd"


def clock(ahead_s: Sequence[Seconds]) -> Finding:
    """Return the finding about this machine's clock, compared with the median of other peers' clocks.

    Args:
        ahead_s: Seconds by which each other peer's clock is ahead of this machine's.
    """
    ahead_s = [ahead for ahead in ahead_s if abs(ahead) <= MOST_AHEAD_S]
    if not ahead_s:
        return unknown("clock", "no other peer's clock to compare with")
    ahead = median(ahead_s)
    theirs = f"{len(ahead_s)} peers'" if len(ahead_s) > 1 else "one peer's"
    if abs(ahead) <= CLOCKS_AGREE_S:
        return ok("clock", f"{abs(ahead):.1f} s from {theirs}")
    spread_s = max(ahead_s) - min(ahead_s)
    apart = f" (their clocks differ by up to {spread_s:.0f} s)" if spread_s > CLOCKS_AGREE_S else ""
    seen = f"this machine's clock is {difference(-ahead)} {theirs}{apart}"
    if abs(ahead) <= RECORD_S:
        return warn("clock", seen, SET_CLOCK)
    consequence = "a peer that starts here while no other peer answers will not see their records later"
    return wrong("clock", f"{seen}; {consequence}", SET_CLOCK)
