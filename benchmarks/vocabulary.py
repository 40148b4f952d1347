"""What a language model's loss takes: whole logits, and chunks of tokens.

    python benchmarks/vocabulary.py --tokens 1024 --width 1024 --vocabulary 50257

prints, for a frozen head and for one that is trained, the time of loss and gradients and the peak
of memory above what was there before, each measured in a process of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from time import process_time

import psutil
import torch
from torch.nn.functional import cross_entropy, linear

from daf_hf.chunked_loss import RowFunction, summed_cross_entropy
from daf_hf.host_memory import tune_malloc

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from common.memory import peak_bytes, reset_peak


def main() -> None:
    """Measure one way, or run a process for each and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--way", choices=("whole", "chunks"), help="measure this one here")
    parser.add_argument("--trained", action="store_true", help="with --way: train the head")
    options = parser.parse_args()
    if options.way:
        print(*measure(options))
        return
    print("| head | logits | CPU seconds | MB at the peak |\n|---|---|---|---|")
    for trained in (False, True):
        for way in ("whole", "chunks"):
            command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
            command += ["--trained"] * trained
            run = subprocess.run(command, check=True, capture_output=True, encoding="utf-8")
            seconds, peak = map(float, run.stdout.split())
            head = "trained" if trained else "frozen"
            print(f"| {head} | {way} | {seconds:.2f} | {peak / 1e6:.0f} |")


def measure(options: argparse.Namespace) -> tuple[float, int]:
    """CPU seconds of the faster of two runs, and the peak of resident memory in bytes."""
    tune_malloc()
    torch.manual_seed(0)
    hidden = torch.randn(options.tokens, options.width, requires_grad=True)
    weight = torch.randn(options.vocabulary, options.width).mul_(0.02)
    weight.requires_grad_(options.trained)
    targets = torch.randint(0, options.vocabulary, (options.tokens,))
    before = psutil.Process().memory_info().rss
    reset_peak()
    times = []
    for _ in range(2):
        hidden.grad = weight.grad = None
        began = process_time()
        if options.way == "whole":
            loss = cross_entropy(linear(hidden, weight), targets, reduction="sum")
        else:
            loss = summed_cross_entropy(hidden, weight, None, RowFunction(), targets)
        loss.backward()
        times.append(process_time() - began)
    return min(times), peak_bytes() - before


if __name__ == "__main__":
    main()
