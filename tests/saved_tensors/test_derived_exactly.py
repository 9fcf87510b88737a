"""What fused normalisations hold as it is tells, bit for bit, what operators behind them read."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.core.errors import CodecError, SavedTensorError
from daf.core.policy import (
    KEEP,
    Method,
    Need,
    Policy,
    Site,
    Treatment,
    coded_policy,
    exact_policy,
    with_chunked_operators,
    with_fused_operators,
)
from daf.core.reports import SiteReport
from daf.saved_tensors.packer import check_sound
from daf.step.dry_run import dry_run

pytestmark = pytest.mark.smoke

FORMATS = [torch.contiguous_format, torch.channels_last]
REDERIVE = Treatment(Method.REDERIVE)


class Blocks(nn.Module):
    """Residual blocks, the second one with an identity and the third with two norms in its sum."""

    def __init__(self, channels: int = 20) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(3 if index == 0 else channels, channels, 3, padding=1, bias=False)
            for index in range(7)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(7))
        for norm in self.norms:
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)

    def part(self, index: int, x: Tensor) -> Tensor:
        return self.norms[index](self.convs[index](x))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.part(0, x))
        z = F.relu(self.part(2, F.relu(self.part(1, y))) + y)
        z = F.relu(self.part(4, F.relu(self.part(3, z))) + self.part(5, z))
        return F.relu(self.part(6, z)).mean((2, 3))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


class Done:
    """Gradients of one step under a policy, what was held, and what was done at each site."""

    def __init__(self, model: nn.Module, policy: Policy, batch: Tensor) -> None:
        model = copy.deepcopy(model)
        capture = Capture(model)
        dry_run(capture, model, policy, batch, loss_of, 4)
        with capture.step(policy, seed=0, step_index=0, batch=batch):
            loss = loss_of(model, batch)
        loss.backward()
        self.gradients = {name: p.grad for name, p in model.named_parameters()}
        self.held_bytes = capture.stats.held_peak_bytes
        self.left_bytes = capture.stats.held_bytes
        self.sites = {report.site: report for report in capture.sites()}
        self.fused = [report.pattern for report in capture.fusions()]

    def at(self, operator: str) -> list[SiteReport]:
        return [each for each in self.sites.values() if each.site.operator == operator]

    def methods(self, operator: str) -> Counter[str]:
        return Counter(each.treatment.method.value for each in self.at(operator))


def make_batch(layout: torch.memory_format) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(8, 3, 16, 17).to(memory_format=layout)


def assert_same_bits(found: Done, expected: Done) -> None:
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert torch.equal(found.gradients[name], gradient), name


def fused_and_kept() -> Policy:
    policy = with_fused_operators(exact_policy(), chunked=False)
    return replace(policy, by_need=exact_policy().by_need, rederive=False)


@pytest.mark.parametrize("chunk_bytes", [None, 100_000])
@pytest.mark.parametrize("layout", FORMATS)
def test_gradients_are_the_same_bits_and_results_are_held_nowhere(
    layout: torch.memory_format, chunk_bytes: int | None
) -> None:
    torch.manual_seed(1)
    model, batch = Blocks().to(memory_format=layout), make_batch(layout)
    kept = fused_and_kept()
    derived = with_fused_operators(exact_policy())
    if chunk_bytes is not None:
        kept = with_chunked_operators(kept, chunk_bytes)
        derived = replace(derived, chunk_bytes=chunk_bytes)
    else:
        derived = with_chunked_operators(derived, chunked=False)
    found, expected = Done(model, derived, batch), Done(model, kept, batch)
    assert all(found.fused)
    assert_same_bits(found, expected)
    # The input of the first of seven convolutions is the caller's own, and held by nobody.
    assert found.methods("conv2d") == {"rederive": 6}
    assert expected.methods("conv2d") == {"keep": 6}
    assert found.methods("batch_norm") == {"keep": 7}
    assert sum(each.held_bytes for each in found.at("conv2d")) == 0
    plain = batch.numel() // 3 * 20 * 4
    # Seven inputs of normalisations, instead of those and five results (a mask is a 32nd).
    assert found.held_bytes < 7.4 * plain
    assert expected.held_bytes > 12 * plain
    assert found.left_bytes == 0


def test_it_is_pytorch_s_gradient_within_rounding() -> None:
    torch.manual_seed(1)
    model, batch = Blocks(), make_batch(torch.contiguous_format)
    found = Done(model, with_fused_operators(exact_policy()), batch).gradients
    loss_of(model, batch).backward()
    for name, parameter in model.named_parameters():
        scale = parameter.grad.abs().max()
        assert (found[name] - parameter.grad).abs().max() < 1e-4 * scale, name


def test_a_norm_that_is_coded_makes_what_is_derived_from_it_noisy_and_no_other() -> None:
    """One site with a code: its own convolution's gradient errs, those before it are exact."""
    torch.manual_seed(1)
    model, batch = Blocks(), make_batch(torch.contiguous_format)
    policy = with_fused_operators(exact_policy())
    coded = replace(
        policy, by_site={Site("norms.6", "batch_norm", 0, 0): Treatment(Method.ROTATED, 2)}
    )
    found, expected = Done(model, coded, batch), Done(model, policy, batch)
    assert found.methods("batch_norm") == {"keep": 6, "rotated": 1}
    assert torch.equal(found.gradients["norms.6.bias"], expected.gradients["norms.6.bias"])
    assert not torch.equal(found.gradients["norms.6.weight"], expected.gradients["norms.6.weight"])
    # A norm in the middle: the sum behind it is then part exact, part code, and still derived.
    middle = replace(
        policy, by_site={Site("norms.4", "batch_norm", 0, 0): Treatment(Method.ROTATED, 2)}
    )
    mixed = Done(model, middle, batch)
    assert mixed.methods("conv2d") == {"rederive": 6}
    errors = {
        name: float((mixed.gradients[name] - gradient).norm() / gradient.norm())
        for name, gradient in expected.gradients.items()
    }
    assert errors["convs.6.weight"] > 0.01
    assert errors["norms.6.weight"] == 0.0
    # The sum's other term alone would miss far more than a code of one of two terms does.
    assert errors["convs.6.weight"] < 0.4


