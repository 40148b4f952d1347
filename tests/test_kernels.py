"""Every backend, on every instruction set, gives the reference's results bit for bit."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from array import array
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from daf_hf.codebook_check import CELLS_MAX, check_codebook
from daf_hf.codecs import Codec, parse_codec
from daf_hf.kernels import BACKENDS, Backend, cpu, cpu_status, get_backend, reference
from daf_hf.kernels.format import (
    GROUP,
    LANES,
    PAGE_BYTES,
    Codebook,
    Granularity,
    Layout,
    PageSpace,
    Statistics,
)

POISON = 0xA5
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.uint8, torch.bool)
CODECS = [
    Codec(granularity, book)
    for granularity in Granularity
    for book in ("uniform", "normal", "root", "rectified")
] + [Codec(Granularity.TENSOR, "gelu"), Codec(Granularity.TENSOR, "sign")]
SHAPES = [
    (1, 1),
    (1, 255),
    (2, 128),
    (1, 257),
    (31, 33),
    (70, 384),
    (300, 7),
    (3, 9001),
    (129, 256),
    (0, 5),
]


def isas() -> list[str]:
    """The instruction sets that this processor has; none without the native backend."""
    if not cpu_status().available:
        return []
    return list(cpu.load().isas)


ISAS = isas()


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors, of which torch is slow to make parallel work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=ISAS or [pytest.param("", marks=pytest.mark.skip("not built"))])
def native(request):
    backend = cpu.load()
    active = backend.isa
    backend.use_isa(request.param)
    yield backend
    backend.use_isa(active)


class Pages:
    """A poisoned page space with a scattered page table, and guard pages in between."""

    def __init__(
        self, layout: Layout, bits: int, pages_per_segment: int = 4, device: str = "cpu"
    ) -> None:
        count = layout.pages(bits)
        segments = -(-(2 * count + 1) // pages_per_segment)
        data = [
            torch.full((pages_per_segment * PAGE_BYTES,), POISON, dtype=torch.uint8, device=device)
            for _ in range(segments)
        ]
        pointers = array("q", [segment.data_ptr() for segment in data])
        self.space = PageSpace(pages_per_segment, list(data), pointers)
        numbers = list(range(segments * pages_per_segment))
        random.Random(count).shuffle(numbers)
        self.table = array("i", numbers[:count])
        self._guards = numbers[count:]
        self._data = data

    def bytes(self) -> torch.Tensor:
        return torch.cat(self._data).cpu().view(-1, PAGE_BYTES)

    def used(self) -> torch.Tensor:
        return self.bytes()[list(self.table)]

    def check_guards(self) -> None:
        assert (self.bytes()[self._guards] == POISON).all()


def poisoned(count: int, dtype: torch.dtype) -> torch.Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    fill = 1 if dtype is torch.bool else POISON
    return torch.full((count * size,), fill, dtype=torch.uint8).view(dtype)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def check_conformance(
    backend: Backend, x: torch.Tensor, codec: Codec, cols: int, bits: int, device: str = "cpu"
) -> bool:
    """Compares ``backend`` on ``device`` with the reference; returns whether it was encoded."""
    layout = codec.layout(x.numel(), cols, bits)
    expected = Pages(layout, bits)
    encoded = reference.encode(x, layout, bits, expected.table, expected.space)
    compare(backend, x, layout, bits, expected if encoded else None, device)
    return encoded


def compare(
    backend: Backend,
    x: torch.Tensor,
    layout: Layout,
    bits: int,
    expected: Pages | None,
    device: str = "cpu",
) -> None:
    """``backend`` writes the ``expected`` pages and reads them; None where ``x`` is refused."""
    actual = Pages(layout, bits, device=device)
    encoded = backend.encode(x.to(device), layout, bits, actual.table, actual.space)
    assert encoded is (expected is not None)
    actual.check_guards()
    if expected is None:
        return
    assert torch.equal(actual.used(), expected.used())
    for planes in {bits, bits // 2} if layout.codebook.name != "binary" else {bits}:
        table = actual.table[: layout.pages(planes)]
        oracle = poisoned(x.numel(), x.dtype)
        restored = oracle.to(device, copy=True)
        reference.decode(oracle, layout, planes, table, expected.space)
        backend.decode(restored, layout, planes, table, actual.space)
        assert same_bits(restored.cpu(), oracle)


def values(kind: str, count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator)
    if kind == "tails":
        x = x / torch.rand(count, generator=generator).clamp_min(1e-4)
    elif kind == "denormal":
        x = x * (1e-41 if dtype is torch.float32 else 1e-6)
    elif kind == "zeros":
        x = torch.where(x > 0, 0.0, -0.0)
    elif kind == "constant":
        x = torch.full_like(x, 0.1 * (seed + 1))
    elif kind == "sparse":
        x = torch.where(x > 1.5, x, 0.0)
    elif kind == "huge":
        x = x * (1e38 if dtype is not torch.float16 else 2e4)
    elif kind == "probability":
        x = x.sigmoid() ** 8
    return x.to(dtype)


KINDS = ["normal", "tails", "denormal", "zeros", "constant", "sparse", "huge", "probability"]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    isa=st.sampled_from(ISAS or [""]),
    codec=st.sampled_from(CODECS),
    shape=st.sampled_from(SHAPES),
    bits=st.integers(0, 8),
    dtype=st.sampled_from(FLOATS),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 5),
)
@pytest.mark.skipif(not ISAS, reason="the native backend was not built")
def test_conformance(isa, codec, shape, bits, dtype, kind, seed):
    backend = cpu.load()
    backend.use_isa(isa)
    rows, cols = shape
    check_conformance(backend, values(kind, rows * cols, dtype, seed), codec, cols, bits)
    backend.use_isa(ISAS[0])


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_every_width(native, codec):
    for bits in range(9):
        x = values("normal", 45 * 96, FLOATS[bits % 3], bits)
        assert check_conformance(native, x, codec, 96, bits)


@pytest.mark.skipif(not ISAS, reason="the native backend was not built")
@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("cols", [1000, 1024, 10000])
def test_threads_do_not_change_results(monkeypatch, codec, cols):
    monkeypatch.setattr(cpu, "PARALLEL_BYTES", 0)
    x = values("normal", cols * (200_000 // cols), torch.float32, 3)
    layout, backend = codec.layout(x.numel(), cols, 3), cpu.load()
    expected = Pages(layout, 3)
    assert reference.encode(x, layout, 3, expected.table, expected.space)
    for isa in reversed(ISAS):
        backend.use_isa(isa)
        for count in (1, 2, 5):
            monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
            compare(backend, x, layout, 3, expected)


@pytest.mark.skipif(not ISAS, reason="the native backend was not built")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("codec", ["channel+uniform", "channel+normal"])
def test_columns_are_packed_panel_by_panel(monkeypatch, codec, dtype, threads):
    """Where the caches do not hold all rows of all columns until these are packed."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    rows, cols, bits = 1301, 2048, 2
    x = torch.randn(rows * cols, generator=torch.Generator().manual_seed(0)).to(dtype)
    layout, backend = parse_codec(codec).layout(x.numel(), cols, bits), cpu.load()
    expected = Pages(layout, bits)
    assert reference.encode(x, layout, bits, expected.table, expected.space)
    for isa in reversed(ISAS):
        backend.use_isa(isa)
        compare(backend, x, layout, bits, expected)
    x[-1] = math.inf
    compare(backend, x, layout, bits, None)


