"""Which modules of a model are its layers."""

import pytest
import torch
from torch import nn

from fused_remat.tracing.discovery import repeated_layers


class Mixer(nn.Module):
    def __init__(self, width: int = 8, kind: type[nn.Module] = nn.Linear):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        size = (1,) if kind is nn.Conv1d else ()
        self.up, self.down = kind(width, 2 * width, *size), kind(2 * width, width, *size)


class Several(Mixer):
    """A layer with three feed-forward networks of its own, as MobileBERT's."""

    def __init__(self):
        super().__init__()
        self.attention = nn.ModuleList([nn.Linear(8, 8) for _ in range(8)])
        self.ffn = nn.ModuleList([Mixer() for _ in range(3)])


class Stage(nn.Module):
    """Layers, and a smaller part that joins patches, as Swin's."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Mixer() for _ in range(4)])
        self.merge, self.norm = nn.Linear(16, 8), nn.LayerNorm(8)


class Resnet(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.time = nn.GroupNorm(2, 8), nn.Linear(8, 8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)


class DownBlock(nn.Module):
    """Of a UNet: convolutions in turn with transformer layers, if any."""

    def __init__(self, attends: bool):
        super().__init__()
        self.resnets = nn.ModuleList([Resnet() for _ in range(2)])
        self.attentions = nn.ModuleList([Mixer() for _ in range(2 * attends)])


class Branch(Mixer):
    """A layer with a branch of convolutions, as HAT's."""

    def __init__(self):
        super().__init__()
        self.branch = nn.Sequential(nn.Conv2d(8, 8, 3), nn.GELU(), nn.Conv2d(8, 8, 3))
        self.experts = nn.ModuleList([nn.ParameterList([torch.zeros(2, 3, 8, 8)])])


class Image(Mixer):
    """A layer that convolves its keys, as SegFormer's."""

    def __init__(self):
        super().__init__()
        self.sr = nn.Conv2d(8, 8, 2, stride=2)


@pytest.mark.parametrize(
    ("make", "kind", "count"),
    [
        (Mixer, Mixer, 2), (lambda: Mixer(8, nn.Conv1d), Mixer, 2), (Several, Several, 2),
        (Stage, Mixer, 8), (lambda: DownBlock(True), Mixer, 4), (Image, Image, 2),
        (Branch, Branch, 2),
    ],
    ids=["linear", "tokens", "several networks", "stage", "unet", "image", "branch"],
)  # fmt: skip
def test_layers(make, kind, count):
    found = repeated_layers(nn.Sequential(make(), make()))
    assert [type(layer) for layer in found] == [kind] * count


def test_a_unet_leaves_its_convolutions():
    model = nn.ModuleDict({"down": nn.ModuleList([DownBlock(True), DownBlock(False)])})
    assert repeated_layers(model) == [*model["down"][0].attentions]
