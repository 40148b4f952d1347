"""The CUDA backend: its kernels, run on the CPU by ``cuda_emulation.cpp``, and how it loads."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from array import array
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels import (
    CODECS,
    DTYPES,
    FLOATS,
    KINDS,
    ODD,
    Pages,
    check_conformance,
    compare,
    poisoned,
    same_bits,
    values,
)
from test_nvrtc import FakeCompiler
from tiny import batch, build, loss_of

from daf_hf import compress_activations, kernels, placement
from daf_hf.codecs import BINARY, Codec
from daf_hf.kernels import cpu, cpu_status, cuda, get_backend, nvrtc, reference
from daf_hf.kernels.cuda_driver import CudaError, Device, Driver, Module
from daf_hf.kernels.format import Granularity

TESTS = Path(__file__).parent
SHAPES = [(0, 5), (1, 1), (1, 255), (2, 128), (1, 257), (31, 33), (70, 38), (300, 7), (2, 4099)]


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors, of which torch is slow to make parallel work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def library(tmp_path_factory) -> str:
    """The kernels and a driver, on the CPU."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not compiler:
        pytest.skip("there is no C++ compiler")
    path = tmp_path_factory.mktemp("cuda") / "emulation.so"
    folder = TESTS.parent / "kernels" / "cuda"
    subprocess.run(
        [compiler, "-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", f"-I{folder}",
         str(TESTS / "cuda_emulation.cpp"), "-o", str(path)],
        check=True,
    )  # fmt: skip
    return str(path)


@pytest.fixture(scope="session")
def emulated(library) -> cuda.CudaBackend:
    driver = Driver(library)
    module = Module(driver, Device(driver, 0), b"")
    return cuda.CudaBackend(module, torch.device("cpu"), lambda: 0)


@pytest.fixture(params=["emulated", "device"])
def any_cuda(request) -> cuda.CudaBackend:
    if request.param == "emulated":
        return request.getfixturevalue("emulated")
    try:
        return cuda.load()
    except RuntimeError as error:
        pytest.skip(str(error))


# The results are the reference's ------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_every_width_and_dtype(emulated, codec):
    for bits in range(9):
        for dtype in FLOATS:
            x = values("normal", 27 * 96, dtype, bits)
            assert check_conformance(emulated, x, codec, 96, bits)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    codec=st.sampled_from(CODECS),
    shape=st.sampled_from(SHAPES),
    bits=st.integers(0, 8),
    dtype=st.sampled_from(FLOATS),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 5),
)
def test_conformance(emulated, codec, shape, bits, dtype, kind, seed):
    rows, cols = shape
    check_conformance(emulated, values(kind, rows * cols, dtype, seed), codec, cols, bits)


@pytest.mark.parametrize("granularity", Granularity, ids=lambda granularity: granularity.name)
@pytest.mark.parametrize("book", ODD, ids=lambda book: f"{book.cells} cells")
def test_a_codebook_of_the_users_own_is_data(emulated, book, granularity):
    for bits in (1, 4, 8):
        x = values(KINDS[bits % len(KINDS)], 330, FLOATS[bits % 3], bits)
        check_conformance(emulated, x, Codec(granularity, book), 33, bits)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("bits", [1, 6])
def test_several_pages(emulated, codec, bits):
    x = values("tails", 301 * 83, torch.bfloat16, 2)
    assert check_conformance(emulated, x, codec, 83, bits)


@pytest.mark.parametrize("granularity", list(Granularity)[1:])
@pytest.mark.parametrize("shape", [(5000, 27), (3, 45_001)])
def test_statistics_of_many_rows(emulated, granularity, shape):
    """More rows than 64 blocks of 64; at 0 bits nothing but these statistics is stored."""
    rows, cols = shape
    x = values("normal", rows * cols, torch.float32, 1)
    assert check_conformance(emulated, x, Codec(granularity, "normal"), cols, 0)


def test_a_variance_that_rounds_below_zero_is_zero(emulated):
    x = torch.full((40_000,), 0.713)
    x[0] = 0.0
    codec = Codec(Granularity.TOKEN, "normal")
    assert check_conformance(emulated, x, codec, 40_000, 1)


