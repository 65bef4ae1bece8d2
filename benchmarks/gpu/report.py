"""Format the results as a short table, each figure as a ratio to its bound or to the bare loop."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Results = Mapping[str, Mapping[str, Any]]
COLUMNS = (9, 14, 12, 12, 8, 7, 14, 12, 12, 14)
HEAD = ("model", "loop", "ours/s", "bare/s", "of bare", "MFU", "ms (bare)", "claimed, GB", "peak, GB", "claim / peak")
FAILURE_CHARS = 160


def table(results: Results) -> list[str]:
    """Return the lines that a reader needs; `results` as `Check.run` returns them, whatever steps are missing in it."""
    figures = {name: found["figures"] for name, found in results.items()}
    return [
        *_head(figures),
        *_training(figures),
        *_kernels(figures.get("kernels", {})),
        *(line for name, own in figures.items() if name.startswith("gossip") for line in _gossip(name, own)),
        *_swarms(figures),
        *(f"{name}: {_rates(own)}" for name, own in figures.items() if name.startswith("generate") and own),
        *(f"{name}: left out, since no time was left" for name, found in results.items() if "left_out" in found),
        *failures(results),
    ]


def _head(figures: Results) -> Iterator[str]:
    machine, ceilings = figures.get("machine", {}), figures.get("ceilings", {})
    if machine:
        yield f"{machine['device']}, torch {machine['packages']['torch']}"
    yield from (f"{name}: {_number(value)}" for name, value in ceilings.items())
    if counts := figures.get("tests", {}).get("counts"):
        yield f"tests/gpu: {', '.join(f'{count} {name}' for name, count in counts.items() if count)}"


def _training(figures: Results) -> Iterator[str]:
    rows = []
    for name, own in figures.items():
        for key, ours in own.items() if name.startswith(("train", "muon", "compiled")) else ():
            if key.startswith("ours, "):
                loop = key.removeprefix("ours, ")
                rows.append(_row(name.partition("-")[2], loop, ours, own))
    if rows:
        yield from (_aligned(row) for row in (HEAD, *rows))


def _row(size: str, loop: str, ours: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    bare, claimed, peak = own.get(f"bare, {loop}", {}), own.get(f"claimed bytes, {loop}"), ours.get("peak_bytes")
    rates = ours.get("tokens_per_s"), bare.get("tokens_per_s")
    steps = " ".join((_number(ours.get("step_ms")), f"({_number(bare.get('step_ms'))})"))
    memory = [_number(one and one / 1e9) for one in (claimed, peak)]
    return [
        size,
        loop,
        *map(_number, rates),
        _ratio(*rates),
        _number(ours.get("mfu")),
        steps,
        *memory,
        _ratio(claimed, peak),
    ]


def _kernels(own: Mapping[str, Any]) -> Iterator[str]:
    if own:
        yield f"kernels: {own.get('chosen')}"
    on_device = own.get("on the device", {})
    for name, found in on_device.items() if "failed" not in on_device else ():
        yield f"  {name}: {_number(found['GB/s'])} GB/s, {_number(found['of a copy'])} of a copy"
    for name, found in own.items():
        if name.startswith("from host memory"):
            yield f"  {name}: {_number(found['ms'])} ms, {_number(found['GB/s'])} GB/s"


def _gossip(name: str, own: Mapping[str, Any]) -> Iterator[str]:
    alone = own.get("alone", {}).get("tokens_per_s")
    yield f"{name}: {_number(alone)} tokens/s alone"
    for phase in ("with windows", "with a checkpoint"):
        rate = own.get(phase, {}).get("tokens_per_s")
        yield f"  {phase}: {_number(rate)} tokens/s, {_ratio(rate, alone)} of alone"


def _swarms(figures: Results) -> Iterator[str]:
    silent = sum(figures.get("swarm-silent", {}).get("tokens_per_s", ()))
    for name, own in figures.items():
        if not name.startswith("swarm") or "tokens_per_s" not in own:
            continue
        rates = own["tokens_per_s"]
        exchanges = ", ".join(f"{count} {outcome}" for outcome, count in own["exchanges"].items()) or "none"
        besides = f", {_ratio(sum(rates), silent)} of silent" if name == "swarm-pair" else ""
        yield f"{name}: {' and '.join(map(_number, rates))} tokens/s{besides}; exchanges: {exchanges}"
        used, claimed = own.get("bytes in use on the GPU"), own["claimed bytes of a peer"]
        yield f"  a peer claims {_number(claimed / 1e9)} GB; both use {_number(used and used / 1e9)} GB of the GPU"


def _rates(own: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in own.items())


def failures(results: Results) -> Iterator[str]:
    """Yield a line for each thing that has failed: whole steps, single figures, tests, and jobs of training."""
    for name, found in results.items():
        if "failed" in found:
            reason, *log = found["failed"].strip().splitlines()
            said = [reason.rpartition("]: ")[2], *log[-1:]]  # without the command
            yield f"{name}: failed: {'; '.join(said)[:FAILURE_CHARS]}"
        for key, value in found["figures"].items():
            if isinstance(value, Mapping) and isinstance(value.get("failed"), str):  # a count is one of exchanges
                yield f"{name}: {key}: failed: {value['failed'][:FAILURE_CHARS]}"
        for one in (*found["figures"].get("failed tests", ()), *found["figures"].get("failures", ())):
            yield f"{name}: failed: {one[:FAILURE_CHARS]}"


def _ratio(part: float | None, whole: float | None) -> str:
    return f"{part / whole:.2f}" if part and whole else "-"


def _number(value: Any) -> str:
    """Return a figure with at least three significant digits; "-" for None, and other values as text."""
    if value is None:
        return "-"
    if not isinstance(value, float | int):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _aligned(cells: Sequence[str]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, COLUMNS, strict=True))
