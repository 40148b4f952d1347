"""What a device has left, read from a file system of our own."""

from __future__ import annotations

import math
import resource
import subprocess
import sys

import psutil
import pytest
import torch

from daf_hf.memory_left import MemoryLeft

CPU = torch.device("cpu")
GIB = 1 << 30


@pytest.fixture
def system(tmp_path):
    """Writes files below the root of a file system."""

    def write(files):
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text, encoding="utf-8")
        return MemoryLeft(CPU, tmp_path)

    write({"proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n"})
    return write


def group(folder, limit, current, inactive=0, high="max", **events):
    counts = {"low": 7, "high": 0, "max": 0, "oom": 0, **events}
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.high": f"{high}\n",
        f"{folder}/memory.current": f"{current}\n",
        f"{folder}/memory.stat": f"anon 5\ninactive_file {inactive}\n",
        f"{folder}/memory.events": "".join(f"{name} {n}\n" for name, n in counts.items()),
    }


def test_the_system_alone(system):
    reading = system({}).read()
    assert (reading.available, reading.source) == (8 * GIB, "the system")
    assert (reading.stalled, reading.events) == (0, 0)


def test_without_proc_psutil_tells(tmp_path):
    reading = MemoryLeft(CPU, tmp_path / "nothing").read()
    assert reading.available == pytest.approx(psutil.virtual_memory().available, rel=0.2)


def test_this_machine():
    assert 0 < MemoryLeft(CPU).read().available < psutil.virtual_memory().total


def test_the_tightest_group_on_the_way_up_counts(system):
    fs = "sys/fs/cgroup"
    left = system(
        {
            "proc/self/cgroup": "0::/user/job/step\n",
            **group(f"{fs}/user", 4 * GIB, 3 * GIB, inactive=GIB // 2, max=2),
            **group(f"{fs}/user/job", 3 * GIB, 1 * GIB, high=2 * GIB, high_events=0, oom=1),
            **group(f"{fs}/user/job/step", "max", 1 * GIB, high="max"),
        }
    )
    reading = left.read()
    assert (reading.available, reading.source) == (GIB, "control group /user/job")
    assert reading.events == 3
    system(group(f"{fs}/user", 4 * GIB, int(3.9 * GIB), inactive=GIB // 2))
    reading = left.read()
    assert reading.source == "control group /user"
    assert reading.available == pytest.approx(0.6 * GIB, abs=1)


def test_a_container_sees_its_group_as_the_root(system):
    left = system(
        {"proc/self/cgroup": "0::/docker/abc\n", **group("sys/fs/cgroup", 2 * GIB, GIB, high=GIB)}
    )
    assert left.read().available == 0


def test_version_1(system):
    folder = "sys/fs/cgroup/memory/jobs"
    left = system(
        {
            "proc/self/cgroup": "5:cpu:/x\n4:memory:/jobs\n0::/\n",
            f"{folder}/memory.limit_in_bytes": f"{2 * GIB}\n",
            f"{folder}/memory.usage_in_bytes": f"{GIB}\n",
            f"{folder}/memory.stat": "total_inactive_file 1024\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
        }
    )
    assert left.read().available == GIB + 1024


def test_pressure_is_the_worst_there_is(system):
    line = "some avg10={} avg60=0.00 avg300=0.00 total=5\nfull avg10=99.00 avg60=0 total=1\n"
    left = system(
        {
            "proc/pressure/memory": line.format("1.50"),
            "proc/self/cgroup": "0::/job\n",
            **group("sys/fs/cgroup/job", "max", 5),
            "sys/fs/cgroup/job/memory.pressure": line.format("12.34"),
        }
    )
    assert left.read().stalled == pytest.approx(0.1234)


@pytest.mark.parametrize(
    ("which", "field", "name"),
    [("RLIMIT_AS", "VmSize", "address space"), ("RLIMIT_DATA", "VmData", "data")],
)
def test_limits_of_the_process(system, monkeypatch, which, field, name):
    wanted = getattr(resource, which)
    limits = {wanted: 3 * GIB}
    monkeypatch.setattr(
        resource, "getrlimit", lambda w: (limits.get(w, resource.RLIM_INFINITY), math.inf)
    )
    reading = system({"proc/self/status": f"Name:\tpython\n{field}:\t 1048576 kB\n"}).read()
    assert reading.available == 2 * GIB
    assert name in reading.source


def test_a_real_limit_is_seen():
    code = (
        "import resource, torch; from daf_hf.memory_left import MemoryLeft\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))\n"
        "left = MemoryLeft(torch.device('cpu')); before = left.read()\n"
        "kept = torch.ones(50_000_000); after = left.read()\n"
        "assert 'RLIMIT_DATA' in before.source, before\n"
        "assert abs(before.available - after.available - 2e8) < 5e6, (before, after)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
