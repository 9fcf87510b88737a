"""One coded tensor serves the norm, its ReLU, the residual addition and the convolution."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.capture.compress import compress
from daf.core.policy import Method, coded_policy
from daf.saved_tensors import backward_rules

FORMATS = [torch.contiguous_format, torch.channels_last]


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, *, inplace: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=inplace)
        self.down = nn.Identity()
        if stride != 1:
            self.down = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.down(x)
        return self.relu(out)


def resnet(width: int = 16, *, inplace: bool = True) -> nn.Sequential:
    """ResNet-18's shape with the CIFAR stem."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=inplace),
    ]
    inputs = width
    for stage in range(4):
        outputs = width * 2**stage
        layers += [
            BasicBlock(inputs, outputs, 1 if stage == 0 else 2, inplace=inplace),
            BasicBlock(outputs, outputs, 1, inplace=inplace),
        ]
        inputs = outputs
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10)]
    return nn.Sequential(*layers, *head)


def step(model: nn.Module, x: Tensor, y: Tensor, bits: int | str) -> tuple[Any, list[Tensor]]:
    capture = compress(model, bits)
    with capture:
        loss = F.cross_entropy(model(x), y)
    stats, sites = capture.stats, capture.sites()
    loss.backward()
    assert capture.stats.held_bytes == capture.stats.plain_bytes == 0
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return (stats, sites), found


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("inplace", [True, False])
def test_resnet18_saves_eighteen_times_less(layout: torch.memory_format, inplace: bool) -> None:
    model = resnet(32, inplace=inplace).to(memory_format=layout)
    x, y = torch.randn(8, 3, 32, 32).to(memory_format=layout), torch.randint(0, 10, (8,))
    (stats, sites), coded = step(model, x, y, 2)
    assert stats.plain_bytes / stats.held_bytes >= 18
    convolutions = [r for r in sites if r.site.operator == "conv2d"]
    assert len(convolutions) == 19
    assert {r.treatment.method for r in convolutions} == {Method.REDERIVE}
    told = sum(r.held_bytes for r in sites)
    assert told < stats.held_bytes < 1.03 * told  # the pool's tables, records and free pages
    assert sum(r.plain_bytes for r in sites) == stats.plain_bytes
    (plain, _), exact = step(model, x, y, "plain")
    assert plain.plain_peak_bytes == plain.held_peak_bytes == stats.plain_peak_bytes
    far = torch.cat([a.flatten() - b.flatten() for a, b in zip(coded, exact, strict=True)]).norm()
    assert far < 0.5 * torch.cat([b.flatten() for b in exact]).norm()


@pytest.mark.parametrize("layout", FORMATS)
def test_more_bits_come_closer(layout: torch.memory_format) -> None:
    model = resnet(8).to(memory_format=layout)
    x, y = torch.randn(8, 3, 32, 32).to(memory_format=layout), torch.randint(0, 10, (8,))
    _, exact = step(model, x, y, "plain")
    errors = []
    for bits in (1, 2, 4, 8):
        _, coded = step(model, x, y, bits)
        pairs = zip(coded, exact, strict=True)
        errors.append(sum((a - b).square().sum().item() for a, b in pairs))
    assert all(later < 0.5 * earlier for earlier, later in itertools.pairwise(errors))


def test_older_versions_that_hide_packed_data_give_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = resnet(8)
    x, y = torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))
    (stats, sites), _ = step(model, x, y, 2)
    monkeypatch.setattr(backward_rules, "shows_packed_data", lambda _raw: False)
    (again, same), _ = step(model, x, y, 2)
    assert again == stats
    assert same == sites


class Restored:
    """Reads what backward will be given for every saved tensor, by node and slot."""

    def __init__(self, root: Tensor) -> None:
        self.nodes: dict[str, list[Any]] = {}
        todo, seen = [root.grad_fn], set()
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            self.nodes.setdefault(node.name(), []).append(node)
            todo += [below for below, _ in node.next_functions]

    def one(self, name: str, slot: str, place: int = 0) -> Tensor:
        return getattr(self.nodes[name][place], "_saved_" + slot).detach()


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_conv_input_is_the_masked_affine_of_the_decoded_norm(
    layout: torch.memory_format, dtype: torch.dtype
) -> None:
    norm, conv = nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3, bias=False)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
        norm.bias.uniform_(-1, 1)
    model = nn.Sequential(norm, nn.ReLU(), conv).to(dtype).to(memory_format=layout)
    x = (torch.randn(4, 8, 12, 12) * 3 + 1).to(dtype).to(memory_format=layout).requires_grad_()
    with Capture(model).step(coded_policy(2), 0, 0):
        out = model(x * 1)
    held = Restored(out)
    norm_name = "NativeBatchNormBackward0"
    mean, deviation = (held.one(norm_name, slot).float() for slot in ("result1", "result2"))
    normalised = held.one(norm_name, "input").float()
    normalised = (normalised - mean[:, None, None]) * deviation[:, None, None]
    gamma, beta = (p.detach().float()[:, None, None] for p in (norm.weight, norm.bias))
    mask = held.one("ReluBackward0", "result")
    expected = (normalised * gamma + beta) * mask.float()
    found = held.one("ConvolutionBackward0", "input")
    assert found.stride() == x.stride()
    assert torch.equal(found == 0, mask == 0)
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