@pytest.mark.parametrize("book", ["uniform", "root"])
@pytest.mark.parametrize("granularity", [Granularity.CHANNEL, Granularity.TENSOR])
def test_extremes_are_found_anywhere(emulated, granularity, book):
    codec, rows, cols = Codec(granularity, book), 700, 9
    for sign in (1, -1):
        x = sign * values("probability", rows * cols, FLOATS[0], 1)
        for place in (0, 8, 255, 3000, rows * cols - 1):
            x[place] = sign * 7.0
            assert check_conformance(emulated, x, codec, cols, 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_non_finite_is_refused(emulated, codec, bad):
    for bits in (0, 2):
        layout = codec.layout(1027, 79, bits)
        for dtype in FLOATS:
            for place in (0, 300, 1026):
                x = values("normal", 1027, dtype, 0)
                x[place] = bad
                compare(emulated, x, layout, bits, None)


@pytest.mark.parametrize("codec", [c for c in CODECS if c.codebook != "gelu"], ids=str)
def test_statistics_that_overflow_are_refused(emulated, codec):
    if codec.private:
        pytest.skip("has no statistics")
    x = torch.full((512,), 3e38)
    x[::3] *= -1
    assert not check_conformance(emulated, x, codec, 16, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 9000, 20_000])
def test_two_valued(emulated, count, dtype):
    choice = torch.arange(count) % 7 == 3
    pairs = [(0.0, 1.0)]
    if dtype in FLOATS:
        pairs += [(0.0, -float("inf")), (-0.0, 0.0), (1 / 0.9, 0.0), (5.0, 5.0)]
    for one, other in pairs:
        x = torch.where(choice, other, one).to(dtype)
        assert check_conformance(emulated, x, BINARY, count, 1)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.uint8])
@pytest.mark.parametrize("place", [0, 2, 299, 8_999])
def test_third_value_is_refused(emulated, dtype, place):
    x = (torch.arange(9_000) % 2).to(dtype)
    x[place] = 3
    assert not check_conformance(emulated, x, BINARY, 9_000, 1)


def test_nan_is_a_value_like_any_other(emulated):
    x = torch.where(torch.arange(600) % 3 == 0, float("nan"), 2.0)
    assert check_conformance(emulated, x, BINARY, 600, 1)


def test_every_half_is_converted_and_rounded(emulated):
    """All bfloat16 and float16 numbers, as what is stored and as what is restored."""
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
        x = x[torch.isfinite(x)]
        for bits in (2, 8):
            layout = Codec(Granularity.GROUP, "uniform").layout(x.numel(), x.numel(), bits)
            expected = Pages(layout, bits)
            encoded = reference.encode(x, layout, bits, expected.table, expected.space)
            compare(emulated, x, layout, bits, expected if encoded else None)


@pytest.mark.parametrize("codec", [*CODECS, BINARY], ids=str)
def test_nothing_is_written_outside_the_output(emulated, codec):
    bits = 1 if codec == BINARY else 3
    for dtype in FLOATS:
        x = (torch.arange(1000) % 2).to(dtype)
        layout = codec.layout(1000, 40, bits)
        pages, around = Pages(layout, bits), poisoned(1600, dtype)
        assert emulated.encode(x, layout, bits, pages.table, pages.space)
        emulated.decode(around[300:1300], layout, bits, pages.table, pages.space)
        for rest in (around[:300], around[1300:]):
            assert same_bits(rest, poisoned(300, dtype))


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_dropping_a_plane_is_encoding_with_one_bit_less(emulated, codec):
    x = values("normal", 900, torch.float32, 1)
    for bits in range(2, 9):
        layout = codec.layout(900, 90, bits)
        wide, narrow = Pages(layout, bits), Pages(layout, bits)
        table = narrow.table[: layout.pages(bits - 1)]
        assert emulated.encode(x, layout, bits, wide.table, wide.space)
        assert emulated.encode(x, layout, bits - 1, table, narrow.space)
        kept = layout.pages(bits - 1)
        assert torch.equal(wide.used()[:kept], narrow.used()[:kept])


