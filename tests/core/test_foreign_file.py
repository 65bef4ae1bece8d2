"""A file of somebody else is read only if it is a regular file of at most N bytes; nothing waits for a pipe."""

import os
from pathlib import Path

import pytest

from decentral.core import foreign_file

OF_ROOT = Path("/etc/passwd")  # a file of another user than the one that runs the tests, or of root
NOBODY = 65534


def refusal(path: Path, most_bytes: int = 10) -> str:
    with pytest.raises(OSError, match="expected") as caught:
        foreign_file.read_bytes(path, most_bytes)
    return caught.value.strerror or ""


def link(folder: Path, target: Path = OF_ROOT) -> Path:
    """Return a link to a file or folder of root, made by another user."""
    made = folder / "link"
    made.symlink_to(target)
    if not os.geteuid():
        os.lchown(made, NOBODY, NOBODY)
    return made


def test_a_regular_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("né")
    assert foreign_file.read_bytes(tmp_path / "file", 3) == "né".encode()
    assert foreign_file.read_text(tmp_path / "file", 3) == "né"


def test_a_larger_file_is_refused_with_both_sizes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(11))
    assert refusal(tmp_path / "file") == "expected at most 10 bytes; it has 11"


def test_a_pipe_without_a_writer_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "it is a pipe" in refusal(tmp_path / "pipe")


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null"])
def test_a_link_to_a_device_is_refused(tmp_path: Path, device: str) -> None:
    (tmp_path / "link").symlink_to(device)
    assert "device" in refusal(tmp_path / "link")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path) == "expected a file; it is a folder"


def test_a_missing_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        foreign_file.opened(tmp_path / "gone")


def test_a_link_in_the_users_own_folder_is_followed(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert foreign_file.read_bytes(link(tmp_path), 1 << 20) == OF_ROOT.read_bytes()


def test_a_link_of_another_user_to_a_third_users_file_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert refusal(link(tmp_path), 1 << 20) == "expected a file; it is a link to another user's file"


def test_a_link_to_a_file_of_the_same_user_is_followed_in_any_folder(tmp_path: Path) -> None:
    """A cache that users share has such links."""
    tmp_path.chmod(0o777)
    (tmp_path / "blob").write_bytes(b"data")
    (tmp_path / "link").symlink_to(tmp_path / "blob")
    assert foreign_file.read_bytes(tmp_path / "link", 10) == b"data"


def test_a_folder_behind_a_link_follows_the_same_rules(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    folder = link(tmp_path, OF_ROOT.parent)
    (tmp_path / "sub").mkdir()
    expected = "expected a file; its folder is a link to another user's folder"
    assert refusal(folder / OF_ROOT.name, 1 << 20) == expected
    assert refusal(tmp_path / "sub" / ".." / "link" / OF_ROOT.name, 1 << 20) == expected
    tmp_path.chmod(0o755)
    assert foreign_file.read_bytes(folder / OF_ROOT.name, 1 << 20) == OF_ROOT.read_bytes()


def test_a_link_to_a_folder_of_the_same_user_is_followed_in_any_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"data")
    (tmp_path / "link").symlink_to("folder")
    assert foreign_file.read_bytes(tmp_path / "link" / "file", 10) == b"data"


def test_a_path_may_be_relative_and_an_error_names_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_bytes(b"data")
    assert foreign_file.read_bytes("file", 10) == foreign_file.read_bytes("./../" + tmp_path.name + "/file", 10)
    for path in ("gone", "gone/file", "file/file"):
        with pytest.raises(OSError, match=r"No such file|Not a directory") as caught:
            foreign_file.opened(path)
        assert caught.value.filename == path
    assert refusal(Path()) == refusal(Path("/")) == "expected a file; it is a folder"


def test_a_file_to_lock_is_made_and_keeps_its_content(tmp_path: Path) -> None:
    foreign_file.opened_to_lock(tmp_path / "lock").close()
    assert not (tmp_path / "lock").read_bytes()
    (tmp_path / "lock").write_bytes(b"of a user whose file the link `lock` names")
    foreign_file.opened_to_lock(tmp_path / "lock").close()
    assert (tmp_path / "lock").stat().st_size


def test_no_descriptor_is_left_open_by_a_refusal(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    refusal(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
