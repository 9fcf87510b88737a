"""Fused layer and root-mean-square normalisation against PyTorch's own, and formulas in float64."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.capture.compress import compress
from daf.codecs.codes import ValueCode
from daf.core.errors import DafError, SavedTensorError
from daf.core.policy import FUSED_OPERATORS, KEEP, Method, Need, coded_policy, with_fused_operators
from daf.operators import row_norm as function

pytestmark = pytest.mark.smoke


class Normed(nn.Module):
    """A normalisation with something before and behind it."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x * 1) * 1


def make(kind: type[nn.Module], shape: Any, **options: Any) -> nn.Module:
    norm = kind(shape, **options)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.uniform_(0.5, 2).mul_(torch.randn_like(parameter).sign())
    return norm


def train(model: nn.Module, x: Tensor, bits: int | str | None) -> dict[str, Tensor]:
    """Result and gradients; ``bits`` None: plain PyTorch, else fused."""
    model = copy.deepcopy(model)
    leaf = x.detach().clone().requires_grad_(x.requires_grad)
    if bits is None:
        out = model(leaf)
    else:
        capture = compress(model, bits, fused=True)
        with capture:
            out = model(leaf)
        assert [bool(r.pattern) for r in capture.fusions()] == [True], capture.fusions()
        assert out.grad_fn.next_functions[0][0].name() == "FusedRowNormBackward"
    torch.manual_seed(5)
    out.backward(torch.randn(out.shape).to(out.dtype))
    if bits is not None:
        assert capture.stats.held_bytes == capture.stats.plain_bytes == 0
    found = {"out": out.detach(), "x": leaf.grad}
    found |= {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: value for name, value in found.items() if value is not None}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        assert found[name].stride() == value.stride(), name
        scale = float(value.abs().max()) + 1e-6
        assert (found[name] - value).abs().max() <= 1e-5 * scale, name


