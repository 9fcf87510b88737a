"""The fused operator against PyTorch's own sequence, and a plain formula in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.capture.compress import compress
from daf.core.errors import SavedTensorError
from daf.core.policy import Method, Need, coded_policy, with_fused_operators
from daf.operators.batch_norm import function

pytestmark = pytest.mark.smoke

FORMATS = [torch.contiguous_format, torch.channels_last]


class Block(nn.Module):
    """A batch normalisation behind something, perhaps an addition, and a ReLU."""

    def __init__(self, norm: nn.Module, *, add: bool, inplace: bool = False) -> None:
        super().__init__()
        self.norm, self.add, self.inplace = norm, add, inplace

    def forward(self, x: Tensor, addend: Tensor) -> Tensor:
        y = self.norm(x * 1)
        if self.add and self.inplace:
            y += addend * 1
        elif self.add:
            y = y + addend * 1
        return F.relu(y, inplace=self.inplace) * 1


def make_norm(channels: int, **options: Any) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, **options)
    if norm.affine:
        with torch.no_grad():
            norm.weight.uniform_(0.5, 2).mul_(torch.randn(channels).sign())
            norm.bias.uniform_(-1, 1)
    return norm


def train(
    block: nn.Module, inputs: tuple[Tensor, ...], bits: int | str | None, entries: int = 2
) -> dict[str, Tensor]:
    """Everything that ``entries`` steps computed; ``bits`` None: plain PyTorch, else fused."""
    block = copy.deepcopy(block)
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    capture = compress(block, bits, fused=True) if bits is not None else None
    for _ in range(entries):
        for tensor in (*leaves, *block.parameters()):
            tensor.grad = None
        if capture is None:
            out = block(*leaves)
        else:
            with capture:
                out = block(*leaves)
        torch.manual_seed(5)
        out.backward(torch.randn_like(out))
    if capture is not None:
        assert [bool(r.pattern) for r in capture.fusions()] == [True], capture.fusions()
        assert out.grad_fn.next_functions[0][0].name() == "FusedNormBackward"
        assert capture.stats.held_bytes == capture.stats.plain_bytes == 0
    found = {"out": out.detach()}
    found |= {f"input {i}": x.grad for i, x in enumerate(leaves) if x.grad is not None}
    found |= {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    return found | dict(block.named_buffers())


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance=2e-5) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        scale = float(value.abs().float().max()) + 1e-6
        assert (found[name] - value).abs().max() <= tolerance * scale, name
        if name == "out":
            assert found[name].stride() == value.stride()


def reference(
    x: Tensor, gamma: Tensor, beta: Tensor, addend: Tensor, gradient: Tensor, epsilon: float
) -> tuple[Tensor, ...]:
    """Result and gradients of input, gamma, beta, addend, by the formulas of ``fused``."""
    axes, shape = (0, 2, 3), (1, -1, 1, 1)
    mean = x.mean(axes)
    deviation = (x.var(axes, unbiased=False) + epsilon).sqrt()
    value = (x - mean.view(shape)) / deviation.view(shape)
    sum_ = value * gamma.view(shape) + beta.view(shape) + addend
    g = gradient * (sum_ > 0)
    product = (g * value).mean(axes).view(shape)
    centred = g - g.mean(axes).view(shape) - value * product
    dx = (gamma / deviation).view(shape) * centred
    return sum_.clamp(min=0), dx, (g * value).sum(axes), g.sum(axes), g


def test_the_formulas_are_the_derivative() -> None:
    """In float64 against PyTorch's own backward."""
    torch.manual_seed(0)
    x, addend = (torch.randn(4, 3, 5, 6, dtype=torch.float64, requires_grad=True) for _ in "xa")
    gamma, beta = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in "gb")
    out = F.relu(F.batch_norm(x, None, None, gamma, beta, True, 0.1, 1e-5) + addend)
    gradient = torch.randn_like(out)
    out.backward(gradient)
    found = reference(x, gamma, beta, addend, gradient, 1e-5)
    expected = (out, x.grad, gamma.grad, beta.grad, addend.grad)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("layout", FORMATS)
def test_uncoded_it_is_the_formulas_to_the_last_bits(layout: torch.memory_format) -> None:
    """A float32 operator, judged in float64: nothing but rounding is lost."""
    torch.manual_seed(0)
    block = Block(make_norm(20), add=True)
    inputs = tuple(
        (torch.randn(6, 20, 7, 9) * 3 + 5).to(memory_format=layout).requires_grad_() for _ in "xa"
    )
    found = train(block, inputs, "exact")
    wide = [t.detach().double() for t in (inputs[0], block.norm.weight, block.norm.bias, inputs[1])]
    torch.manual_seed(5)
    gradient = torch.randn_like(found["out"]).double()
    names = ("out", "input 0", "norm.weight", "norm.bias", "input 1")
    for name, value in zip(names, reference(*wide, gradient, 1e-5), strict=True):
        error = (found[name] - value).abs().max() / value.abs().max()
        assert error < 3e-6, name


