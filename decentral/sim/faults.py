"""Faults: what goes wrong, when, for which peers and for how long, from a text, by chance, or from a trace.

    crash 2 at 20                 kill -9; `restart 2 at 30` brings it back with its disk, `wipe 2 at 30` without
    crash all at 60; restart all at 65
    freeze 1 at 10 for 5          the process is stopped, and goes on
    slow 0 x5 at 10 for 20        its steps take 5 times as long
    leave 3 at 40                 Ctrl-C
    join 100 at 30                so many newcomers at once
    part 0,1 at 20 for 15         a partition: peers 0 and 1 on one side, all others on the other
    oneway 0>1 at 5 for 10        packets from 0 do not reach 1
    degrade 0-1 x0.1 at 5 for 10  a tenth of the link's rate is left
    skew 2 by -1.5 at 0           its clock is 1.5 s behind
    clock 2 by 3600 at 20         its machine's clock jumps by an hour, which its next life reads
    full-disk 1 at 20 for 15      its disk takes nothing: no checkpoint, no journal line, no number
    nat 3 at 0                    others reach it through a relay only
    lie 2 nan at 10 for 20        it is Byzantine: it sends snapshots that are nan, scaled, stale, replayed or corrupted
    lie 2 flipped at 10 for 20    or one of those that read the honest peers' windows first (sim/liars.py)
    lie 2 hop-zero at 10 for 20   or it lies along routes, and nowhere else (sim/route_liars.py)
    loss 0.05 at 5 for 20         this share of all messages loses a packet
    corrupt 0.02 at 5 for 20      this share of all messages is damaged; also truncate, duplicate, reorder
    late 2 at 5 for 20            directory records are found 2 s late, and a fifth of the lookups are stale

Faults are separated by semicolons or lines. Peers are numbers, ranges such as 3-7, lists such as 0,2, or `all`.
"""

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from decentral.core.errors import UserError
from decentral.core.units import Seconds

BESIDES = ("hosts", "liars")  # faults that a seed draws separately from all others: HOSTS and KNOWING_LIES
HOSTS = ("clock", "full-disk")  # faults of one machine
PEERS = ("crash", "restart", "wipe", "freeze", "slow", "leave", "part", "skew", "nat", "lie")
PAIRS = {"oneway": ">", "degrade": "-"}
SHARES = ("loss", "corrupt", "truncate", "duplicate", "reorder", "late")
LIES = ("nan", "scaled", "stale", "replayed", "corrupted")  # drawn among all faults; the others apart
KNOWING_LIES = ("zero", "grown", "huge", "flipped", "opposed", "little", "drift", "tokens", "random")  # sim/liars.py
PATIENT_LIES = ("copied", "belated", "blurred", "hidden", "astray")  # likewise; too slow for a sweep, which draws none
HOP_LIES = (
    *("hop-flipped", "hop-opposed", "hop-zero", "hop-grown", "hop-replayed", "hop-random", "hop-loss"),
)  # sim/route_liars.py
ALL_LIES = (*LIES, *KNOWING_LIES, *PATIENT_LIES, *HOP_LIES)
LASTING = (
    "freeze",
    "full-disk",
    "slow",
    "part",
    "oneway",
    "degrade",
    "lie",
    *SHARES,
)  # the kinds that end by themselves
ALL = -1
LONG_FREEZE_S = 75.0  # longer than any deadline of the peers that wait for an answer

