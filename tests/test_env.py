"""What ``python -m daf_hf.env`` says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from daf_hf import __version__, env, kernels
from daf_hf.kernels import CANDIDATES, cpu, cpu_status, cuda, get_backend, reference
from daf_hf.self_check import self_check


class Altered:
    """The reference, with an error of its own."""

    name = "altered"

    def __init__(self, encode=reference.encode, decode=reference.decode) -> None:
        self.encode, self.decode = encode, decode


def one_bit_off(x, layout, bits, table, space):
    encoded = reference.encode(x, layout, bits, table, space)
    space.segments[0][-1] ^= 1
    return encoded


def rounded(out, layout, bits, table, space):
    reference.decode(out, layout, bits, table, space)
    out[7] += 1


def failing(*_):
    raise RuntimeError("cuLaunchKernel: CUDA_ERROR_ILLEGAL_ADDRESS (700)")


def test_self_check_of_what_is_right():
    assert self_check(reference) == ""
    assert self_check(get_backend("auto")) == ""


@pytest.mark.parametrize(
    ("altered", "message"),
    [
        (Altered(encode=one_bit_off), "its pages are not the reference's"),
        (Altered(decode=rounded), "its values are not the reference's"),
        (Altered(decode=failing), "fails: cuLaunchKernel: CUDA_ERROR_ILLEGAL_ADDRESS"),
        (Altered(encode=lambda *_: False), "takes finite values for others"),
    ],
    ids=["pages", "values", "error", "refusal"],
)
def test_self_check_of_what_is_wrong(altered, message):
    assert message in self_check(altered)


def test_report():
    found = env.report()
    assert json.loads(json.dumps(found)) == found
    assert found["packages"]["daf_hf"] == __version__
    assert found["packages"]["torch"] == torch.__version__
    assert set(found["backends"]) == set(CANDIDATES)
    for kind, on in found["backends"].items():
        assert list(on["candidates"]) == [*CANDIDATES[kind], "reference"]
        for backend in on["candidates"].values():
            assert backend["available"] is (backend["reason"] == "")
            assert backend["self_check"] == ("passed" if backend["available"] else None)
    assert found["backends"]["cpu"]["active"] == get_backend("auto").name
    assert env.all_passed(found)


@pytest.mark.skipif(not cpu_status().available, reason="the native backend was not built")
def test_the_native_library_is_described():
    native = env.report()["native"]
    assert native["isa"] in native["isas"] and native["isas"][-1] in ("baseline", "neon")
    assert set(native["isas"]) <= set(cpu.ISAS)
    assert any(name in native["compiler"] for name in ("GCC", "Clang"))
    assert Path(native["library"]).is_file()


def test_without_the_native_library(monkeypatch, capsys):
    monkeypatch.setattr(cpu, "_library_path", lambda: None)
    cpu.load.cache_clear()
    try:
        found = env.report()
    finally:
        cpu.load.cache_clear()
    assert found["backends"]["cpu"]["active"] == "reference"
    assert "was not built" in found["backends"]["cpu"]["candidates"]["cpu"]["reason"]
    assert found["native"]["isas"] == [] and found["native"]["compiler"] is None


def test_without_a_driver(monkeypatch):
    def none(path="libcuda.so.1"):
        raise OSError(f"{path}: cannot open shared object file")

    for module in (env, cuda):
        monkeypatch.setattr(module, "Driver", none)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = env.report()
    on = found["backends"]["cuda"]
    assert found["gpu"]["driver"] == "none (libcuda.so.1: cannot open shared object file)"
    assert on["active"] is None
    assert "no NVIDIA driver" in on["candidates"]["cuda"]["reason"]
    assert on["candidates"]["reference"]["reason"] == "torch finds no CUDA device"


def test_a_failed_check_shows_in_the_status(monkeypatch, capsys):
    monkeypatch.setitem(kernels._LOADERS, "cpu", lambda _: Altered(decode=rounded))
    assert env.main(["--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert "values" in found["backends"]["cpu"]["candidates"]["cpu"]["self_check"]
    assert env.main([]) == 1
    assert "not the" in capsys.readouterr().out


def test_the_table_holds_what_the_report_does(monkeypatch, capsys):
    class Compiler:
        path, version, capabilities = "/lib/libnvrtc.so", (12, 4), (50, 90)

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(env, "compilers", lambda: [Compiler])
    assert env.main([]) == 0
    text = capsys.readouterr().out
    assert "CUDA 12.4, sm_50 to sm_90: /lib/libnvrtc.so" in text
    for words in (torch.__version__, "allocator", "active", "passed", "reference"):
        assert words in text


def test_as_a_module():
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-m", "daf_hf.env", "--json"],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["packages"]["daf_hf"] == __version__


def test_the_library_of_another_abi_is_refused(monkeypatch):
    if not cpu_status().available:
        pytest.skip("the native backend was not built")
    monkeypatch.setattr(cpu, "_ABI_VERSION", -1)
    backend, reason = cpu._try_load()
    assert backend is None and "this package needs -1" in reason
