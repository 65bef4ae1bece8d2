"""What a soak's evidence says, and what of it must not be: pure functions.

Training's share of a peer is what its `step` lines account to training, of all the time that has passed: a peer that
hangs writes no lines, and its share falls. It is taken over the time in which the peer itself had no fault: until one
begins, and from SETTLES_S after it is over. What counts is this share under faults, of that in the quiet minutes.

All survivors together have to keep KEPT_SHARE of it, and so do those with the whole model, whose work depends on
nobody. A peer with a part trains what others send it: while some of them are gone, or a newcomer has chosen other
layers than the one before it, there is more to do at one place and less at another. So its own share is only reported.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

from benchmarks.soak.evidence import Evidence, Line, Sample, Span, without
from decentral.core.journal.lines import recorded
from decentral.core.journal.micro_batch_counts import CountAudit, audit
from decentral.core.journal.peer_totals import PeerTotals
from decentral.core.units import plural

SETTLES_S = 5.0
KEPT_SHARE = 0.97  # of training's share, under faults
LEAST_CLEAR_S = 20.0  # a peer with less time without a fault says nothing of its share
WARM_S = 120.0  # a younger process still loads and compiles
LEAST_SPAN_S = 300.0  # of samples of one process, from which a slope follows
MOST_GROWTH = 0.25  # of a process's memory, in an hour
MOST_RESIDENT_BYTES = 1.2e9  # of one process
MOST_FILES = 512  # open at once in one process
MOST_DISK_BYTES = 64e6  # of one place: journals and checkpoints
MOST_RECOVERY_S = 150.0
REPEATS_S = 65.0  # a peer repeats an error in its journal about a minute after it was over


def violations(found: Evidence) -> list[str]:
    """What must not be, a line each; none: the soak has passed."""
    checks = (_share, _counted, _outputs, _errors, _ended, _recovered, _memory, _files, _disk, _loss, _exchanges)
    return [line for check in checks for line in check(found)]


@dataclass(frozen=True, slots=True)
class Share:
    """Training's share at one place, quiet and under faults, and of how many seconds that is said."""

    place: int
    quiet: float
    faulty: float
    quiet_s: float
    faulty_s: float

    @property
    def kept(self) -> float:
        return self.faulty / self.quiet if self.quiet else 0.0

    @property
    def says(self) -> bool:
        """Whether there is enough time to say something of."""
        return min(self.quiet_s, self.faulty_s) >= LEAST_CLEAR_S


def shares(found: Evidence) -> list[Share]:
    """A line for each place."""
    result = []
    for place in range(found.places):
        steps = list(found.lines(place, "step"))
        quiet, quiet_s = trained(steps, without(found.quiet, found.stalls))
        faulty, faulty_s = trained(steps, clear(found, place))
        result.append(Share(place, _of(quiet, quiet_s), _of(faulty, faulty_s), quiet_s, faulty_s))
    return result


def clear(found: Evidence, place: int) -> list[Span]:
    """The time under faults in which this place had none itself, and had recovered from its last one."""
    own = [(hit.began, (hit.over or found.faulty[1]) + SETTLES_S) for hit in found.hits if hit.place == place]
    return without(found.faulty, [*own, *((begin, end + SETTLES_S) for begin, end in found.stalls)])


def trained(steps: Sequence[Line], spans: Sequence[Span]) -> tuple[float, float]:
    """Seconds of training in these spans, and how long they are.

    A line tells of the time from the line before it: what is in a span counts in proportion.
    """
    total = 0.0
    for line in steps:
        lasted = PeerTotals.of([dict(line)]).work.spent.total
        begin, end = line["t"] - lasted, line["t"]
        inside = sum(max(0.0, min(end, one[1]) - max(begin, one[0])) for one in spans)
        total += line["seconds"] * (inside / lasted if lasted else 0.0)
    return total, sum(end - begin for begin, end in spans)


def kept_share(of: Sequence[Share]) -> float:
    """Training's share under faults, of that in quiet: of all these places, weighted by their time."""
    wanted = sum(one.quiet * one.faulty_s for one in of if one.says)
    return _of(sum(one.faulty * one.faulty_s for one in of if one.says), wanted)


def counts(found: Evidence) -> CountAudit:
    """Whether each micro-batch was counted once: over all lives of all peers."""
    return audit((recorded(journal) for place in found.journals.values() for journal in place), found.layers)


def _share(found: Evidence) -> Iterator[str]:
    survivors = shares(found)
    whole = [one for one in survivors if one.place in found.whole]
    for of, what in (whole, " with the whole model"), (survivors, ""):
        if not any(one.says for one in of):
            yield f"no peer{what} had {LEAST_CLEAR_S:.0f} s without a fault: nothing is known of its share"
        elif (kept := kept_share(of)) < KEPT_SHARE:
            yield f"survivors{what} trained {kept:.3f} of what they trained in quiet; at least {KEPT_SHARE} was to be"
            break


