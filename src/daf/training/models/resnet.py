"""Residual networks with torchvision's parameter names (He et al., CVPR 2016)."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.training.task import Goal, trained_to

MakeBlock = Callable[[int, int, int], nn.Module]  # of input channels, width and stride


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut: [N, in, H, W] to [N, width, H/stride, W/stride]."""

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = shortcut_of(in_channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(residual(x) + shortcut(x))."""
        shortcut = x if self.downsample is None else self.downsample(x)
        y = F.relu(self.bn1(self.conv1(x)))
        total = self.bn2(self.conv2(y)) + shortcut
        return F.relu(total)


def shortcut_of(in_channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    """Return the projection beside a block; None where the input itself has the block's shape."""
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
    )


class ResNet(nn.Module):
    """Images [N, 3, H, W] to class scores [N, classes]; ``block`` makes each of its blocks."""

    def __init__(
        self,
        block: MakeBlock,
        blocks: Sequence[int],
        classes: int,
        *,
        small_images: bool,
        expansion: int = 1,
    ) -> None:
        super().__init__()
        kernel, stride = (3, 1) if small_images else (7, 2)
        self.conv1 = nn.Conv2d(3, 64, kernel, stride, kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.Identity() if small_images else nn.MaxPool2d(3, 2, 1)
        widths = [64, 128, 256, 512]
        inputs = [64, *(width * expansion for width in widths[:-1])]
        self.layer1, self.layer2, self.layer3, self.layer4 = (
            nn.Sequential(
                block(inputs[i], width, 1 if i == 0 else 2),
                *(block(width * expansion, width, 1) for _ in range(blocks[i] - 1)),
            )
            for i, width in enumerate(widths)
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * expansion, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores [N, classes]."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        scores: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return scores


@trained_to(Goal.CLASSIFY)
def resnet18(classes: int = 10) -> ResNet:
    """Return ResNet-18, one 3x3 convolution as stem: 11,173,962 parameters at 10 classes."""
    return ResNet(BasicBlock, (2, 2, 2, 2), classes, small_images=True)
