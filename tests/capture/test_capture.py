"""Capture in anybody's loop: whatever else happens around it, the gradients are right."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import daf
from daf.capture.capture import Capture
from daf.capture.compress import compress
from daf.core.errors import CodecError, SavedTensorError
from daf.core.policy import Method, Need, Policy, Treatment, exact_policy, policy_for
from daf.memory.glibc import can_return_freed_blocks

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("code_everything")]


class TwoLayers(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.norm = nn.LayerNorm(width)
        self.second = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(F.relu(self.norm(self.first(x))), 0.25))


def gradients(model: nn.Module) -> list[Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def assert_same(first: list[Tensor], second: list[Tensor]) -> None:
    assert len(first) == len(second) > 0
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def plainly(model: nn.Module, run: Any) -> list[Tensor]:
    torch.manual_seed(5)
    run().backward()
    return gradients(model)


def captured(model: nn.Module, run: Any, bits: int | str = "exact") -> list[Tensor]:
    torch.manual_seed(5)
    capture = compress(model, bits)
    with capture:
        loss = run()
    loss.backward()
    assert capture.stats.held_bytes == 0
    assert capture.stats.plain_bytes == 0
    return gradients(model)


def test_the_facade_exports_compress() -> None:
    assert isinstance(daf.compress(nn.Linear(2, 2), 2), compress)


def test_unknown_width_is_refused() -> None:
    with pytest.raises(ValueError, match="9 bits"):
        compress(nn.Linear(2, 2), 9)


def test_backward_inside_or_outside() -> None:
    model, x = TwoLayers(), torch.randn(8, 16)
    expected = plainly(model, lambda: model(x).sum())
    assert_same(captured(model, lambda: model(x).sum()), expected)
    torch.manual_seed(5)
    with compress(model, "exact"):
        model(x).sum().backward()
    assert_same(gradients(model), expected)


def test_one_object_serves_many_steps_with_fresh_seeds() -> None:
    model, x = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 4)), torch.randn(32, 16)
    capture = compress(model, 1)
    found = []
    for _ in range(2):
        with capture:
            loss = model(x).square().sum()
        loss.backward()
        found.append(gradients(model)[2])
    assert not torch.equal(*found)


def test_the_same_seed_and_step_repeat_every_bit() -> None:
    model, x = TwoLayers(), torch.randn(8, 16)
    capture = Capture(model)
    found = []
    for seed, step in ((0, 3), (0, 3), (0, 4), (1, 3)):
        torch.manual_seed(5)
        with capture.step(policy_for(2), seed, step):
            loss = model(x).sum()
        loss.backward()
        found.append(gradients(model))
    assert_same(found[0], found[1])
    assert not torch.equal(found[0][4], found[2][4])
    assert not torch.equal(found[0][4], found[3][4])


def test_retain_graph_decodes_twice() -> None:
    model, x = TwoLayers(), torch.randn(8, 16)
    with compress(model, 2):
        loss = model(x).sum()
    loss.backward(retain_graph=True)
    once = gradients(model)
    loss.backward()
    assert_same(gradients(model), once)


def test_double_backward_through_kept_and_lossless_tensors() -> None:
    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return slope.square().sum()

    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4), nn.ReLU())
    x = torch.randn(8, 16, requires_grad=True)
    expected = plainly(model, lambda: penalty(model, x))
    assert_same(captured(model, lambda: penalty(model, x)), expected)


@pytest.mark.parametrize("bits", ["exact", 2])
def test_change_in_place_is_reported(bits: int | str) -> None:
    model = nn.Linear(16, 16)
    with compress(model, bits):
        value = model(torch.randn(8, 16)).exp()
        loss = value.sum()
    with torch.no_grad():
        value.add_(1)
    with pytest.raises(SavedTensorError, match="modified by an inplace operation"):
        loss.backward()


def test_change_of_a_parameter_in_place_is_reported() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    with compress(model, 2):
        loss = model(torch.randn(8, 16)).sum()
    with torch.no_grad():
        model[1].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_change_in_place_of_what_was_coded_does_no_harm() -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), torch.randn(8, 16)

    def run(*, disturb: bool) -> list[Tensor]:
        middle = []
        handle = model[1].register_forward_pre_hook(lambda _, inputs: middle.append(inputs[0]))
        with Capture(model).step(policy_for(4), 0, 0):
            loss = model(x).sum()
        handle.remove()
        if disturb:
            middle[0].data.fill_(100)
        loss.backward()
        return gradients(model)

    assert_same(run(disturb=True), run(disturb=False))


def test_nested_the_inner_one_wins() -> None:
    model, x = TwoLayers(), torch.randn(512, 16)
    outer, inner = compress(model, "plain"), compress(model, 2)
    with outer, inner:
        loss = model(x).sum()
    assert outer.stats.held_peak_bytes == 0
    assert 0 < inner.stats.held_bytes < inner.stats.plain_bytes
    loss.backward()
    with outer:
        with inner:
            pass
        loss = model(x).sum()
    assert outer.stats.held_bytes > 0
    assert inner.stats.held_peak_bytes == 0
    loss.backward()


def test_no_grad_regions_save_nothing() -> None:
    model, x = TwoLayers(), torch.randn(8, 16)
    capture = compress(model, 2)
    with capture, torch.no_grad():
        model(x)
    assert capture.stats.plain_peak_bytes == 0
    assert capture.sites() == ()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_checkpoint_inside(reentrant: bool, inside: bool) -> None:
    model, x = TwoLayers(), torch.randn(8, 16, requires_grad=True)

    def run() -> Tensor:
        return checkpoint(model, x, use_reentrant=reentrant).sum()

    expected = plainly(model, run)
    torch.manual_seed(5)
    with compress(model, "exact"):
        loss = run()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    assert_same(gradients(model), expected)


def test_recomputation_inside_the_with_is_coded_operator_by_operator() -> None:
    model, x = TwoLayers(), torch.randn(64, 16, requires_grad=True)
    capture = compress(model, 2)
    with capture:
        checkpoint(model, x, use_reentrant=True).sum().backward()
    methods = {report.site.operator: report.treatment.method for report in capture.sites()}
    assert methods["relu"] is Method.MASK


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(x, places)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        x, places = ctx.saved_tensors
        assert places.dtype == torch.int64
        return 2 * x * gradient * (places >= 0), None


def test_custom_functions_are_never_coded_with_loss() -> None:
    model, x = nn.Linear(16, 16), torch.randn(64, 16)
    places = torch.randint(0, 9, (64, 16))

    def run() -> Tensor:
        return Square.apply(model(x), places.clone()).sum()

    expected = plainly(model, run)
    assert_same(captured(model, run, 2), expected)
    capture = compress(model, 2)
    with capture:
        loss = run()
    reports = {r.need: r for r in capture.sites() if r.site.operator == "autograd.Function"}
    assert reports[Need.EXACT].treatment.method is Method.KEEP
    assert reports[Need.INTEGER].treatment.method is Method.PACK
    assert reports[Need.INTEGER].held_bytes < reports[Need.INTEGER].plain_bytes // 8
    del loss


def test_autocast_copies_of_parameters_are_recognised() -> None:
    model, x = TwoLayers(), torch.randn(64, 16)

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().sum()

    expected = plainly(model, run)
    assert_same(captured(model, run), expected)
    capture = compress(model, 2)
    with capture:
        loss = run()
    coded = [r for r in capture.sites() if r.treatment.method is Method.ROTATED]
    assert {r.site.module for r in coded} <= {"norm", "second", "first"}
    weight_bytes = 2 * sum(p.numel() for p in model.parameters())
    assert all(r.plain_bytes != weight_bytes for r in capture.sites())
    loss.backward()


def test_control_flow_may_change_from_step_to_step() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
            self.deep = False

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.layers[0](x))
            if self.deep:
                x = F.relu(self.layers[1](x))
            return self.layers[2](x)

    model, x = Sometimes(), torch.randn(8, 16)
    capture = compress(model, "exact")
    names = []
    for deep in (False, True, False):
        model.deep = deep
        expected = plainly(model, lambda: model(x).sum())
        with capture:
            loss = model(x).sum()
        loss.backward()
        assert_same(gradients(model), expected)
        names.append({str(report.site) for report in capture.sites()})
    assert names[0] == names[2] < names[1]


def test_a_shared_module_is_one_site_with_fresh_seeds() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(self.layer(x)))

    model, x = Shared(), torch.randn(8, 16)
    assert_same(captured(model, lambda: model(x).sum()), plainly(model, lambda: model(x).sum()))
    capture = compress(model, 2)
    with capture:
        loss = model(x).sum()
    (report,) = capture.sites()
    assert str(report.site) == "layer:linear#0[0]"
    assert report.plain_bytes == 2 * 8 * 16 * 4
    del loss


def test_sites_are_named_by_module_operator_and_call() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(F.relu(x) - 0.1)

    model = nn.Sequential(nn.Linear(16, 16), Twice())
    capture = compress(model, "exact")
    with capture:
        loss = F.mse_loss(model(torch.randn(8, 16)), torch.zeros(8, 16))
    names = [str(report.site) for report in capture.sites()]
    assert names[:2] == ["1:relu#0[0]", "1:relu#1[0]"]
    assert all(name.startswith("<outside>:mse_loss#0") for name in names[2:])
    del loss


def test_a_raising_forward_leaves_nothing_behind() -> None:
    class Raises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            kept = F.relu(self.layer(x))
            raise ValueError(str(kept.shape))

    model = Raises()
    capture = compress(model, 2)
    before = len(torch.nn.modules.module._global_forward_hooks)
    for _ in range(2):
        with pytest.raises(ValueError, match="Size"), capture:
            model(torch.randn(8, 16))
    assert capture.stats.held_bytes == 0
    assert capture.stats.plain_bytes == 0
    assert len(torch.nn.modules.module._global_forward_hooks) == before
    assert len(model._forward_pre_hooks) == 0
    assert torch.overrides._get_current_function_mode() is None
    value = torch.randn(3, requires_grad=True)
    assert torch.equal(value.exp().grad_fn._saved_result, value.exp())


def test_a_raising_operator_is_forgotten() -> None:
    model = nn.Linear(16, 16)
    capture = compress(model, 2)
    with capture:
        hidden = model(torch.randn(8, 16))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            hidden @ torch.randn(3, 3, requires_grad=True)
        loss = hidden.sum()
    loss.backward()
    assert capture.stats.plain_bytes == 0


def test_module_calls_of_other_threads_do_not_confuse_the_names() -> None:
    model, other = nn.Sequential(nn.Linear(16, 16), nn.ReLU()), nn.Linear(4, 4)
    capture = compress(model, "exact")
    with capture:
        thread = threading.Thread(target=lambda: other(torch.randn(2, 4)))
        thread.start()
        thread.join()
        loss = model(torch.randn(8, 16)).sum()
    assert [report.site.module for report in capture.sites()] == ["1"]
    del loss


def jacobian_penalty(model: nn.Module, x: Tensor) -> Tensor:
    return torch.vmap(torch.func.jacrev(model))(x).square().sum()


def hessian_penalty(model: nn.Module, x: Tensor) -> Tensor:
    return torch.vmap(torch.func.hessian(lambda each: model(each).sum()))(x).square().sum()


def forward_derivative(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.jvp(model, (x,), (torch.ones_like(x),))[1].square().sum()


def mapped(model: nn.Module, x: Tensor) -> Tensor:
    return torch.vmap(model)(x).square().sum()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own
@pytest.mark.parametrize(
    "transform", [jacobian_penalty, hessian_penalty, forward_derivative, mapped]
)
def test_function_transforms_have_plain_s_gradient(transform: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())
    x = torch.randn(64, 8)
    (transform(model, x) + model(x).sum()).backward()
    plain = [each.grad for each in model.parameters()]
    model.zero_grad()
    with compress(model, "exact") as captured:
        loss = transform(model, x) + model(x).sum()
    loss.backward()
    for gradient, each in zip(plain, model.parameters(), strict=True):
        torch.testing.assert_close(each.grad, gradient, rtol=0.0, atol=0.0)
    assert any(each.treatment.method is Method.MASK for each in captured.sites())


def test_function_transforms_under_hooks_of_the_user_s_own_fail_as_without_ours() -> None:
    model = nn.Linear(4, 4)
    with (
        compress(model, 2),
        torch.autograd.graph.save_on_cpu(),
        pytest.raises(RuntimeError, match="saved tensor hooks"),
    ):
        torch.func.grad(lambda x: model(x).sum())(torch.randn(4))
    with compress(model, 2):
        torch.func.grad(lambda x: model(x).sum())(torch.randn(4))


def test_an_unsound_treatment_is_refused() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    policy = Policy("bad", {Need.SIGN: Treatment(Method.ROTATED, 2)})
    with pytest.raises(CodecError, match="1:relu#0"), compress(model, policy=policy):
        model(torch.randn(8, 16))


def test_sparse_complex_empty_and_expanded_tensors_pass() -> None:
    model = nn.Linear(16, 16)
    sparse = torch.eye(8).to_sparse()

    def run() -> Tensor:
        hidden = model(torch.ones(8, 16))
        mixed = torch.sparse.mm(sparse, hidden)
        spectrum = torch.fft.rfft(hidden) * torch.fft.rfft(mixed)
        empty = hidden[:0].square().sum()
        wide = hidden[:, :1].expand(8, 64) * hidden[:, 1:2].expand(8, 64)
        return spectrum.abs().sum() + empty + wide.sum() + hidden.t()[3:9:2].square().sum()

    expected = plainly(model, run)
    assert_same(captured(model, run), expected)
    assert all(torch.isfinite(g).all() for g in captured(model, run, 4))


def test_micro_batches_share_one_account() -> None:
    model, x = TwoLayers(), torch.randn(8, 16)
    capture = Capture(model)
    held = []
    for index in range(2):
        with capture.step(exact_policy(), 0, 0, micro_index=index, batch=x):
            loss = model(x).sum()
        held.append(capture.stats.held_bytes)
        loss.backward()
    assert held[0] == held[1] == capture.stats.held_peak_bytes


def test_the_caller_s_batch_is_not_counted_or_coded() -> None:
    model, x = nn.Linear(16, 16), torch.randn(8, 16)
    capture = compress(model, 2)
    with capture:
        loss = model(x).sum()
    assert capture.stats.plain_bytes == 0
    loss.backward()
    expected = torch.ones(8, 16).t() @ x
    assert torch.equal(model.weight.grad, expected)


IDLE_BLOCKS = """
import torch, daf
from daf.memory.process_memory import resident_bytes

model = torch.nn.Linear(4, 4)
ours = daf.compress(model, bits="exact")
del [torch.empty(2**20)][0]  # from now on glibc keeps blocks of up to 4 MB
blocks = [torch.ones(2**18) for _ in range(200)]
before = resident_bytes()
del blocks[:-1]  # what is below the last one stays with the process
between = resident_bytes()
with ours:
    loss = model(torch.ones(2, 4)).sum()
loss.backward()
print(before, between, resident_bytes())
"""


@pytest.mark.skipif(not can_return_freed_blocks(), reason="the C library is not glibc")
def test_entering_returns_what_freed_blocks_hold_idle() -> None:
    command = [sys.executable, "-c", IDLE_BLOCKS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    before, between, after = map(int, done.stdout.split())
    assert between > before - 20 * 2**20  # glibc kept them
    assert after < between - 150 * 2**20