def _counted(found: Evidence) -> Iterator[str]:
    result = counts(found)
    if result.twice:
        yield f"{plural(len(result.twice), 'micro-batch')} counted twice, the first {result.twice[0]}"
    if result.unapplied:
        yield f"{result.unapplied} tokens counted that no step took"
    if len(found.whole) < found.places and not result.everywhere:
        yield "no micro-batch was counted in all layers: that none counted twice says nothing"


def _outputs(found: Evidence) -> Iterator[str]:
    yield from (f"a traceback in the output of {where}" for where in found.tracebacks)


def _errors(found: Evidence) -> Iterator[str]:
    """A peer that has a fault may say so."""
    for place, line in found.everywhere("error"):
        own = (hit for hit in found.hits if hit.place == place)
        if not any(hit.began <= line["t"] <= (hit.over or line["t"]) + REPEATS_S for hit in own):
            yield f"place {place}, without a fault of its own: {line['reason']}"


def _ended(found: Evidence) -> Iterator[str]:
    for one in found.exits:
        if one.code not in one.expected:
            expected = " or ".join(map(str, one.expected)) or "none"
            yield f"peer {one.number} ended with {one.code}, where {expected} was expected: {one.said}"


def _recovered(found: Evidence) -> Iterator[str]:
    for hit in found.hits:
        if hit.over is None:
            yield f"place {hit.place} did not recover from {hit.kind} at {hit.began - found.faulty[0]:.0f} s"
        elif (took := hit.recovered_s) is not None and took > MOST_RECOVERY_S:
            yield f"place {hit.place} took {took:.0f} s to recover from {hit.kind}"


def _memory(found: Evidence) -> Iterator[str]:
    for role, of_role in by_role(found.samples):
        most = max(one.resident_bytes for one in of_role)
        if most > MOST_RESIDENT_BYTES:
            yield f"a {role} had {most / 1e6:.0f} MB in memory; at most {MOST_RESIDENT_BYTES / 1e6:.0f} were to be"
        growth = growth_per_hour(of_role)
        if growth is not None and growth > MOST_GROWTH:
            yield f"a {role}'s memory grows by {growth:.0%} an hour; at most {MOST_GROWTH:.0%} was to be"


def _files(found: Evidence) -> Iterator[str]:
    for role, of_role in by_role(found.samples):
        if (most := max(one.files for one in of_role)) > MOST_FILES:
            yield f"a {role} had {most} files open; at most {MOST_FILES} were to be"


def _disk(found: Evidence) -> Iterator[str]:
    for place, most in sorted(found.disk_bytes.items()):
        if most > MOST_DISK_BYTES:
            yield f"place {place} took {most / 1e6:.0f} MB of disk; at most {MOST_DISK_BYTES / 1e6:.0f} were to be"


def _loss(found: Evidence) -> Iterator[str]:
    before, after = losses(found)
    if after is None or before is None:
        yield "no held-out loss from the end"
    elif after >= before:
        yield f"the held-out loss went from {before:.3f} to {after:.3f}"


def losses(found: Evidence) -> tuple[float | None, float | None]:
    """The mean of the peers' held-out losses: of the first ones, and of the last ones under faults."""
    first, last = list[float](), list[float]()
    for place in range(found.places):
        evals = [line for line in found.lines(place, "eval") if line["loss"] is not None]
        first += [line["loss"] for line in evals[:1]]
        last += [line["loss"] for line in evals[-1:] if line["t"] >= found.faulty[0]]
    return (mean(first) if first else None), (mean(last) if last else None)


def _exchanges(found: Evidence) -> Iterator[str]:
    for place in range(found.places):
        done = [line for line in found.lines(place, "exchange") if line["outcome"] == "done"]
        if not any(found.tail[0] <= line["t"] <= found.tail[1] for line in done):
            yield f"place {place} exchanged nothing after the last fault"


def growth_per_hour(samples: Sequence[Sample]) -> float | None:
    """By how much of itself a process's memory grows in an hour: one slope for all that lived long enough.

    Each has its own level: least squares within processes. None: none lived long enough.
    """
    by_process = defaultdict[int, list[Sample]](list)
    for one in samples:
        if one.age_s >= WARM_S:
            by_process[one.pid].append(one)
    above = below = 0.0
    for of_one in by_process.values():
        ages, sizes = [one.age_s for one in of_one], [one.resident_bytes for one in of_one]
        if ages[-1] - ages[0] < LEAST_SPAN_S:
            continue
        age, size = mean(ages), mean(sizes)
        above += sum((a - age) * (s / size - 1) for a, s in zip(ages, sizes, strict=True))
        below += sum((a - age) ** 2 for a in ages)
    return above / below * 3600 if below else None


def by_role(samples: Sequence[Sample]) -> Iterator[tuple[str, list[Sample]]]:
    for role in ("peer", "daemon"):
        if of_role := [one for one in samples if one.role == role]:
            yield role, of_role


def _of(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
