"""Describe faults of a simulated swarm, read from text or a trace of churn, or sampled at random.

Start reading at `Fault` and `parse`. A fault in a text has one of these forms; times are virtual seconds:

    crash 2 at 20                 kill -9; `restart 2 at 30` starts peer 2 again with its disk; `wipe 2 at 30` removes
                                  peer 2 with its disk, and starts a new peer
    crash all at 60; restart all at 65
    freeze 1 at 10 for 5          the process is stopped, and continues after 5 s
    slow 0 x5 at 10 for 20        steps of peer 0 take 5 times as long
    leave 3 at 40                 Ctrl-C
    join 100 at 30                100 newcomers at once
    part 0,1 at 20 for 15         a partition: peers 0 and 1 on one side, all others on the other
    oneway 0>1 at 5 for 10        packets from 0 do not reach 1
    degrade 0-1 x0.1 at 5 for 10  the link between peers 0 and 1 has a tenth of its rate
    skew 2 by -1.5 at 0           the clock of peer 2 is 1.5 s behind
    clock 2 by 3600 at 20         the clock of peer 2's machine jumps by an hour; the peer reads it at its next start
    full-disk 1 at 20 for 15      writes to the disk of peer 1 fail: checkpoints, journal lines, micro-batch numbers
    nat 3 at 0                    other peers reach peer 3 only through a relay
    lie 2 nan at 10 for 20        peer 2 is Byzantine: its snapshots are nan, scaled, stale, replayed or corrupted
    lie 2 flipped at 10 for 20    one of the false snapshots that sim/liars.py computes from honest snapshots
    lie 2 hop-zero at 10 for 20   peer 2 sends false gradients in a pipeline (sim/liars.py)
    loss 0.05 at 5 for 20         5% of all messages lose a packet
    corrupt 0.02 at 5 for 20      2% of all messages are damaged; also truncate, duplicate, reorder
    lie 2 withheld at 10 for 20   peer 2 answers questions for records, revocations and plans as if it had none
    revoke 3 at 30                the founder of a private swarm revokes the invitation of peer 3, and tells one member
    propose 2 at 30               peer 2 proposes a plan by which each peer keeps its layers
    late 2 at 5 for 20            DHT records are found about 2 s late, and a fifth of the lookups find an old version
    eclipse peers at 5 for 60     hostile nodes own the DHT key of the peers' records, and say that nothing is there;
                                  also eclipse plan, eclipse revoked

Faults are separated by semicolons or lines. Peers are numbers, ranges such as 3-7, lists such as 0,2, or `all`.
"""

import csv
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from random import Random
from typing import TypeVar

from decentral.core import foreign_file
from decentral.core.errors import UserError
from decentral.core.near_names import listed
from decentral.core.units import MiB, Seconds

Number = TypeVar("Number", int, float)

# Extra faults that a sweep may use: "hosts" and "liars" add faults, "eclipses" replaces all other faults.
BESIDES = ("hosts", "liars", "eclipses")
HOSTS = ("clock", "full-disk")  # faults of a peer's machine: its clock jumps, or its disk is full
PEERS = ("crash", "restart", "wipe", "freeze", "slow", "leave", "part", "skew", "nat", "lie")  # faults of named peers
NEWS = ("revoke", "propose")  # faults of named peers, after which all peers must learn a new record
PAIRS = {"oneway": ">", "degrade": "-"}  # faults between two peers, which a trace writes as PEER>PEER or PEER-PEER
SHARES = ("loss", "corrupt", "truncate", "duplicate", "reorder", "late")  # faults of the swarm, which name no peers
ECLIPSED = ("peers", "plan", "revoked")  # the DHT keys that hostile nodes can own in an eclipse
LIES = ("nan", "scaled", "stale", "replayed", "corrupted")  # the lies that `draw` samples
# The lies about snapshots that `draw_of_liars` samples; sim/liars.py computes them.
KNOWING_LIES = ("zero", "grown", "huge", "flipped", "opposed", "little", "drift", "tokens", "random")
# Lies about snapshots that are never sampled at random; sim/liars.py computes them.
PATIENT_LIES = ("copied", "belated", "blurred", "hidden", "astray", "inflated")
# Lies about gradients of a pipeline, which sim/liars.py computes.
HOP_LIES = (*("hop-flipped", "hop-opposed", "hop-zero", "hop-grown", "hop-replayed", "hop-random", "hop-loss"),)
WITHHELD = "withheld"  # a peer that tells this lie sends other peers no DHT records
ALL_LIES = (*LIES, *KNOWING_LIES, *PATIENT_LIES, *HOP_LIES, WITHHELD)
# Faults with a duration, which a trace writes as `for SECONDS`.
LASTING = ("freeze", "full-disk", "slow", "part", "oneway", "degrade", "lie", "eclipse", *SHARES)
MOST_TRACE_BYTES = 64 * MiB
ALL = -1  # in `Fault.peers`, this number means all peers
LONG_FREEZE_S = 75.0  # a long freeze lasts this time, so that all other peers stop waiting for the frozen peer

