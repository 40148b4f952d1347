r"""What a loss outside the model costs: a distillation computed inside the model, and outside.

    python benchmarks/distillation.py --budgets recommended 4

A small GPT-2 with LoRA on ``c_attn``, random weights, against a sharper copy of itself: 8 x 64
tokens of a vocabulary of 8000. For each budget two steps; the figures are the second one's, when
what the first one held has been learnt. ``measured`` is ``|g' - g| / |g|`` of all adapters
together, against plain training on the same dropout.
"""

from __future__ import annotations

import argparse
import warnings
from contextlib import AbstractContextManager, nullcontext

import torch
from peft import LoraConfig, PeftMixedModel, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import kl_div
from transformers import GPT2Config, GPT2LMHeadModel

from daf_hf import compress_activations

VOCABULARY, EXAMPLES, TOKENS = 8000, 8, 64
SHARPER = 3.0  # the teacher's logits over the student's first ones


def student() -> PeftModel | PeftMixedModel:
    """A model in training mode, the same at each call."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=128, n_layer=3, n_head=4)
    config.bos_token_id = config.eos_token_id = None
    adapters = LoraConfig(
        r=8, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False
    )
    return get_peft_model(GPT2LMHeadModel(config), adapters).train()


def distillation(logits: Tensor, teacher: Tensor) -> Tensor:
    """Divergence of the student from the teacher's log-probabilities."""
    return kl_div(logits.log_softmax(-1), teacher, log_target=True, reduction="batchmean")


class Distilled(nn.Module):
    """A model whose own forward computes the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.student = student()

    def forward(self, tokens: Tensor, teacher: Tensor) -> dict[str, Tensor]:
        return {"loss": distillation(self.student(tokens).logits, teacher)}


def gradient(
    model: nn.Module, tokens: Tensor, teacher: Tensor, scope: AbstractContextManager[object]
) -> Tensor:
    """Of all that is trained, as one vector."""
    model.zero_grad()
    torch.manual_seed(1)
    with scope:
        if isinstance(model, Distilled):
            loss = model(tokens, teacher)["loss"]
        else:
            loss = distillation(model(tokens).logits, teacher)
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def main(argv: list[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--budgets", nargs="+", default=["recommended"], help="MB, or that word")
    options = parser.parse_args(argv)
    # transformers' own use of a name that it has deprecated.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
    torch.manual_seed(2)
    tokens = torch.randint(VOCABULARY, (EXAMPLES, TOKENS))
    with torch.no_grad():
        teacher = (SHARPER * student().eval()(tokens).logits).log_softmax(-1)
    print(f"{'loss':>8} {'budget':>12} {'MB':>6} {'ratio':>6} {'predicted':>10} {'measured':>9}")
    for budget in options.budgets:
        asked = budget if budget == "recommended" else float(budget)
        for name, model in (("outside", student()), ("inside", Distilled())):
            exact = gradient(model, tokens, teacher, nullcontext())
            daf = compress_activations(model, budget_mb=asked)
            for _ in range(2):
                found = gradient(model, tokens, teacher, daf)
                daf.step()
            report, error = daf.report, float((found - exact).norm() / exact.norm())
            print(
                f"{name:>8} {budget:>12} {report.budget_bytes / 1e6:6.2f} {report.ratio:6.1f} "
                f"{report.predicted_gradient_error:10.2f} {error:9.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