OPTIONS = [
    {},
    {"momentum": None},
    {"affine": False},
    {"track_running_stats": False},
    {"momentum": 0.7, "eps": 0.1},
]


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_everything_is_pytorch_s(options, add, inplace, layout) -> None:
    """Result, gradients and running statistics, after two steps, the second of them fused."""
    torch.manual_seed(1)
    block = Block(make_norm(12, **options), add=add, inplace=inplace)
    inputs = tuple(
        (torch.randn(4, 12, 6, 10) * 2 + 1).to(memory_format=layout).requires_grad_() for _ in "xa"
    )
    found, expected = train(block, inputs, "exact"), train(block, inputs, None)
    assert_close(found, expected)
    if "norm.num_batches_tracked" in expected:
        assert found["norm.num_batches_tracked"] == 2


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(2, 9),
    channels=st.integers(1, 40),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    layout=st.sampled_from(FORMATS),
    add=st.booleans(),
    offset=st.sampled_from([0.0, 30.0]),
)
def test_any_shape(batch, channels, height, width, layout, add, offset) -> None:
    torch.manual_seed(2)
    batch *= max(
        1, -(-1200 // (batch * channels * height * width))
    )  # smaller ones stay as they are
    shape = (batch, channels, height, width)
    if channels == 1 or height * width == 1:
        layout = torch.contiguous_format  # both at once; see the test of odd strides
    block = Block(make_norm(channels), add=add)
    inputs = tuple(
        (torch.randn(shape) + offset).to(memory_format=layout).requires_grad_() for _ in "xa"
    )
    x, addend = (each.detach().double() for each in inputs)
    sum_ = F.batch_norm(x, None, None, block.norm.weight.double(), block.norm.bias.double(), True)
    # Where ReLU's input is nothing but rounding, each may be right with another sign of it.
    assume(
        float((sum_ + addend if add else sum_).detach().abs().min()) > (1e-5 if offset else 1e-6)
    )
    expected = train(block, inputs, None)
    found = train(block, inputs, "exact")
    assert_close(found, expected, 2e-4 if offset else 5e-5)


@pytest.mark.parametrize("frozen", ["norm.weight", "norm.bias", "both", "input", "addend"])
def test_only_what_asks_gets_a_gradient(frozen: str) -> None:
    torch.manual_seed(3)
    block = Block(make_norm(8), add=True)
    for name, parameter in block.named_parameters():
        parameter.requires_grad_(name != frozen and frozen != "both")
    x, addend = (torch.randn(4, 8, 9, 9) for _ in "xa")
    inputs = (x.requires_grad_(frozen != "input"), addend.requires_grad_(frozen != "addend"))
    expected = train(block, inputs, None)
    assert_close(train(block, inputs, "exact"), expected)
    coded = train(block, inputs, 8)
    assert coded.keys() == expected.keys()


def test_the_mask_is_exact_and_nan_passes() -> None:
    """At one bit too; a value that is NaN lets the gradient through, as in PyTorch."""
    torch.manual_seed(4)
    block = Block(make_norm(8), add=True)
    x, addend = torch.randn(4, 8, 12, 12), torch.randn(4, 8, 12, 12)
    addend[0, 0, :3] = torch.nan
    inputs = (x.requires_grad_(), addend.requires_grad_())
    coded, plain = train(block, inputs, 1), train(block, inputs, None)
    assert torch.equal(coded["input 1"], plain["input 1"])
    torch.testing.assert_close(coded["out"], plain["out"], equal_nan=True)
    torch.testing.assert_close(coded["norm.bias"], plain["norm.bias"])


def test_statistics_stand_a_large_mean() -> None:
    """Means ten thousand deviations away: sums of float32 would lose the variance."""
    torch.manual_seed(5)
    x = (torch.randn(8, 4, 16, 16) + 1e4).requires_grad_()
    block = Block(make_norm(4), add=False)
    found = train(block, (x, x), "exact")
    wide = x.detach().double()
    variance = wide.var((0, 2, 3), unbiased=True) * (1 - 0.9**2) + 0.9**2
    torch.testing.assert_close(found["norm.running_var"].double(), variance, rtol=1e-4, atol=0)


# --- coded ----------------------------------------------------------------------------------


def gradients_of_seeds(layout: torch.memory_format, bits: int, seeds: int) -> tuple[Any, Any]:
    """(seeds, …) gradients of input and gamma under fresh codes, and the true ones."""
    torch.manual_seed(6)
    block = Block(make_norm(16), add=False)
    x = torch.randn(4, 16, 16, 16).to(memory_format=layout).requires_grad_()
    true = train(block, (x, x), None, 1)
    capture = compress(block, bits, fused=True)
    coded: list[tuple[Tensor, Tensor]] = []
    for _ in range(seeds + 1):
        x.grad = block.norm.weight.grad = None
        with capture:
            out = block(x, x)
        torch.manual_seed(5)
        out.backward(torch.randn_like(out))
        coded.append((x.grad.clone(), block.norm.weight.grad.clone()))
    found = tuple(torch.stack(part) for part in zip(*coded[1:], strict=True))
    return found, (true["input 0"], true["norm.weight"])


@pytest.mark.parametrize("layout", FORMATS)
def test_coded_gradients_are_unbiased_but_for_the_norm_s_second_use(layout) -> None:
    seeds = 48
    (inputs, gammas), (true_input, true_gamma) = gradients_of_seeds(layout, 2, seeds)

    def bias_share(found: Tensor, true: Tensor) -> float:
        """Squared bias over the squared gradient, without what averaging leaves of the noise."""
        error = (found.mean(0) - true).square().sum() - found.var(0).sum() / seeds
        return float(error / true.square().sum())

    noise = float((inputs - true_input).square().sum() / seeds / true_input.square().sum())
    assert 0 < noise < 0.02
    assert abs(bias_share(inputs, true_input)) < 0.001
    assert abs(bias_share(gammas, true_gamma)) < 0.001


def test_more_bits_come_closer() -> None:
    errors = []
    for bits in (1, 2, 4, 8):
        (inputs, _), (true, _) = gradients_of_seeds(torch.channels_last, bits, 2)
        errors.append(float((inputs - true).square().mean()))
    assert errors == sorted(errors, reverse=True)
    assert errors[3] < 0.01 * errors[1]


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("bits", [2, 6])
def test_the_convolution_behind_holds_nothing_and_reads_the_same_code(layout, bits) -> None:
    torch.manual_seed(7)
    norm = make_norm(8)
    model = nn.Sequential(norm, nn.ReLU(), nn.Conv2d(8, 4, 3, bias=False))
    x = torch.randn(4, 8, 12, 12).to(memory_format=layout).requires_grad_()
    capture = compress(model, bits, fused=True)
    for _ in range(2):
        with capture:
            out = model(x * 1)
    (conv,) = (r for r in capture.sites() if r.site.operator == "conv2d")
    assert conv.treatment.method is Method.REDERIVE
    assert conv.held_bytes == 0
    node = out.grad_fn.next_functions[0][0]
    assert node.name() == "FusedNormBackward"
    found, x_again = out.grad_fn._saved_input.detach(), node.saved_tensors[0].detach()
    value = F.batch_norm(x.detach(), None, None, norm.weight, norm.bias, True)
    true = F.relu(value).detach()
    limit = {2: 0.15, 6: 0.002}[bits]
    assert ((found - true).square().mean() / true.square().mean()).item() < limit
    assert ((x_again - x.detach()).square().mean() / x.square().mean()).item() < 0.2
    assert torch.equal(found == 0, true == 0)  # the mask


def test_sites_and_needs_are_those_of_the_unfused_step() -> None:
    """So that a policy for single sites means the same."""
    torch.manual_seed(8)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), make_norm(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    x = torch.randn(4, 3, 14, 14)
    capture, told = compress(model, 2, fused=True), []
    for _ in range(2):
        with capture:
            _out = model(x)
        rows = (r for r in capture.sites() if r.need in (Need.NORM, Need.SIGN, Need.LINEAR))
        told.append({str(r.site): (r.need, r.treatment) for r in rows})
        assert sum(r.plain_bytes for r in capture.sites()) == capture.stats.plain_bytes
        assert sum(r.held_bytes for r in capture.sites()) <= capture.stats.held_bytes
    assert told[0] == told[1]


def test_a_pool_that_gives_up_planes_still_gives_a_gradient() -> None:
    torch.manual_seed(9)
    model = nn.Sequential(make_norm(16), nn.ReLU())
    x = torch.randn(16, 16, 32, 32, requires_grad=True)
    capture = compress(model, 4, fused=True, pool_bytes=1 << 22)
    for _ in range(2):
        x.grad = None
        with capture:
            out = model(x * 1)
    before = capture.stats
    assert before.evicted_planes == 0
    capture.pool_bytes = before.held_bytes // 2
    assert capture.stats.evicted_planes > 0
    torch.manual_seed(5)
    gradient = torch.randn_like(out)
    out.backward(gradient)
    true = torch.autograd.grad(model(x * 1), x, gradient)[0]
    assert ((x.grad - true).square().sum() / true.square().sum()) < 0.05


# --- autograd's rules -----------------------------------------------------------------------


class Bare(nn.Module):
    """Whose result is the fused operator's own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = make_norm(8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(x * 1))


def fused_step(x: Tensor, bits: int | str = "exact") -> tuple[Tensor, nn.Module]:
    block = Bare()
    capture = compress(block, bits, fused=True)
    for _ in range(2):
        with capture:
            out = block(x)
    assert out.grad_fn.name() == "FusedNormBackward"
    return out, block


def true_gradient(block: nn.Module, x: Tensor, gradient: Tensor) -> Tensor:
    return torch.autograd.grad(block(x), x, gradient)[0]


@pytest.mark.parametrize("holder", ["root", "hook", "retain_grad", "sum", "view"])
def test_a_gradient_that_others_hold_is_not_written_over(holder: str) -> None:
    torch.manual_seed(10)
    x = torch.randn(4, 8, 9, 9, requires_grad=True)
    out, block = fused_step(x)
    gradient, kept = torch.randn_like(out), []
    before = gradient.clone()
    if holder == "root":
        out.backward(gradient)
        seen = gradient
    elif holder == "hook":
        out.register_hook(lambda g: kept.append(g))
        (out * 1).backward(gradient)
        (seen,) = kept
    elif holder == "view":
        out.register_hook(lambda g: kept.append(g[:1]))
        (out * 1).backward(gradient)
        (seen,) = kept
    elif holder == "retain_grad":
        out.retain_grad()
        (out * 1).backward(gradient)
        seen = out.grad
    else:
        other = torch.zeros_like(out, requires_grad=True)
        ((out + other) * 1).backward(gradient)
        seen = other.grad
    expected = before[:1] if holder == "view" else before
    assert torch.equal(seen, expected)
    torch.testing.assert_close(x.grad, true_gradient(block, x, before), rtol=1e-4, atol=1e-5)


def test_a_gradient_of_one_s_own_is_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise backward would need another tensor of that size."""
    owned_and_used: list[tuple[bool, bool]] = []
    backward = function.NormHeld.backward

    def spy(self: Any, gradient: Tensor, needs: Any, *, owned: bool) -> Any:
        found = backward(self, gradient, needs, owned=owned)
        owned_and_used.append((owned, found[0].data_ptr() == gradient.data_ptr()))
        return found

    monkeypatch.setattr(function.NormHeld, "backward", spy)
    x = torch.randn(4, 8, 9, 9, requires_grad=True)
    out, _ = fused_step(x)
    (out * 2).sum().backward()
    assert owned_and_used == [(True, True)]


def test_a_gradient_in_another_layout_is_understood() -> None:
    x = torch.randn(4, 8, 9, 9).to(memory_format=torch.channels_last).requires_grad_()
    out, block = fused_step(x)
    gradient = torch.randn(4, 8, 9, 9)
    out.backward(gradient)
    torch.testing.assert_close(x.grad, true_gradient(block, x, gradient), rtol=1e-4, atol=1e-5)
    out, block = fused_step(x)
    x.grad = None
    out.sum().backward()  # expanded from one number
    expected = true_gradient(block, x, torch.ones_like(out))
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-5)


