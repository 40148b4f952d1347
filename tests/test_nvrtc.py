"""NVRTC: what it makes of the kernels for devices, what is kept of it, and which one is chosen."""

from __future__ import annotations

import re

import pytest

from daf_hf.kernels import cuda, nvrtc

CAPABILITIES = (72, 75, 87, 90)  # Xavier, Turing, Orin, Hopper
KERNELS = 10


def compiler_of(capability: int) -> nvrtc.Nvrtc:
    found = nvrtc.compilers()
    if not found:
        pytest.skip("NVRTC is not installed: pip install 'daf-hf[cuda]'")
    for compiler in found:
        if capability in compiler.capabilities:
            return compiler
    pytest.skip(f"no NVRTC here for sm_{capability} ({[c.version for c in found]}); CUDA 12 has it")


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiles_without_spills(capability):
    options = (*cuda.OPTIONS, "--ptxas-options=--verbose")
    compiled = compiler_of(capability).compile(*cuda.sources(), f"sm_{capability}", options)
    assert compiled.image.startswith(b"\x7fELF")
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", compiled.log)
    assert spills == [("0", "0")] * KERNELS
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", compiled.log)]
    assert max(registers) <= 64  # so that four blocks of 256 fit


def test_nothing_is_contracted_or_approximated():
    ptx = compiler_of(87).compile(*cuda.sources(), "compute_87", cuda.OPTIONS).image.decode()
    arithmetic = set(re.findall(r"\b((?:fma|mad|div|sqrt|rcp|add|sub|mul)\S*f32)\b", ptx))
    allowed = {f"{name}.rn.f32" for name in ("add", "sub", "mul", "div", "sqrt", "rcp")}
    assert {"div.rn.f32", "sqrt.rn.f32"} <= arithmetic <= allowed


def test_compile_errors_come_with_the_log():
    compiler = compiler_of(75)
    with pytest.raises(RuntimeError, match="no_such_type"):
        compiler.compile("no_such_type x;", {}, "sm_75")
    with pytest.raises(RuntimeError, match="sm_1"):
        compiler.compile("", {}, "sm_1")


class FakeCompiler:
    """Counts what it compiles."""

    def __init__(self, version=(12, 4), capabilities=(72, 87)) -> None:
        self.path, self.version, self.capabilities = "libnvrtc.so", version, capabilities
        self.compiled = []

    def compile(self, source, headers, arch, options=()):
        self.compiled.append(arch)
        return nvrtc.Compiled(f"{source} for {arch}".encode(), "")


def test_what_was_compiled_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = FakeCompiler()
    for _ in range(2):
        assert nvrtc.compile_cached(compiler, "a", {}, 87) == b"a for sm_87"
    assert len(compiler.compiled) == 1
    nvrtc.compile_cached(compiler, "b", {}, 87)
    nvrtc.compile_cached(compiler, "a", {"h": ""}, 87)
    nvrtc.compile_cached(compiler, "a", {}, 72)
    nvrtc.compile_cached(compiler, "a", {}, 87, ("-G",))
    nvrtc.compile_cached(FakeCompiler(version=(12, 9)), "a", {}, 87)
    assert len(compiler.compiled) == 5
    assert len(list((tmp_path / "daf_hf").iterdir())) == 6


def test_without_a_cache_it_compiles_each_time(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    compiler = FakeCompiler()
    for _ in range(2):
        assert nvrtc.compile_cached(compiler, "a", {}, 87) == b"a for sm_87"
    assert len(compiler.compiled) == 2


def test_choice_of_compiler(monkeypatch):
    old, new = FakeCompiler((12, 9), (50, 72, 87)), FakeCompiler((13, 5), (75, 87, 120))
    monkeypatch.setattr(nvrtc, "compilers", lambda: [new, old])
    assert nvrtc.compiler_for(87, 13) is new
    assert nvrtc.compiler_for(87, 12) is old, "CUDA 12's driver takes no cubin of CUDA 13"
    assert nvrtc.compiler_for(72, 13) is old
    with pytest.raises(RuntimeError, match=r"sm_120 .* CUDA 12 .* nvidia-cuda-nvrtc-cu12"):
        nvrtc.compiler_for(120, 12)
    monkeypatch.setattr(nvrtc, "compilers", lambda: [new])
    with pytest.raises(RuntimeError, match=r"sm_75 to sm_120\): pip install .*-cu12$"):
        nvrtc.compiler_for(72, 13)
    monkeypatch.setattr(nvrtc, "compilers", list)
    with pytest.raises(RuntimeError, match=r"pip install 'daf-hf\[cuda\]'"):
        nvrtc.compiler_for(87, 12)
