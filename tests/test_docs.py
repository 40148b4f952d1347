"""The documentation speaks of what there is."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
from tiny import batch, build, gradients

from daf_hf import DAFConfig, MemoryReport, codecs, compress_activations, importance
from daf_hf.codecs import _CODEBOOKS
from daf_hf.kernels.format import Granularity

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")


def page_id(page):
    return page.name


def as_written(value):
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    if isinstance(value, tuple):
        return repr(value).replace("'", '"')
    return json.dumps(value)


@pytest.mark.parametrize("option", dataclasses.fields(DAFConfig), ids=lambda field: field.name)
def test_every_option_is_documented_with_its_default(option):
    assert f"| `{option.name}` | `{as_written(option.default)}` |" in CONFIGURATION


def test_no_option_is_documented_that_there_is_not():
    table = CONFIGURATION.partition("## Options")[2].partition("\n## ")[0]
    documented = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert documented == [field.name for field in dataclasses.fields(DAFConfig)]


@pytest.mark.parametrize("name", MemoryReport().to_dict())
def test_every_figure_of_the_report_is_documented(name):
    assert f"| `{name}` |" in CONFIGURATION


@pytest.mark.parametrize("name", [*_CODEBOOKS, *(g.name.lower() for g in Granularity)])
def test_every_codec_is_explained(name):
    assert f"| `{name}` |" in (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")


def test_the_example_of_a_metric_works(monkeypatch):
    section = CONFIGURATION.partition("## Importance metrics")[2].partition("\n## ")[0]
    (snippet,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    monkeypatch.setattr(importance.METRICS, "_objects", dict(importance.METRICS._objects))
    names = {}
    exec(snippet, names)
    model = build("bert")
    daf = compress_activations(model, names["callback"].config)
    gradients(model, batch("bert"), daf)
    measured = [site for site in daf.report.sites if site.importance is not None]
    dearest = max(site.importance for site in measured)
    # Small sites are not measured, but taken to be as dear as the dearest.
    assert all(site.importance in (site.shape[-1], dearest) for site in measured)
    assert len({site.importance for site in measured}) > 2


def test_the_example_of_a_codec_works(monkeypatch, tmp_path):
    section = CONFIGURATION.partition("### Your own codec")[2].partition("\n## ")[0]
    (options,) = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    in_a_file, registered = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (tmp_path / "laplace.py").write_text(in_a_file, encoding="utf-8")
    (tmp_path / "daf.yaml").write_text(options, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(codecs, "_CODEBOOKS", dict(codecs._CODEBOOKS))
    names = {}
    exec(registered, names)
    assert codecs_taken(names["callback"].config, 0.3) == {"group+powers"}
    config = DAFConfig.from_file("daf.yaml")
    alone = DAFConfig.build(config, codec=config.codec[1])
    assert {name.partition("+")[2] for name in codecs_taken(alone, 0.3)} == {"laplace"}
    assert codecs_taken(config, 0.3)


def codecs_taken(config, budget_mb):
    """Names of the codecs that a step takes."""
    model = build("bert")
    daf = compress_activations(model, config, budget_mb=budget_mb)
    gradients(model, batch("bert"), daf)
    assert daf.report.held_bytes_peak <= budget_mb * 1e6
    return {site.codec for site in daf.report.sites if site.bits is not None} - {"binary"}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_prose_is_wrapped(page):
    text = re.sub(r"^\|.*$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert [line for line in text.splitlines() if len(line) > 100] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_exist(page):
    text = page.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
    targets = re.findall(r"^make (\w+)", blocks, re.MULTILINE) + re.findall(r"`make (\w+)", text)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"
    for script in re.findall(r"\.venv/bin/python (\S+\.py)", text):
        assert (ROOT / script).is_file(), script


def test_readme_has_the_two_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "```sh\nmake demo\nmake test\n```" in text


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        if "://" in target or path.endswith(".png"):
            continue
        other = page.parent / path if path else page
        assert other.exists(), target
        headings = re.findall(r"^#+ (.*)", other.read_text(encoding="utf-8"), re.MULTILINE)
        anchors = [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings]
        assert not anchor or anchor in anchors, target


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_options_of_the_example_exist(page):
    scripts = [p for name in ("glue", "common") for p in (ROOT / "examples" / name).glob("*.py")]
    example = "".join(path.read_text(encoding="utf-8") for path in scripts)
    trainers = pytest.importorskip("transformers").TrainingArguments
    known = {field.name for field in dataclasses.fields(trainers)}
    known |= set(re.findall(r"^    (\w+): .* = field\(", example, re.MULTILINE))
    known |= {"model_name_or_path", "task_name", "help"}
    blocks = re.findall(r"run_glue\.py(?:[^\n]*\\\n)*[^\n]*", page.read_text(encoding="utf-8"))
    for option in re.findall(r"--(\w+)", "\n".join(blocks)):
        assert option in known, f"--{option}"
