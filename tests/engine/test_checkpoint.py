"""Checkpoints: the old one or the new one, never half of one."""

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from decentral.core.errors import UserError
from decentral.engine import checkpoint, tensor_file
from decentral.engine.tensor_file import DIRECT, TensorFile

OLD = {"theta": torch.arange(5.0)}
NEW = {"theta": torch.arange(5.0) + 1}


def saved(folder: Path) -> tuple[list[float], Any]:
    found = checkpoint.read(folder)
    assert found is not None
    tensors, facts = found
    return tensors["theta"].tolist(), facts


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    size = checkpoint.write(tmp_path, OLD, {"step": 7, "window": [[1, False]]})
    assert saved(tmp_path) == ([0, 1, 2, 3, 4], {"step": 7, "window": [[1, False]]})
    assert size == (tmp_path / checkpoint.FILE).stat().st_size


def test_a_folder_without_a_checkpoint_has_none(tmp_path: Path) -> None:
    assert checkpoint.read(tmp_path) is None


def test_a_new_checkpoint_replaces_the_old_one_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, OLD, {"step": 1})
    checkpoint.write(tmp_path, NEW, {"step": 2})
    assert saved(tmp_path) == ([1, 2, 3, 4, 5], {"step": 2})
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.FILE]


@pytest.mark.parametrize(("owner", "call"), [(os, "fsync"), (Path, "replace")], ids=["fsync", "replace"])
def test_an_interrupted_write_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, call: str
) -> None:
    checkpoint.write(tmp_path, OLD, {"step": 1})

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(owner, call, full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.write(tmp_path, NEW, {"step": 2})
    monkeypatch.undo()
    assert saved(tmp_path) == ([0, 1, 2, 3, 4], {"step": 1})


@pytest.mark.parametrize(("owner", "call"), [(os, "fsync"), (Path, "replace")], ids=["fsync", "replace"])
def test_a_file_that_is_given_up_is_closed_once_and_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, call: str
) -> None:
    """Its number may be another thread's file or socket by then."""

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    file = TensorFile(tmp_path / checkpoint.FILE, OLD)
    file.add("theta", OLD["theta"])
    monkeypatch.setattr(owner, call, full)
    with pytest.raises(OSError, match="No space left"):
        file.finish({})
    others = [os.open("/dev/null", os.O_RDONLY) for _ in range(2)]
    file.abandon()
    for other in others:
        os.close(other)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_refuses_direct_writes_is_written_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite

    def refusing(file: int, data: bytes, at: int) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(file, data, at)

    monkeypatch.setattr(os, "pwrite", refusing)
    checkpoint.write(tmp_path, OLD, {"step": 1})
    assert saved(tmp_path) == ([0, 1, 2, 3, 4], {"step": 1})


def test_there_is_room_for_the_facts_of_very_many_fragments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "BUFFER_BYTES", 4 * tensor_file.ALIGNED)  # the header takes several pieces
    count, names = 1000, ("theta", "exp_avg", "exp_avg_sq")
    facts = {
        "fragments": [{"index": n, "first": n, "last": n + 1, "parameters": 7079424} for n in range(count)],
        "window": [[1234567, False]] * count,
        "fragment_steps": [1234567] * count,
        "versions": {str(n): "0" * 32 for n in range(count)},
    }
    tensors = {f"{n}.{name}": torch.full((3,), n / 8) for n in range(count) for name in names}
    checkpoint.write(tmp_path, tensors, facts)
    found = checkpoint.read(tmp_path)
    assert found is not None
    assert found[1] == facts
    assert all(torch.equal(found[0][name], tensor) for name, tensor in tensors.items())


def test_a_bit_that_the_disk_has_turned_is_a_user_error(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, OLD, {"step": 1})
    path = tmp_path / checkpoint.FILE
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert "theta does not match" in refusal(tmp_path)


def test_a_damaged_checkpoint_is_set_aside_where_a_swarm_is_there(tmp_path: Path) -> None:
    (tmp_path / checkpoint.FILE).write_bytes(b"damaged")
    with pytest.raises(checkpoint.DamagedCheckpoint) as caught:
        checkpoint.span(tmp_path)
    assert "starts with the swarm's weights" in caught.value.set_aside()
    assert checkpoint.span(tmp_path) is None
    assert (tmp_path / checkpoint.DAMAGED).read_bytes() == b"damaged"


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_number_that_is_not_finite_is_found(wrong: float, dtype: torch.dtype) -> None:
    numbers = torch.zeros(1000, dtype=dtype)
    assert checkpoint.finite(numbers)
    numbers[777] = wrong
    assert not checkpoint.finite(numbers)


def test_large_numbers_are_finite_though_their_sum_is_not() -> None:
    assert checkpoint.finite(torch.full((100,), 1e38))
    assert checkpoint.finite(torch.full((3,), 255, dtype=torch.uint8))


def test_half_a_file_left_by_a_kill_does_no_harm(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, OLD, {"step": 1})
    (tmp_path / (checkpoint.FILE + ".new")).write_bytes(b"half of a checkp")
    assert saved(tmp_path)[1] == {"step": 1}
    checkpoint.write(tmp_path, NEW, {"step": 2})
    assert saved(tmp_path)[1] == {"step": 2}


@given(length=st.integers(0, 10**6))
def test_a_cut_checkpoint_is_a_user_error(tmp_path_factory: pytest.TempPathFactory, length: int) -> None:
    folder = tmp_path_factory.getbasetemp()
    checkpoint.write(folder, OLD, {"step": 1})
    path = folder / checkpoint.FILE
    whole = path.read_bytes()
    path.write_bytes(whole[: length % len(whole)])
    assert checkpoint.FILE in refusal(folder)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"not a checkpoint at all", id="text"),
        pytest.param(b"\xff" * 64, id="an impossible header"),
        pytest.param(save(OLD), id="no facts"),
        pytest.param(save(OLD, {"other": "{}"}), id="other facts"),
        pytest.param(save(OLD, {"facts": "{"}), id="facts that are cut"),
    ],
)
def test_a_damaged_checkpoint_is_a_user_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / checkpoint.FILE).write_bytes(content)
    assert "damaged" in refusal(tmp_path)


def test_a_checkpoint_that_its_peer_replaces_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.write(tmp_path, {"a": torch.zeros(1000)}, {})
    later, from_file = [torch.ones(1000)], torch.UntypedStorage.from_file

    def replaced_first(*arguments: Any, **named: Any) -> Any:  # safetensors has read the header before it calls this
        if later:
            checkpoint.write(tmp_path, {"a": later.pop()}, {})
        return from_file(*arguments, **named)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", replaced_first)
    tensors, _ = checkpoint.read(tmp_path) or ({}, {})
    assert not later
    assert tensors["a"].tolist() == [1.0] * 1000


def test_a_damaged_checkpoint_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / checkpoint.FILE).write_bytes(b"damaged")
    refusal(tmp_path)
    assert (tmp_path / checkpoint.FILE).read_bytes() == b"damaged"


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        checkpoint.read(folder)
    line = str(caught.value)
    assert line.splitlines() == [line]
    return line
