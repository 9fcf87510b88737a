"""DenseNet-121 with torchvision's parameter names (Huang et al., CVPR 2017)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.training.task import Goal, trained_to

_BOTTLENECK = 4


class DenseLayer(nn.Module):
    """A layer that adds ``growth`` channels computed from all channels so far."""

    def __init__(self, in_channels: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, _BOTTLENECK * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(_BOTTLENECK * growth)
        self.conv2 = nn.Conv2d(_BOTTLENECK * growth, growth, 3, padding=1, bias=False)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Return the new features [N, growth, H, W]."""
        y = self.conv1(F.relu(self.norm1(torch.cat(list(features), 1))))
        new: Tensor = self.conv2(F.relu(self.norm2(y)))
        return new


class DenseBlock(nn.ModuleDict):
    """``layers`` dense layers, each reading everything before it."""

    def __init__(self, in_channels: int, layers: int, growth: int) -> None:
        super().__init__(
            {
                f"denselayer{i + 1}": DenseLayer(in_channels + i * growth, growth)
                for i in range(layers)
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return [N, in + layers * growth, H, W]."""
        features = [x]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


class Transition(nn.Sequential):
    """A layer that halves channels, height and width between two dense blocks."""

    def __init__(self, in_channels: int) -> None:
        super().__init__(
            OrderedDict(
                norm=nn.BatchNorm2d(in_channels),
                relu=nn.ReLU(),
                conv=nn.Conv2d(in_channels, in_channels // 2, 1, bias=False),
                pool=nn.AvgPool2d(2, 2),
            )
        )


class DenseNet(nn.Module):
    """DenseNet: images [N, 3, H, W], H and W at least 32, to class scores [N, classes]."""

    def __init__(self, blocks: Sequence[int], growth: int, stem: int, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            OrderedDict[str, nn.Module](
                conv0=nn.Conv2d(3, stem, 7, 2, 3, bias=False),
                norm0=nn.BatchNorm2d(stem),
                relu0=nn.ReLU(),
                pool0=nn.MaxPool2d(3, 2, 1),
            )
        )
        channels = self._add_blocks(blocks, growth, stem)
        self.features.add_module("norm5", nn.BatchNorm2d(channels))
        self.classifier = nn.Linear(channels, classes)
        self._initialize()

    def _add_blocks(self, blocks: Sequence[int], growth: int, channels: int) -> int:
        for number, layers in enumerate(blocks, 1):
            self.features.add_module(f"denseblock{number}", DenseBlock(channels, layers, growth))
            channels += layers * growth
            if number < len(blocks):
                self.features.add_module(f"transition{number}", Transition(channels))
                channels //= 2
        return channels

    def _initialize(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores [N, classes]."""
        x = F.adaptive_avg_pool2d(F.relu(self.features(x)), 1)
        scores: Tensor = self.classifier(torch.flatten(x, 1))
        return scores


@trained_to(Goal.CLASSIFY)
def densenet121(classes: int = 1000) -> DenseNet:
    """Return DenseNet-121: 7,978,856 parameters at 1000 classes."""
    return DenseNet((6, 12, 24, 16), growth=32, stem=64, classes=classes)