def test_a_sum_is_decoded_as_the_sum_of_its_parts() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
            self.conv = nn.Conv2d(8, 4, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(F.relu(self.one(x * 2) + self.two(x.sin())))

    model = Sum()
    x = torch.randn(4, 8, 12, 12, requires_grad=True)
    capture = Capture(model)
    with capture.step(coded_policy(4), 0, 0):
        out = model(x)
    methods = {str(r.site): r.treatment.method for r in capture.sites()}
    assert methods["conv:conv2d#0[0]"] is Method.REDERIVE
    found = Restored(out).one("ConvolutionBackward0", "input")
    true = F.relu(
        F.batch_norm(x * 2, None, None, training=True)
        + F.batch_norm(x.sin(), None, None, training=True)
    )
    assert ((found - true).square().mean() / true.square().mean()).item() < 0.03


def test_layer_norm_serves_the_linear_behind_it() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 16))
    x = torch.randn(4, 20, 32)
    capture = Capture(model)
    with capture.step(coded_policy(4), 0, 0):
        loss = model(x)
    methods = {str(r.site): r.treatment.method for r in capture.sites()}
    assert methods["2:linear#0[0]"] is Method.REDERIVE
    true = model[1](model[0](x)).detach().reshape(-1, 64)
    found = Restored(loss).one("AddmmBackward0", "mat1")
    assert ((found - true).square().mean() / true.square().mean()).item() < 0.02


def test_gamma_and_beta_are_those_of_the_forward_pass() -> None:
    model = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, bias=False))
    x = torch.randn(4, 8, 12, 12, requires_grad=True)
    with Capture(model).step(coded_policy(2), 0, 0):
        out = model(x * 1)
    before = Restored(out).one("ConvolutionBackward0", "input")
    with torch.no_grad():
        model[0].weight.fill_(100)
        model[0].bias.fill_(100)
    assert torch.equal(Restored(out).one("ConvolutionBackward0", "input"), before)


def changed_behind(x: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(3)
    return x


@pytest.mark.parametrize("where", ["after the norm", "after the relu"])
def test_a_change_behind_autograd_s_back_is_not_overlooked(where: str) -> None:
    """What the convolution multiplies with is three times what the recipe would give."""

    class Changed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.conv = nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            if where == "after the norm":
                y = changed_behind(y)
            y = F.relu(y)
            if where == "after the relu":
                y = changed_behind(y)
            return self.conv(y)

    model, x = Changed(), torch.randn(4, 8, 12, 12, requires_grad=True)
    with Capture(model).step(coded_policy(4), 0, 0):
        out = model(x * 1)
    found = Restored(out).one("ConvolutionBackward0", "input")
    true = 3 * F.relu(F.batch_norm(x, None, None, training=True))
    assert ((found - true).square().mean() / true.square().mean()).item() < 0.03


def test_long_chains_of_additions_are_cut() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.BatchNorm2d(8) for _ in range(9)])
            self.convs = nn.ModuleList([nn.Conv2d(8, 8, 3, 1, 1, bias=False) for _ in range(9)])

        def forward(self, x: Tensor) -> Tensor:
            for norm, conv in zip(self.norms, self.convs, strict=True):
                x = F.relu(x + norm(conv(x)))
            return x

    model = Chain()
    capture = Capture(model)
    with capture.step(coded_policy(2), 0, 0):
        out = model(F.relu(model.norms[0](torch.randn(4, 8, 12, 12))))
    methods = [r.treatment.method for r in capture.sites() if r.site.operator == "conv2d"]
    assert methods.count(Method.ROTATED) >= 1
    assert methods.count(Method.REDERIVE) >= 6
    out.sum().backward()
    assert capture.stats.held_bytes == 0


def test_without_permission_everything_is_coded_by_itself() -> None:
    model = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, bias=False))
    allowed = coded_policy(2)
    policy = type(allowed)(allowed.name, allowed.by_need, rederive=False)
    capture = compress(model, policy=policy)
    with capture:
        out = model(torch.randn(4, 8, 12, 12, requires_grad=True) * 1)
    methods = {r.site.operator: r.treatment.method for r in capture.sites()}
    assert methods["conv2d"] is Method.ROTATED
    out.sum().backward()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("norm", [nn.LayerNorm(64), nn.GroupNorm(4, 64)], ids=str)
def test_gamma_and_beta_come_back_where_their_norm_saves_them(norm: nn.Module, fused: bool) -> None:
    """PyTorch's layer norm saves beta before its input, the others do not save it."""
    torch.manual_seed(0)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
        norm.bias.uniform_(-3, 3)
    model, x = nn.Sequential(norm, nn.Linear(64, 8)), torch.randn(128, 64, requires_grad=True)
    with compress(model, 8, fused=fused):
        out = model(x * 1)
    found, true = out.grad_fn._saved_mat1.detach(), norm(x).detach()
    assert (found - true).square().sum() < 1e-3 * true.square().sum()