KINDS = [
    (nn.LayerNorm, {}),
    (nn.LayerNorm, {"bias": False}),
    (nn.LayerNorm, {"elementwise_affine": False}),
    (nn.LayerNorm, {"eps": 0.3}),
    (nn.RMSNorm, {}),
    (nn.RMSNorm, {"elementwise_affine": False}),
    (nn.RMSNorm, {"eps": 0.3}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)
@pytest.mark.parametrize(("shape", "row"), [((6, 5, 48), 48), ((9, 4, 33), (4, 33))], ids=str)
def test_uncoded_everything_is_pytorch_s(kind, options, shape, row) -> None:
    torch.manual_seed(1)
    model = Normed(make(kind, row, **options))
    x = (torch.randn(shape) * 2 + 3).requires_grad_()
    assert_close(train(model, x, "exact"), train(model, x, None))


@pytest.mark.parametrize("frozen", ["input", "parameters", "weight"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    torch.manual_seed(1)
    model = Normed(make(nn.LayerNorm, 64))
    model.norm.requires_grad_(frozen != "parameters")
    model.norm.weight.requires_grad_(frozen == "input")
    x = torch.randn(40, 64, requires_grad=frozen != "input")
    assert_close(train(model, x, "exact"), train(model, x, None))


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 30),
    length=st.integers(3, 600),
    kind=st.sampled_from([nn.LayerNorm, nn.RMSNorm]),
    mean=st.floats(-20, 20),
)
def test_any_rows(rows, length, kind, mean) -> None:
    torch.manual_seed(rows * length)
    rows += -(-1024 // length)  # not small
    model = Normed(make(kind, length, eps=0.01))
    x = (torch.randn(rows, length) + mean).requires_grad_()
    wide = model.double()
    expected = train(wide, x.double(), None)
    found = train(model.float(), x, "exact")
    for name, value in expected.items():
        scale = max(float(value.abs().max()), 1.0)
        assert (found[name] - value).abs().max() <= 3e-5 * scale, name


@pytest.mark.parametrize("centred", [True, False])
def test_the_formulas_are_the_derivative(centred: bool) -> None:
    """In float64 against PyTorch's own backward, and that by differences."""
    torch.manual_seed(0)
    x = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    gamma, beta = (torch.randn(7, dtype=torch.float64, requires_grad=True) for _ in "gb")

    def norm(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        if centred:
            return F.layer_norm(x, (7,), gamma, beta, 1e-5)
        return F.rms_norm(x, (7,), gamma, 1e-5) + beta

    assert torch.autograd.gradcheck(norm, (x, gamma, beta))
    gradient = torch.randn(4, 7, dtype=torch.float64)
    expected = torch.autograd.grad(norm(x, gamma, beta), (x, gamma, beta), gradient)
    moved = x - x.mean(1, keepdim=True) if centred else x
    r = (moved.square().mean(1, keepdim=True) + 1e-5).rsqrt()
    y, g = moved * r, gradient * gamma
    offset = g.mean(1, keepdim=True) if centred else 0
    of_x = r * (g - offset - y * (g * y).mean(1, keepdim=True))
    found = (of_x, (gradient * y).sum(0), gradient.sum(0))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


# --- coded ----------------------------------------------------------------------------------


def gradients_of_seeds(kind: type[nn.Module], bits: int, seeds: int) -> Any:
    """(seeds, …) gradients of input and gamma under fresh codes, and the true ones."""
    torch.manual_seed(6)
    model = Normed(make(kind, 192))
    x = torch.randn(64, 192, requires_grad=True)
    true = train(model, x, None)
    capture, coded = compress(model, bits, fused=True), []
    for _ in range(seeds):
        with capture:
            out = model(x)
        torch.manual_seed(5)
        coded.append(torch.autograd.grad(out, (x, model.norm.weight), torch.randn_like(out)))
    found = (torch.stack(part) for part in zip(*coded, strict=True))
    return tuple(zip(found, (true["x"], true["norm.weight"]), strict=True))


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_coded_gradients_are_unbiased_but_for_the_norm_s_second_use(kind) -> None:
    seeds = 64
    for found, true in gradients_of_seeds(kind, 2, seeds):
        energy = true.square().sum()
        noise = (found - true).square().sum() / seeds / energy
        # What averaging leaves of the noise is taken off.
        bias = ((found.mean(0) - true).square().sum() - found.var(0).sum() / seeds) / energy
        assert 0 < noise < 0.2
        assert abs(bias) < 0.001


def test_more_bits_come_closer() -> None:
    errors = []
    for bits in (1, 2, 4, 8):
        (found, true), _ = gradients_of_seeds(nn.LayerNorm, bits, 2)
        errors.append(float((found - true).square().mean()))
    assert errors == sorted(errors, reverse=True)
    assert errors[3] < 0.01 * errors[1]


class Projections(nn.Module):
    """A normalisation whose result three linear layers read."""

    def __init__(self, norm: nn.Module, width: int) -> None:
        super().__init__()
        self.norm = norm
        self.parts = nn.ModuleList(nn.Linear(width, width) for _ in "qkv")

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x * 1)
        return torch.cat([part(y) for part in self.parts], -1)


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("chunked", [False, True])
def test_one_code_serves_the_norm_and_every_linear_layer_behind(kind, chunked) -> None:
    torch.manual_seed(7)
    model = Projections(make(kind, 64), 64)
    x = torch.randn(8, 32, 64, requires_grad=True)
    capture = compress(model, 4, fused=True, chunked=chunked)
    with capture:
        out = model(x)
    sites = {str(r.site): r for r in capture.sites()}
    linears = [r for name, r in sites.items() if ":linear#" in name]
    assert [(r.treatment.method, r.held_bytes) for r in linears] == [(Method.REDERIVE, 0)] * 3
    (norm,) = (r for r in sites.values() if r.need is Need.NORM)
    vectors = 4 * (8 * 32 + 2 * 64)  # scales of the rows; gamma and beta
    assert norm.held_bytes <= x.numel() * 4.125 / 8 + vectors + 1024
    gradient = torch.randn_like(out)
    found = torch.autograd.grad(out, list(model.parameters()), gradient)
    true = torch.autograd.grad(model(x), list(model.parameters()), gradient)
    for one, other in zip(found, true, strict=True):
        assert (one - other).square().sum() < 0.02 * other.square().sum()


def test_backward_decodes_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ValueCode, "decode", None)
    monkeypatch.setattr(function.RowsHeld, "restore", None)
    model = Normed(make(nn.LayerNorm, 64))
    x = torch.randn(64, 64, requires_grad=True)
    with compress(model, 2, fused=True):
        out = model(x)
    out.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("affine", [True, False])
def test_plain_s_bytes_are_those_that_plain_holds(kind, affine) -> None:
    """As a capture without fused operators counts them, while it watches PyTorch's own."""
    model = nn.Sequential(kind(64, elementwise_affine=affine), nn.Linear(64, 8))
    x = torch.randn(32, 64, requires_grad=True)
    told = []
    for fused in (False, True):
        capture = compress(model, 2, fused=fused)
        with capture:
            out = model(x * 1)
        told.append(capture.stats.plain_bytes)
        assert sum(r.plain_bytes for r in capture.sites()) == capture.stats.plain_bytes
        del out
        assert capture.stats.plain_bytes == 0
    assert told[0] == told[1]


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}], ids=str)
def test_the_site_is_that_of_the_unfused_step(options) -> None:
    """So that a policy for single sites means the same."""
    norm, x, found = make(nn.LayerNorm, 64, **options), torch.randn(64, 64, requires_grad=True), []
    for fused in (False, True):
        capture = compress(norm, 2, fused=fused)
        with capture:
            norm(x * 1)
        found.append([(r.site, r.treatment) for r in capture.sites() if r.need is Need.NORM])
    assert found[0] == found[1]
    assert len(found[0]) == 1


