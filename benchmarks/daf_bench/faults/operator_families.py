"""Families of PyTorch's operators: what reads tensors and returns tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from daf_bench.faults.family import Family, Step, gradients_of, of_function, of_module

_Make = Callable[[], Step]


def operator_families() -> dict[str, Family]:
    """Return every family by name."""
    kinds = (
        _convolutions() | _products() | _recurrent() | _pools() | _norms() | _elementwise(),
        _indexing() | _linear_algebra() | _losses() | _resampling(),
    )
    return {name: Family(name, make) for kind in kinds for name, make in kind.items()}


def _convolutions() -> dict[str, _Make]:
    image = (4, 8, 24, 24)
    depthwise = partial(nn.Conv2d, 8, 8, 3, padding=1, groups=8)
    return {
        "conv1d": of_module(lambda: nn.Conv1d(8, 16, 5, padding=2), 8, 8, 200),
        "conv2d": of_module(lambda: nn.Conv2d(8, 32, 3, padding=1), *image),
        "conv2d strided": of_module(lambda: nn.Conv2d(8, 16, 7, stride=2), *image),
        "conv2d dilated": of_module(lambda: nn.Conv2d(8, 16, 3, dilation=2), *image),
        "conv2d depthwise": of_module(depthwise, *image),
        "conv2d channels last": of_module(_channels_last, *image),
        "conv2d bfloat16": of_module(lambda: nn.Conv2d(8, 16, 3), *image, dtype=torch.bfloat16),
        "conv3d": of_module(lambda: nn.Conv3d(4, 8, 3, padding=1), 2, 4, 8, 16, 16),
        "conv1d transposed": of_module(lambda: nn.ConvTranspose1d(8, 16, 5, stride=2), 8, 8, 200),
        "conv2d transposed": of_module(lambda: nn.ConvTranspose2d(8, 16, 3, stride=2), *image),
        "conv3d transposed": of_module(lambda: nn.ConvTranspose3d(4, 8, 3), 2, 4, 6, 12, 12),
    }


def _channels_last() -> nn.Module:
    first = nn.Conv2d(8, 16, 3, padding=1)
    return nn.Sequential(first, nn.ReLU(), nn.Conv2d(16, 8, 1)).to(
        memory_format=torch.channels_last  # type: ignore[call-overload]
    )


def _products() -> dict[str, _Make]:
    heads = (2, 4, 48, 16)
    attend = F.scaled_dot_product_attention
    masked = partial(attend, dropout_p=0.1)
    encoder = partial(nn.TransformerEncoderLayer, 64, 4, 128, dropout=0.1, batch_first=True)
    return {
        "linear": of_module(lambda: nn.Linear(256, 192), 128, 256),
        "linear bfloat16": of_module(lambda: nn.Linear(256, 192), 128, 256, dtype=torch.bfloat16),
        "bilinear": of_function(F.bilinear, (64, 24), (64, 32), (16, 24, 32)),
        "matrix product": of_function(torch.matmul, (96, 128), (128, 160)),
        "batched product": of_function(torch.bmm, (8, 48, 64), (8, 64, 48)),
        "einsum": of_function(
            partial(torch.einsum, "bik,bjk,bl->ijl"), (6, 24, 16), (6, 20, 16), (6, 8)
        ),
        "attention": of_function(attend, heads, heads, heads),
        "attention causal": of_function(partial(attend, is_causal=True), heads, heads, heads),
        "attention dropout": of_function(masked, heads, heads, heads),
        "multi-head attention": _multi_head,
        "transformer encoder": of_module(encoder, 4, 32, 64),
    }


def _multi_head() -> Step:
    module = nn.MultiheadAttention(64, 4, batch_first=True)
    given = torch.randn(4, 32, 64, requires_grad=True)
    leaves = [given, *module.parameters()]
    return lambda: gradients_of(module(given, given, given)[0], leaves)


def _recurrent() -> dict[str, _Make]:
    def first(found: object) -> Tensor:
        assert isinstance(found, tuple)
        whole: Tensor = found[0]
        return whole

    return {
        "lstm": of_module(lambda: nn.LSTM(48, 48, 2), 16, 24, 48, output=first),
        "lstm bidirectional": of_module(
            lambda: nn.LSTM(32, 32, bidirectional=True, batch_first=True), 24, 12, 32, output=first
        ),
        "gru": of_module(lambda: nn.GRU(48, 48), 12, 24, 48, output=first),
        "rnn": of_module(lambda: nn.RNN(48, 48), 12, 24, 48, output=first),
        "lstm cell": of_module(lambda: nn.LSTMCell(64, 64), 48, 64, output=first),
    }


def _pools() -> dict[str, _Make]:
    image = (4, 8, 32, 32)
    return {
        "max pool 1d": of_module(lambda: nn.MaxPool1d(3), 8, 16, 160),
        "max pool 2d": of_module(lambda: nn.MaxPool2d(3, 2), *image),
        "max pool 3d": of_module(lambda: nn.MaxPool3d(2), 2, 8, 12, 16, 16),
        "average pool 2d": of_module(lambda: nn.AvgPool2d(2), *image),
        "average pool 3d": of_module(lambda: nn.AvgPool3d(2), 2, 8, 12, 16, 16),
        "adaptive average pool": of_module(lambda: nn.AdaptiveAvgPool2d(5), *image),
        "adaptive max pool": of_module(lambda: nn.AdaptiveMaxPool2d(5), *image),
        "fractional max pool": of_module(
            lambda: nn.FractionalMaxPool2d(3, output_ratio=0.5), *image
        ),
        "power pool": of_module(lambda: nn.LPPool2d(2, 2), *image),
    }


def _norms() -> dict[str, _Make]:
    image = (4, 16, 20, 20)
    return {
        "batch norm 1d": of_module(lambda: nn.BatchNorm1d(64), 256, 64),
        "batch norm 2d": of_module(lambda: nn.BatchNorm2d(16), *image),
        "batch norm 3d": of_module(lambda: nn.BatchNorm3d(8), 2, 8, 10, 12, 12),
        "layer norm": of_module(lambda: nn.LayerNorm(128), 96, 128),
        "group norm": of_module(lambda: nn.GroupNorm(4, 16), *image),
        "instance norm": of_module(lambda: nn.InstanceNorm2d(16, affine=True), *image),
        "rms norm": of_module(lambda: nn.RMSNorm(128), 96, 128),
        "local response norm": of_module(lambda: nn.LocalResponseNorm(3), *image),
        "weight norm": of_module(
            lambda: nn.utils.parametrizations.weight_norm(nn.Linear(128, 96)), 64, 128
        ),
        "spectral norm": of_module(
            lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(128, 96)).eval(), 64, 128
        ),
    }


def _elementwise() -> dict[str, _Make]:
    shape = (96, 160)
    gated = nn.Sequential
    return {
        "activations": of_module(
            lambda: gated(nn.ReLU(), nn.GELU(), nn.SiLU(), nn.Tanh(), nn.Softplus()), *shape
        ),
        "softmax": of_function(lambda x: F.softmax(x, 1) + F.log_softmax(x, 0), shape),
        "dropout": of_function(lambda x: F.dropout(x, 0.3), shape),
        "gated unit": of_function(F.glu, shape),
        "reductions": of_function(
            lambda x: x.sum(0) + x.amax(0) + x.var(0) + x.logsumexp(0) + x.median(), shape
        ),
        "cumulative": of_function(
            lambda x: x.cumsum(0) + x.cummax(1).values + x.logcumsumexp(1), shape
        ),
        "pairs broadcast": of_function(
            lambda a, b: a * b + torch.where(a > b, a, b), (96, 1, 40), (48, 40)
        ),
        "complex numbers": of_function(lambda x: torch.view_as_complex(x).exp(), (80, 96, 2)),
        "fft": of_function(lambda x: torch.fft.rfft2(x), (4, 48, 48)),
        "fft inverse": of_function(lambda x: torch.fft.irfft(torch.fft.fft(x)), (32, 250)),
        "short-time fft": of_function(_short_time, (4, 4000)),
    }


def _short_time(signal: Tensor) -> Tensor:
    window = torch.hann_window(256)
    return torch.stft(signal, 256, 64, window=window, return_complex=True)


def _indexing() -> dict[str, _Make]:
    def drawn(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=torch.Generator().manual_seed(3))

    words = drawn(200, 64, 24)
    return {
        "embedding": of_function(lambda table: F.embedding(words, table), (200, 64)),
        "embedding bag": of_function(lambda table: F.embedding_bag(words, table), (200, 64)),
        "embedding sparse": of_function(
            lambda table: F.embedding(words, table, sparse=False, scale_grad_by_freq=True),
            (200, 64),
        ),
        "sort": of_function(lambda x: x.sort(1).values, (96, 200)),
        "top k": of_function(lambda x: x.topk(20, 1).values, (96, 200)),
        "index": of_function(lambda x: x[drawn(96, 300)], (96, 128)),
        "index select": of_function(lambda x: x.index_select(0, drawn(96, 200)), (96, 128)),
        "gather": of_function(lambda x: x.gather(0, drawn(96, 150, 128)), (96, 128)),
        "scatter": of_function(
            lambda x: x.new_zeros(64, 128).scatter_add(0, drawn(64, 96, 128), x), (96, 128)
        ),
        "masked": of_function(lambda x: x[x > 0].sum() + x.masked_fill(x < 0, 2.0), (96, 200)),
        "unique": of_function(lambda x: x[torch.unique(drawn(96, 300))], (96, 128)),
        "concatenate": of_function(
            lambda a, b: torch.cat([a, b, a]).roll(3, 0), (64, 128), (32, 128)
        ),
        "pad and flip": of_function(
            lambda x: F.pad(x, (3, 3, 2, 2), "reflect").flip(2), (4, 8, 24, 24)
        ),
        "unfold and fold": of_function(
            lambda x: F.fold(F.unfold(x, 3, padding=1), (24, 24), 3, padding=1), (4, 8, 24, 24)
        ),
    }


def _linear_algebra() -> dict[str, _Make]:
    square = (3, 40, 40)
    positive = lambda x: x @ x.mT + 40 * torch.eye(40)  # noqa: E731
    linalg = torch.linalg
    return {
        "cholesky": of_function(lambda x: linalg.cholesky(positive(x)), square),
        "solve": of_function(lambda a, b: linalg.solve(positive(a), b), square, (3, 40, 8)),
        "triangular solve": of_function(
            lambda a, b: linalg.solve_triangular(positive(a).tril(), b, upper=False),
            square,
            (3, 40, 8),
        ),
        "inverse": of_function(lambda x: linalg.inv(positive(x)), square),
        "determinant": of_function(lambda x: linalg.slogdet(positive(x)).logabsdet, square),
        # No least squares: plain PyTorch's are not the same bits twice (torch 2.13, by LAPACK).
        "qr": of_function(lambda x: linalg.qr(x).R, (3, 48, 32)),
        "svd": of_function(lambda x: linalg.svdvals(x), (3, 40, 32)),
        "symmetric eigenvalues": of_function(lambda x: linalg.eigvalsh(x + x.mT), square),
        "eigenvalues": of_function(lambda x: linalg.eigvals(x).abs(), (2, 24, 24)),
        "lu": of_function(lambda x: linalg.lu(positive(x))[2], square),
        "pseudo-inverse": of_function(linalg.pinv, (3, 40, 24)),
        "matrix exponential": of_function(linalg.matrix_exp, square, scale=0.1),
        "distances": of_function(torch.cdist, (64, 32), (80, 32)),
    }


def _losses() -> dict[str, _Make]:
    labels = torch.randint(40, (128,), generator=torch.Generator().manual_seed(4))
    scores, pair = (128, 40), ((96, 64), (96, 64))
    lengths = torch.full((6,), 20), torch.full((6,), 7)
    return {
        "cross entropy": of_function(
            lambda x: F.cross_entropy(x, labels, label_smoothing=0.1), scores
        ),
        "likelihood": of_function(lambda x: F.nll_loss(F.log_softmax(x, 1), labels), scores),
        "binary cross entropy": of_function(
            lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()), *pair
        ),
        "square and absolute": of_function(
            lambda x, y: F.mse_loss(x, y) + F.l1_loss(x, y) + F.huber_loss(x, y), *pair
        ),
        "divergence": of_function(
            lambda x, y: F.kl_div(F.log_softmax(x, 1), F.softmax(y, 1), reduction="batchmean"),
            *pair,
        ),
        "ctc": of_function(
            lambda x: F.ctc_loss(F.log_softmax(x, 2), labels[:42].view(6, 7) % 11 + 1, *lengths),
            (20, 6, 12),
        ),
        "triplet": of_function(F.triplet_margin_loss, *pair, (96, 64)),
        "cosine": of_function(lambda x, y: F.cosine_similarity(x, y), *pair),
        "multi margin": of_function(lambda x: F.multi_margin_loss(x, labels), scores),
    }


def _resampling() -> dict[str, _Make]:
    image = (2, 8, 20, 20)

    def resized(mode: str) -> _Make:
        return of_function(lambda x: F.interpolate(x, scale_factor=2.0, mode=mode), image)

    def warped(x: Tensor) -> Tensor:
        turn = torch.tensor([[0.9, 0.1, 0.0], [-0.1, 0.9, 0.1]]).expand(2, 2, 3)
        return F.grid_sample(x, F.affine_grid(turn, list(image), False), align_corners=False)

    return {
        "nearest": resized("nearest"),
        "bilinear resizing": resized("bilinear"),
        "bicubic resizing": resized("bicubic"),
        "grid sample": of_function(warped, image),
        "pixel shuffle": of_function(lambda x: F.pixel_shuffle(x, 2), image),
    }