@pytest.mark.parametrize("codec", [*CODECS, BINARY], ids=str)
def test_backends_read_what_others_wrote(emulated, codec):
    bits = 1 if codec == BINARY else 3
    x = values("zeros" if codec == BINARY else "normal", 5000, torch.float32, 0)
    layout = codec.layout(5000, 100, bits)
    others = [reference, *([cpu.load()] if cpu_status().available else [])]
    for writer, reader in [(o, emulated) for o in others] + [(emulated, o) for o in others]:
        pages, out, again = Pages(layout, bits), poisoned(5000, x.dtype), poisoned(5000, x.dtype)
        assert writer.encode(x, layout, bits, pages.table, pages.space)
        reader.decode(out, layout, bits, pages.table, pages.space)
        writer.decode(again, layout, bits, pages.table, pages.space)
        assert same_bits(out, again)


def move(pages: Pages, device: torch.device) -> Pages:
    pages._data = [segment.to(device) for segment in pages._data]
    pages.space.segments[:] = pages._data
    pages.space.pointers[:] = array("q", [segment.data_ptr() for segment in pages._data])
    return pages


@pytest.mark.parametrize("codec", [*CODECS, BINARY], ids=str)
def test_a_device_writes_and_reads_what_the_cpu_does(any_cuda, codec):
    widths = (1,) if codec == BINARY else (0, 1, 4, 8)
    kind = "zeros" if codec == BINARY else "tails"
    for bits in widths:
        for dtype in FLOATS:
            x, layout = values(kind, 5000, dtype, bits), codec.layout(5000, 100, bits)
            expected, actual = Pages(layout, bits), move(Pages(layout, bits), any_cuda.device)
            oracle, out = poisoned(5000, dtype), poisoned(5000, dtype).to(any_cuda.device)
            assert reference.encode(x, layout, bits, expected.table, expected.space)
            on_device = x.to(any_cuda.device)
            assert any_cuda.encode(on_device, layout, bits, actual.table, actual.space)
            assert torch.equal(actual.used().cpu(), expected.used())
            reference.decode(oracle, layout, bits, expected.table, expected.space)
            any_cuda.decode(out, layout, bits, actual.table, actual.space)
            assert same_bits(out.cpu(), oracle)


def test_training_is_the_same(emulated, monkeypatch):
    """Calibration, plan, demotion and gradients, on what the kernels really return."""

    def train(backend):
        monkeypatch.setattr(placement, "get_backend", lambda *_: backend)
        model = build("bert")
        torch.manual_seed(3)
        with compress_activations(model, budget_mb=0.1) as daf:
            loss_of(model(**batch("bert"))).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return daf.report, gradients

    (one, expected), (other, actual) = train(reference), train(emulated)
    assert 0 < one.mean_bits == other.mean_bits < 8
    assert one.held_bytes_peak == other.held_bytes_peak
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


# What does not fit, and what fails ----------------------------------------------------------------


def test_misfits_are_named(emulated):
    layout = Codec(Granularity.GROUP, "uniform").layout(512, 512, 2)
    pages, good = Pages(layout, 2), torch.zeros(512)
    cases = [
        (good.double(), 2, pages.table, "dtype torch.float64"),
        (good.to(torch.uint8), 2, pages.table, "'uniform' cannot encode torch.uint8"),
        (good[:500], 2, pages.table, "512 elements on cpu"),
        (torch.zeros(1024)[::2], 2, pages.table, "contiguous"),
        (torch.zeros(512, device="meta"), 2, pages.table, "got .* device meta"),
        (good, 9, pages.table, "0 <= bits <= 8"),
        (good, 2, pages.table[:-1], "table of 2"),
    ]
    for x, bits, table, message in cases:
        with pytest.raises(ValueError, match=message):
            emulated.encode(x, layout, bits, table, pages.space)
    with pytest.raises(ValueError, match=r"dtype torch\.float64"):
        emulated.decode(good.double(), layout, 2, pages.table, pages.space)
    with pytest.raises(ValueError, match="at 1 bit, not 2"):
        emulated.encode(good, BINARY.layout(512, 512, 2), 2, pages.table, pages.space)


