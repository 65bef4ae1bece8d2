"""Where the served weights come from: new ones replace the old while those still answer, and trouble keeps them."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from decentral.commands import dashboard, export
from decentral.core import jobs
from decentral.core.errors import UserError
from decentral.core.ids import RunId
from decentral.data.text_codec import ByteCodec
from decentral.engine.compute import Compute, ComputeSetup
from decentral.engine.step import Device
from decentral.peers.startup.state import StateFolder
from decentral.serving import served_model
from decentral.serving.loaded_model import LoadedModel
from decentral.serving.openai_requests import ApiError
from decentral.serving.served_model import AGAIN_S, ServedModel

CPU = Device(torch.device("cpu"), torch.float32)


class Over(Exception):
    pass


def loaded(source: str) -> LoadedModel:
    return LoadedModel(None, [], ByteCodec(), source)  # type: ignore[arg-type]


def followed(*outcomes: LoadedModel | str | None) -> tuple[ServedModel, list[tuple[str, str, float]]]:
    """Loads these one after the other; texts are errors. Gives what was served and how long it rested, each time."""
    served, left, seen = ServedModel("m", CPU), list(outcomes), list[tuple[str, str, float]]()

    async def load() -> LoadedModel | None:
        outcome = left.pop(0)
        if isinstance(outcome, str):
            raise UserError(outcome)
        return outcome

    async def rest(seconds: float) -> None:
        seen.append((served.model.source if served.model else "none", served.trouble, round(seconds)))
        if not left:
            raise Over

    with pytest.raises(Over):
        asyncio.run(served.keep_fresh(load, 600.0, rest))
    return served, seen


def test_newer_weights_replace_the_served_ones() -> None:
    assert followed(loaded("one"), None, loaded("two"))[1] == [("one", "", 600), ("one", "", 600), ("two", "", 600)]


def test_trouble_is_said_once_and_the_last_weights_stay(capsys: pytest.CaptureFixture[str]) -> None:
    _, seen = followed(loaded("one"), "nobody gave layer 1", "nobody gave layer 1", loaded("two"))
    again = round(AGAIN_S)
    assert seen[1:3] == [("one", "nobody gave layer 1", again)] * 2
    assert seen[3] == ("two", "", 600)
    assert capsys.readouterr().err == "no newer weights: nobody gave layer 1\n"


def test_without_weights_a_program_hears_why() -> None:
    with pytest.raises(ApiError, match="nobody gave layer 1") as refused:
        followed("nobody gave layer 1")[0].of_name("m")
    assert refused.value.status == 503


@pytest.fixture
def folder(setup_of: Callable[..., ComputeSetup]) -> Path:
    """The state folder of a peer."""
    setup = setup_of("A")
    Compute(setup).do(jobs.Save())
    StateFolder(setup.folder).write_run(RunId("words-3fa2c1"), setup.config)
    return setup.folder


def test_a_state_folder_s_weights_are_loaded_again_when_they_have_changed(folder: Path) -> None:
    source = served_model.of_folder(folder, None, CPU)
    asyncio.run(source.load_first())
    assert source.served.of_name("A").source.endswith("at learning-rate step 0")
    assert asyncio.run(source.load()) is None
    (checkpoint,) = folder.glob("*.safetensors")
    os.utime(checkpoint, ns=(1, 1))
    assert asyncio.run(source.load()) is not None


def test_an_exported_folder_is_served(folder: Path, tmp_path: Path) -> None:
    assert export.main(["--state-dir", str(folder), "--out", str(tmp_path / "model")]) == 0
    source = served_model.of_folder(tmp_path / "model", None, CPU)
    asyncio.run(source.load_first())
    assert source.served.of_name("model").codec.encode("a") == [97]
    assert source.served.template is None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--serve-model", "gone"], "--serve-model gone is not a folder"),
        (["--serve-model"], "expected --join ADDR"),
        (["--serve-model", "."], "has no peer's state"),
        (["--serve-model", ".", "--device", "abacus"], "--device expects"),
    ],
)
def test_a_mistake_takes_one_line(
    flags: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert dashboard.main([*flags, "--at", "0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert said in line