def test_a_pool_that_gives_up_planes_still_gives_a_gradient() -> None:
    torch.manual_seed(9)
    model = Normed(make(nn.LayerNorm, 512))
    x = torch.randn(512, 512, requires_grad=True)
    capture = compress(model, 4, fused=True, pool_bytes=1 << 22)
    with capture:
        out = model(x)
    capture.pool_bytes = capture.stats.held_bytes // 2
    assert capture.stats.evicted_planes > 0
    gradient = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, x, gradient)
    (true,) = torch.autograd.grad(model(x), x, gradient)
    assert (found - true).square().sum() < 0.05 * true.square().sum()


# --- where it is left alone -----------------------------------------------------------------


def left_alone(model: nn.Module, x: Tensor) -> str:
    """Why; everything must then be as without fused operators."""
    capture = compress(model, "exact", fused=True)
    with capture:
        out = model(x)
    (report,) = capture.fusions()
    assert (report.module, report.call, report.pattern) == ("norm", 0, "")
    assert report.operator == ("layer_norm" if isinstance(model.norm, nn.LayerNorm) else "rms_norm")
    assert torch.equal(out, model(x))
    return report.reason


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_other_calls_are_left_alone_with_the_reason(kind) -> None:
    model, x = Normed(make(kind, 64)), torch.randn(64, 64, requires_grad=True)
    assert left_alone(model, x[:4]) == "its input is small"
    assert left_alone(model, x.t().contiguous().t()) == "its input is not contiguous"
    assert left_alone(copy.deepcopy(model).double(), x.double()).startswith("its input is no float")
    assert left_alone(copy.deepcopy(model).bfloat16(), x.bfloat16()).startswith("its input is no")
    with torch.autocast("cpu", torch.bfloat16):
        assert left_alone(model, x) == "autocast is on"
    with torch.no_grad():
        assert left_alone(model, x) == "it needs no gradient"
    still = copy.deepcopy(model).requires_grad_(False)
    assert left_alone(still, x.detach()) == "it needs no gradient"


def test_odd_arguments_raise_what_pytorch_raises() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(x, (63,))

    with pytest.raises(RuntimeError, match="normalized_shape"), compress(Odd(), 2, fused=True):
        Odd()(torch.randn(64, 64, requires_grad=True))


