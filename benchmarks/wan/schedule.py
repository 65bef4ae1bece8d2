"""Changes of the network while the lab runs, as text, in the words that the simulator has for its faults.

    part 0,1 at 30 for 15             a partition: peers 0 and 1 on one side, all others on the other
    part 0,1 | 2-4 | 5 at 30 for 15   into these groups; peers that are in none reach nobody
    oneway 0>1 at 5 for 10            packets from 0 do not reach 1
    degrade 0-1 x0.1 at 5 for 10      a tenth of the rate between the two is left
    degrade 2 x0.1 at 5 for 10        a tenth of the rates of its uplink and downlink
    delay 0-1 x3 at 5 for 10          three times the delay
    loss 0.05 at 5 for 20             this share of all packets is lost, beside what the topology says
    loss 0-1 x0.05 at 5 for 20        of those between the two
    move 2 at 40                      its address changes; what was under way to the old one is lost

Changes are separated by semicolons or lines. Without `at` a change comes at once, without `for` it stays until it is
healed. Those that overlap add up, and one that ends takes back only what it did. Times are seconds.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from benchmarks.wan.description import Description
from decentral.core.errors import UserError
from decentral.scheduler.topology.arrays import Flags, Floats

KINDS_OF_CHANGE = ("part", "oneway", "degrade", "delay", "loss", "move")

_FORM = re.compile(
    r"(?P<kind>[a-z]+)\s+(?P<target>[\d.,|>\s-]*?[\d.])(?:\s+x(?P<value>[\d.]+))?"
    r"(?:\s+at\s+(?P<at>\d+\.?\d*))?(?:\s+for\s+(?P<lasts>\d+\.?\d*))?"
)


@dataclass(frozen=True, slots=True)
class Change:
    """One change of the network. `groups`: of a partition; `peers`: one, or a pair, or none for all links."""

    kind: str
    peers: tuple[int, ...] = ()
    groups: tuple[frozenset[int], ...] = ()
    value: float = 1.0  # a factor, or a share of packets
    at: float = 0.0
    lasts: float | None = None  # None: until it is healed


class Conditions(NamedTuple):
    """The network as it is now, in the units of Description."""

    up: Floats
    down: Floats
    path: Floats
    delay_s: Floats
    loss: Floats
    open: Flags


def parse(text: str, peers: int) -> list[Change]:
    """The changes that a text describes, by time. Raises UserError with the part that is no change."""
    parts = [part.strip() for part in re.split(r"[;\n]", text)]
    return sorted((_one(part, peers) for part in parts if part), key=lambda change: change.at)


def _one(text: str, peers: int) -> Change:
    found = _FORM.fullmatch(text)
    if found is None or found["kind"] not in KINDS_OF_CHANGE:
        example, known = "'part 0,1 at 30 for 15' or 'degrade 0-1 x0.1 at 5'", ", ".join(KINDS_OF_CHANGE)
        raise UserError(f"{text!r} is no change of the network; expected such as {example} (known: {known})")
    at, lasts = float(found["at"] or 0), float(found["lasts"]) if found["lasts"] else None
    try:
        change = _built(found["kind"], found["target"].strip(), found["value"], peers)
    except ValueError:
        raise UserError(f"{text!r} is not complete; the forms stand in benchmarks/wan/schedule.py") from None
    named = {*change.peers, *(peer for group in change.groups for peer in group)}
    if named and max(named) >= peers:
        raise UserError(f"{text!r} names peer {max(named)}; there are 0 to {peers - 1}")
    return Change(change.kind, change.peers, change.groups, change.value, at, lasts)


def _built(kind: str, target: str, value: str | None, peers: int) -> Change:
    """Raises ValueError for what is missing or out of its range."""
    if kind == "part":
        groups = [frozenset(_numbers(group)) for group in target.split("|")]
        if len(groups) == 1:
            groups.append(frozenset(range(peers)) - groups[0])
        if sum(map(len, groups)) != len(frozenset().union(*groups)):
            raise ValueError(target)  # a peer in two groups
        return Change(kind, groups=tuple(groups))
    if kind == "move":
        return Change(kind, (int(target),))
    if kind == "oneway":
        return Change(kind, _pair(target, ">"))
    if kind == "loss" and value is None:
        return Change(kind, value=_share(target))
    members = (int(target),) if target.isdecimal() and kind == "degrade" else _pair(target, "-")
    factor = _share(value) if kind == "loss" else float(value or "nan")
    if not 0 < factor < 1e6:
        raise ValueError(value)
    return Change(kind, members, value=factor)


def _share(text: str | None) -> float:
    share = float(text or "nan")
    if not 0 < share < 1:
        raise ValueError(text)
    return share


def _pair(text: str, between: str) -> tuple[int, int]:
    first, second = (int(part) for part in text.split(between))
    if first == second:
        raise ValueError(text)
    return first, second


def _numbers(text: str) -> list[int]:
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def conditions(base: Description, active: Sequence[Change]) -> Conditions:
    """The network under all changes that are active."""
    count = len(base)
    now = Conditions(
        base.up.copy(),
        base.down.copy(),
        base.path.copy(),
        base.delay_s.copy(),
        base.loss.copy(),
        np.ones((count, count), np.bool_),
    )
    for change in active:
        _apply(now, change, base)
    return now


def _apply(now: Conditions, change: Change, base: Description) -> None:
    both: list[tuple[int, ...]] = [change.peers, change.peers[::-1]] if len(change.peers) == 2 else []
    match change.kind:
        case "part":
            side = np.full(len(base), -1)
            for number, group in enumerate(change.groups):
                side[list(group)] = number
            now.open[:] &= (side[:, None] == side) & (side >= 0)
        case "oneway":
            now.open[change.peers] = False
        case "degrade" if both:
            for source, target in both:  # of what the pair could carry, which its uplink may bound and not its path
                degraded = base.rate(source, target) * change.value
                now.path[source, target] = min(now.path[source, target] * change.value, degraded)
        case "degrade":
            now.up[change.peers[0]] *= change.value
            now.down[change.peers[0]] *= change.value
        case "delay":
            for pair in both:
                now.delay_s[pair] *= change.value
        case "loss":
            for pair in both or np.ndindex(now.loss.shape):
                now.loss[pair] = 1 - (1 - now.loss[pair]) * (1 - change.value)
