"""One code for GELU or SiLU and the layer behind, and what dropout leaves of it."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.capture.compress import compress
from daf.codecs.codes import ElementsCode, ValueCode
from daf.core.policy import KEEP, Method, Need, Treatment, coded_policy
from daf.kernels import Codec
from daf.kernels.normalisation import ElementCode
from daf.operators import activation as function
from daf.pool.store import PlainStore
from daf.saved_tensors.activation_codes import smooth_code

ACTIVATIONS = [nn.GELU(), nn.GELU(approximate="tanh"), nn.SiLU()]


class Feedforward(nn.Module):
    """Two linear layers with an activation, and perhaps dropout, between."""

    def __init__(self, activation: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)
        self.activation = activation
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(self.activation(self.up(x))))


def run(model: nn.Module, x: Tensor, bits: int, **options: Any) -> tuple[Any, list[Tensor], Any]:
    """(stats and sites by operator, gradients, capture) of one step."""
    capture = compress(model, bits, **options)
    torch.manual_seed(3)
    with capture:
        out = model(x)
    stats, sites = capture.stats, {r.site.module: r for r in capture.sites()}
    torch.manual_seed(5)
    gradients = torch.autograd.grad(out, list(model.parameters()), torch.randn(out.shape))
    assert capture.stats.held_bytes == capture.stats.plain_bytes == 0
    return (stats, sites), list(gradients), capture


def patterns(capture: Any) -> dict[str, tuple[str, str]]:
    return {r.module: (r.pattern, r.reason) for r in capture.fusions()}


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("chunked", [False, True])
def test_one_code_serves_the_activation_and_the_layer_behind(activation, chunked) -> None:
    torch.manual_seed(0)
    model, x = Feedforward(activation), torch.randn(64, 32, requires_grad=True)
    (stats, sites), found, capture = run(model, x, 2, fused=True, chunked=chunked)
    name = "silu" if isinstance(activation, nn.SiLU) else "gelu"
    assert patterns(capture) == {"activation": (f"{name} + layer behind", "")}
    assert sites["down"].treatment.method is Method.REDERIVE
    assert sites["down"].held_bytes == 0
    assert sites["activation"].treatment == Treatment(Method.ROTATED, 3)
    (apart, apart_sites), _, _ = run(model, x, 2)
    assert stats.plain_bytes == apart.plain_bytes
    both = apart_sites["activation"].held_bytes + apart_sites["down"].held_bytes
    assert sites["activation"].held_bytes < 0.8 * both
    true = torch.autograd.grad(
        model(x), list(model.parameters()), (torch.manual_seed(5), torch.randn(64, 32))[1]
    )
    for one, other in zip(found, true, strict=True):
        assert (one - other).square().sum() < 0.2 * other.square().sum()


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_the_result_is_pytorch_s_and_more_bits_come_closer(activation) -> None:
    torch.manual_seed(1)
    x = torch.randn(64, 64, requires_grad=True)
    model = nn.Sequential(copy.deepcopy(activation), nn.Linear(64, 8))
    gradient = torch.randn(64, 8)
    true = torch.autograd.grad(model(x), x, gradient)[0]
    errors = []
    for bits in (1, 2, 4, 8):
        with compress(model, bits, fused=True):
            out = model(x * 1)
        assert torch.equal(out, model(x))
        node = out.grad_fn.next_functions[1][0]
        assert node.name() == "FusedSmoothBackward"
        found = torch.autograd.grad(out, x, gradient)[0]
        errors.append(float((found - true).square().sum() / true.square().sum()))
    assert errors == sorted(errors, reverse=True)
    assert errors[3] < 1e-4


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_the_bias_is_as_stated(activation) -> None:
    """Squared bias over the square, of derivative and result, by a code of 3 bits."""
    torch.manual_seed(2)
    x = torch.randn(256, 256, requires_grad=True)
    model = nn.Sequential(activation, nn.Linear(256, 1, bias=False))
    nn.init.ones_(model[1].weight)
    rounds, slopes, results = 32, [], []
    capture = compress(model, 2, fused=True)
    for _ in range(rounds):
        with capture:
            out = model(x * 1)
        results.append(out.grad_fn._saved_self.detach().clone())
        slopes.append(torch.autograd.grad(out.sum(), x)[0])
    true = torch.autograd.grad(activation(x).sum(), x)[0]
    for found, expected in ((slopes, true), (results, activation(x).detach())):
        each = torch.stack(found)
        energy = expected.square().mean()
        noise = each.var(0).mean() / rounds
        bias = ((each.mean(0) - expected).square().mean() - noise) / energy
        assert 0 < each.var(0).mean() / energy < 0.06
        assert abs(bias) < 0.0005


def table_rows() -> list[list[float]]:
    """The numbers of the table in the documents: bits, bytes apart and shared, errors."""
    text = (Path(__file__).parents[2] / "docs" / "operators.md").read_text()
    rows = text.partition("| bits asked for |")[2].splitlines()[2:6]
    return [[float(number) for number in row.replace("|", ",").split(",")[1:-1]] for row in rows]


def test_the_documents_table_is_measured() -> None:
    torch.manual_seed(0)
    x = torch.randn(1 << 16)
    plain = x.clone().requires_grad_()
    result = F.gelu(plain)
    (slope,) = torch.autograd.grad(result.sum(), plain)
    node, result = result.grad_fn, result.detach()

    def error(found: Tensor, true: Tensor) -> float:
        return float((found - true).square().sum() / true.square().sum())

    def decoded(values: Tensor, treatment: Treatment) -> Tensor:
        out = torch.empty_like(values)
        ValueCode(PlainStore(), values, treatment, 7).decode(out)
        return out

    policy_bits = {1: 2, 2: 2, 3: 3, 4: 4}  # of the derivative code
    for bits, apart, shared, *errors in table_rows():
        linear = Treatment(Method.ROTATED, int(bits))
        one_code = function.shared_treatment(linear)
        assert one_code is not None
        header = 0.125
        assert apart == pytest.approx(bits + policy_bits[int(bits)] + header, abs=0.05)
        assert shared == pytest.approx(one_code.bits + header, abs=0.05)
        again = decoded(x, one_code).requires_grad_()
        (derived,) = torch.autograd.grad(F.gelu(again).sum(), again)
        assert errors[0] == pytest.approx(error(decoded(result, linear), result), rel=0.1)
        assert errors[1] == pytest.approx(error(F.gelu(again.detach()), result), rel=0.1)
        code = smooth_code(node, policy_bits[int(bits)])
        assert code is not None
        asked = ElementCode(Codec.DERIVATIVE, key=7, table=code.lines)
        held = ElementsCode.encode(PlainStore(), x, policy_bits[int(bits)], asked)
        assert held is not None
        held.decode(again := torch.empty_like(x), table=code.representatives)
        (coded,) = torch.autograd.grad(F.gelu(again.requires_grad_()).sum(), again)
        assert errors[2] == pytest.approx(error(coded, slope), rel=0.1)
        assert errors[3] == pytest.approx(error(derived, slope), rel=0.1)


def test_an_activation_that_no_layer_reads_is_left_alone_from_the_second_step_on() -> None:
    """A code of the derivative is smaller; a frozen layer behind saves nothing."""
    torch.manual_seed(0)
    model, x = Feedforward(nn.GELU()), torch.randn(64, 32, requires_grad=True)
    model.down.requires_grad_(False)
    capture, held = compress(model, 2, fused=True), []
    for _ in range(3):
        with capture:
            out = model(x)
        (site,) = (r for r in capture.sites() if r.site.module == "activation")
        held.append((site.treatment.method, site.held_bytes))
        out.sum().backward()
    assert [method for method, _ in held] == [Method.ROTATED] + 2 * [Method.DERIVATIVE]
    assert held[2][1] < held[0][1]
    assert patterns(capture)["activation"] == (
        "",
        "no layer behind it reads its result in backward",
    )


@pytest.mark.parametrize("fused_norm", [nn.LayerNorm(64), nn.BatchNorm1d(64)], ids=str)
def test_a_norm_s_code_serves_the_activation_and_the_layer_behind_too(fused_norm) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(fused_norm, nn.SiLU(), nn.Linear(64, 16))
    x = torch.randn(128, 64, requires_grad=True)
    capture = compress(model, 3, fused=True)
    with capture:
        out = model(x * 1)
    sites = {r.site.module: r for r in capture.sites()}
    assert sites["1"].treatment.method is sites["2"].treatment.method is Method.REDERIVE
    assert sites["1"].held_bytes == sites["2"].held_bytes == 0
    gradient = torch.randn_like(out)
    found = torch.autograd.grad(out, [x, *model.parameters()], gradient)
    true = torch.autograd.grad(model(x), [x, *model.parameters()], gradient)
    for one, other in zip(found, true, strict=True):
        assert (one - other).square().sum() < 0.1 * other.square().sum()


def test_a_convolution_in_channels_last_memory_is_served() -> None:
    torch.manual_seed(0)
    layers = (nn.Conv2d(8, 16, 3), nn.SiLU(), nn.Conv2d(16, 4, 3))
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    x = torch.randn(4, 8, 20, 20).to(memory_format=torch.channels_last).requires_grad_()
    (_, sites), found, capture = run(model, x, 4, fused=True)
    assert patterns(capture)["1"] == ("silu + layer behind", "")
    assert sites["2"].held_bytes == 0
    torch.manual_seed(5)
    out = model(x)
    true = torch.autograd.grad(out, list(model.parameters()), torch.randn(out.shape))
    for one, other in zip(found, true, strict=True):
        assert (one - other).square().sum() < 0.05 * other.square().sum()


def test_backward_decodes_a_part_at_a_time_and_writes_over_its_gradient(monkeypatch) -> None:
    monkeypatch.setattr(function, "_BLOCKS_AT_A_TIME", 3)
    sizes: list[int] = []
    decode = ValueCode.decode

    def spy(self: Any, out: Tensor, *arguments: Any, **keywords: Any) -> None:
        sizes.append(out.numel())
        decode(self, out, *arguments, **keywords)

    monkeypatch.setattr(ValueCode, "decode", spy)
    owned_and_used: list[tuple[bool, bool]] = []
    backward = function.SmoothHeld.backward

    def watch(self: Any, gradient: Tensor, needs: Any, *, owned: bool) -> Any:
        found = backward(self, gradient, needs, owned=owned)
        owned_and_used.append((owned, found[0].data_ptr() == gradient.data_ptr()))
        return found

    monkeypatch.setattr(function.SmoothHeld, "backward", watch)
    x = torch.randn(10, 333, requires_grad=True)
    activation = nn.GELU()
    with compress(activation, 8, fused=True):
        out = activation(x * 1)
    gradient = torch.randn(10, 333)
    found = torch.autograd.grad(out * 1, x, gradient)[0]
    assert owned_and_used == [(True, True)]
    assert sizes == [768] * 4 + [3330 - 4 * 768]
    true = torch.autograd.grad(activation(x), x, gradient)[0]
    torch.testing.assert_close(found, true, rtol=0.05, atol=0.05)
    with compress(activation, 8, fused=True):
        out = activation(x * 1)
    kept = gradient.clone()
    torch.autograd.grad(out, x, gradient)  # the caller's own gradient
    assert owned_and_used[1:] == [(False, False)]
    assert torch.equal(gradient, kept)


def test_where_it_is_left_alone_the_reason_is_told() -> None:
    x = torch.randn(64, 64, requires_grad=True)

    def reason(activation: nn.Module, x: Tensor, policy: Any = None) -> str:
        model = nn.Sequential(activation)
        capture = compress(model, policy=policy or coded_policy(2), fused=True)
        with capture:
            out = model(x)
        assert torch.equal(out, activation(x))
        (report,) = capture.fusions()
        assert report.pattern == ""
        assert report.operator == ("silu" if isinstance(activation, nn.SiLU) else "gelu")
        return report.reason

    assert "in place" in reason(nn.SiLU(inplace=True), x.detach().clone())
    assert "small" in reason(nn.GELU(), x[:2] * 1)
    assert "no float32" in reason(nn.GELU(), x.bfloat16())
    assert "contiguous" in reason(nn.GELU(), (x * 1).t())
    assert "caller's own" in reason(nn.GELU(), x)
    alone = replace(coded_policy(2), by_need={Need.SMOOTH: Treatment(Method.DERIVATIVE, 2)})
    assert "policy" in reason(nn.GELU(), x * 1, alone)
    plain = replace(coded_policy(2), by_need={Need.SMOOTH: KEEP}, rederive=False)
    assert "policy" in reason(nn.GELU(), x * 1, plain)
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast" in reason(nn.GELU(), x * 1)
    with torch.no_grad():
        assert "gradient" in reason(nn.GELU(), x * 1)


# --- dropout --------------------------------------------------------------------------------


def test_a_layer_behind_activation_and_dropout_is_served() -> None:
    torch.manual_seed(0)
    model, x = Feedforward(nn.GELU(), 0.25), torch.randn(64, 32, requires_grad=True)
    (_, sites), _, _ = run(model, x, 4, fused=True)
    assert sites["down"].treatment.method is Method.REDERIVE
    assert sites["down"].held_bytes == 0
    assert sites["dropout"].treatment.method is Method.MASK
    torch.manual_seed(3)
    capture = compress(model, 4, fused=True)
    with capture:
        out = model(x)
    torch.manual_seed(3)
    true = model.dropout(model.activation(model.up(x))).detach()
    found = out.grad_fn._saved_mat1.detach()
    assert torch.equal(found == 0, true == 0)  # the mask is exact
    assert (found - true).square().sum() < 0.03 * true.square().sum()
    assert patterns(capture)["activation"][0] == "gelu + layer behind"


@pytest.mark.parametrize("fused", [False, True])
def test_layers_behind_norm_and_dropout_are_served(fused: bool) -> None:
    """As behind the embeddings of BERT."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(64), nn.Dropout(0.5), nn.Linear(64, 16))
    with torch.no_grad():
        model[0].weight.uniform_(0.5, 2)
        model[0].bias.uniform_(-1, 1)
    x = torch.randn(128, 64, requires_grad=True)
    capture = compress(model, 4, fused=fused)
    torch.manual_seed(3)
    with capture:
        out = model(x * 1)
    sites = {r.site.module: r for r in capture.sites()}
    assert sites["2"].treatment.method is Method.REDERIVE
    assert sites["2"].held_bytes == 0
    torch.manual_seed(3)
    true = model[1](model[0](x)).detach()
    found = out.grad_fn._saved_mat1.detach()
    assert torch.equal(found == 0, true == 0)
    assert (found - true).square().sum() < 0.02 * true.square().sum()


@pytest.mark.parametrize("change", ["inplace", "between"])
def test_what_was_changed_in_place_is_not_derived(change: str) -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(64), nn.Linear(64, 16)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x * 1)
            if change == "between":
                with torch.no_grad():
                    y.mul_(3)
            return self.linear(F.dropout(y, 0.5, inplace=change == "inplace"))

    torch.manual_seed(0)
    model, x = Changing(), torch.randn(128, 64, requires_grad=True)
    capture = compress(model, 4)
    with capture:
        out = model(x)
    (linear,) = (r for r in capture.sites() if r.site.module == "linear")
    assert linear.treatment.method is Method.ROTATED
    found = out.grad_fn._saved_mat1.detach()
    assert found.square().mean() > (9 if change == "between" else 1)