def test_a_bad_launch_raises_with_the_errors_name(monkeypatch, emulated, library):
    layout = Codec(Granularity.GROUP, "uniform").layout(512, 512, 2)
    pages = Pages(layout, 2)
    monkeypatch.setattr(cuda, "THREADS", 2048)
    with pytest.raises(CudaError, match="cuLaunchKernel: CUDA_ERROR_INVALID_VALUE"):
        emulated.encode(torch.zeros(512), layout, 2, pages.table, pages.space)
    with pytest.raises(CudaError, match="cuModuleGetFunction: CUDA_ERROR_NOT_FOUND"):
        emulated._module.launch("no_such_kernel", (1, 1), 32, 0, cuda.Job(), 0)
    with pytest.raises(CudaError, match="cuDeviceGet: CUDA_ERROR_INVALID_DEVICE"):
        Device(Driver(library), 7)


def test_the_emulation_sees_threads_that_wait_in_vain(monkeypatch, emulated):
    """Half a warp cannot shuffle; a device would hang, or give nonsense."""
    layout = Codec(Granularity.GROUP, "uniform").layout(512, 512, 2)
    pages = Pages(layout, 2)
    monkeypatch.setattr(cuda, "THREADS", 48)
    with pytest.raises(CudaError, match="CUDA_ERROR_LAUNCH_FAILED"):
        emulated.encode(torch.zeros(512), layout, 2, pages.table, pages.space)


# Choice of the backend ----------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch):
    """Nothing is loaded yet, nor what the test loads afterwards."""
    monkeypatch.setattr(cuda, "_loaded", {})
    kernels._best.cache_clear()
    yield
    kernels._best.cache_clear()


@pytest.fixture
def with_torch(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def no_driver(path="libcuda.so.1"):
    raise OSError(f"{path}: cannot open shared object file")


def no_triton(device):
    raise RuntimeError("no Triton here")


def test_why_it_cannot_serve(monkeypatch, fresh, library):
    with pytest.raises(RuntimeError, match="cannot serve cpu: use 'auto'"):
        get_backend("cuda", "cpu")
    monkeypatch.setattr(cuda, "Driver", no_driver)
    with pytest.raises(RuntimeError, match=r"no NVIDIA driver \(libcuda.so.1"):
        get_backend("cuda", "cuda")
    monkeypatch.setattr(cuda, "Driver", lambda: Driver(library))
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(RuntimeError, match=r"torch .* \(without CUDA\) finds no CUDA device"):
        get_backend("cuda", "cuda")


def test_without_nvrtc_it_says_so(monkeypatch, fresh, with_torch, library):
    monkeypatch.setattr(cuda, "Driver", lambda: Driver(library))
    monkeypatch.setattr(nvrtc, "compilers", list)
    with pytest.raises(RuntimeError, match=r"'cuda' is not available: NVRTC .* was not found"):
        get_backend("cuda", "cuda:0")


def test_loads_once_for_a_device(monkeypatch, tmp_path, fresh, with_torch, library):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = FakeCompiler()
    monkeypatch.setattr(cuda, "Driver", lambda: Driver(library))
    monkeypatch.setattr(nvrtc, "compilers", lambda: [compiler])
    monkeypatch.setitem(kernels._LOADERS, "triton", no_triton)  # it may be installed
    backend = get_backend("auto", "cuda")
    assert isinstance(backend, cuda.CudaBackend) and backend.device == torch.device("cuda", 0)
    assert get_backend("cuda", "cuda:0") is backend
    assert compiler.compiled == ["sm_87"]
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_DEVICE"):
        get_backend("cuda", "cuda:1")


def test_auto_falls_back_and_says_so_once(monkeypatch, caplog, fresh):
    monkeypatch.setattr(cuda, "Driver", no_driver)
    with caplog.at_level(logging.WARNING, "daf_hf.kernels"):
        assert get_backend("auto", "cuda") is get_backend("auto", "cuda") is reference
    assert len(caplog.records) == 1
    assert re.search("no NVIDIA driver .*; using 'reference'", caplog.text)
