"""Which backend serves a GPU, why Triton's cannot, and its launch shapes; and its own tests."""

from __future__ import annotations

import json
import logging
import os
from importlib.util import find_spec

import pytest
import torch
from test_kernels import run_python

from daf_hf import kernels
from daf_hf.kernels import get_backend, reference, triton_loader
from daf_hf.kernels.triton_launch import (
    DEFAULT_SHAPES,
    LAUNCH_VARIABLE,
    LaunchTable,
    Shape,
    launch_table,
    write_table,
)

INSTALLED = find_spec("triton") is not None
GPU = torch.cuda.is_available()
needs_triton = pytest.mark.skipif(not INSTALLED, reason="triton is not installed")


@pytest.fixture(autouse=True)
def nothing_is_remembered():
    for remembered in (triton_loader.load, kernels._best):
        remembered.cache_clear()
    yield
    for remembered in (triton_loader.load, kernels._best):
        remembered.cache_clear()


@pytest.fixture
def gpu_of(monkeypatch):
    """Pretends that there is an NVIDIA GPU of a compute capability, and triton."""

    def pretend(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(triton_loader, "find_spec", lambda name: name)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    return pretend


def test_reasons_are_named(monkeypatch, gpu_of):
    monkeypatch.setattr(triton_loader, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"cannot serve cuda: .*install 'daf-hf\[triton\]'"):
        get_backend("triton", "cuda")
    gpu_of((7, 0))
    with pytest.raises(RuntimeError, match=r"capability is \(7, 0\), and \(7, 5\) is the least"):
        get_backend("triton", "cuda")
    with pytest.raises(RuntimeError, match=r"cannot serve cpu: .*TRITON_INTERPRET=1 must be set"):
        get_backend("triton", "cpu")
    with pytest.raises(RuntimeError, match="cannot serve meta: it serves NVIDIA GPUs only"):
        get_backend("triton", "meta")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="no GPU that torch can use"):
        get_backend("triton", "cuda:1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="with which it serves the CPU"):
        get_backend("triton", "cuda")


@pytest.mark.skipif(GPU, reason="there is a GPU")
def test_kernels_that_do_not_run_are_a_reason(gpu_of):
    gpu_of((8, 0))
    with pytest.raises(RuntimeError, match="its kernels do not run here"):
        get_backend("triton", "cuda")


@pytest.mark.skipif(GPU, reason="there is a GPU")
def test_automatic_choice_falls_back_and_says_so_once(caplog):
    with caplog.at_level(logging.WARNING, "daf_hf.kernels"):
        assert get_backend("auto", "cuda") is reference
        assert get_backend("auto", "cuda") is reference
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "'triton' cannot serve cuda" in caplog.text and "using 'reference'" in caplog.text


def test_triton_is_not_imported_without_need():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from daf_hf.kernels import get_backend\n"
        "get_backend('auto', 'cpu').name, get_backend('reference', 'cuda').name\n"
        "print([name for name in sys.modules if 'triton_backend' in name])"
    )
    assert run_python(code).stdout.strip() == "[]"


def test_tables_come_from_a_file(tmp_path, monkeypatch):
    path = tmp_path / "launch.json"
    tuned = LaunchTable({"encode_pair": Shape(8, 2)}, 64)
    write_table(path, 80, tuned)
    write_table(path, 90, LaunchTable())
    monkeypatch.setenv(LAUNCH_VARIABLE, str(path))
    assert launch_table(80) == tuned
    assert launch_table(80)["encode_pair"] == Shape(8, 2)
    assert launch_table(80)["decode_pair"] == DEFAULT_SHAPES["decode_pair"]
    assert launch_table(90) == launch_table(75) == launch_table(None) == LaunchTable()


@pytest.mark.parametrize(
    ("shapes", "why"),
    [
        ({"encode": [8, 2]}, "known kernels"),
        ({"encode_pair": [12, 2]}, "powers of two"),
        ({"encode_pair": [8]}, "not enough values"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path, monkeypatch, shapes, why):
    path = tmp_path / "launch.json"
    path.write_text(json.dumps({"80": {"shapes": shapes, "atomic_above": 1}}))
    monkeypatch.setenv(LAUNCH_VARIABLE, str(path))
    with pytest.raises(ValueError, match=f"{LAUNCH_VARIABLE}=.*{why}"):
        launch_table(80)


def test_a_missing_file_is_refused(monkeypatch):
    monkeypatch.setenv(LAUNCH_VARIABLE, "nowhere.json")
    with pytest.raises(ValueError, match=r"nowhere\.json.*FileNotFoundError"):
        launch_table(None)


INTERPRETED = """
import pytest, sys
sys.exit(pytest.main(["tests/test_triton.py", "-q", "-p", "no:cacheprovider"]))
"""


@needs_triton
@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    GPU or os.environ.get("TRITON_INTERPRET") == "1", reason="test_triton.py runs by itself"
)
def test_the_kernels_in_the_interpreter():
    result = run_python(INTERPRETED, timeout=1100, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert result.returncode == 0 and " passed" in result.stdout, result.stdout + result.stderr


TUNED = """
import runpy, sys
sys.argv = ["triton_tune.py", "--device", "cpu", "--mb", "0.001", "--repeats", "1",
            "--kernels", "gather_pairs", "--write", sys.argv[1]]
runpy.run_path("benchmarks/triton_tune.py", run_name="__main__")
"""


@needs_triton
def test_tuning_writes_a_table(tmp_path, monkeypatch):
    path = tmp_path / "launch.json"
    code = TUNED.replace("sys.argv[1]", repr(str(path)))
    result = run_python(code, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stderr
    monkeypatch.setenv(LAUNCH_VARIABLE, str(path))
    assert set(launch_table(0).shapes) == {"gather_pairs"}


@needs_triton
def test_kernels_compile_for_a_gpu_that_is_not_there(tmp_path):
    """All that the backend would launch for one codec, without spills or fused arithmetic."""
    code = (
        "import sys; sys.path.insert(0, 'benchmarks')\n"
        "import triton_compile as script\n"
        "script.QUICK_CODECS[:] = ['group+normal']\n"
        "results = script.compile_all([80], True, 1)\n"
        "assert {r.kernel for r in results} == {'encode_units', 'decode_elements'}, results\n"
        "assert not any(r.stack_bytes or r.forbidden for r in results), results\n"
        "assert all(r.registers > 0 for r in results), results"
    )
    result = run_python(code, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert result.returncode == 0, result.stderr