@pytest.mark.parametrize("bits", [3, 8])
@pytest.mark.parametrize("codec", ["group+normal", "channel+uniform", "token+root"])
def test_large_tensors_are_written_past_the_caches(native, codec, bits):
    """To the same bits, wherever they begin, and nothing beside them."""
    cols, count = 1031, (16 << 20) // 4 + 300
    x = torch.randn(count // cols * cols, generator=torch.Generator().manual_seed(0)).abs_()
    layout = parse_codec(codec).layout(x.numel(), cols, bits)
    pages = Pages(layout, bits, pages_per_segment=1 << 13)
    assert native.encode(x, layout, bits, pages.table, pages.space)
    around = torch.full((x.numel() + 64,), 7.0)
    results = []
    for start in (16, 17):
        around.fill_(7.0)
        native.decode(around[start : start + x.numel()], layout, bits, pages.table, pages.space)
        assert bool((around[:start] == 7.0).all())
        assert bool((around[start + x.numel() :] == 7.0).all())
        results.append(around[start : start + x.numel()].clone())
    assert same_bits(*results)
    assert float((results[0] - x).abs().max()) < float(x.max())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_non_finite_is_refused(native, codec, bad):
    layouts = [(bits, codec.layout(1027, 79, bits)) for bits in (0, 2)]
    for dtype in FLOATS:
        for place in (0, 300, 1023, 1026):
            x = values("normal", 1027, dtype, 0)
            x[place] = bad
            for bits, layout in layouts:
                compare(native, x, layout, bits, None)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_statistics_that_overflow_are_refused(native, codec):
    if codec.private:
        pytest.skip("has no statistics")
    x = torch.full((512,), 3e38)
    x[::3] *= -1
    assert not check_conformance(native, x, codec, 16, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 255, 256, 257, 9000, 70_000])
