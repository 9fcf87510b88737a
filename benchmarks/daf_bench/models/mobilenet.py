"""MobileNet-v2 with torchvision's parameter names (Sandler et al., CVPR 2018)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from daf.training.task import Goal, trained_to

# (expansion, output channels, repeats, stride of the first): table 2 of the paper
_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)

_LAST_CHANNELS = 1280


class ConvNormActivation(nn.Sequential):
    """Convolution, batch norm, ReLU6."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1
    ) -> None:
        super().__init__(
            nn.Conv2d(
                in_channels, out_channels, kernel, stride, kernel // 2, groups=groups, bias=False
            ),
            nn.BatchNorm2d(out_channels),
            nn.ReLU6(),
        )


class InvertedResidual(nn.Module):
    """1x1 expansion, 3x3 depthwise filter, 1x1 projection; plus the input if the shapes agree."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = in_channels * expansion
        expand = [ConvNormActivation(in_channels, hidden, 1)] if expansion != 1 else []
        self.conv = nn.Sequential(
            *expand,
            ConvNormActivation(hidden, hidden, 3, stride, groups=hidden),
            nn.Conv2d(hidden, out_channels, 1, bias=False),
            nn.BatchNorm2d(out_channels),
        )
        self.adds_input = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        """Return [N, out, H/stride, W/stride]."""
        y: Tensor = self.conv(x)
        return x + y if self.adds_input else y


class MobileNetV2(nn.Module):
    """MobileNet-v2: images [N, 3, H, W], H and W at least 32, to class scores [N, classes]."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [ConvNormActivation(3, 32, 3, 2)]
        channels = 32
        for expansion, width, repeats, stride in _STAGES:
            for repeat in range(repeats):
                first = stride if repeat == 0 else 1
                layers.append(InvertedResidual(channels, width, first, expansion))
                channels = width
        layers.append(ConvNormActivation(channels, _LAST_CHANNELS, 1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(_LAST_CHANNELS, classes))
        self._initialize()

    def _initialize(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0.0, 0.01)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores [N, classes]."""
        x = nn.functional.adaptive_avg_pool2d(self.features(x), 1)
        scores: Tensor = self.classifier(torch.flatten(x, 1))
        return scores


@trained_to(Goal.CLASSIFY)
def mobilenet_v2(classes: int = 1000) -> MobileNetV2:
    """Return MobileNet-v2, width 1: 3,504,872 parameters at 1000 classes."""
    return MobileNetV2(classes)
