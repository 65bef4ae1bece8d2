"""A soak's figures: as JSON, and as a table to read."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.soak.evidence import Evidence, Hit, Sample
from benchmarks.soak.judge import Share, by_role, counts, growth_per_hour, kept_share, losses, shares, violations


def report(found: Evidence) -> dict[str, Any]:
    """All figures, as JSON."""
    wrong, of_places = violations(found), shares(found)
    whole = [one for one in of_places if one.place in found.whole]
    parts = [one for one in of_places if one.place not in found.whole]
    outcomes = Counter(line["outcome"] for _, line in found.everywhere("exchange"))
    before, after = losses(found)
    return {
        "passed": not wrong,
        "violations": wrong,
        "quiet_s": round(found.quiet[1] - found.quiet[0], 1),
        "faulty_s": round(found.faulty[1] - found.faulty[0], 1),
        "faults": len(found.hits),
        "by_kind": {kind: _of_kind(found, kind) for kind in sorted({hit.kind for hit in found.hits})},
        "latest_fault_s": max((hit.late_s for hit in found.hits), default=0.0),
        "kept_share": {
            "all": round(kept_share(of_places), 4),
            "whole": round(kept_share(whole), 4),
            "parts": round(kept_share(parts), 4),
        },
        "places": [_of_place(found, one) for one in of_places],
        "counted": counts(found).figures(),
        "exchanges": {outcome: outcomes[outcome] for outcome in ("done", "solo", "failed")},
        "failures": Counter(line["reason"] for _, line in found.everywhere("exchange") if line["outcome"] == "failed"),
        "errors": Counter(line["reason"] for _, line in found.everywhere("error")),
        "lost_lines": sum(line["lines"] for _, line in found.everywhere("lost")),
        "losses": {"first": before, "last": after},
        "processes": {role: _of_role(of_role) for role, of_role in by_role(found.samples)},
        "disk_bytes": max(found.disk_bytes.values(), default=0),
        "stalled_s": round(sum(end - begin for begin, end in found.stalls), 1),
        "exits": Counter(str(one.code) for one in found.exits),
        "hits": [_of_hit(found, hit) for hit in found.hits],
        "memory": _course(found.samples),
    }


def _of_kind(found: Evidence, kind: str) -> dict[str, Any]:
    """How often it came, and how long recovering took once it had been taken back."""
    hits = [hit for hit in found.hits if hit.kind == kind]
    took = [seconds for hit in hits if (seconds := hit.recovered_s) is not None]
    times = {"median_s": median(took), "most_s": max(took)} if took else {"median_s": None, "most_s": None}
    return {"times": len(hits), **times}


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"


def _of_place(found: Evidence, one: Share) -> dict[str, Any]:
    times = Counter(hit.kind for hit in found.hits if hit.place == one.place)
    gaps = [late["t"] - early["t"] for early, late in pairwise(found.lines(one.place, "step"))]
    figures = {"quiet": one.quiet, "faulty": one.faulty, "kept": one.kept, "clear_s": one.faulty_s}
    return {
        "place": one.place,
        "holds": "all" if one.place in found.whole else "a part",
        **{name: round(value, 4) for name, value in figures.items()},
        "longest_gap_s": round(max(gaps, default=0.0), 1),
        "faults": times,
    }


def _of_role(samples: Sequence[Sample]) -> dict[str, Any]:
    growth = growth_per_hour(samples)
    return {
        "most_resident_bytes": max(one.resident_bytes for one in samples),
        "median_resident_bytes": int(median(one.resident_bytes for one in samples)),
        "growth_per_hour": None if growth is None else round(growth, 4),
        "most_files": max(one.files for one in samples),
    }


def _of_hit(found: Evidence, hit: Hit) -> dict[str, Any]:
    def since(t: float | None) -> float | None:
        return None if t is None else round(t - found.faulty[0], 1)

    times = {"began": since(hit.began), "lifted": since(hit.lifted), "over": since(hit.over)}
    return {"kind": hit.kind, "place": hit.place, **times, "late_s": round(hit.late_s, 1)}


def _course(samples: Sequence[Sample]) -> dict[str, list[tuple[float, int]]]:
    """By process, its age in seconds and its memory, about once a minute."""
    by_process = defaultdict[str, list[tuple[float, int]]](list)
    for one in samples:
        kept = by_process[f"place {one.place}, {one.role} {one.pid}"]
        if not kept or one.age_s - kept[-1][0] >= 60:
            kept.append((round(one.age_s, 1), one.resident_bytes))
    return by_process


def table(result: dict[str, Any]) -> Iterator[str]:
    """`result` is what `report` gave."""
    yield f"{result['faults']} faults in {result['faulty_s']:.0f} s, after {result['quiet_s']:.0f} s of quiet"
    for kind, one in result["by_kind"].items():
        yield f"  {kind:8s} {one['times']:3d}  recovered within {_s(one['median_s'])}, at most {_s(one['most_s'])}"
    yield "place  holds   training: quiet  under faults  kept   of s    longest gap, s  faults"
    for one in result["places"]:
        faults = ", ".join(f"{times} {kind}" for kind, times in sorted(one["faults"].items()))
        yield (
            f"{one['place']:5d}  {one['holds']:6s}  {one['quiet']:15.3f}  {one['faulty']:12.3f}  {one['kept']:.3f}  "
            f"{one['clear_s']:5.0f}  {one['longest_gap_s']:14.1f}  {faults}"
        )
    kept = result["kept_share"]
    yield f"kept: {kept['all']:.4f}; {kept['whole']:.4f} where the whole model is, {kept['parts']:.4f} elsewhere"
    counted, exchanges = result["counted"], result["exchanges"]
    yield (
        f"micro-batches along routes: {counted['everywhere']} counted once in all layers, {counted['in_part']} in a "
        f"part of them, {counted['twice']} twice; {counted['thrown_away']} executions thrown away"
    )
    yield f"exchanges: {exchanges['done']} done, {exchanges['solo']} solo, {exchanges['failed']} failed"
    for role, one in result["processes"].items():
        growth = "-" if one["growth_per_hour"] is None else f"{one['growth_per_hour']:+.1%} an hour"
        yield (
            f"{role}: at most {one['most_resident_bytes'] / 1e6:.0f} MB in memory, growth {growth}, "
            f"at most {one['most_files']} files open"
        )
    first, last = (f"{loss:.3f}" if loss is not None else "-" for loss in result["losses"].values())
    yield f"held-out loss {first} -> {last}; at most {result['disk_bytes'] / 1e6:.1f} MB of disk at a place"
    yield from (f"VIOLATED: {line}" for line in result["violations"])
    yield "passed" if result["passed"] else f"{len(result['violations'])} violations"
