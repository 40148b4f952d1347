"""The benchmarks measure what they say: rows, peers, and the check of a GPU, on a CPU."""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from daf_hf.kernels import cpu_status, get_backend

FOLDER = Path(__file__).parents[1] / "benchmarks"
needs_native = pytest.mark.skipif(not cpu_status().available, reason="not built")


@pytest.fixture(scope="module")
def benchmark():
    """Imports a module of the benchmarks by its name."""
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module
    sys.path.remove(str(FOLDER))


def run(script, *arguments, timeout=240):
    command = [sys.executable, "-W", "error", str(FOLDER / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=timeout)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """What benchmarks/kernels.py writes for a tiny tensor."""
    path = tmp_path_factory.mktemp("benchmark") / "rows.json"
    small = "--rows 32 --cols 96 --rounds 2 --repeats 1 --slow-repeats 1 --threads 1 2 --bits 1 3 8"
    result = run("kernels.py", *small.split(), "--peers", "torch-eager", "--json", path)
    assert result.returncode == 0, result.stderr
    return json.loads(path.read_text(encoding="utf-8"))


@needs_native
def test_there_is_one_row_for_each_choice(rows):
    fields = ("backend", "direction", "granularity", "codebook", "bits", "dtype", "threads")
    keys = [tuple(row[name] for name in fields) for row in rows]
    assert len(set(keys)) == len(keys)
    codecs = [*product(("group", "token", "channel"), ("uniform", "normal", "root"), (1, 3, 8))]
    codecs += [("tensor", "gelu", bits) for bits in (1, 3, 8)] + [("tensor", "binary", 1)]
    expected = {
        ("cpu", direction, *codec, dtype, threads)
        for direction, codec, dtype, threads in product(
            ("encode", "decode"), codecs, ("float32", "bfloat16"), (1, 2)
        )
    }
    assert {key for key in keys if key[0] == "cpu" and key[1] != "draw"} == expected
    assert ("torch-eager", "encode", "group", "uniform", 3, "float32", 1) in keys
    assert ("reference", "decode", "group", "uniform", 8, "float32", 1) in keys
    for backend in ("cpu", "torch"):
        assert (backend, "draw", "none", "noise", 0, "float32", 1) in keys


def test_fractions_are_bytes_moved_against_memcpy(rows):
    for row in rows:
        assert row["ms"] > 0 and row["memcpy_ms"] > 0, row
        width, numel = 4 if row["dtype"] == "float32" else 2, 32 * 96
        assert row["ns_per_element"] == pytest.approx(row["ms"] * 1e6 / numel, rel=0.05)
        fraction = row["fraction_of_memcpy"] * row["ms"] / row["memcpy_ms"]
        if row["direction"] == "draw":
            assert fraction == pytest.approx(0.5, rel=0.1)  # written, not read
        elif row["backend"] in ("cpu", "reference"):
            statistics = row["granularity"] != "tensor" or row["codebook"] == "binary"
            pages = row["bits"] + statistics  # one page each
            moved = numel * width + 1024 * pages
            assert fraction == pytest.approx(moved / (2 * numel * width), rel=0.1), row


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--bits", "9"], "--bits [9]: use widths of 1 to 8"),
        (["--rows", "3", "--cols", "5"], "must be a multiple of 256"),
        (["--threads", "0"], "--threads [0]: use 1 or more"),
        (
            ["--clock", "own", "--threads", "1", "2"],
            "--clock own --threads [1, 2]: use --threads 1",
        ),
        (["--codecs", "group"], "use GRANULARITY+CODEBOOK"),
    ],
)
def test_what_cannot_be_measured_is_refused(benchmark, capsys, arguments, words):
    # By its path: a package of the same name stands at the top of the repository.
    spec = importlib.util.spec_from_file_location("kernels_benchmark", FOLDER / "kernels.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    with pytest.raises(SystemExit):
        script.parse(arguments)
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_memcpy_copies_every_byte(benchmark, threads):
    source = torch.arange(1001, dtype=torch.int16)
    with benchmark("timing").Memcpy(source, threads) as copy:
        copy()
        assert copy.moved_bytes == 2 * source.nbytes
        assert torch.equal(copy._tensors[1], source)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_torch_peer_packs_really_so_many_bits_and_restores(benchmark, bits, dtype):
    (peer,) = benchmark("peers").torch_peers([bits], False)
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed = peer.encode(x)
    groups = 40
    assert peer.size(packed) == groups * (32 * bits + (8 if bits > 4 else 4))
    span = (x.float().amax(1) - x.float().amin(1)).unsqueeze(1)
    restored = peer.decode(packed).view_as(x)
    # Half a step; statistics of up to 4 bits are rounded to bf16.
    allowed = span / 2 ** (bits + 1) + (1e-6 if bits > 4 else 0.05 * span / 4)
    assert ((restored - x.float()).abs() <= allowed).all()


def test_bitsandbytes_restores(benchmark):
    pytest.importorskip("bitsandbytes")
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(0))
    for peer in benchmark("peers").bitsandbytes_peers([4, 8]):
        packed = peer.encode(x)
        assert peer.size(packed) == 40 * (32 * peer.bits + 4)
        error = (peer.decode(packed).view_as(x) - x).square().mean()
        assert error < (0.001 if peer.bits == 8 else 0.05)


