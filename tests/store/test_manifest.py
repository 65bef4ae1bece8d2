"""The manifest of an upload: its name by content, and everything in it that a reader refuses."""

import dataclasses
from collections.abc import Callable

import pytest

from decentral.core import strict_json
from decentral.core.errors import UserError
from decentral.core.strict_json import JsonObject
from decentral.store import manifest
from decentral.store.manifest import UploadManifest, UploadPart, parsed, step_of

DIGEST = "0" * 32
PARTS = (
    UploadPart("run.json", "run.json", 10, DIGEST),
    UploadPart("checkpoint.safetensors-00000", "checkpoint.safetensors", 20, DIGEST),
    UploadPart("checkpoint.safetensors-00001", "checkpoint.safetensors", 5, DIGEST),
)
CHECKPOINT = UploadManifest("checkpoint", PARTS, "words-3fa2c1", "QmAnn-abcdefgh", 12, 0, 4)


def test_a_manifest_is_read_as_it_was_written() -> None:
    assert parsed(CHECKPOINT.packed(), "m") == CHECKPOINT
    assert CHECKPOINT.size == 35


def test_a_checkpoint_s_name_has_run_peer_step_and_a_digest_of_its_content() -> None:
    name = CHECKPOINT.name
    assert name.startswith("words-3fa2c1-abcdefgh-step-000000000012-")
    assert step_of(name) == 12
    other = dataclasses.replace(CHECKPOINT, parts=(dataclasses.replace(PARTS[0], digest="1" * 32), *PARTS[1:]))
    assert other.name != name


def test_a_model_s_name_is_of_no_step() -> None:
    model = UploadManifest("model", (UploadPart("config.json", "config.json", 2, DIGEST),))
    assert model.name.startswith("model-")
    assert step_of(model.name) == -1


def changed(change: Callable[[JsonObject], object]) -> bytes:
    found: JsonObject = strict_json.loads(CHECKPOINT.packed())
    change(found)
    return strict_json.dumps(found).encode()


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found.update(format="decentral-upload-2"),
        lambda found: found.update(kind="code"),
        lambda found: found.update(step=-1),
        lambda found: found.update(run="../x"),
        lambda found: found["parts"][0].update(name="../run.json"),
        lambda found: found["parts"][0].update(name=".hidden"),
        lambda found: found["parts"][0].update(of="a/b"),
        lambda found: found["parts"][0].update(bytes=-1),
        lambda found: found["parts"][0].update(bytes=1 << 60),
        lambda found: found["parts"][0].update(digest="abc"),
        lambda found: found["parts"][0].update(of="identity.key"),
        lambda found: found["parts"][0].update(of="weights.bin"),
        lambda found: found["parts"][1].update(name="run.json"),
        lambda found: found["parts"][1].update(name="manifest.json"),
        lambda found: found["parts"].append({**found["parts"][0], "name": "again"}),
    ],
)
def test_what_a_stranger_may_have_changed_is_refused_in_one_line(change: Callable[[JsonObject], object]) -> None:
    with pytest.raises(UserError) as caught:
        parsed(changed(change), "manifest.json")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b"{" * 10_000, b'{"kind": NaN}'])
def test_what_is_no_json_is_refused(data: bytes) -> None:
    with pytest.raises(UserError, match="is no manifest"):
        parsed(data, "m")


@pytest.mark.parametrize("name", ["weights.bin", "model.pt", "run.py", "model.safetensors.exe", "-x.json"])
def test_a_model_has_no_file_that_runs_or_is_unpickled(name: str) -> None:
    assert not manifest.MODEL_FILE.fullmatch(name)