def test_two_valued(native, count, dtype):
    layout_codec = Codec(Granularity.TENSOR, "binary")
    choice = torch.arange(count) % 7 == 3
    pairs = [(0.0, 1.0)]
    if dtype in FLOATS:
        pairs += [(0.0, -float("inf")), (-0.0, 0.0), (1 / 0.9, 0.0), (5.0, 5.0)]
    for one, other in pairs:
        x = torch.where(choice, other, one).to(dtype)
        assert check_conformance(native, x, layout_codec, count, 1)
        layout = layout_codec.layout(count, count, 1)
        pages, out = Pages(layout, 1), poisoned(count, dtype)
        native.encode(x, layout, 1, pages.table, pages.space)
        native.decode(out, layout, 1, pages.table, pages.space)
        assert same_bits(out, x)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.uint8])
@pytest.mark.parametrize("place", [2, 299, 69_999])
def test_third_value_is_refused(native, dtype, place):
    x = (torch.arange(70_000) % 2).to(dtype)
    x[place] = 3
    assert not check_conformance(native, x, Codec(Granularity.TENSOR, "binary"), 70_000, 1)


def test_nan_is_a_value_like_any_other(native):
    x = torch.where(torch.arange(600) % 3 == 0, float("nan"), 2.0)
    layout = Codec(Granularity.TENSOR, "binary").layout(600, 600, 1)
    pages, out = Pages(layout, 1), poisoned(600, torch.float32)
    assert native.encode(x, layout, 1, pages.table, pages.space)
    native.decode(out, layout, 1, pages.table, pages.space)
    assert same_bits(out, x)


@pytest.mark.parametrize("name", ["reference", *ISAS])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_dropping_a_plane_is_encoding_with_one_bit_less(name, codec):
    backend = get_backend(name) if name == "reference" else cpu.load()
    if name != "reference":
        cpu.load().use_isa(name)
    x = values("normal", 900, torch.float32, 1)
    for bits in range(1, 9):
        layout = codec.layout(900, 90, bits)
        wide, narrow = Pages(layout, bits), Pages(layout, bits)
        assert backend.encode(x, layout, bits, wide.table, wide.space)
        table = narrow.table[: layout.pages(bits - 1)]
        assert bits == 1 or backend.encode(x, layout, bits - 1, table, narrow.space)
        kept = layout.pages(bits - 1) if bits > 1 else 0
        assert torch.equal(wide.used()[:kept], narrow.used()[:kept])