_FORM = re.compile(
    r"(?P<kind>[a-z-]+)\s+(?P<target>[-\w.,>]+)(?:\s+(?:x|by\s+)?(?P<value>-?[\d.]+(?:e-?\d+)?|[a-z][a-z-]*))?"
    r"\s+at\s+(?P<at>\d+\.?\d*)(?:\s+for\s+(?P<lasts>\d+\.?\d*))?"
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `str` gives the text that `parse` reads."""

    kind: str
    at: Seconds
    peers: tuple[int, ...] = ()  # members by number; (ALL,): all of them
    value: float = 0.0  # factor, share, seconds or count
    lasts: Seconds = 0.0
    how: str = ""  # for a lie: one of ALL_LIES

    def __str__(self) -> str:
        target = "all" if self.peers == (ALL,) else ",".join(map(str, self.peers))
        if self.kind in PAIRS:
            target = PAIRS[self.kind].join(map(str, self.peers))
        times, seconds = f" x{self.value:g}", f" by {self.value:g}"
        words = {"slow": times, "degrade": times, "skew": seconds, "clock": seconds}
        if self.kind in (*SHARES, "join"):
            target = f"{self.value:g}"
        middle = f" {self.how}" if self.kind == "lie" else words.get(self.kind, "")
        return f"{self.kind} {target}{middle} at {self.at:g}" + (f" for {self.lasts:g}" if self.lasts else "")


def parse(text: str) -> list[Fault]:
    """The faults that a text describes. Raises UserError with the part that is no fault."""
    parts = [part.strip() for part in re.split(r"[;\n]", text)]
    return [_one(part) for part in parts if part and not part.startswith("#")]


def _one(text: str) -> Fault:
    found = _FORM.fullmatch(text)
    if found is None:
        raise UserError(f"--faults: {text!r} is no fault; expected such as 'crash 2 at 20' or 'slow 0 x5 at 10 for 20'")
    try:
        fault = _built(found["kind"], found["target"], found["value"], float(found["at"]), float(found["lasts"] or 0))
    except ValueError:
        raise UserError(f"--faults: {text!r} is not complete; the forms stand in decentral/sim/faults.py") from None
    if fault.kind in LASTING and not fault.lasts:
        raise UserError(f"--faults: {text!r} must end: add 'for SECONDS'")
    return fault


def _built(kind: str, target: str, value: str | None, at: Seconds, lasts: Seconds) -> Fault:
    if kind in (*SHARES, "join"):
        return Fault(kind, at, value=_number(target), lasts=lasts)
    if kind in PAIRS:
        first, _, second = target.partition(PAIRS[kind])
        return Fault(kind, at, (int(first), int(second)), _number(value) if kind == "degrade" else 0.0, lasts)
    if kind not in (*PEERS, *HOSTS):
        known = ", ".join([*PEERS, *HOSTS, *PAIRS, *SHARES, "join"])
        raise UserError(f"--faults: unknown fault {kind!r}; known: {known}")
    if kind == "lie" and value not in ALL_LIES:
        raise UserError(f"--faults: a lie is one of {', '.join(ALL_LIES)}; got {value!r}")
    either = kind in ("skew", "clock")
    size = _number(value, negative=either) if either or kind == "slow" else 0.0
    return Fault(kind, at, _peers(target), size, lasts, how=(value or "") if kind == "lie" else "")


def _number(text: str | None, negative: bool = False) -> float:
    """Raises ValueError for a text that is no number, and for numbers that are not positive."""
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
    """Churn from a CSV with the columns time (s), peer (number), up or down. Raises UserError."""
    kinds = {"up": "restart", "down": "crash"}
    try:
        with path.open(newline="") as file:
            return [
                Fault(
                    kinds[(row.get("up/down") or row.get("state") or "").strip()],
                    float(row["time"]),
                    (int(row["peer"]),),
                )
                for row in csv.DictReader(file)
            ]
    except (OSError, KeyError, ValueError, TypeError) as error:
        what = "expected a CSV with the columns time, peer, up/down"
        raise UserError(f"--trace {path}: {what} ({type(error).__name__})") from None


def draw(chance: Random, peers: int, until: Seconds, count: int) -> list[Fault]:
    """`count` faults by chance, of all kinds, in order of time, that begin before `until`. Crashed peers come back."""
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
    """A disk that is full for a while, or a clock that jumps by an hour before its peer dies and comes back, or both.

    The fault of each kind is of one peer, which restarts during it or after it: what it did to the disk and what the
    next life makes of the clock shows only then.
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
    """One peer lies as one who knows what the honest ones publish; with `routes`, along them or in gossip."""
    kinds = [*KNOWING_LIES, *HOP_LIES] if routes else [*KNOWING_LIES]
    at = round(chance.uniform(0.1, 0.5) * until, 2)
    lasts = round(chance.uniform(0.2, 0.5) * until, 2)
    return [Fault("lie", at, (chance.randrange(peers),), lasts=lasts, how=chance.choice(kinds))]


def text_of(faults: Sequence[Fault]) -> str:
    """The text from which `parse` reads these faults."""
    return "; ".join(map(str, faults))