def test_what_nobody_holds_is_kept() -> None:
    """Asked to derive without fused operators, or behind something else: kept, bit for bit."""
    torch.manual_seed(1)
    model, batch = Blocks(), make_batch(torch.contiguous_format)
    asked = replace(exact_policy(), by_need=exact_policy().by_need | {Need.LINEAR: REDERIVE})
    for rederive in (False, True):
        found = Done(model, replace(asked, rederive=rederive), batch)
        assert found.methods("conv2d") == {"keep": 6}
    loss_of(model, batch).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(found.gradients[name], parameter.grad), name


def test_sums_in_another_order_are_kept() -> None:
    """(a + b) + (c + d) added up one by one would differ in the last bits."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(4))
            self.conv = nn.Conv2d(8, 8, 3)

        def forward(self, x: Tensor) -> Tensor:
            a, b, c, d = (norm(x * (index + 1)) for index, norm in enumerate(self.norms))
            return self.conv(self.add(a, b, c, d))

        def add(self, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
            return (a + b) + (c + d)

    class InOrder(Sums):
        def add(self, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
            return ((a + b) + c) + d

    torch.manual_seed(0)
    batch = torch.randn(8, 8, 12, 12, requires_grad=True)
    policy = with_fused_operators(exact_policy())
    for kind, method in ((Sums, "keep"), (InOrder, "rederive")):
        torch.manual_seed(1)
        found = Done(kind(), policy, batch)
        torch.manual_seed(1)
        expected = Done(kind(), fused_and_kept(), batch)
        assert found.methods("conv2d") == {method: 1}, kind
        assert_same_bits(found, expected)


class Bounded(nn.Module):
    """Convolutions behind normalisations with ReLU6, the last of them behind a sum too."""

    def __init__(self, rectifier: nn.Module, channels: int = 20) -> None:
        super().__init__()
        self.rectifier = rectifier
        self.convs = nn.ModuleList(
            nn.Conv2d(3 if index == 0 else channels, channels, 3, padding=1) for index in range(4)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(3))
        for norm in self.norms:
            nn.init.normal_(norm.weight, std=4.0)  # so that both bounds are met
            nn.init.normal_(norm.bias, mean=2.0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.convs[0](x)
        for norm, conv in zip(self.norms[:2], self.convs[1:3], strict=True):
            y = conv(self.rectifier(norm(y)))
        return self.convs[3](self.rectifier(self.norms[2](y) + y)).mean((2, 3))


BOUNDED = [nn.ReLU6(), nn.ReLU6(inplace=True), nn.Hardtanh(0.0, 0.7)]


@pytest.mark.parametrize("rectifier", BOUNDED, ids=str)
@pytest.mark.parametrize("layout", FORMATS)
def test_convolutions_behind_bounded_rectifiers_are_told_by_norms_that_are_kept(
    rectifier: nn.Module, layout: torch.memory_format
) -> None:
    torch.manual_seed(1)
    model, batch = Bounded(rectifier).to(memory_format=layout), make_batch(layout)
    derived = replace(with_fused_operators(exact_policy()), chunk_bytes=100_000)
    kept = with_chunked_operators(fused_and_kept(), 100_000)
    found, expected = Done(model, derived, batch), Done(model, kept, batch)
    assert all(found.fused)
    assert_same_bits(found, expected)
    # Nobody else holds the caller's batch, nor what a sum was before it was cut off.
    assert found.methods("conv2d") == {"rederive": 2, "keep": 1}
    assert expected.methods("conv2d") == {"keep": 3}
    one = batch.nbytes // 3 * 20
    assert expected.held_bytes - found.held_bytes == pytest.approx(2 * one, rel=0.01)


def test_convolutions_behind_bounded_rectifiers_have_codes_of_their_own_else() -> None:
    """A mask of one bit does not tell which bound was passed, and a code only about."""
    torch.manual_seed(1)
    found = Done(Bounded(nn.ReLU6()), with_fused_operators(coded_policy(2)), make_batch(FORMATS[0]))
    assert found.methods("batch_norm") == {"rotated": 3}
    assert found.methods("conv2d") == {"rotated": 3}


def test_codes_are_still_preferred_by_a_policy_of_codes() -> None:
    torch.manual_seed(1)
    found = Done(Blocks(), with_fused_operators(coded_policy(2)), make_batch(FORMATS[0]))
    assert found.methods("batch_norm") == {"rotated": 7}
    assert found.methods("conv2d") == {"rederive": 6}


def test_only_where_the_input_enters_linearly() -> None:
    model = nn.Linear(64, 64)
    policy = Policy("odd", {Need.PRODUCT: REDERIVE})
    with Capture(model).step(policy, seed=0, step_index=0):
        x = model(torch.randn(64, 64))
        with pytest.raises(CodecError, match="asked for rederive"):
            torch.matmul(x, x.T)


def test_only_what_a_plan_chose_is_left_where_it_is_unsound() -> None:
    """What a user asks for at a site is refused; and so is a recipe where none is made."""
    model, x = nn.Sequential(nn.ReLU(), nn.Linear(64, 64)), torch.randn(64, 64)
    capture = Capture(model)
    with capture.step(exact_policy(), seed=0, step_index=0):
        model(x)
    (site,) = (each.site for each in capture.sites() if each.need is Need.LINEAR)
    mask = Treatment(Method.MASK, 1)
    asked = Policy("odd", {}, {site: mask})
    with capture.step(asked, 0, 1), pytest.raises(CodecError, match="asked for mask"):
        model(x)
    planned = replace(asked, is_planned=True)
    with capture.step(planned, seed=0, step_index=2):
        model(x)
    assert {each.treatment for each in capture.sites() if each.site == site} == {KEEP}
    assert planned.treatment(Need.SIGN, site) == mask
    with pytest.raises(CodecError, match="asked for recompute"):
        check_sound(Method.RECOMPUTE, Need.LINEAR, site)


class Attending(nn.Module):
    """Normalised rows that three linear layers read, and others that one does."""

    def __init__(self, kind: type[nn.Module], width: int = 64) -> None:
        super().__init__()
        self.norm, self.behind = kind(width), kind(width)
        for norm in (self.norm, self.behind):
            nn.init.normal_(norm.weight)
        self.heads = nn.ModuleList(nn.Linear(width, width) for _ in "qkv")
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x * 1)
        q, k, v = (head(y) for head in self.heads)
        x = x + F.scaled_dot_product_attention(q, k, v)
        return x + self.down(F.relu(self.up(self.behind(x))))


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("chunk_bytes", [None, 50_000])
def test_linear_layers_derive_what_normalised_rows_they_read(
    kind: type[nn.Module], chunk_bytes: int | None
) -> None:
    torch.manual_seed(0)
    model, batch = Attending(kind), torch.randn(16, 24, 64)
    derived = with_fused_operators(exact_policy(), chunked=chunk_bytes is not None)
    operators = derived.operators - {"activation"}
    derived = replace(derived, chunk_bytes=chunk_bytes, operators=operators)
    kept = replace(derived, by_need=exact_policy().by_need, rederive=False)
    found, expected = Done(model, derived, batch), Done(model, kept, batch)
    assert_same_bits(found, expected)
    # Behind the ReLU there is nothing to derive from.
    assert found.methods("linear") == {"rederive": 4, "keep": 1}
    assert expected.methods("linear") == {"keep": 5}
    assert expected.held_bytes - found.held_bytes > 1.9 * batch.nbytes  # the two results
    assert found.left_bytes == 0


class Feedforward(nn.Module):
    """An activation between two linear layers, with one more reader of its result or none."""

    def __init__(self, activation: nn.Module, readers: int = 1) -> None:
        super().__init__()
        self.up, self.activation = nn.Linear(64, 256), activation
        self.down = nn.ModuleList(nn.Linear(256, 64) for _ in range(readers))

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.up(x))
        return sum((down(y) for down in self.down), start=y[:, :64])


ACTIVATIONS = [nn.GELU(), nn.GELU(approximate="tanh"), nn.SiLU()]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize(("readers", "chunk_bytes"), [(1, None), (1, 100_000), (2, 100_000)])
def test_layers_derive_results_of_smooth_activations_from_inputs_that_are_held_anyway(
    activation: nn.Module, readers: int, chunk_bytes: int | None
) -> None:
    torch.manual_seed(0)
    model, batch = Feedforward(activation, readers), torch.randn(512, 64)
    derived = with_fused_operators(exact_policy(), chunked=chunk_bytes is not None)
    derived = replace(derived, chunk_bytes=chunk_bytes)
    kept = replace(derived, by_need=exact_policy().by_need, rederive=False)
    found, expected = Done(model, derived, batch), Done(model, kept, batch)
    assert_same_bits(found, expected)
    name = "silu" if isinstance(activation, nn.SiLU) else "gelu"
    assert found.fused == [f"{name} + layer behind"]
    assert expected.fused == [""]
    assert found.methods(name) == {"keep": 1}
    # The first layer reads the caller's own batch.
    assert found.methods("linear") == {"rederive": readers}
    assert expected.methods("linear") == {"keep": readers}
    # One tensor is held where PyTorch holds input and result, and what the loss squares.
    wide = 4 * batch.nbytes
    assert found.held_bytes == wide + batch.nbytes
    assert expected.held_bytes == 2 * wide + batch.nbytes
    assert found.left_bytes == 0


def test_nothing_is_left_to_the_default_type() -> None:
    """Factors that kernels read are float32, whatever new tensors are otherwise."""
    torch.manual_seed(0)
    model, batch = Feedforward(nn.Sequential(nn.GELU(), nn.Dropout(0.25))), torch.randn(512, 64)

    def done(default: torch.dtype) -> Done:
        torch.manual_seed(1)  # of dropout
        torch.set_default_dtype(default)
        try:
            return Done(model, with_fused_operators(exact_policy()), batch)
        finally:
            torch.set_default_dtype(torch.float32)

    expected, found = done(torch.float32), done(torch.float64)
    assert found.methods("linear") == {"rederive": 1}
    assert_same_bits(found, expected)


def test_an_activation_that_is_kept_runs_fused_whoever_reads_it() -> None:
    """Plans count on it, with readers or without, and on where its gradient is written."""
    torch.manual_seed(0)
    model, batch = Feedforward(nn.GELU()), torch.randn(512, 64)
    derived = with_fused_operators(exact_policy())
    unread = replace(derived, by_site={Site("down.0", "linear", 0, 0): Treatment(Method.KEEP)})
    capture, operators, found = Capture(model), [], []
    model.activation.register_forward_hook(
        lambda _module, _given, result: operators.append(result.grad_fn.name())
    )
    for policy in (unread, unread, derived, derived, unread, unread):
        with capture.step(policy, seed=0, step_index=0, batch=batch):
            loss = loss_of(model, batch)
        loss.backward()
        (report,) = capture.fusions()
        both = sum(each.held_bytes for each in capture.sites()) > 1.5 * 4 * batch.nbytes
        found.append((report.pattern, report.reason, both))
    told = ("gelu + layer behind", "", False)
    nobody = ("", "no layer behind it reads its result in backward", True)
    assert found == [nobody, nobody, told, told, nobody, nobody]
    assert set(operators) == {"FusedSmoothBackward"}


class Twice(nn.Module):
    """One module of an activation, used before a layer and then before none."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 256)
        self.activation = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.down(self.activation(self.up(x))))


def test_a_shared_activation_whose_last_use_no_layer_reads_tells_in_every_step() -> None:
    torch.manual_seed(0)
    model, batch = Twice(), torch.randn(512, 64)
    capture, policy = Capture(model), with_fused_operators(exact_policy())
    methods = []
    for _ in range(3):
        for piece in batch.split(256):
            with capture.step(policy, seed=0, step_index=0, batch=piece):
                loss = loss_of(model, piece)
            loss.backward()
            sites = {each.site.module: each for each in capture.sites()}
            methods.append((sites["down"].treatment.method, sites["down"].held_bytes))
    assert methods == [(Method.REDERIVE, 0)] * 6


def test_an_input_that_was_changed_behind_an_activation_is_an_error_as_in_pytorch() -> None:
    torch.manual_seed(0)
    model, batch = Feedforward(nn.GELU()), torch.randn(512, 64)
    with Capture(model).step(with_fused_operators(exact_policy()), seed=0, step_index=0):
        x = model.up(batch)
        y = model.down[0](model.activation(x))
        x.add_(1.0)
    with pytest.raises(SavedTensorError, match="modified by an inplace operation"):
        y.sum().backward()
