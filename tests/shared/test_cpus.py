import os
import subprocess
import sys

import pytest

from shared import cgroups
from shared.cpus import size_thread_pools, usable_cpus


@pytest.fixture(autouse=True)
def _sixteen_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return a function that maps (files below the cgroup root, /proc/self/cgroup) to the result of `usable_cpus`."""

    def cpus(files, process):
        for name, text in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (tmp_path / "process").write_text(process)
        monkeypatch.setattr(cgroups, "ROOT", tmp_path / "cgroup")
        monkeypatch.setattr(cgroups, "PROCESS_CGROUPS", tmp_path / "process")
        return usable_cpus()

    return cpus


V1 = "4:memory:/x\n3:cpu,cpuacct:{}\n2:cpuset:/\n"
CASES = {
    "v2 in its own namespace": ({"cpu.max": "250000 100000\n"}, "0::/\n", 3),
    "v2 without a limit": ({"cpu.max": "max 100000\n"}, "0::/\n", 16),
    "v2 limited above": ({"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "max 100000\n"}, "0::/a/b\n", 2),
    "v2 limited twice": ({"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "700000 100000\n"}, "0::/a/b\n", 2),
    "v2 with the machine's path": ({"cpu.max": "150000 100000\n"}, "0::/kubepods/pod1/c1\n", 2),
    "v2 less than one": ({"cpu.max": "10000 100000\n"}, "0::/\n", 1),
    "v2 more than allowed": ({"cpu.max": "6400000 100000\n"}, "0::/\n", 16),
    "v2 damaged": ({"cpu.max": "nonsense\n"}, "0::/\n", 16),
    "v1": (
        {"cpu,cpuacct/cpu.cfs_quota_us": "400000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
        V1.format("/"),
        4,
    ),
    "v1 without a limit": (
        {"cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
        V1.format("/"),
        16,
    ),
    "v1 with the machine's path, by its link": (
        {"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"},
        V1.format("/docker/abc"),
        2,
    ),
    "v1 beside v2": ({"cpu/cpu.cfs_quota_us": "500000\n", "cpu/cpu.cfs_period_us": "100000\n"}, "1:cpu:/\n0::/\n", 5),
    "no cgroups": ({}, "", 16),
}


@pytest.mark.parametrize("name", CASES)
def test_the_quota_of_the_container_counts(machine, name):
    files, process, expected = CASES[name]
    assert machine(files, process) == expected


def test_the_affinity_counts(machine, monkeypatch):
    files = {"cpu.max": "800000 100000\n"}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 7})
    assert machine(files, "0::/\n") == 2


def test_pools_are_sized_unless_the_environment_sets_their_size(monkeypatch):
    environment = {"OMP_NUM_THREADS": "7"}
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    size_thread_pools(environment)
    assert list(environment) == ["OMP_NUM_THREADS", "GOMP_SPINCOUNT"], "the whole machine is ours"
    monkeypatch.setattr(os, "cpu_count", lambda: 1000)
    size_thread_pools(environment)
    assert environment["OMP_NUM_THREADS"] == "7"
    assert environment["RAYON_NUM_THREADS"] == str(usable_cpus())


@pytest.mark.parametrize("chosen", [{"GOMP_SPINCOUNT": "5"}, {"OMP_WAIT_POLICY": "active"}])
def test_how_threads_wait_stays_as_it_was_chosen(chosen):
    environment = dict(chosen)
    size_thread_pools(environment)
    assert chosen.items() <= environment.items()
    assert len(environment.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}) == 1


@pytest.mark.parametrize(("threads", "size"), [("3", "3"), ("0", None), ("many", None)])
def test_pools_have_the_size_of_the_setting(monkeypatch, threads, size):
    """As in a pod without a CPU limit on a large node: the setting is all that says how many CPUs it asked for."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1000)
    environment = {"NEAP_THREADS": threads}
    size_thread_pools(environment)
    assert environment["OMP_NUM_THREADS"] == (size or str(usable_cpus()))


@pytest.mark.parametrize("module", ["inference_service", "calibrator_service"])
def test_the_services_size_their_pools_before_torch_is_imported(module):
    """The program fails if torch is imported before the pools are sized."""
    program = f"""
import os, runpy, sys
os.cpu_count = lambda: 1000
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "numpy"):
            print("sized" if "OMP_NUM_THREADS" in os.environ else "too early", flush=True)
            os._exit(0)
sys.meta_path.insert(0, Finder())
sys.argv = ["{module}", "--listen", "nonsense", "--model", "m=/no/such"]
runpy.run_module("{module}", run_name="__main__")
"""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    # The calibration service itself imports neither; the processes of its jobs do.
    assert "too early" not in done.stdout
    assert done.stdout.strip() == "sized" or module == "calibrator_service"
