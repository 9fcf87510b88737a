"""U-Net (Ronneberger et al., MICCAI 2015), padded so that output and input sizes agree."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import daf_bench.data.denoising  # noqa: F401 - what a U-Net is trained to do
from daf.training.task import Goal, trained_to

_LEVELS = 4
SIZE_MULTIPLE = 2**_LEVELS


class DoubleConv(nn.Sequential):
    """Twice: 3x3 convolution, batch norm, ReLU."""

    def __init__(self, in_channels: int, width: int) -> None:
        super().__init__(
            nn.Conv2d(in_channels, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        )


class UNet(nn.Module):
    """Images [N, channels, H, W] to maps [N, outputs, H, W]; H and W are multiples of 16."""

    def __init__(self, channels: int, outputs: int, width: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(_LEVELS + 1)]
        self.down = nn.ModuleList(
            DoubleConv(before, after)
            for before, after in zip([channels, *widths[:-1]], widths, strict=True)
        )
        self.pool = nn.MaxPool2d(2)
        above = widths[-2::-1]
        self.rise = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in above)
        self.up = nn.ModuleList(DoubleConv(2 * w, w) for w in above)
        self.head = nn.Conv2d(width, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return maps [N, outputs, H, W]."""
        skips: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else self.pool(x))
            skips.append(x)
        skips.pop()
        for rise, block in zip(self.rise, self.up, strict=True):
            x = block(torch.cat([skips.pop(), rise(x)], 1))
        maps: Tensor = self.head(x)
        return maps


@trained_to(Goal.DENOISE)
def unet(channels: int = 3) -> UNet:
    """Return a U-Net of 32 to 512 channels, as many outputs as inputs: 7.8 M parameters."""
    return UNet(channels, channels, width=32)
