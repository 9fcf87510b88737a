"""Residual networks with torchvision's parameter names (He et al., CVPR 2016)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut: [N, in, H, W] to [N, width, H/stride, W/stride]."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(in_channels, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(residual(x) + shortcut(x))."""
        shortcut = x if self.downsample is None else self.downsample(x)
        y = F.relu(self.bn1(self.conv1(x)))
        total = self.bn2(self.conv2(y)) + shortcut
        return F.relu(total)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions: [N, in, H, W] to [N, 4 * width, H/stride, W/stride]."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.downsample = _shortcut(in_channels, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(residual(x) + shortcut(x))."""
        shortcut = x if self.downsample is None else self.downsample(x)
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        total = self.bn3(self.conv3(y)) + shortcut
        return F.relu(total)


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride, bias=False),
        nn.BatchNorm2d(out_channels),
    )


class ResNet(nn.Module):
    """Images [N, 3, H, W] to class scores [N, classes]."""

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        blocks: Sequence[int],
        classes: int,
        *,
        small_images: bool,
    ) -> None:
        super().__init__()
        kernel, stride = (3, 1) if small_images else (7, 2)
        self.conv1 = nn.Conv2d(3, 64, kernel, stride, kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.Identity() if small_images else nn.MaxPool2d(3, 2, 1)
        widths = [64, 128, 256, 512]
        inputs = [64, *(width * block.expansion for width in widths[:-1])]
        self.layer1, self.layer2, self.layer3, self.layer4 = (
            _stage(block, inputs[i], widths[i], blocks[i], 1 if i == 0 else 2) for i in range(4)
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * block.expansion, classes)
        self._initialize()

    def _initialize(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores [N, classes]."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        scores: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return scores


def _stage(
    block: type[BasicBlock] | type[Bottleneck],
    in_channels: int,
    width: int,
    blocks: int,
    stride: int,
) -> nn.Sequential:
    rest = [block(width * block.expansion, width, 1) for _ in range(blocks - 1)]
    return nn.Sequential(block(in_channels, width, stride), *rest)


def resnet18(classes: int = 10) -> ResNet:
    """Return ResNet-18, one 3x3 convolution as stem: 11,173,962 parameters at 10 classes."""
    return ResNet(BasicBlock, (2, 2, 2, 2), classes, small_images=True)


def resnet50(classes: int = 1000) -> ResNet:
    """Return ResNet-50, stride on the 3x3 convolution: 25,557,032 parameters at 1000 classes."""
    return ResNet(Bottleneck, (3, 4, 6, 3), classes, small_images=False)
