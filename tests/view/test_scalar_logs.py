"""What TensorBoard and W&B get of a peer's journal, read back by their own readers."""

from pathlib import Path
from typing import Any

import pytest

from decentral.core.journal.file import Journal
from decentral.view.scalar_logs import LOGS, JournalFollower, JournalScalars, RunFacts
from tests.journal_lines import event_of

FACTS = RunFacts("QmA", "words-3fa2c1", "cpu", 1e9)
ASIDE = {"gossip": 0.25, "waiting": 0.25, "beside": 0.1}


def step(number: int, loss: float | None = 2.0) -> dict[str, Any]:
    return {"step": number, "tokens": 100, "micro_batches": 1, "loss": loss, "seconds": 0.5, "aside": ASIDE}


def of(scalars: JournalScalars, event: str, **fields: Any) -> dict[str, float]:
    return scalars.of(0.0, event_of(event, **fields))


def test_a_step_line_gives_loss_speed_and_shares_of_time() -> None:
    scalars = JournalScalars()
    found = of(scalars, "step", **step(3))
    assert found["loss/training"] == 2.0
    assert found["tokens_per_s"] == 100.0
    assert (found["time/training"], found["time/gossip"], found["time/waiting"]) == (0.5, 0.25, 0.25)
    assert of(scalars, "step", **step(4))["tokens"] == 200
    assert scalars.work.step == 4


def test_a_loss_that_is_not_finite_is_no_point() -> None:
    assert "loss/training" not in of(JournalScalars(), "step", **step(1, None))


def test_exchanges_are_counted_and_peers_come_and_go() -> None:
    scalars = JournalScalars()
    counts = [of(scalars, "exchange", outcome=outcome) for outcome in ("done", "failed", "done")]
    assert counts == [{"exchanges/done": 1}, {"exchanges/failed": 1}, {"exchanges/done": 2}]
    there = [
        of(scalars, "joined", peers=2),
        of(scalars, "peer_joined"),
        of(scalars, "peer_left"),
        of(scalars, "peer_left"),
    ]
    assert [one["swarm/peers"] for one in there] == [2, 3, 2, 1]


def test_lines_without_numbers_to_draw_give_none() -> None:
    assert of(JournalScalars(), "stopped", reason="interrupted") == {}


def follow(names: list[str], folder: Path) -> list[str]:
    """Follows a journal of two steps and an evaluation, with lines before; gives the troubles."""
    journal = Journal(folder / "journal.jsonl", lambda: 1e9 + 1)
    journal.write(event_of("step", **step(1, 9.0)))
    troubles: list[str] = []
    follower = JournalFollower(names, journal.path, FACTS, troubles.append)
    journal.write(event_of("step", **step(2, 3.0)))
    journal.write(event_of("step", **step(3, 2.5)))
    journal.write(event_of("eval", tokens=10, loss=2.75, seconds=0.1))
    journal.close()
    follower.over.set()
    follower.run()
    return troubles


def test_tensorboard_reads_what_came_since_the_start(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert follow(["tensorboard"], tmp_path) == []
    (folder,) = (tmp_path / "tensorboard").iterdir()
    read = EventAccumulator(str(folder))
    read.Reload()
    assert [(one.step, one.value) for one in read.Scalars("loss/training")] == [(2, 3.0), (3, 2.5)]
    assert [(one.step, one.value) for one in read.Scalars("loss/held-out")] == [(3, 2.75)]


def test_wandb_keeps_an_offline_run_in_the_folder(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is large, and so no part of the dev extra")
    assert follow(["wandb"], tmp_path) == []
    (run,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = run.read_bytes()
    for known in (b"loss/training", b"loss/held-out", b"words-3fa2c1"):
        assert known in content


def test_a_log_that_cannot_be_written_is_told_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: Path, run: RunFacts) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(LOGS, "tensorboard", broken)
    (said,) = follow(["tensorboard"], tmp_path)
    assert said.startswith("--log tensorboard has ended: OSError")