def decode_by_hand(layout: Layout, bits: int, pages: Pages) -> list[float]:
    """Values of a group-wise encoding, read bit by bit as format.py words it."""
    data = [bytes(page.tolist()) for page in pages.used()]
    planes = [
        b"".join(data[layout.statistics_pages + k * layout.plane_pages :][: layout.plane_pages])
        for k in range(bits)
    ]
    statistics = bytearray(b"".join(data[: layout.statistics_pages]))
    dtype = torch.float32 if layout.wide else torch.bfloat16
    pairs = torch.frombuffer(statistics, dtype=dtype).float().view(-1, 2).tolist()
    table = layout.codebook.tables[bits].tolist()
    result = []
    for index in range(layout.numel):
        group, element = divmod(index, GROUP)
        code = 0
        for plane in planes:
            byte = plane[group * LANES + element % LANES]
            code = 2 * code + (byte >> (element // LANES) & 1)
        a, s = pairs[group]
        result.append(a + s * table[code])
    return result


@pytest.mark.parametrize("bits", range(9))
@pytest.mark.parametrize("book", ["uniform", "normal", "root"])
def test_decoders_read_the_format_as_it_is_worded(book, bits):
    layout = Codec(Granularity.GROUP, book).layout(700, 700, bits)
    pages = Pages(layout, bits)
    for page in pages.table:  # arbitrary bytes are arbitrary codes
        segment = pages.space.segments[page // pages.space.pages_per_segment]
        start = page % pages.space.pages_per_segment * PAGE_BYTES
        generator = torch.Generator().manual_seed(page)
        segment[start : start + PAGE_BYTES] = torch.randint(
            0, 256, (PAGE_BYTES,), dtype=torch.uint8, generator=generator
        )
    dtype = torch.float32 if layout.wide else torch.bfloat16
    statistics = torch.tensor([[0.5, 2.0], [-3.0, 0.25], [7.0, 0.0]]).to(dtype).view(torch.uint8)
    page = pages.table[0]
    segment = pages.space.segments[page // pages.space.pages_per_segment]
    start = page % pages.space.pages_per_segment * PAGE_BYTES
    segment[start : start + statistics.numel()] = statistics.flatten()
    expected = torch.tensor(decode_by_hand(layout, bits, pages))
    for backend in [reference, *([cpu.load()] if ISAS else [])]:
        out = poisoned(700, torch.float32)
        backend.decode(out, layout, bits, pages.table, pages.space)
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


def test_backends_read_what_others_wrote(native):
    x = values("normal", 5000, torch.float32, 0)
    layout = Codec(Granularity.TOKEN, "normal").layout(5000, 100, 3)
    for writer, reader in ((reference, native), (native, reference)):
        pages, out, again = Pages(layout, 3), poisoned(5000, x.dtype), poisoned(5000, x.dtype)
        assert writer.encode(x, layout, 3, pages.table, pages.space)
        reader.decode(out, layout, 3, pages.table, pages.space)
        writer.decode(again, layout, 3, pages.table, pages.space)
        assert same_bits(out, again)


def test_misfits_are_named(native):
    layout = Codec(Granularity.GROUP, "uniform").layout(512, 512, 2)
    pages = Pages(layout, 2)
    good = torch.zeros(512)
    cases = [
        (good.double(), 2, pages.table, "dtype torch.float64"),
        (good.to(torch.uint8), 2, pages.table, "'uniform' cannot encode torch.uint8"),
        (good[:500], 2, pages.table, "512 elements"),
        (torch.zeros(1024)[::2], 2, pages.table, "contiguous"),
        (good, 9, pages.table, "0 <= bits <= 8"),
        (good, 2, pages.table[:-1], "table of 2"),
    ]
    for x, bits, table, message in cases:
        with pytest.raises(ValueError, match=message):
            native.encode(x, layout, bits, table, pages.space)


def odd_codebook(seed: int, cells: int = 9999) -> Codebook:
    """What a user's own may be: a grid of any size, codes left out at both ends and in between."""
    draw = random.Random(seed)
    lut = sorted(draw.choices(draw.sample(range(256), draw.choice([3, 60, 256])), k=cells))
    levels = torch.randn(256, generator=torch.Generator().manual_seed(seed)).sort().values
    book = Codebook(
        "odd",
        draw.choice([Statistics.NONE, Statistics.RANGE, Statistics.MOMENTS]),
        draw.choice([0.0, 0.3, -3.1415]),
        draw.choice([1 / 3, cells / 6.2832, 2.0 * cells]),
        cells,
        torch.tensor(lut, dtype=torch.uint8),
        tuple(levels.view(1 << bits, -1).mean(1) for bits in range(9)),
    )
    check_codebook(book)
    return book


ODD = [odd_codebook(seed, cells) for seed, cells in enumerate((2, 17, 255, 257, 9999, CELLS_MAX))]


@pytest.mark.parametrize("granularity", Granularity, ids=lambda granularity: granularity.name)
@pytest.mark.parametrize("book", ODD, ids=lambda book: f"{book.cells} cells")
def test_a_codebook_of_the_users_own_is_data(native, book, granularity):
    codec = Codec(granularity, book)
    for bits in range(9):
        x = values(KINDS[bits % len(KINDS)], 330, FLOATS[bits % 3], bits)
        check_conformance(native, x, codec, 33, bits)


def run_python(
    code: str, timeout: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, **environment},
        capture_output=True,
        encoding="utf-8",
        timeout=timeout,
    )


@pytest.mark.parametrize("isa", ISAS)
def test_environment_forces_an_instruction_set(isa):
    code = "from daf_hf.kernels import cpu_status; print(cpu_status().isa)"
    assert run_python(code, DAF_HF_ISA=isa).stdout.strip() == isa


BAD_ISA = """
from daf_hf.kernels import cpu_status, get_backend

print(cpu_status().reason)
for name in ("auto", "cpu"):
    try:
        get_backend(name)
    except ValueError as error:
        print(error)
"""


@pytest.mark.skipif(not ISAS, reason="the native backend was not built")
@pytest.mark.parametrize("isa", ["mmx", "AVX2", "baseline" if "neon" in ISAS else "neon"])
def test_an_instruction_set_that_cannot_serve_is_refused(isa):
    result = run_python(BAD_ISA, DAF_HF_ISA=isa)
    assert result.stdout.splitlines() == [f"DAF_HF_ISA={isa!r}: use one of {ISAS}"] * 3
    assert result.stderr == ""


MISSING = """
import logging
logging.basicConfig(format="%(name)s %(levelname)s %(message)s")
from daf_hf.kernels import cpu, get_backend
cpu._library_path = lambda: None
print(get_backend("auto").name, get_backend("auto").name)
try:
    get_backend("cpu")
except RuntimeError as error:
    print(error)
"""


def test_without_the_library_auto_falls_back_and_says_so_once():
    result = run_python(MISSING)
    automatic, explicit = result.stdout.splitlines()
    assert automatic == "reference reference"
    assert "not built" in explicit and "use the backend 'reference'" in explicit
    assert result.stderr.count("daf_hf.kernels WARNING") == 1


def test_choice_of_backend():
    assert get_backend("reference") is reference
    assert get_backend().name == ("cpu" if ISAS else "reference")
    with pytest.raises(ValueError, match="unknown backend 'gpu'"):
        get_backend("gpu")
    with pytest.raises(RuntimeError, match="cannot serve meta"):
        get_backend("cpu", "meta")
    assert set(BACKENDS) == {"auto", "reference", "cpu", "triton", "cuda"}


FORKED = """
import os, torch
from daf_hf.codecs import Codec, parse_codec
from daf_hf.kernels import cpu
from daf_hf.kernels.format import Granularity
from tests.test_kernels import Pages

torch.set_num_threads(2)
x = torch.randn(1 << 20)
layout = Codec(Granularity.GROUP, "normal").layout(x.numel(), 1024, 2)
pages = Pages(layout, 2)

def encode():
    return cpu.load().encode(x, layout, 2, pages.table, pages.space)

assert encode()
child = os.fork()
if child == 0:
    os._exit(0 if encode() else 1)
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not ISAS or not hasattr(os, "fork"), reason="needs the native backend and fork")
def test_works_in_a_forked_child():
    result = run_python(FORKED)
    assert result.stdout.strip() == "0", result.stderr
