"""Images: convolutions, batch and group normalisation, pooling, activations in place, ViT."""

from __future__ import annotations

import torch
from harness import Loop, case
from tiny import build
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification


def images(examples: int = 8, size: int = 32) -> dict[str, Tensor]:
    """Noise, brighter on the left or on the right, and which of the two."""
    labels = torch.arange(examples) % 2
    pixels = torch.randn(examples, 3, size, size)
    columns = torch.arange(size) * 2 // size
    pixels += (columns == labels[:, None]).float()[:, None, None]
    return {"pixel_values": pixels, "labels": labels}


def resnet18(width: int = 8) -> ResNetForImageClassification:
    """ResNet-18's layout, narrow."""
    config = ResNetConfig(
        embedding_size=width,
        hidden_sizes=[width, 2 * width, 4 * width, 8 * width],
        depths=[2, 2, 2, 2],
        layer_type="basic",
        num_labels=2,
    )
    return ResNetForImageClassification(config).train()


def loop(model: nn.Module, inputs: dict[str, Tensor] | None = None) -> Loop:
    """Full training of a model on images."""
    inputs = inputs or images()
    return Loop(model, lambda: model(**inputs)["loss"].backward())


@case("Vision", "ResNet-18")
def resnet() -> Loop:
    return loop(resnet18(), images(16))


@case("Vision", "ResNet-18, channels last")
def channels_last() -> Loop:
    model = resnet18().to(memory_format=torch.channels_last)
    inputs = images(16)
    pixels = inputs["pixel_values"].contiguous(memory_format=torch.channels_last)
    return loop(model, inputs | {"pixel_values": pixels})


@case("Vision", "activations in place")
def in_place() -> Loop:
    return loop(build("conv"), images(16))


@case("Vision", "ViT, LoRA")
def vit() -> Loop:
    return loop(build("vit"), images())


class Stage(nn.Module):
    """Group normalisation, SiLU, average pooling, stochastic depth."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(3))
        self.pool = nn.AvgPool2d(2)
        self.head = nn.Linear(width, 2)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.stem(pixel_values)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            kept = torch.empty(len(x), 1, 1, 1).bernoulli_(0.8) / 0.8
            x = self.pool(x + kept * conv(nn.functional.silu(norm(x))))
        return {"loss": nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels)}


@case("Vision", "group normalisation, SiLU, stochastic depth")
def stage() -> Loop:
    return loop(Stage(), images(16))


@case("Vision", "mixup with soft labels")
def mixup() -> Loop:
    model, inputs = Stage(), images(16)

    def step() -> None:
        share = float(torch.rand(()))
        pixels, labels = inputs["pixel_values"], nn.functional.one_hot(inputs["labels"]).float()
        mixed = share * pixels + (1 - share) * pixels.flip(0)
        soft = share * labels + (1 - share) * labels.flip(0)
        model(mixed, soft)["loss"].backward()

    return Loop(model, step)
