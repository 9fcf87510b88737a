"""Every module of ``torch.nn`` with small inputs; whichever is skipped says why."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Build = Callable[[], tuple[nn.Module, tuple[Any, ...]]]


def floats(*shape: int, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    return torch.randn(*shape).to(memory_format=layout).requires_grad_()


def chances(*shape: int) -> Tensor:
    return torch.rand(*shape).clamp(0.1, 0.9).requires_grad_()


def classes(*shape: int, below: int = 5) -> Tensor:
    return torch.randint(0, below, shape)


def signs(*shape: int) -> Tensor:
    return torch.randint(0, 2, shape).float() * 2 - 1


def of(module: Callable[[], nn.Module], *inputs: Callable[[], Any]) -> Build:
    return lambda: (module(), tuple(make() for make in inputs))


row = partial(floats, 6, 8)
line = partial(floats, 3, 6, 16)
plane = partial(floats, 2, 6, 9, 8)
last = partial(floats, 2, 6, 9, 8, layout=torch.channels_last)
space = partial(floats, 2, 4, 6, 5, 4)
POINTWISE = [
    "CELU",
    "ELU",
    "GELU",
    "Hardshrink",
    "Hardsigmoid",
    "Hardswish",
    "Hardtanh",
    "LeakyReLU",
    "LogSigmoid",
    "Mish",
    "PReLU",
    "ReLU",
    "ReLU6",
    "RReLU",
    "SELU",
    "SiLU",
    "Sigmoid",
    "Softplus",
    "Softshrink",
    "Softsign",
    "Tanh",
    "Tanhshrink",
    "Identity",
    "AlphaDropout",
    "Dropout",
    "FeatureAlphaDropout",
    "Flatten",
]


class Unpool(nn.Module):
    def __init__(self, pool: nn.Module, unpool: nn.Module) -> None:
        super().__init__()
        self.pool, self.unpool = pool, unpool

    def forward(self, x: Tensor) -> Tensor:
        return self.unpool(*self.pool(x))


class Recurrent(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


CASES: dict[str, list[Build]] = {
    **{name: [of(getattr(nn, name), plane), of(getattr(nn, name), last)] for name in POINTWISE},
    "GLU": [of(nn.GLU, row)],
    "Threshold": [of(lambda: nn.Threshold(0.1, 2.0), plane)],
    "Softmax": [of(lambda: nn.Softmax(1), plane)],
    "Softmin": [of(lambda: nn.Softmin(1), plane)],
    "LogSoftmax": [of(lambda: nn.LogSoftmax(1), plane)],
    "Softmax2d": [of(nn.Softmax2d, plane)],
    "Dropout1d": [of(nn.Dropout1d, line)],
    "Dropout2d": [of(nn.Dropout2d, plane)],
    "Dropout3d": [of(nn.Dropout3d, space)],
    "Linear": [of(lambda: nn.Linear(8, 5), row), of(lambda: nn.Linear(16, 5, bias=False), line)],
    "Bilinear": [of(lambda: nn.Bilinear(8, 8, 3), row, row)],
    "Embedding": [of(lambda: nn.Embedding(5, 4), lambda: classes(7, 6))],
    "EmbeddingBag": [
        of(partial(nn.EmbeddingBag, 5, 4, mode=mode), lambda: classes(7, 6))
        for mode in ("sum", "mean", "max")
    ],
    "Conv1d": [of(lambda: nn.Conv1d(6, 4, 3, padding=1), line)],
    "Conv2d": [
        of(lambda: nn.Conv2d(6, 4, 3), plane),
        of(lambda: nn.Conv2d(6, 6, 3, groups=3), last),
    ],
    "Conv3d": [of(lambda: nn.Conv3d(4, 2, 3), space)],
    "ConvTranspose1d": [of(lambda: nn.ConvTranspose1d(6, 4, 3), line)],
    "ConvTranspose2d": [of(lambda: nn.ConvTranspose2d(6, 4, 3, 2), make) for make in (plane, last)],
    "ConvTranspose3d": [of(lambda: nn.ConvTranspose3d(4, 2, 3), space)],
    "BatchNorm1d": [of(lambda: nn.BatchNorm1d(6), line), of(lambda: nn.BatchNorm1d(8), row)],
    "BatchNorm2d": [of(lambda: nn.BatchNorm2d(6), plane), of(lambda: nn.BatchNorm2d(6), last)],
    "BatchNorm3d": [of(lambda: nn.BatchNorm3d(4, affine=False), space)],
    "InstanceNorm1d": [of(lambda: nn.InstanceNorm1d(6), line)],
    "InstanceNorm2d": [
        of(lambda: nn.InstanceNorm2d(6, affine=True), make) for make in (plane, last)
    ],
    "InstanceNorm3d": [of(lambda: nn.InstanceNorm3d(4), space)],
    "GroupNorm": [of(lambda: nn.GroupNorm(3, 6), plane), of(lambda: nn.GroupNorm(3, 6), last)],
    "LayerNorm": [of(lambda: nn.LayerNorm(8), plane), of(lambda: nn.LayerNorm([9, 8]), plane)],
    "RMSNorm": [of(lambda: nn.RMSNorm(8), plane)],
    "LocalResponseNorm": [of(lambda: nn.LocalResponseNorm(3), plane)],
    "CrossMapLRN2d": [of(lambda: nn.CrossMapLRN2d(3), plane)],
    "AvgPool1d": [of(lambda: nn.AvgPool1d(3), line)],
    "AvgPool2d": [of(lambda: nn.AvgPool2d(3, 2), plane), of(lambda: nn.AvgPool2d(3, 2, 1), last)],
    "AvgPool3d": [of(lambda: nn.AvgPool3d(2), space)],
    "AdaptiveAvgPool1d": [of(lambda: nn.AdaptiveAvgPool1d(5), line)],
    "AdaptiveAvgPool2d": [of(partial(nn.AdaptiveAvgPool2d, n), last) for n in (1, (3, 2))],
    "AdaptiveAvgPool3d": [of(lambda: nn.AdaptiveAvgPool3d(2), space)],
    "MaxPool1d": [of(lambda: nn.MaxPool1d(3), line)],
    "MaxPool2d": [
        of(lambda: nn.MaxPool2d(2), plane),
        of(lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True), last),
        of(lambda: nn.MaxPool2d((2, 3), (1, 2), (1, 1), (2, 1)), plane),
    ],
    "MaxPool3d": [of(lambda: nn.MaxPool3d(2), space), of(lambda: nn.MaxPool3d(3, 1, 1, 2), space)],
    "AdaptiveMaxPool1d": [of(lambda: nn.AdaptiveMaxPool1d(5), line)],
    "AdaptiveMaxPool2d": [of(lambda: nn.AdaptiveMaxPool2d(3), make) for make in (plane, last)],
    "AdaptiveMaxPool3d": [of(lambda: nn.AdaptiveMaxPool3d(2), space)],
    "FractionalMaxPool2d": [of(lambda: nn.FractionalMaxPool2d(2, output_size=4), plane)],
    "FractionalMaxPool3d": [of(lambda: nn.FractionalMaxPool3d(2, output_size=2), space)],
    "LPPool1d": [of(lambda: nn.LPPool1d(2, 3), line)],
    "LPPool2d": [of(lambda: nn.LPPool2d(2, 3), plane)],
    "LPPool3d": [of(lambda: nn.LPPool3d(2, 2), space)],
    "MaxUnpool1d": [
        of(lambda: Unpool(nn.MaxPool1d(2, return_indices=True), nn.MaxUnpool1d(2)), line)
    ],
    "MaxUnpool2d": [
        of(lambda: Unpool(nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)), plane)
    ],
    "MaxUnpool3d": [
        of(
            lambda: Unpool(nn.MaxPool3d(2, return_indices=True), nn.MaxUnpool3d(2)),
            lambda: floats(2, 3, 4, 4, 4),
        )
    ],
    **{
        f"{kind}{axes}d": [of(partial(getattr(nn, f"{kind}{axes}d"), 1, *extra), make)]
        for kind, extra in (
            ("CircularPad", ()),
            ("ConstantPad", (0.5,)),
            ("ReflectionPad", ()),
            ("ReplicationPad", ()),
            ("ZeroPad", ()),
        )
        for axes, make in ((1, line), (2, plane), (3, space))
    },
    "Fold": [of(lambda: nn.Fold((4, 5), 2), lambda: floats(2, 8, 12))],
    "Unfold": [of(lambda: nn.Unfold(2), plane)],
    "Unflatten": [of(lambda: nn.Unflatten(1, (2, 3)), plane)],
    "PixelShuffle": [of(lambda: nn.PixelShuffle(2), lambda: floats(2, 8, 3, 3))],
    "PixelUnshuffle": [of(lambda: nn.PixelUnshuffle(2), lambda: floats(2, 3, 4, 6))],
    "ChannelShuffle": [of(lambda: nn.ChannelShuffle(3), plane)],
    "Upsample": [
        of(partial(nn.Upsample, scale_factor=2, mode=mode), plane)
        for mode in ("nearest", "bilinear", "bicubic")
    ],
    "UpsamplingBilinear2d": [of(lambda: nn.UpsamplingBilinear2d(scale_factor=2), plane)],
    "UpsamplingNearest2d": [of(lambda: nn.UpsamplingNearest2d(scale_factor=2), plane)],
    "CosineSimilarity": [of(nn.CosineSimilarity, plane, plane)],
    "PairwiseDistance": [of(nn.PairwiseDistance, row, row)],
    "L1Loss": [of(nn.L1Loss, row, row)],
    "MSELoss": [of(nn.MSELoss, row, row)],
    "SmoothL1Loss": [of(nn.SmoothL1Loss, row, row)],
    "HuberLoss": [of(nn.HuberLoss, row, row)],
    "BCELoss": [of(nn.BCELoss, lambda: chances(6, 8), lambda: chances(6, 8).detach())],
    "BCEWithLogitsLoss": [of(nn.BCEWithLogitsLoss, row, lambda: chances(6, 8).detach())],
    "CrossEntropyLoss": [
        of(nn.CrossEntropyLoss, row, lambda: classes(6)),
        of(partial(nn.CrossEntropyLoss, label_smoothing=0.1), plane, lambda: classes(2, 9, 8)),
    ],
    "NLLLoss": [of(nn.NLLLoss, row, lambda: classes(6))],
    "NLLLoss2d": [of(nn.NLLLoss, plane, lambda: classes(2, 9, 8))],
    "KLDivLoss": [of(partial(nn.KLDivLoss, reduction="sum"), row, lambda: chances(6, 8))],
    "PoissonNLLLoss": [of(nn.PoissonNLLLoss, row, lambda: chances(6, 8).detach())],
    "GaussianNLLLoss": [of(nn.GaussianNLLLoss, row, row, lambda: chances(6, 8))],
    "HingeEmbeddingLoss": [of(nn.HingeEmbeddingLoss, row, lambda: signs(6, 8))],
    "MarginRankingLoss": [of(nn.MarginRankingLoss, row, row, lambda: signs(6, 8))],
    "SoftMarginLoss": [of(nn.SoftMarginLoss, row, lambda: signs(6, 8))],
    "CosineEmbeddingLoss": [of(nn.CosineEmbeddingLoss, row, row, lambda: signs(6))],
    "TripletMarginLoss": [of(nn.TripletMarginLoss, row, row, row)],
    "TripletMarginWithDistanceLoss": [of(nn.TripletMarginWithDistanceLoss, row, row, row)],
    "MultiMarginLoss": [of(nn.MultiMarginLoss, row, lambda: classes(6))],
    "MultiLabelMarginLoss": [of(nn.MultiLabelMarginLoss, row, lambda: classes(6, 8))],
    "MultiLabelSoftMarginLoss": [
        of(nn.MultiLabelSoftMarginLoss, row, lambda: chances(6, 8).detach())
    ],
    "CTCLoss": [
        of(
            nn.CTCLoss,
            lambda: floats(12, 2, 5).log_softmax(-1).detach().requires_grad_(),
            lambda: classes(2, 4, below=4) + 1,
            lambda: torch.tensor([12, 11]),
            lambda: torch.tensor([4, 3]),
        )
    ],
    "AdaptiveLogSoftmaxWithLoss": [
        of(
            lambda: nn.AdaptiveLogSoftmaxWithLoss(64, 10, [3, 6]),
            lambda: floats(6, 64),
            lambda: classes(6, below=10),
        )
    ],
    "LinearCrossEntropyLoss": [
        of(lambda: nn.LinearCrossEntropyLoss(8, 5), row, lambda: classes(6))
    ],
    "RNN": [of(lambda: Recurrent(nn.RNN(16, 5, 2, dropout=0.3)), line)],
    "GRU": [of(lambda: Recurrent(nn.GRU(16, 5, bidirectional=True)), line)],
    "LSTM": [of(lambda: Recurrent(nn.LSTM(16, 5, 2, dropout=0.3)), line)],
    "RNNCell": [of(lambda: nn.RNNCell(8, 5), row)],
    "GRUCell": [of(lambda: nn.GRUCell(8, 5), row)],
    "LSTMCell": [of(lambda: nn.LSTMCell(8, 5), row)],
    "MultiheadAttention": [
        of(lambda: nn.MultiheadAttention(16, 4, dropout=0.2), line, line, line),
        of(
            lambda: nn.MultiheadAttention(16, 4, kdim=8, vdim=8),
            line,
            *[partial(floats, 5, 6, 8)] * 2,
        ),
    ],
    "TransformerEncoderLayer": [of(lambda: nn.TransformerEncoderLayer(16, 4, 32, 0.1), line)],
    "TransformerDecoderLayer": [of(lambda: nn.TransformerDecoderLayer(16, 4, 32, 0.1), line, line)],
    "TransformerEncoder": [
        of(
            lambda: nn.TransformerEncoder(
                nn.TransformerEncoderLayer(16, 4, 32, activation="gelu"),
                2,
                enable_nested_tensor=False,
            ),
            line,
        )
    ],
    "TransformerDecoder": [
        of(lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32), 2), line, line)
    ],
    "Transformer": [of(lambda: nn.Transformer(16, 4, 1, 1, 32, 0.0, batch_first=True), line, line)],
    "Sequential": [of(lambda: nn.Sequential(nn.Conv2d(6, 6, 3), nn.ReLU(inplace=True)), last)],
    **{
        f"LazyConv{n}d": [of(partial(getattr(nn, f"LazyConv{n}d"), 4, 3), make)]
        for n, make in ((1, line), (2, last), (3, space))
    },
    **{
        f"LazyConvTranspose{n}d": [of(partial(getattr(nn, f"LazyConvTranspose{n}d"), 4, 3), make)]
        for n, make in ((1, line), (2, last), (3, space))
    },
    **{
        f"LazyBatchNorm{n}d": [of(getattr(nn, f"LazyBatchNorm{n}d"), make)]
        for n, make in ((1, line), (2, last), (3, space))
    },
    **{
        f"LazyInstanceNorm{n}d": [of(getattr(nn, f"LazyInstanceNorm{n}d"), make)]
        for n, make in ((1, line), (2, last), (3, space))
    },
    "LazyLinear": [of(lambda: nn.LazyLinear(4), row)],
}

SKIPPED: dict[str, str] = {
    "Container": "holds modules, computes nothing",
    "Module": "the base class",
    "ModuleDict": "holds modules, computes nothing",
    "ModuleList": "holds modules, computes nothing",
    "ParameterDict": "holds parameters, computes nothing",
    "ParameterList": "holds parameters, computes nothing",
    "LinearCrossEntropyOptions": "an options record, not a module",
    "RNNBase": "the base of RNN, GRU and LSTM",
    "RNNCellBase": "the base of the cells",
    "SyncBatchNorm": "needs a GPU",
}
