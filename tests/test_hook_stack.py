"""The stack of saved-tensors hooks."""

from __future__ import annotations

import subprocess
import sys

WITHOUT = """
import torch
class Old:
    def __getattr__(self, name):
        return object if name == "SavedTensor" else getattr(real, name)
real, torch._C._autograd = torch._C._autograd, Old()
import daf_hf
"""


def test_a_torch_that_does_not_tell_what_was_packed_is_refused():
    """Calibrations would find no reader, and call everything unimportant."""
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert done.returncode
    assert "ImportError: daf_hf needs torch 2.13 or later" in done.stderr
