"""The thin residual networks for CIFAR (He et al., CVPR 2016, section 4.2).

Parameter names are those of akamaster/pytorch_resnet_cifar10, so its published weights load.
Shortcuts have no parameters (*option A*): every other pixel, zeros in the missing channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.training.task import Goal, trained_to


class ThinBlock(nn.Module):
    """Two 3x3 convolutions and a parameter-free shortcut."""

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.stride = stride
        self.added_channels = width - in_channels

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(residual(x) + shortcut(x)), [N, width, H/stride, W/stride]."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self._shortcut(x))

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.stride == 1 and not self.added_channels:
            return x
        before = self.added_channels // 2
        channels = (before, self.added_channels - before)
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, *channels))


class ThinResNet(nn.Module):
    """Images [N, 3, 32, 32] to class scores [N, classes]; 6 * blocks + 2 weighted layers."""

    def __init__(self, blocks: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, blocks, 1)
        self.layer2 = _stage(16, 32, blocks, 2)
        self.layer3 = _stage(32, 64, blocks, 2)
        self.linear = nn.Linear(64, classes)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores [N, classes]."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        scores: Tensor = self.linear(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))
        return scores


def _stage(in_channels: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    rest = [ThinBlock(width, width, 1) for _ in range(blocks - 1)]
    return nn.Sequential(ThinBlock(in_channels, width, stride), *rest)


@trained_to(Goal.CLASSIFY)
def resnet20(classes: int = 10) -> ThinResNet:
    """Return ResNet-20 for 32x32 images: 269,722 parameters at 10 classes."""
    return ThinResNet(3, classes)
