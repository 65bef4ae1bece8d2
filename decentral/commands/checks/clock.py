"""Check of this machine's clock against those of other peers."""

from collections.abc import Sequence
from statistics import median

from decentral.commands.checks.finding import Finding, ok, unknown, warn, wrong
from decentral.core.units import Seconds
from decentral.peers.runtime.clock import CLOCKS_AGREE_S, MOST_AHEAD_S, difference

RECORD_S = 60.0  # so long a peer's record lasts: of peers whose clocks differ by more, one does not see the other
SET_CLOCK = "set this machine's clock: timedatectl set-ntp true (Linux), or start chronyd or ntpd"


def clock(ahead_s: Sequence[Seconds]) -> Finding:
    """`ahead_s`: how far other peers' clocks are ahead of this machine's. The median counts, as it does for a peer."""
    ahead_s = [ahead for ahead in ahead_s if abs(ahead) <= MOST_AHEAD_S]
    if not ahead_s:
        return unknown("clock", "no other peer's clock to compare with")
    ahead = median(ahead_s)
    theirs = f"{len(ahead_s)} peers'" if len(ahead_s) > 1 else "one peer's"
    if abs(ahead) <= CLOCKS_AGREE_S:
        return ok("clock", f"{abs(ahead):.1f} s from {theirs}")
    spread_s = max(ahead_s) - min(ahead_s)
    apart = f" (theirs differ by {spread_s:.0f} s among each other)" if spread_s > CLOCKS_AGREE_S else ""
    seen = f"this machine's clock is {difference(-ahead)} {theirs}{apart}"
    if abs(ahead) <= RECORD_S:
        return warn("clock", seen, SET_CLOCK)
    consequence = "a peer that starts here while nobody answers, and meets them later, does not see their records"
    return wrong("clock", f"{seen}; {consequence}", SET_CLOCK)
