"""Limits of control groups, as kernels, container runtimes, systemd and Slurm set them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastdecode.core import cgroups, machine

GIB = 1 << 30
NONE_V1 = "9223372036854771712"


class Groups:
    """A tree of control groups on disk, and this process's place in it."""

    def __init__(self, folder: Path) -> None:
        self.root, self.process = folder / "cgroup", folder / "self"
        self.process.mkdir()

    def place(self, *lines: str, mounts: str = "") -> None:
        (self.process / "cgroup").write_text("\n".join(lines) + "\n")
        (self.process / "mountinfo").write_text(mounts)

    def set(self, group: str, **values: object) -> None:
        """Write files of a group; "__" in a name stands for a dot."""
        folder = self.root / group
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            (folder / name.replace("__", ".")).write_text(f"{value}\n")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    made = Groups(tmp_path)
    monkeypatch.setattr(cgroups, "ROOT", made.root)
    monkeypatch.setattr(cgroups, "PROCESS", made.process)
    monkeypatch.setattr(machine, "_meminfo_bytes", lambda key: {"MemAvailable": 18 * GIB, "MemTotal": 24 * GIB}[key])
    return made


def limits() -> tuple[float, float]:
    """Return free and total memory in GiB."""
    return machine.available_memory_bytes() / GIB, machine.total_memory_bytes() / GIB


def test_without_groups_the_machine_counts(groups: Groups) -> None:
    assert limits() == (18, 24) and cgroups.cpu_limit() is None


def test_version_1_limits_memory_and_time(groups: Groups) -> None:
    groups.place("4:memory:/job", "1:cpu,cpuacct:/job", "0::/")
    groups.set("memory", memory__limit_in_bytes=NONE_V1, memory__usage_in_bytes=9 * GIB)
    groups.set("memory/job", memory__limit_in_bytes=3 * GIB, memory__usage_in_bytes=GIB)
    groups.set("cpu,cpuacct/job", cpu__cfs_quota_us=150000, cpu__cfs_period_us=100000)
    assert limits() == (2, 3) and cgroups.cpu_limit() == 1.5
    groups.set("cpu,cpuacct/job", cpu__cfs_quota_us=-1)
    assert cgroups.cpu_limit() is None


def test_in_a_container_of_version_1_the_mounted_root_is_the_own_group(groups: Groups) -> None:
    """In a container the path names groups that cannot be seen from inside."""
    groups.place("4:memory:/docker/abc", "1:cpu,cpuacct:/docker/abc")
    groups.set("memory", memory__limit_in_bytes=3 * GIB, memory__usage_in_bytes=GIB)
    groups.set("cpu", cpu__cfs_quota_us=100000, cpu__cfs_period_us=100000)
    assert limits() == (2, 3) and cgroups.cpu_limit() == 1


def test_version_1_tells_of_limits_that_cannot_be_seen(groups: Groups) -> None:
    groups.place("4:memory:/")
    groups.set(
        "memory", memory__limit_in_bytes=NONE_V1, memory__usage_in_bytes=2 * GIB,
        memory__stat=f"cache {GIB}\ntotal_inactive_file {GIB}\nhierarchical_memory_limit {4 * GIB}",
    )  # fmt: skip
    assert limits() == (3, 4)


def test_page_cache_is_free(groups: Groups) -> None:
    groups.place("0::/pod")
    used = int(3.9 * GIB)
    groups.set(
        "pod", memory__max=4 * GIB, memory__current=used, memory__stat="anon 900000000\ninactive_file 3000000000"
    )
    assert 2.85 < limits()[0] < 3.6
    groups.set("pod", memory__stat="anon 900000000\ninactive_file 1000000000\nactive_file 2000000000")
    assert 2.85 < limits()[0] < 3.6


def test_every_group_above_counts(groups: Groups) -> None:
    """Slurm limits the job and systemd a slice; the step's own group has no limit."""
    groups.place("0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0")
    groups.set("system.slice", memory__max="max", memory__current=20 * GIB, cpu__max="max 100000")
    job = "system.slice/slurmstepd.scope/job_7"
    groups.set(job, memory__max=8 * GIB, memory__current=3 * GIB, cpu__max="200000 100000")
    groups.set(f"{job}/step_0/user/task_0", memory__max="max", memory__current=GIB, cpu__max="max 100000")
    assert limits() == (5, 8) and cgroups.cpu_limit() == 2
    groups.set("system.slice", memory__max=21 * GIB)
    assert limits() == (1, 8)
    groups.set("system.slice", memory__max=19 * GIB)
    assert limits() == (0, 8), "used by others already"


def test_a_group_is_throttled_above_its_high_limit(groups: Groups) -> None:
    groups.place("0::/user.slice")
    groups.set("user.slice", memory__max="max", memory__high=6 * GIB, memory__current=2 * GIB)
    assert limits() == (4, 6)


def test_both_versions_at_once(groups: Groups) -> None:
    """systemd's hybrid hierarchy has version 2 for processes and version 1 for controllers."""
    groups.place("4:memory:/job", "1:name=systemd:/job", "0::/job")
    groups.set("unified/job", cgroup__procs="")
    groups.set("memory/job", memory__limit_in_bytes=3 * GIB, memory__usage_in_bytes=GIB)
    assert limits() == (2, 3)


def test_mounts_may_lie_elsewhere(groups: Groups, tmp_path: Path) -> None:
    mount = f"30 20 0:25 / {tmp_path / 'own'} rw shared:9 - cgroup cgroup rw,memory\n"
    groups.place("4:memory:/job", mounts=mount + "31 20 0:26 / /tmp rw - tmpfs tmpfs rw\n")
    groups.set("../own/job", memory__limit_in_bytes=3 * GIB, memory__usage_in_bytes=GIB)
    assert limits() == (2, 3)


def test_a_name_space_s_path_may_lead_upwards(groups: Groups) -> None:
    groups.place("0::/../../pod")
    groups.set("pod", memory__max=4 * GIB, memory__current=GIB)
    assert limits() == (3, 4)


def test_a_quota_of_part_of_a_core_leaves_one(groups: Groups) -> None:
    groups.place("0::/pod")
    groups.set("pod", cpu__max="50000 100000")
    assert len(machine.usable_cores()) == 1