def test_checkpointed_calls_are_left_alone() -> None:
    from torch.utils.checkpoint import checkpoint

    model, x = Normed(make(nn.LayerNorm, 64)), torch.randn(64, 64, requires_grad=True)
    capture = compress(model, 2, fused=True)
    with capture:
        out = checkpoint(model, x, use_reentrant=False)
    (report,) = capture.fusions()
    assert "checkpointing" in report.reason
    (found,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(found, torch.autograd.grad(model(x).sum(), x)[0])


def test_calls_within_one_module_are_told_apart() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(x, (64,)) + F.layer_norm(x[:4], (64,)) + F.rms_norm(x, (64,))[:1]

    model, x = Twice(), torch.randn(64, 64, requires_grad=True)
    capture = compress(model, 2, fused=True)
    with capture, pytest.raises(RuntimeError):
        model(x)  # shapes do not fit: only the calls matter
    told = {(r.operator, r.call): r.pattern for r in capture.fusions()}
    assert told == {("layer_norm", 0): "layer_norm", ("layer_norm", 1): ""}


# --- autograd's rules -----------------------------------------------------------------------


def fused_step(x: Tensor, bits: int | str = 8) -> tuple[Tensor, nn.Module]:
    norm = make(nn.LayerNorm, 64)
    with compress(norm, bits, fused=True):
        out = norm(x * 1)
    assert out.grad_fn.name() == "FusedRowNormBackward"
    return out, norm


def test_a_gradient_of_one_s_own_is_written_over_and_no_other() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    places: dict[str, int] = {}

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
            ctx.place = name
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            if ctx.place == "before":
                places["before"] = gradient.data_ptr()
                return gradient, None
            passed = gradient.clone()
            places["behind"] = passed.data_ptr()
            return passed, None

    norm = make(nn.LayerNorm, 64)
    for kept in (False, True):
        held: list[Tensor] = []
        with compress(norm, 8, fused=True):
            out = norm(Spy.apply(x, "before"))
        if kept:
            out.register_hook(held.append)
        behind = Spy.apply(out, "behind")
        (behind * torch.ones(64, 64)).sum().backward()
        assert (places["before"] == places["behind"]) is not kept
        assert not kept or torch.equal(held[0], torch.ones(64, 64))


def test_a_gradient_in_another_layout_is_understood() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    gradient = torch.randn(64, 64).t()
    out, norm = fused_step(x, "exact")
    (found,) = torch.autograd.grad(out, x, gradient)
    (true,) = torch.autograd.grad(norm(x), x, gradient)
    torch.testing.assert_close(found, true, rtol=1e-4, atol=1e-5)
    out, norm = fused_step(x, "exact")
    (found,) = torch.autograd.grad(out.sum(), x)  # expanded from one number
    (true,) = torch.autograd.grad(norm(x).sum(), x)
    torch.testing.assert_close(found, true, rtol=1e-4, atol=1e-5)


def test_backward_twice_needs_retain_graph() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    out, _ = fused_step(x, 2)
    first = torch.autograd.grad(out.square().sum(), x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(out.square().sum(), x)[0], first)
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


def test_parameters_may_change_before_backward() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    out, norm = fused_step(x, "exact")
    gradient = torch.randn_like(out)
    (true,) = torch.autograd.grad(norm(x), x, gradient)
    with torch.no_grad():
        norm.weight.fill_(100)
    (found,) = torch.autograd.grad(out, x, gradient)
    torch.testing.assert_close(found, true, rtol=1e-4, atol=1e-5)


def test_an_input_kept_and_changed_is_reported_and_one_coded_comes_without_its_means() -> None:
    for kind, bits in ((nn.LayerNorm, "exact"), (nn.LayerNorm, 8), (nn.RMSNorm, 8)):
        norm, y = make(kind, 64), 5 * torch.randn(64, 64, requires_grad=True) + 3
        before = y.detach() - y.detach().mean(-1, keepdim=True) * (kind is nn.LayerNorm)
        with compress(norm, bits, fused=True):
            out = norm(y)
        with torch.no_grad():
            y.mul_(2)
        if bits == "exact":
            with pytest.raises(SavedTensorError, match="inplace"):
                _ = out.grad_fn.saved_tensors
        else:
            (found,) = out.grad_fn.saved_tensors
            assert (found - before).norm() < 0.02 * before.norm()
            out.sum().backward()


def test_the_caller_s_own_batch_is_kept_by_reference() -> None:
    """It is alive anyway: a code would only add bytes."""
    model = Normed(make(nn.LayerNorm, 64)).norm
    capture, x = Capture(model), torch.randn(64, 64)
    policy = with_fused_operators(coded_policy(2))
    with capture.step(policy, 0, 0, batch=x):
        out = model(x)
    (norm,) = (r for r in capture.sites() if r.need is Need.NORM)
    assert norm.treatment == KEEP
    assert norm.held_bytes == 4 * 2 * (64 + 64)  # both vectors of the rows; gamma and beta
    out.sum().backward()


def test_a_treatment_that_is_unsound_is_refused() -> None:
    norm, x = make(nn.LayerNorm, 64), torch.randn(64, 64, requires_grad=True)
    for need_treatment in (Method.SPILL, Method.MASK):
        treatment = replace(KEEP, method=need_treatment)
        policy = replace(coded_policy(2), by_need={Need.NORM: treatment}, operators=FUSED_OPERATORS)
        capture = compress(norm, policy=policy)
        with pytest.raises(DafError, match="layer_norm"), capture:
            norm(x * 1)
        assert capture.stats.held_bytes == capture.stats.plain_bytes == 0