def test_a_peer_that_is_not_there_is_left_out_with_a_line(benchmark, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    peers = benchmark("subjects").usable_peers(["bitsandbytes"], [8], torch.zeros(1, 256))
    assert peers == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("left out: bitsandbytes: ")


@needs_native
def test_the_check_of_a_gpu_passes_on_a_cpu(tmp_path):
    path = tmp_path / "check.json"
    result = run("gpu_check.py", "--device", "cpu", "--json", path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "5 passed, 0 failed" in result.stdout
    found = {outcome["section"]: outcome for outcome in json.loads(path.read_text("utf-8"))}
    assert list(found) == ["environment", "conformance", "bandwidth", "hooks", "step"]
    assert all(outcome["rows"] and not outcome["failures"] for outcome in found.values())
    checked = found["conformance"]["rows"]
    assert all(row["result"] == "equal" for row in checked)
    assert sum(row["cases"] for row in checked) > 200
    assert {row["bits"] for row in found["bandwidth"]["rows"]} == {1, 2, 4, 8}
    (hooks,) = found["hooks"]["rows"]
    assert hooks["kernels_us"] > 0 and hooks["in_hooks_us"] > 0
    plain, daf, checkpointing = found["step"]["rows"]
    assert [plain["mode"], checkpointing["mode"]] == ["plain", "checkpointing"]
    assert 0 < daf["held_mb"] <= 0.25 < daf["plain_mb"]


@pytest.fixture
def check(benchmark):
    return benchmark("gpu_check")


def test_a_section_that_hangs_or_crashes_fails_alone(check, tmp_path, capsys):
    arguments = ["--device", "cpu", "--sections", "environment", "--limit", "1"]
    assert check.main([*arguments, "--json", str(tmp_path / "check.json")]) == 1
    assert "FAILED: environment : not done after 1 s" in capsys.readouterr().out
    if not torch.cuda.is_available():
        options = argparse.Namespace(device="cuda", size="tiny", limit=None)
        (failure,) = check.run("hooks", "", options, 60).failures
        assert "exit status 2" in failure and "finds no CUDA device" in failure


class Wrong:
    """A backend that restores something else."""

    name = "wrong"

    def __init__(self):
        self.encode = get_backend("reference").encode

    def decode(self, out, *arguments):
        get_backend("reference").decode(out, *arguments)
        out.view(-1)[-1] += 1


def test_a_wrong_backend_does_not_conform(benchmark, monkeypatch):
    sections = benchmark("check_kernels")
    right, wrong = sections.get_backend, Wrong()

    def get(name, device="cpu"):
        return wrong if name == "cpu" else right(name)

    monkeypatch.setattr(sections, "get_backend", get)
    torch.set_num_threads(1)  # little to do
    machine = sections.Machine(torch.device("cpu"), True)
    rows = list(sections.conformance(machine, "cpu"))
    assert len(rows) == 1 + len(sections.CODECS)
    assert all("values" in row["failed"] for row in rows)


@pytest.mark.parametrize("device", ["mps", "nothing", "meta"])
def test_another_device_is_refused(check, capsys, device):
    with pytest.raises(SystemExit):
        check.parse(["--device", device])
    assert f"--device {device}: use cpu, cuda, or cuda:INDEX" in capsys.readouterr().err


def test_allocators_are_compared():
    pytest.importorskip("scipy")
    result = run("allocation.py", "--instances", 6, "--sites", 50, "--options", 5)
    assert result.returncode == 0, result.stderr
    assert "6 plans" in result.stdout and "50 sites of 5 options" in result.stdout


def test_changes_of_the_budget(tmp_path):
    path = tmp_path / "changes.json"
    small = "--layers 3 --hidden 64 --batch 8 --tokens 32 --high 0.6 --low 0.5 --sites 50"
    result = run("budget_changes.py", *small.split(), "--step_mb", "0.05", "0.1", "--json", path)
    assert result.returncode == 0, result.stderr
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["fall"]["held_after_mb"] <= 0.5
    assert found["fall"]["step_held_at_the_end_mb"] == 0
    assert len(found["trace"]) == 6
    assert [row["step_mb"] for row in found["steps"]] == [0.05, 0.1]
    assert found["replanning"]["median_milliseconds"] > 0


def test_a_distillation_inside_and_outside():
    result = run("distillation.py", "--budgets", "recommended")
    assert result.returncode == 0, result.stderr
    outside, inside = (line.split() for line in result.stdout.splitlines()[1:])
    assert (outside[0], inside[0]) == ("outside", "inside")
    assert all(float(row[-1]) < 0.3 for row in (outside, inside))


def test_a_memory_limit_is_one(benchmark):
    limits = benchmark("memory_limit")
    try:
        with limits.group(80_000_000) as made:
            greedy = made.run("--trouble", "--seconds", "60")
            greedy.communicate(timeout=60)
            assert greedy.returncode == -signal.SIGKILL
            assert made.hits() > 0
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    assert not made.folder.exists()


def test_checkpointing_is_measured_beside_daf(benchmark):
    script = benchmark("checkpointing")
    small = "--layers 2 --width 64 --heads 4 --examples 8 --tokens 16 --steps 1"
    options = script.parse([*small.split(), "--budget_mb=0.4", "--checkpoint_budget_mb=0.1"])
    rows = [script.measure(mode, options) for mode in script.MODES]
    plain, daf, checkpointing, both, coarse = (row["held_mb"] for row in rows)
    assert max(coarse, both) <= 0.1 < checkpointing <= 0.2 < daf <= 0.4 < plain
    assert all(row["step_s"] > 0 and row["peak_rss_mb"] > 0 for row in rows)
    assert all(mode in script.table(rows) for mode in script.MODES)
