"""NEON, and x86's baseline on a processor with nothing beyond SSE2, give the reference's bits.

Both are emulated, so no time that is taken here means anything.
"""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qemu import MACHINES, QemuBackend
from test_kernels import (
    CODECS,
    DTYPES,
    FLOATS,
    KINDS,
    SHAPES,
    Pages,
    check_conformance,
    compare,
    poisoned,
    same_bits,
    values,
)
from test_noise import serial, state_after

from daf_hf.codecs import BINARY
from daf_hf.kernels import reference
from daf_hf.kernels.format import Codebook, Granularity, Layout, Statistics
from daf_hf.kernels.noise import STATE_BYTES, TorchStream


@pytest.fixture(scope="module", params=MACHINES, ids=lambda machine: machine.name)
def machine(request):
    reason = request.param.why_not()
    if reason:
        pytest.skip(reason)
    return request.param


@pytest.fixture(scope="module")
def process(machine, tmp_path_factory):
    backend = QemuBackend(machine.build(tmp_path_factory.mktemp(machine.name)))
    yield backend
    backend.close()


@pytest.fixture
def emulated(process):
    process.threads = 1
    return process


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors, of which torch is slow to make parallel work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_machine_is_what_it_is_taken_for(emulated, machine):
    assert emulated.isa == machine.isa


def test_conformance(emulated):
    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(
        codec=st.sampled_from(CODECS),
        shape=st.sampled_from(SHAPES),
        bits=st.integers(0, 8),
        dtype=st.sampled_from(FLOATS),
        kind=st.sampled_from(KINDS),
        seed=st.integers(0, 5),
        threads=st.integers(1, 2),
    )
    def check(codec, shape, bits, dtype, kind, seed, threads):
        emulated.threads = threads
        rows, cols = shape
        check_conformance(emulated, values(kind, rows * cols, dtype, seed), codec, cols, bits)

    check()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_every_width(emulated, codec, dtype):
    for bits in range(9):
        x = values("normal", 45 * 95, dtype, bits)
        assert check_conformance(emulated, x, codec, 95, bits)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_every_prefix_of_the_planes(emulated, codec):
    x = values("normal", 33 * 77, torch.float32, 4)
    layout = codec.layout(x.numel(), 77, 8)
    pages = Pages(layout, 8)
    assert emulated.encode(x, layout, 8, pages.table, pages.space)
    for bits in range(9):
        expected, restored = poisoned(x.numel(), x.dtype), poisoned(x.numel(), x.dtype)
        table = pages.table[: layout.pages(bits)]
        reference.decode(expected, layout, bits, table, pages.space)
        emulated.decode(restored, layout, bits, table, pages.space)
        assert same_bits(restored, expected)


@pytest.mark.parametrize("cells", [2, 5, 100, 256, 4096])
@pytest.mark.parametrize("kind", [Statistics.RANGE, Statistics.MOMENTS])
def test_any_codebook(emulated, kind, cells):
    generator = torch.Generator().manual_seed(cells)
    few = torch.randint(0, 256, (7,), generator=generator, dtype=torch.uint8)
    many = torch.randint(0, 256, (cells,), generator=generator, dtype=torch.uint8)
    rising = many.sort().values
    for lut in (few[torch.arange(cells) * 7 // cells], many, rising):
        tables = tuple(torch.randn(1 << bits, generator=generator) for bits in range(9))
        book = Codebook("any", kind, -0.7, cells / 2, cells, lut.contiguous(), tables)
        for bits in (1, 2, 3, 5, 8):
            x = values("normal", 40 * 63, torch.float32, bits)
            layout = Layout(x.numel(), 63, Granularity.TOKEN, book, bits > 4)
            expected = Pages(layout, bits)
            assert reference.encode(x, layout, bits, expected.table, expected.space)
            compare(emulated, x, layout, bits, expected)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("cols", [1000, 1024, 10000])
def test_threads_do_not_change_results(emulated, codec, cols):
    x = values("normal", cols * (200_000 // cols), torch.float32, 3)
    layout = codec.layout(x.numel(), cols, 3)
    expected = Pages(layout, 3)
    assert reference.encode(x, layout, 3, expected.table, expected.space)
    for emulated.threads in (1, 2):
        compare(emulated, x, layout, 3, expected)


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_non_finite_is_refused(emulated, codec, bad):
    layouts = [(bits, codec.layout(1027, 79, bits)) for bits in (0, 2)]
    for dtype in FLOATS:
        for place in (0, 300, 1023, 1026):
            x = values("normal", 1027, dtype, 0)
            x[place] = bad
            for bits, layout in layouts:
                compare(emulated, x, layout, bits, None)


@pytest.mark.parametrize("codec", CODECS[:-1], ids=str)
def test_statistics_that_overflow_are_refused(emulated, codec):
    if codec.private:
        pytest.skip("has no statistics")
    x = torch.full((512,), 3e38)
    x[::3] *= -1
    assert not check_conformance(emulated, x, codec, 16, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 255, 256, 257, 70_000])
def test_two_valued(emulated, count, dtype):
    pairs = [(0.0, 1.0)]
    if dtype in FLOATS:
        pairs += [(0.0, -float("inf")), (-0.0, 0.0), (1 / 0.9, 0.0), (5.0, 5.0)]
    for one, other in pairs:
        x = torch.where(torch.arange(count) % 7 == 3, other, one).to(dtype)
        for emulated.threads in (1, 2):
            assert check_conformance(emulated, x, BINARY, count, 1)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.uint8], ids=str)
@pytest.mark.parametrize("place", [2, 299, 69_999])
def test_third_value_is_refused(emulated, dtype, place):
    x = (torch.arange(70_000) % 2).to(dtype)
    x[place] = 3
    assert not check_conformance(emulated, x, BINARY, 70_000, 1)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_is_a_value_like_any_other(emulated, dtype):
    x = torch.where(torch.arange(600) % 3 == 0, float("nan"), 2.0).to(dtype)
    layout = BINARY.layout(600, 600, 1)
    pages, out = Pages(layout, 1), poisoned(600, dtype)
    assert emulated.encode(x, layout, 1, pages.table, pages.space)
    emulated.decode(out, layout, 1, pages.table, pages.space)
    assert same_bits(out, x)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_noise_is_torchs_in_any_parts(emulated, dtype):
    if not serial():
        pytest.skip("this torch draws in another way")
    generator = random.Random(str(dtype))
    for words in (0, 1, 2, 623, 624, 625, 1247, 1248):
        state = state_after(words)
        for keep in (0.9, 0.5, 0.1, 1 - 1e-9, generator.random()):
            expected = torch.empty(generator.randrange(3000), dtype=dtype)
            TorchStream(state, keep).fill(expected)
            stream, drawn = emulated.noise(state, keep), torch.full_like(expected, 7.0)
            for part in drawn.split(generator.choice([7, 313, 700, 3000])):
                stream.fill(part)
            assert torch.equal(drawn, expected)


def test_another_generators_state_is_refused(emulated):
    for broken in (torch.zeros(STATE_BYTES), torch.full((STATE_BYTES,), 255)):
        with pytest.raises(ValueError, match="Mersenne"):
            emulated.noise(broken.to(torch.uint8), 0.9)
