"""The paper's image models: residual networks for 32 x 32 images (paper section 4.2, tables 2 and 10).

Depths 6n+2 (8, 14, 20, 32, 44, 56) are those of He et al. 2015 (arXiv 1512.03385), section 4.2: three stages of n
basic blocks with 16, 32, 64 channels. Where a stage widens, the shortcut is either padded with zero channels (their
option A, the default here, which published CIFAR weights use) or projected (option B). The paper does not say which one
it uses, but the memory of its ResNet-14 tells (table 10: 2.01 MB in full, at 12 bytes a parameter for SGD with
momentum):

    padded     172,506 parameters   1.97 MiB
    projected  175,258 parameters   2.01 MiB

So use `shortcut="projected"` to repeat its ResNet-14. Depths 50 and 101 are bottlenecks [3, 4, 6, 3] and [3, 4, 23, 3]
with the ImageNet widths (64 to 512, times 4), projected shortcuts and a 3 x 3 stem without pooling; the paper does not
say which ResNet-50 and ResNet-101 it trains, and this is the usual choice for CIFAR.

Parameter names follow akamaster/pytorch_resnet_cifar10 (`layer1.0.conv1`), whose pretrained weights load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from blocktrain.errors import ConfigError, nearest

Shortcut = Literal["padded", "projected"]

BASIC_DEPTHS = (8, 14, 20, 32, 44, 56)
BOTTLENECK_STAGES = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


@dataclass(frozen=True, kw_only=True)
class ImageOutput:
    """The result of a forward call, named as in transformers."""

    loss: Tensor | None  # scalar; None without labels
    logits: Tensor  # (B, num_classes)


class PaddedShortcut(nn.Module):
    """He et al.'s option A: every second pixel, with zeros for the new channels, half of them on each side. It has no
    parameters."""

    def __init__(self, new_channels: int):
        super().__init__()
        self.padding = new_channels // 2

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C + new_channels, H/2, W/2)."""
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.padding, self.padding))


def projection(channels_in: int, channels: int, stride: int) -> nn.Sequential:
    """He et al.'s option B: (B, channels_in, H, W) -> (B, channels, H/stride, W/stride), learned."""
    return nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))


class BasicUnit(nn.Module):
    """Two 3 x 3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, channels_in: int, channels: int, stride: int, shortcut: Shortcut):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1:
            padded = shortcut == "padded"
            self.shortcut = (
                PaddedShortcut(channels - channels_in) if padded else projection(channels_in, channels, stride)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels_in, H, W) -> (B, channels, H/stride, W/stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class BottleneckUnit(nn.Module):
    """1 x 1, 3 x 3, 1 x 1 convolutions (the last widens four times) and a shortcut, projected where shapes differ."""

    expansion = 4

    def __init__(self, channels_in: int, channels: int, stride: int, _shortcut: Shortcut):
        super().__init__()
        wide = channels * self.expansion
        self.conv1 = nn.Conv2d(channels_in, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, wide, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(wide)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != wide:
            self.shortcut = projection(channels_in, wide, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels_in, H, W) -> (B, 4 * channels, H/stride, W/stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Stem, stages of residual units, average pool and linear head."""

    def __init__(
        self,
        unit: type[BasicUnit] | type[BottleneckUnit],
        stages: tuple[int, ...],
        width: int,
        num_classes: int,
        shortcut: Shortcut,
    ):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.stages = tuple(f"layer{number}" for number in range(1, len(stages) + 1))
        channels_in = width
        for number, units in enumerate(stages):
            channels = width * 2**number
            stage = nn.Sequential()
            for index in range(units):
                stage.append(unit(channels_in, channels, 2 if number > 0 and index == 0 else 1, shortcut))
                channels_in = channels * unit.expansion
            self.add_module(self.stages[number], stage)
        self.linear = nn.Linear(channels_in, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> ImageOutput:
        """pixel_values: (B, 3, 32, 32), normalized; labels: (B,) class indices. The loss is the mean cross-entropy."""
        x = F.relu(self.bn1(self.conv1(pixel_values)))
        for name in self.stages:
            x = self.get_submodule(name)(x)
        logits = self.linear(x.mean(dim=(2, 3)))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return ImageOutput(loss=loss, logits=logits)

    def layers(self) -> dict[str, list[str]]:
        """Layer name -> module paths, in forward order: the stem, each residual unit, the head."""
        units = [f"{stage}.{name}" for stage in self.stages for name, _ in self.get_submodule(stage).named_children()]
        return {"stem": ["conv1", "bn1"]} | {path: [path] for path in units} | {"head": ["linear"]}


def resnet(depth: int, num_classes: int = 10, *, shortcut: Shortcut | None = None) -> ResNet:
    """A residual network for 32 x 32 images, randomly initialized (He et al. 2015: normal, fan out).

    depth: 8, 14, 20, 32, 44 or 56 (basic units), 50 or 101 (bottlenecks).
    num_classes: outputs of the head.
    shortcut: where a stage widens; default `"padded"` for basic units, bottlenecks are always `"projected"`.

    Raises `ConfigError` for another depth or shortcut.

    >>> sum(parameter.numel() for parameter in resnet(14, shortcut="projected").parameters())
    175258
    """
    if shortcut not in (None, "padded", "projected"):
        raise ConfigError(f"ResNet shortcut '{shortcut}' is unknown; {nearest(shortcut, ['padded', 'projected'])}")
    if depth in BASIC_DEPTHS:
        return ResNet(BasicUnit, ((depth - 2) // 6,) * 3, 16, num_classes, shortcut or "padded")
    if depth in BOTTLENECK_STAGES:
        if shortcut == "padded":
            raise ConfigError(f"ResNet-{depth} has projected shortcuts only; leave out shortcut='padded'")
        return ResNet(BottleneckUnit, BOTTLENECK_STAGES[depth], 64, num_classes, "projected")
    known = ", ".join(str(number) for number in sorted((*BASIC_DEPTHS, *BOTTLENECK_STAGES)))
    raise ConfigError(f"ResNet depth {depth} is unknown; known: {known}")
