"""Tuning: each contestant's learning rate and settings, in the world with equal devices.

First the options are tried in turn with a middle rate, then the rates with the best options; where the best rate stands
at an end of the grid, the grid goes on, until both neighbours of the best are worse. All that was tried, and what was
chosen, is in tuned.json beside this file, with the command that made it. The loss at the end of a run decides.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.contest import runner, scenarios
from benchmarks.contest.contestants import RATES, TUNED, Contestant
from benchmarks.contest.runner import Task

SCENARIO = "household/equal"
SEED = 100  # not one of the contest's own
NEVER = 99.0  # the loss of a run that could not begin
MOST_STEPS = 4  # beyond the grid's ends
Picked = dict[str, Any]
Tried = list[tuple[Picked, float]]


def tune(chosen: Sequence[Contestant], seconds: float, log: Path) -> None:
    """Tunes these, and writes each one's choice as soon as it is made. What the log has already is not run again."""
    place = scenarios.scenario(SCENARIO)
    for one in chosen:
        if one.like:
            continue
        tried: Tried = []

        def loss_of(picked: Picked, one: Contestant = one, tried: Tried = tried) -> float:
            loss = _known(log, one.name, picked, seconds)
            if loss is None:
                result = runner.run(Task(one, place, SEED, seconds, picked))
                loss = result["curve"][-1]["loss"] if result.get("curve") else NEVER
                _append(log, {"contestant": one.name, "picked": picked, "seconds": seconds, "loss": loss})
            tried.append((picked, loss))
            print(f"{one.name}  {picked}  {loss:.3f}", flush=True)
            return loss

        _write(one.name, search(one, loss_of), tried)


def search(one: Contestant, loss_of: Callable[[Picked], float]) -> Picked:
    """The best of the options, one after the other, and then the best rate between two worse ones."""
    picked: Picked = {"rate": RATES[len(RATES) // 2]}
    for option, values in one.grid.items():
        losses = {value: loss_of({**picked, option: value}) for value in values}
        picked[option] = min(losses, key=lambda value: losses[value])
    return {**picked, "rate": best_rate(lambda rate: loss_of({**picked, "rate": rate}))}


def best_rate(loss_of: Callable[[float], float]) -> float:
    """From the middle of RATES downhill by factors of two, until both neighbours of the best are worse."""
    losses: dict[float, float] = {}
    rate = RATES[len(RATES) // 2]
    for _ in range(len(RATES) + MOST_STEPS):
        for near in (rate, rate / 2, rate * 2):
            if near not in losses:
                losses[near] = loss_of(near)
        best = min(losses, key=lambda one: losses[one])
        if best == rate:
            break
        rate = best
    return rate


def _known(log: Path, name: str, picked: Picked, seconds: float) -> float | None:
    return next(
        (
            line["loss"]
            for line in _lines(log)
            if (line["contestant"], line["picked"], line["seconds"]) == (name, picked, seconds)
        ),
        None,
    )


def _lines(log: Path) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in log.read_text().splitlines()) if log.exists() else iter(())


def _append(log: Path, line: dict[str, Any]) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _write(name: str, picked: Picked, tried: Tried) -> None:
    found: dict[str, Any] = json.loads(TUNED.read_text()) if TUNED.exists() else {"chosen": {}, "tried": {}}
    found["command"] = f"python -m benchmarks.contest --tune, in {SCENARIO}, seed {SEED}"
    found["chosen"][name] = picked
    found["tried"][name] = [{**tries, "loss": round(loss, 4)} for tries, loss in tried]
    TUNED.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")