def test_backward_twice_needs_retain_graph() -> None:
    x = torch.randn(4, 8, 9, 9, requires_grad=True)
    out, _ = fused_step(x, 2)
    first = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], first)
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


def test_an_input_kept_and_changed_is_reported() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = make_norm(8)

        def forward(self, x: Tensor) -> Tensor:
            y = x * 1
            out = F.relu(self.norm(y))
            with torch.no_grad():
                y.mul_(2)
            return out

    x = torch.randn(4, 8, 9, 9, requires_grad=True)
    model = Changing()
    for bits in ("exact", 4):
        capture = compress(model, bits, fused=True)
        for _ in range(2):
            with capture:
                out = model(x)
        assert [bool(r.pattern) for r in capture.fusions()] == [True]
        if bits == "exact":
            with pytest.raises(SavedTensorError, match="inplace"):
                out.sum().backward()
        else:
            out.sum().backward()


def test_parameters_may_change_before_backward() -> None:
    x = torch.randn(4, 8, 9, 9, requires_grad=True)
    out, block = fused_step(x)
    gradient = torch.randn_like(out)
    expected = true_gradient(block, x, gradient)
    with torch.no_grad():
        block.norm.weight.fill_(100)
    out.backward(gradient)
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-5)


def test_the_caller_s_own_batch_is_kept_by_reference() -> None:
    """It is alive anyway: a code would only add bytes."""
    model = nn.Sequential(make_norm(8), nn.ReLU())
    capture, x = Capture(model), torch.randn(4, 8, 20, 20)
    policy = with_fused_operators(coded_policy(2))
    for step in range(2):
        with capture.step(policy, 0, step, batch=x):
            model(x)
    (norm,) = (r for r in capture.sites() if r.need is Need.NORM)
    assert norm.treatment.method is Method.KEEP
    assert norm.held_bytes < x.nbytes / 100
