"""The cores that affinity and cgroups allow, and the threads of a run."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest
import torch

from lowpeak import GRPOConfig, cpu_cores

CORE = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
CPUS = {0, 1, 2, 3, 8, 9, 10, 11}
V1 = "3:cpu,cpuacct:/job\n1:memory:/job\n"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({CORE.format(cpu): f"{cpu % 8},{cpu % 8 + 8}\n" for cpu in CPUS}, 4),
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/slice/job\n", "sys/fs/cgroup/slice/cpu.max": "250000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/on/the/host\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": V1, "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1\n"}, 8),
        ({"proc/self/cgroup": "unreadable\n0::/job\n", "sys/fs/cgroup/job/cpu.max": "100000 0\n"}, 8),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
    ],
)
def test_cores_are_those_of_affinity_and_of_every_cgroups_quota(tmp_path, monkeypatch, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: CPUS, raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 16)
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert cpu_cores.allowed_cores(tmp_path) == cores


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("chosen", "ranks", "variable", "expected"), [(8, 1, "", 3), (2, 1, "", 2), (8, 2, "", 8), (8, 1, "8", 8)]
)
def test_a_config_of_one_process_lowers_torchs_threads_to_the_cores_unless_the_variable_is_set(
    tmp_path, monkeypatch, threads, chosen, ranks, variable, expected
):
    monkeypatch.setattr(cpu_cores, "allowed_cores", lambda: 3)
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    if not variable:
        monkeypatch.delenv("OMP_NUM_THREADS")
    torch.set_num_threads(chosen)
    type("Config", (GRPOConfig,), {"world_size": ranks})(output_dir=str(tmp_path), use_cpu=True)
    assert torch.get_num_threads() == expected


@pytest.mark.parametrize(("value", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_torchs_idle_threads_sleep_unless_the_variable_is_set(value, expected):
    variables = {name: text for name, text in os.environ.items() if name != "OMP_WAIT_POLICY"}
    variables |= {"OMP_WAIT_POLICY": value} if value else {}
    script = "import lowpeak, os; print(os.environ['OMP_WAIT_POLICY'])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=variables)
    assert done.stdout.strip() == expected