_FORM = re.compile(
    r"(?P<kind>[a-z-]+)\s+(?P<target>[-\w.,>]+)(?:\s+(?:x|by\s+)?(?P<value>-?[\d.]+(?:e-?\d+)?|[a-z][a-z-]*))?"
    r"\s+at\s+(?P<at>\d+\.?\d*)(?:\s+for\s+(?P<lasts>\d+\.?\d*))?"
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault to inject into a simulated swarm: its kind, its peers, when it begins, and how long it lasts."""

    kind: str
    at: Seconds
    peers: tuple[int, ...] = ()  # indices of the peers, or (ALL,) for all
    value: float = 0.0  # depends on the kind: a factor, a share, seconds or a count
    lasts: Seconds = 0.0
    how: str = ""  # the lie, from ALL_LIES, or the eclipsed keys, from ECLIPSED; else ""

    def __str__(self) -> str:
        """Return the text from which `parse` makes this fault."""
        target = "all" if self.peers == (ALL,) else ",".join(map(str, self.peers))
        if self.kind in PAIRS:
            target = PAIRS[self.kind].join(map(str, self.peers))
        times, seconds = f" x{self.value:g}", f" by {self.value:g}"
        words = {"slow": times, "degrade": times, "skew": seconds, "clock": seconds}
        if self.kind in (*SHARES, "join"):
            target = f"{self.value:g}"
        if self.kind == "eclipse":
            target = self.how
        middle = f" {self.how}" if self.kind == "lie" else words.get(self.kind, "")
        return f"{self.kind} {target}{middle} at {self.at:g}" + (f" for {self.lasts:g}" if self.lasts else "")


def parse(text: str) -> list[Fault]:
    """Return the faults in a text, separated by semicolons or lines; parts that begin with `#` are comments.

    Raises:
        UserError: If a part has none of the forms in this module's docstring; the error quotes the part.
    """
    parts = [part.strip() for part in re.split(r"[;\n]", text)]
    return [_one(part) for part in parts if part and not part.startswith("#")]


def require_possible(chosen: Sequence[Fault], peers: int, seconds: Seconds) -> None:
    """Raise UserError if one of these faults begins after the end of a run, or names a peer that it never has.

    Args:
        chosen: All faults of the run.
        peers: The number of peers at the start.
        seconds: The length of the run in virtual seconds.
    """
    known = peers + sum(int(one.value) for one in chosen if one.kind == "join")
    for one in chosen:
        if one.at >= seconds:
            raise UserError(f"--faults: {one} comes after the end of the run; give a longer --seconds than {seconds:g}")
        if missing := [peer for peer in one.peers if peer >= known]:
            raise UserError(f"--faults: {one} names peer {missing[0]}; the run has the peers 0 to {known - 1}")


def _one(text: str) -> Fault:
    found = _FORM.fullmatch(text)
    if found is None:
        raise UserError(f"--faults: expected a fault such as 'crash 2 at 20', 'slow 0 x5 at 10 for 20'; got {text!r}")
    try:
        fault = _built(found["kind"], found["target"], found["value"], float(found["at"]), float(found["lasts"] or 0))
    except ValueError:
        raise UserError(
            f"--faults: {text!r}: a number is wrong or missing; decentral/sim/faults.py lists the forms of all faults"
        ) from None
    if fault.kind in LASTING and not fault.lasts:
        raise UserError(f"--faults: {text!r} needs a duration: add 'for SECONDS'")
    return fault


def _built(kind: str, target: str, value: str | None, at: Seconds, lasts: Seconds) -> Fault:
    if kind in (*SHARES, "join"):
        return Fault(kind, at, value=_number(target), lasts=lasts)
    if kind in PAIRS:
        first, _, second = target.partition(PAIRS[kind])
        return Fault(kind, at, (int(first), int(second)), _number(value) if kind == "degrade" else 0.0, lasts)
    if kind == "eclipse" and target in ECLIPSED:
        return Fault(kind, at, lasts=lasts, how=target)
    if kind not in (*PEERS, *HOSTS, *NEWS):
        kinds = [*PEERS, *HOSTS, *NEWS, *PAIRS, *SHARES, "join", *(f"eclipse {key}" for key in ECLIPSED)]
        raise UserError(f"--faults: unknown fault {kind!r}; known: {listed(kind, kinds)}")
    if kind == "lie" and value not in ALL_LIES:
        raise UserError(f"--faults: got {value!r}; a lie is one of {listed(value or '', ALL_LIES)}")
    either = kind in ("skew", "clock")
    size = _number(value, negative=either) if either or kind == "slow" else 0.0
    return Fault(kind, at, _peers(target), size, lasts, how=(value or "") if kind == "lie" else "")


def _number(text: str | None, negative: bool = False) -> float:
    """Return the number in `text`. Raises ValueError if `text` is not a number, or <= 0 unless `negative` is True."""
    number = float(text or "nan")
    if not (number > 0 or (negative and number <= 0)):
        raise ValueError(text)
    return number


def _peers(text: str) -> tuple[int, ...]:
    if text == "all":
        return (ALL,)
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    if not numbers:
        raise ValueError(text)
    return tuple(numbers)


def trace(path: Path) -> list[Fault]:
    """Return the crashes (`down`) and restarts (`up`) that a CSV file lists.

    Args:
        path: The file. Its columns: `time` in virtual seconds, `peer` (a number), and `up/down` or `state`.

    Raises:
        UserError: If the file cannot be read, lacks a column, or has a wrong value.
    """
    kinds = {"up": "restart", "down": "crash"}
    try:
        text = foreign_file.read_text(path, MOST_TRACE_BYTES)
        return [
            Fault(
                kinds[(row.get("up/down") or row.get("state") or "").strip()],
                _at_least_zero(float(row["time"])),
                (_at_least_zero(int(row["peer"])),),
            )
            for row in csv.DictReader(StringIO(text, newline=""))
        ]
    except (OSError, KeyError, ValueError, TypeError, csv.Error) as error:
        what = "expected a CSV with the columns time, peer, up/down"
        why = getattr(error, "strerror", None) or type(error).__name__
        raise UserError(f"--trace {path}: {what} ({why})") from None


def _at_least_zero(number: Number) -> Number:
    """Return a number. Raises ValueError if it is negative, infinite or not a number."""
    if not 0 <= number < math.inf:
        raise ValueError(number)
    return number


def draw(chance: Random, peers: int, until: Seconds, count: int) -> list[Fault]:
    """Return `count` random faults, sorted by time; each crash is followed by a restart, which does not count.

    Args:
        chance: The random number generator.
        peers: Number of peers.
        until: Virtual time before which all faults begin, except restarts.
        count: Number of faults.
    """
    drawn = [fault for _ in range(count) for fault in _drawn(chance, peers, until)]
    return sorted(drawn, key=lambda fault: fault.at)


def _drawn(chance: Random, peers: int, until: Seconds) -> Iterator[Fault]:
    kind = chance.choice([*PEERS, *PAIRS, *SHARES, "join", "crash", "crash", "all", "freeze", "freeze", "lie"])
    at = round(chance.uniform(0.1, 0.7) * until, 2)
    lasts = round(chance.uniform(0.05, 0.25) * until, 2)
    back = round(at + lasts, 2)
    peer = chance.randrange(peers)
    match kind:
        case "crash" | "restart" | "wipe" | "all":
            gone = (ALL,) if kind == "all" else (peer,)
            yield Fault("crash", at, gone)
            yield Fault("wipe" if kind == "wipe" else "restart", back, gone)
        case "freeze":
            yield Fault(kind, at, (peer,), lasts=LONG_FREEZE_S if chance.random() < 0.4 else lasts)
        case "slow":
            yield Fault(kind, at, (peer,), float(chance.choice([2, 5, 20])), lasts)
        case "skew":
            yield Fault(kind, at, (peer,), round(chance.uniform(-3, 3), 2))
        case "part":
            some = tuple(sorted(chance.sample(range(peers), chance.randint(1, max(1, peers // 2)))))
            yield Fault(kind, at, some, lasts=lasts)
        case "lie":
            yield Fault(kind, at, (peer,), lasts=lasts, how=chance.choice(LIES))
        case "oneway" | "degrade":
            pair = tuple(chance.sample(range(peers), 2))
            yield Fault(kind, at, pair, 0.1 if kind == "degrade" else 0.0, lasts)
        case "join":
            yield Fault(kind, at, value=chance.randint(1, 4))
        case "late":
            yield Fault(kind, at, value=2.0, lasts=lasts)
        case _ if kind in SHARES:
            yield Fault(kind, at, value=round(chance.uniform(0.01, 0.2), 3), lasts=lasts)
        case _:
            yield Fault(kind, at, (peer,), lasts=lasts if kind in LASTING else 0.0)


def draw_of_hosts(chance: Random, peers: int, until: Seconds) -> list[Fault]:
    """Return random faults of one machine: a disk that is full for a while, a clock that jumps by an hour, or both.

    After a clock jump, and after half of the full disks, the peer also crashes and restarts, since only a restart shows
    the effect.
    """
    found: list[Fault] = []
    for kind in chance.choice([HOSTS[:1], HOSTS[1:], HOSTS]):
        at, peer = round(chance.uniform(0.1, 0.6) * until, 2), chance.randrange(peers)
        lasts = round(chance.uniform(0.1, 0.5) * until, 2)
        down = round(at + chance.uniform(0.0, 1.5) * lasts, 2)
        hour = float(chance.choice([-3600, 3600]))
        found.append(Fault(kind, at, (peer,), lasts=lasts) if kind == "full-disk" else Fault(kind, at, (peer,), hour))
        if kind == "clock" or chance.random() < 0.5:
            found += [Fault("crash", down, (peer,)), Fault("restart", round(down + 2.0, 2), (peer,))]
    return sorted(found, key=lambda fault: fault.at)


def draw_of_liars(chance: Random, peers: int, until: Seconds, routes: bool) -> list[Fault]:
    """Return one fault in a list: a random lie of a random peer, from KNOWING_LIES and, with `routes`, HOP_LIES."""
    kinds = [*KNOWING_LIES, *HOP_LIES] if routes else [*KNOWING_LIES]
    at = round(chance.uniform(0.1, 0.5) * until, 2)
    lasts = round(chance.uniform(0.2, 0.5) * until, 2)
    return [Fault("lie", at, (chance.randrange(peers),), lasts=lasts, how=chance.choice(kinds))]


def draw_of_eclipses(chance: Random, peers: int, key: str) -> list[Fault]:
    """Return an eclipse of a DHT key, with hostile peers that send no records, and news that honest peers must learn.

    At most a third of the peers are hostile, and never peer 0. The news is a newcomer, a revocation or a plan.
    """
    at, lasts = round(chance.uniform(12.0, 16.0), 2), round(chance.uniform(36.0, 42.0), 2)
    hostile = tuple(sorted(chance.sample(range(1, peers), chance.randint(1, peers // 3))))
    later, other = round(at + chance.uniform(0.0, 4.0), 2), chance.randrange(1, peers)
    news = {
        "peers": Fault("join", later, value=1),
        "revoked": Fault("revoke", later, (other,)),
        "plan": Fault("propose", later, (chance.choice(sorted({*range(peers)} - {*hostile})),)),
    }
    lie = Fault("lie", at, hostile, lasts=lasts, how=WITHHELD)
    return [Fault("eclipse", at, lasts=lasts, how=key), lie, news[key]]


def text_of(faults: Sequence[Fault]) -> str:
    """Return the text from which `parse` makes these faults."""
    return "; ".join(map(str, faults))
