"""Places of uploads: which names are places, that none holds credentials, and what a folder as a store does."""

import sys
from pathlib import Path

import pytest

from decentral.core.errors import UserError
from decentral.store.places import SEND_BYTES, asking, checked_place, store_of
from tests.store.local_uploads import BytesSource


def refused(text: str) -> str:
    with pytest.raises(UserError) as caught:
        checked_place(text, "--upload")
    said = str(caught.value)
    assert said.isprintable()
    return said


@pytest.mark.parametrize(
    "text",
    [
        "s3://key:secret@bucket/runs",
        "s3://key@bucket/runs",
        "s3://bucket/runs?token=secret",
        "simplecache::s3://bucket/runs",
        "s3://bucket/my runs",
        "s3://",
    ],
)
def test_a_name_with_credentials_or_options_is_refused_and_not_repeated(text: str) -> None:
    said = refused(text)
    assert "without user, key or options" in said
    assert "secret" not in said


def test_an_unknown_provider_names_the_nearest_one() -> None:
    assert refused("s33://bucket/runs").endswith("got 's33'; did you mean s3?")


def test_a_repository_needs_its_user() -> None:
    assert "expects hf://USER/NAME" in refused("hf://name")


def test_nothing_is_no_place() -> None:
    assert "got nothing" in refused("")
    assert "expects s3://BUCKET/PATH, or ./s3:/bad for a folder" in refused("s3:/bad")


@pytest.mark.parametrize(
    ("place", "module", "extra"), [("s3://b/r", "s3fs", "upload"), ("hf://u/n", "huggingface_hub", "hf")]
)
def test_a_missing_package_is_named_with_its_extra(
    place: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec  # noqa: F401 - it has the module that remembers which classes were imported

    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, place.partition(":")[0], raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    assert refused(place).endswith(f"pip install 'decentral[{extra}]'")


def test_a_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert checked_place("backup", "DEST") == str(tmp_path / "backup")


def test_a_folder_that_is_not_there_has_nothing(tmp_path: Path) -> None:
    store = store_of(str(tmp_path / "none"))
    assert (store.folders(), store.files(""), store.files("a")) == ([], {}, {})


@pytest.mark.parametrize("size", [0, 10, 2 * SEND_BYTES + 1])
def test_a_file_is_read_as_it_was_sent(tmp_path: Path, size: int) -> None:
    store, content = store_of(str(tmp_path)), bytes(range(251)) * (size // 251 + 1)
    store.send("a/b.json", BytesSource(content[:size]))
    assert b"".join(store.read("a/b.json", size)) == content[:size]
    assert (store.folders(), store.files("a")) == (["a"], {"b.json": size})


def test_no_more_is_read_than_the_bound_and_a_byte_that_tells(tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(bytes(1000))
    assert len(b"".join(store_of(str(tmp_path)).read("long", 10))) == 11


def test_a_file_is_there_if_size_and_content_are_equal(tmp_path: Path) -> None:
    store = store_of(str(tmp_path))
    store.send("a/x", BytesSource(b"content"))
    assert store.has("a/x", BytesSource(b"content"))
    assert not store.has("a/x", BytesSource(b"CONTENT"))
    assert not store.has("a/x", BytesSource(b"contents"))
    assert not store.has("a/y", BytesSource(b"content"))


def test_a_provider_s_error_becomes_one_line() -> None:
    with pytest.raises(UserError, match=r"^s3://b: no such\? bucket$"), asking("s3://b"):
        raise RuntimeError("no such\x1b\n bucket")
