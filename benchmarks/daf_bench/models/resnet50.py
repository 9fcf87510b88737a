"""ResNets for photographs, with torchvision's parameter names (He et al., CVPR 2016)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from daf.training.models.resnet import BasicBlock, ResNet, shortcut_of
from daf.training.task import Goal, trained_to

EXPANSION = 4


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions: [N, in, H, W] to [N, 4 * width, H/stride, W/stride]."""

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width * EXPANSION, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width * EXPANSION)
        self.downsample = shortcut_of(in_channels, width * EXPANSION, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(residual(x) + shortcut(x))."""
        shortcut = x if self.downsample is None else self.downsample(x)
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        total = self.bn3(self.conv3(y)) + shortcut
        return F.relu(total)


@trained_to(Goal.CLASSIFY)
def resnet50(classes: int = 1000) -> ResNet:
    """Return ResNet-50, stride on the 3x3 convolution: 25,557,032 parameters at 1000 classes."""
    return ResNet(Bottleneck, (3, 4, 6, 3), classes, small_images=False, expansion=EXPANSION)


@trained_to(Goal.CLASSIFY)
def resnet18_imagenet(classes: int = 1000) -> ResNet:
    """Return ResNet-18 with the 7x7 stem: 11,689,512 parameters at 1000 classes."""
    return ResNet(BasicBlock, (2, 2, 2, 2), classes, small_images=False)
