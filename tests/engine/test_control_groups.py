"""A container's memory limit is found wherever it stands: in version 1 or 2, in our group or in one around it."""

from pathlib import Path

import pytest

from decentral.engine import control_groups, measure

NO_LIMIT = str((1 << 63) - 4096)  # what version 1 says
V1 = "cgroup cgroup rw,memory"
V2 = "cgroup2 cgroup2 rw"


class Process:
    """The files of /proc/self that name the groups, and the groups' own files."""

    def __init__(self, folder: Path, groups: str, kind: str, root: str = "/") -> None:
        self.proc, self.top = folder / "proc", folder / "memory"
        self.proc.mkdir()
        (self.proc / "cgroup").write_text(groups)
        others = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
        others += f"32 31 0:29 / {folder / 'cpu'} rw,relatime - cgroup cgroup rw,cpu\n"
        (self.proc / "mountinfo").write_text(f"{others}35 31 0:32 {root} {self.top} rw shared:9 - {kind}\n")

    def limit(self, group: str, name: str, text: str) -> None:
        folder = self.top / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")

    def limit_bytes(self) -> int | None:
        return control_groups.limit_bytes(self.proc)


def test_version_1_has_the_limit_of_the_own_group(tmp_path: Path) -> None:
    process = Process(tmp_path, "5:cpu:/job\n4:memory:/job\n0::/\n", V1)
    process.limit("job", "memory.limit_in_bytes", "1000000000")
    process.limit("", "memory.limit_in_bytes", NO_LIMIT)
    assert process.limit_bytes() == 10**9


def test_version_2_has_the_smaller_of_its_two_limits(tmp_path: Path) -> None:
    process = Process(tmp_path, "0::/kubepods/pod\n", V2)
    process.limit("kubepods/pod", "memory.max", "4000")
    process.limit("kubepods/pod", "memory.high", "3000")
    assert process.limit_bytes() == 3000


@pytest.mark.parametrize(
    ("groups", "kind", "name"),
    [("4:memory:/a/b/c\n", V1, "memory.limit_in_bytes"), ("0::/a/b/c\n", V2, "memory.max")],
)
def test_a_group_around_ours_may_have_the_limit(tmp_path: Path, groups: str, kind: str, name: str) -> None:
    process = Process(tmp_path, groups, kind)
    process.limit("a/b/c", name, "max" if kind == V2 else NO_LIMIT)
    process.limit("a", name, "5000")
    assert process.limit_bytes() == 5000


def test_a_container_that_sees_the_hosts_names_of_its_groups_finds_its_own_at_the_mount(tmp_path: Path) -> None:
    process = Process(tmp_path, "4:memory:/docker/3f2a/inner\n", V1, root="/docker/3f2a")
    process.limit("inner", "memory.limit_in_bytes", NO_LIMIT)
    process.limit("", "memory.limit_in_bytes", "7000")
    assert process.limit_bytes() == 7000


def test_a_group_outside_of_what_is_mounted_has_the_limit_of_the_mount(tmp_path: Path) -> None:
    process = Process(tmp_path, "0::/../sibling\n", V2, root="/own")
    process.limit("", "memory.max", "8000")
    assert process.limit_bytes() == 8000


def test_without_limits_or_without_groups_there_is_none(tmp_path: Path) -> None:
    process = Process(tmp_path, "0::/\n", V2)
    process.limit("", "memory.max", "max")
    process.limit("", "memory.high", NO_LIMIT)
    assert process.limit_bytes() is None
    assert control_groups.limit_bytes(tmp_path / "elsewhere") is None


@pytest.mark.parametrize("group", ["a job", "a\\job", "job-\xe9"])
def test_a_path_that_the_kernel_escapes_is_found(tmp_path: Path, group: str) -> None:
    top = tmp_path / group
    top.mkdir()
    escaped = group.replace("\\", "\\134").replace(" ", "\\040")
    process = Process(top, f"0::/{group}/inner\n", V2, root=f"/{escaped}")
    mounts = process.proc / "mountinfo"
    mounts.write_text(mounts.read_text().replace(f" {top}", f" {tmp_path / escaped}"))
    process.limit("inner", "memory.max", "6000")
    assert process.limit_bytes() == 6000


def test_lines_that_do_not_parse_are_skipped(tmp_path: Path) -> None:
    process = Process(tmp_path, "odd\n\n4:memory\n0::/own\n", V2)
    process.limit("own", "memory.max", "9000")
    mounts = process.proc / "mountinfo"
    odd = b"odd\n\n1 2 - cgroup2 cgroup2 rw\n36 31 0:33 / /\xff rw - cgroup2\n36 31 0:33 / /a\\000b rw - cgroup2 x rw\n"
    mounts.write_bytes(odd + mounts.read_bytes())
    (process.proc / "status").write_text("VmRSS:\n")
    assert process.limit_bytes() == 9000
    assert control_groups.resident_bytes(process.proc) == 0


def test_a_small_limit_leaves_the_model_what_the_process_has_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_groups, "limit_bytes", lambda: 10**9)
    monkeypatch.setattr(control_groups, "resident_bytes", lambda: 4 * 10**8)
    assert measure.machine_bytes() == 6 * 10**8
    monkeypatch.setattr(control_groups, "limit_bytes", lambda: None)
    assert measure.machine_bytes() == control_groups.host_bytes()


def test_a_process_has_taken_some_memory_and_less_than_the_machine_has() -> None:
    assert 10**6 < control_groups.resident_bytes() < control_groups.host_bytes()
