"""Replay: calls hold only their inputs, run again in backward, and change nothing else."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from exactness import same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import at_most
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from daf.capture.capture import Capture
from daf.core.errors import CodecError, SavedTensorError, UnknownNameError
from daf.core.policy import (
    Method,
    Need,
    Policy,
    Site,
    Treatment,
    coded_policy,
    exact_policy,
    plain_policy,
    with_chunked_operators,
    with_fused_operators,
)
from daf.operators.chunked import products, weight_gradient
from daf.pool.store import PlainStore

pytestmark = pytest.mark.smoke

WIDTH = 32
ROWS = 16
ACTIVATION_BYTES = ROWS * WIDTH * 4


def replaying(*paths: str, policy: Policy | None = None) -> Policy:
    return replace(policy or plain_policy(), replayed=frozenset(paths))


class Block(nn.Module):
    """Batch norm, dropout and a shortcut."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.25)


class Quiet(nn.Module):
    """Neither random numbers nor buffers: such a call holds its input and nothing else."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Result(NamedTuple):
    tensors: list[Tensor]
    replays: tuple[tuple[str, int], ...]
    held_bytes: int
    plain_bytes: int


def step(
    model: nn.Module, policy: Policy, loss_of: Callable[[nn.Module], Tensor], batch: Any = None
) -> Result:
    """One forward and backward from the same beginning; everything that it computed."""
    model = copy.deepcopy(model)
    torch.manual_seed(5)
    capture = Capture(model, PlainStore())
    with capture.step(policy, 0, 0, batch=batch):
        loss = loss_of(model)
    held, plain = capture.stats.held_bytes, capture.stats.plain_bytes
    loss.backward()
    assert capture.stats.held_bytes == 0, "something outlived backward"
    assert capture.stats.plain_bytes == 0, "something outlived backward"
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    tensors = [loss.detach(), *gradients, *model.buffers(), torch.get_rng_state()]
    return Result(tensors, capture.replays, held, plain)


def assert_exact(
    model: nn.Module,
    paths: Iterable[str],
    loss_of: Callable[[nn.Module], Tensor],
    *,
    saves_rebuilt: bool = False,
) -> Result:
    """Gradients, buffers and random state equal those without replay; less is held."""
    gc.collect()
    gc.disable()
    try:
        plain = step(model, plain_policy(), loss_of)
        again = step(model, replaying(*paths), loss_of)
    finally:
        gc.enable()
    assert len(plain.tensors) == len(again.tensors)
    assert all(map(same_bits, plain.tensors, again.tensors))
    assert plain.replays == ()
    # Backward passes of backward passes save what was rebuilt, which lies in memory of its own.
    assert saves_rebuilt or again.plain_bytes == plain.plain_bytes
    return again


def rows() -> Tensor:
    return torch.randn(ROWS, WIDTH)


# --- order, exactness, bytes ------------------------------------------------------------------


def test_blocks_are_replayed_last_first() -> None:
    x = rows()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *[Block() for _ in range(3)])
    done = assert_exact(model, ["1", "2", "3"], lambda m: m(x).square().sum())
    assert done.replays == (("3", 0), ("2", 0), ("1", 0))


def test_only_inputs_are_held_and_only_once() -> None:
    x = rows()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *[Quiet() for _ in range(3)])
    capture = Capture(model, PlainStore())
    with capture.step(replaying("1", "2", "3"), 0, 0, batch=x):
        loss = model(x).sum()
    # The inner tensor of every block: twice as wide; the first block's input is plain's too.
    assert capture.stats.plain_bytes == 3 * 2 * ACTIVATION_BYTES + 3 * ACTIVATION_BYTES
    assert capture.stats.held_bytes == 3 * ACTIVATION_BYTES
    rows_of = {str(report.site): report for report in capture.sites()}
    for path in "123":
        assert rows_of[f"{path}:input#0[0]"].held_bytes == ACTIVATION_BYTES
        assert rows_of[f"{path}:input#0[0]"].need is Need.INPUT
        assert rows_of[f"{path}:replay#0[0]"].plain_bytes == 3 * ACTIVATION_BYTES
        assert rows_of[f"{path}:replay#0[0]"].treatment.method is Method.REPLAY
    loss.backward()
    # While one block is rebuilt, its inner tensor joins the inputs; never those of two blocks.
    assert capture.stats.held_peak_bytes == (3 + 2) * ACTIVATION_BYTES
    assert capture.stats.held_bytes == 0


def test_an_input_that_something_else_holds_is_not_counted_twice() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Quiet()

        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()  # saves its result, which is the block's input
            return self.block(y)

    x = rows().requires_grad_()
    done = step(Shared(), replaying("block"), lambda m: m(x).sum())
    assert done.held_bytes == ACTIVATION_BYTES


def test_rebuilt_tensors_die_as_backward_consumes_them() -> None:
    x, born, alive = rows(), [], []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
                born.append(StorageWeakRef(x.untyped_storage()))
            return x

    model = nn.Sequential(Watched())
    capture = Capture(model, PlainStore())
    for layer in model[0].layers:
        layer.weight.register_post_accumulate_grad_hook(
            lambda _: alive.append(capture.stats.held_bytes)
        )
    with capture.step(replaying("0"), 0, 0, batch=x):
        loss = model(x).sum()
    assert [reference.expired() for reference in born] == [True] * 4
    assert capture.stats.held_bytes == 0  # the input is the caller's own
    loss.backward()
    assert capture.stats.held_peak_bytes == 4 * ACTIVATION_BYTES
    assert alive == sorted(alive, reverse=True)
    assert alive[-1] == 0
    assert alive[0] <= 3 * ACTIVATION_BYTES


def test_replay_stops_at_the_last_tensor_that_is_needed() -> None:
    ran = []

    class Long(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            ran.append("needed")
            y = y + 1
            ran.append("not needed")
            return y

    x = rows().requires_grad_()
    model = nn.Sequential(Long())
    capture = Capture(model)
    with capture.step(replaying("0"), 0, 0):
        loss = model(x * 1).sum()
    assert ran == ["needed", "not needed"]
    loss.backward()
    assert ran == ["needed", "not needed"]  # exp saves its result and is the last to save


@pytest.mark.parametrize(
    "paths",
    [("",), ("0", "1"), ("0", "0.up", "0.norm"), ("", "0", "0.down", "1"), ("0.up", "1.norm")],
)
def test_nested_calls(paths: tuple[str, ...]) -> None:
    x = rows()
    done = assert_exact(nn.Sequential(Block(), Block()), paths, lambda m: m(x).square().sum())
    assert {path for path, _ in done.replays} == set(paths)


def test_an_outer_call_is_replayed_before_its_inner_ones() -> None:
    x = rows()
    model = nn.Sequential(nn.Sequential(Quiet(), Quiet()))
    done = assert_exact(model, ["0", "0.0", "0.1"], lambda m: m(x).sum())
    assert done.replays == (("0", 0), ("0.1", 0), ("0.0", 0))
    assert done.held_bytes == 0  # the outer input is the caller's own, the inner ones are rebuilt


def test_running_statistics_advance_once() -> None:
    x, model = rows(), nn.Sequential(Block())
    capture = Capture(model)
    with capture.step(replaying("0"), 0, 0):
        loss = model(x).sum()
    after = {name: buffer.clone() for name, buffer in model.named_buffers()}
    versions = [buffer._version for buffer in model.buffers()]
    loss.backward()
    assert capture.replays == (("0", 0),)
    assert model[0].norm.num_batches_tracked == 1
    assert all(torch.equal(buffer, after[name]) for name, buffer in model.named_buffers())
    assert [buffer._version for buffer in model.buffers()] == versions


def test_a_buffer_that_forward_reads_has_its_earlier_value_again() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            scale = self.seen.clone()
            self.seen.data.mul_(2)  # which the version does not tell
            return (x * scale).exp()

    x = rows().requires_grad_()
    done = assert_exact(nn.Sequential(Counting()), ["0"], lambda m: m(m(x) / 1e3).sum())
    assert done.replays == (("0", 1), ("0", 0))


# --- models -----------------------------------------------------------------------------------


def test_transformer_blocks_with_dropout() -> None:
    layers = [nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True) for _ in "ab"]
    x = torch.randn(2, 8, 32)
    model = nn.Sequential(nn.Linear(32, 32), *layers)
    done = assert_exact(model, ["1", "2", "2.self_attn"], lambda m: m(x).square().sum())
    assert done.replays == (("2", 0), ("2.self_attn", 0), ("1", 0))


class SmallUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self.block(3, 8), self.block(8, 16)])
        self.middle = self.block(16, 16)
        self.up = nn.ModuleList([self.block(32, 8), self.block(16, 8)])

    @staticmethod
    def block(inner: int, outer: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(inplace=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1))
        return x


def test_skips_across_replayed_blocks() -> None:
    x = torch.randn(2, 3, 16, 16)
    paths = ["down.0", "down.1", "middle", "up.0", "up.1"]
    done = assert_exact(SmallUNet(), paths, lambda m: m(x).square().mean())
    assert [path for path, _ in done.replays] == ["up.1", "up.0", "middle", "down.1", "down.0"]


def test_a_shared_module_is_replayed_once_for_every_call() -> None:
    x, block = rows(), Block()
    model = nn.Sequential(block, nn.Tanh(), block, block)
    done = assert_exact(model, ["0"], lambda m: m(x).square().sum())
    assert done.replays == (("0", 2), ("0", 1), ("0", 0))


def test_autocast_is_as_it_was() -> None:
    x = rows()

    def loss_of(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().sum()

    done = assert_exact(nn.Sequential(Quiet(), Block()), ["0", "1"], loss_of)
    assert done.replays == (("1", 0), ("0", 0))


class ReadsTwice(torch.autograd.Function):
    """Its backward asks for what it saved two times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (x, _), (_, y) = ctx.saved_tensors, ctx.saved_tensors
        return gradient * y, gradient * x


class Peculiar(nn.Module):
    """A function of its own, a checkpoint, views, and power iteration in its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).sigmoid()
        z = ReadsTwice.apply(y, y.sin())
        z = checkpoint(lambda t: torch.tanh(self.second(F.dropout(t))), z, use_reentrant=False)
        return z.t().contiguous().t() * y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x.unsqueeze(0))[0][0]


@pytest.mark.parametrize("paths", [("1",), ("2",), ("1", "2"), ("", "1", "2.cells", "3")])
@pytest.mark.parametrize("kind", ["plain", "exact", "spill"])
def test_modules_with_ways_of_their_own(paths: tuple[str, ...], kind: str) -> None:
    base = {
        "plain": plain_policy(),
        "exact": exact_policy(),
        "spill": Policy("spilled inputs", {Need.INPUT: Treatment(Method.SPILL)}),
    }[kind]
    layers = [nn.Linear(WIDTH, WIDTH), Peculiar(), Recurrent(), nn.Linear(WIDTH, WIDTH)]
    x = rows()
    expected = step(nn.Sequential(*layers), plain_policy(), lambda m: m(x).square().sum())
    found = step(
        nn.Sequential(*layers), replaying(*paths, policy=base), lambda m: m(x).square().sum()
    )
    assert all(map(same_bits, expected.tensors, found.tensors))
    assert {path for path, _ in found.replays} == set(paths)


# --- inputs and outputs -----------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    left: Tensor
    right: Tensor | None

    def __post_init__(self) -> None:
        assert isinstance(self.left, Tensor)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, pair: Pair, *, more: dict[str, Any], places: tuple[Tensor, ...], power: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert pair.right is None
        assert more["mode"] == "full"
        assert places[0] is pair.left, "the same tensor given twice is the same tensor again"
        y = torch.tanh(self.layer(pair.left)) * more["scale"]
        y = y.masked_fill(more["mask"], 0.5)
        return y**power, {"also": torch.sigmoid(y)}


def test_nested_keyword_inputs_and_several_outputs() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.nested = Nested()

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            more = {"scale": y.sigmoid(), "mask": x > 1, "mode": "full"}
            first, rest = self.nested(Pair(y, None), more=more, places=(y,), power=3)
            return first.sum() + rest["also"].exp().sum()

    x = rows()
    for paths in (["nested"], ["", "nested"]):
        done = assert_exact(Outer(), paths, lambda m: m(x))
        assert done.replays[-1] == ("nested", 0)


def test_inputs_that_need_no_gradient() -> None:
    x = rows()
    assert not x.requires_grad
    done = assert_exact(Quiet(), [""], lambda m: m(x).sum())
    assert done.replays == (("", 0),)


def test_nothing_is_replayed_without_gradients() -> None:
    model, x = nn.Sequential(Quiet()), rows()
    capture = Capture(model)
    with capture.step(replaying("0"), 0, 0), torch.no_grad():
        model(x)
    assert capture.stats.plain_peak_bytes == capture.stats.held_peak_bytes == 0


def test_coded_inputs_take_fewer_bytes_and_are_told_as_such() -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, 256), Quiet(256)), rows()
    eight = Treatment(Method.MINMAX, 8)
    policy = replaying("1", policy=Policy("coded input", {Need.INPUT: eight}))
    exact = step(model, replaying("1"), lambda m: m(x).square().sum(), x)
    coded = step(model, policy, lambda m: m(x).square().sum(), x)
    assert exact.held_bytes > ROWS * 256 * 4
    assert coded.held_bytes < exact.held_bytes - ROWS * 256 * 2.5
    for one, other in zip(exact.tensors[1:5], coded.tensors[1:5], strict=True):
        assert 0 < (one - other).norm() < 0.05 * one.norm()


def test_policies_keep_inputs_exactly_unless_they_name_them() -> None:
    for policy in (exact_policy(), coded_policy(2)):
        assert policy.treatment(Need.INPUT, Site("0", "input", 0, 0)).method is Method.KEEP


# --- backward in other ways -------------------------------------------------------------------


def test_retain_graph_replays_again() -> None:
    x, model = rows(), nn.Sequential(Block(), Block())
    capture = Capture(model)
    with capture.step(replaying("0", "1", "1.up"), 0, 0):
        loss = model(x).square().sum()
    found = []
    waiting = capture.stats.held_bytes
    for retain in (True, False):
        loss.backward(retain_graph=retain)
        assert capture.replays == (("1", 0), ("1.up", 0), ("0", 0))
        found.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
        assert capture.stats.held_bytes == (waiting if retain else 0)
    assert all(map(torch.equal, *found))


def test_a_partial_backward_leaves_no_rebuilt_tensor() -> None:
    x, model = rows(), nn.Sequential(Quiet(), Quiet())
    capture = Capture(model, PlainStore())
    with capture.step(replaying("0", "1"), 0, 0):
        loss = model(x).sum()
    waiting = capture.stats.held_bytes
    torch.autograd.grad(loss, model[1].down.bias, retain_graph=True)
    torch.autograd.grad(loss, model[1].up.weight, retain_graph=True)
    assert capture.replays == (("1", 0),)
    assert capture.stats.held_bytes == waiting


def test_second_derivatives() -> None:
    model, x = nn.Sequential(Quiet(), nn.Tanh(), Quiet()), rows().requires_grad_()

    def penalty(model: nn.Module) -> Tensor:
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return slope.square().sum()

    done = assert_exact(model, ["0", "2"], penalty, saves_rebuilt=True)
    assert {path for path, _ in done.replays} == {"0", "2"}


def test_a_module_that_differentiates_in_its_own_forward() -> None:
    class Energy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            energy = torch.tanh(self.layer(x)).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return x + force

    x = rows().requires_grad_()
    model = nn.Sequential(Energy())
    done = assert_exact(model, ["0"], lambda m: m(x * 1).square().sum(), saves_rebuilt=True)
    assert done.replays[-1] == ("0", 0)


def test_backward_inside_the_capture_and_micro_batches() -> None:
    x = rows()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Quiet(), Quiet())
    plain = copy.deepcopy(model)
    capture = Capture(model)
    for index, piece in enumerate(x.split(ROWS // 2)):
        with capture.step(replaying("1", "2", "2.up"), 0, 0, index, batch=piece):
            model(piece).square().sum().backward()
            seen = capture.replays
            outside = torch.tanh(model[0](piece)).sum()  # sites are named as ever after a replay
        assert seen == (("2", 0), ("2.up", 0), ("1", 0))
        del outside
        plain(piece).square().sum().backward()
    assert capture.stats.held_bytes == 0
    assert {r.site.module for r in capture.sites()} <= {"<outside>", "0", "1", "2", "2.up"}
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_hooks_of_the_module_fire_once_and_those_inside_again() -> None:
    fired: list[str] = []
    model = nn.Sequential(Quiet())
    model[0].register_forward_hook(lambda *_: fired.append("outer"))
    model[0].up.register_forward_hook(lambda *_: fired.append("inner"))
    capture = Capture(model)
    with capture.step(replaying("0"), 0, 0):
        loss = model(rows()).sum()
    assert fired == ["inner", "outer"]
    loss.backward()
    assert fired == ["inner", "outer", "inner"]


# --- what goes wrong --------------------------------------------------------------------------


def test_a_held_input_changed_in_place_is_reported() -> None:
    model, x = nn.Sequential(Quiet()), rows()
    y = x * 1
    capture = Capture(model)
    with capture.step(replaying("0"), 0, 0):
        loss = model[0](y).sum()
    y.add_(1)
    with pytest.raises(SavedTensorError, match=r"modified by an inplace operation.*0:input"):
        loss.backward()


def test_a_module_that_changes_its_input_is_refused_at_once() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.ReLU(inplace=True)))
    capture = Capture(model)
    with (
        capture.step(replaying("1"), 0, 0),
        pytest.raises(SavedTensorError, match="'1', whose forward pass modified its input"),
    ):
        model(rows())


def test_a_changed_parameter_is_reported() -> None:
    model = nn.Sequential(Quiet())
    capture = Capture(model)
    with capture.step(replaying("0"), 0, 0):
        loss = model(rows()).sum()
    with torch.no_grad():
        model[0].up.bias.add_(1)
    with pytest.raises(SavedTensorError, match="step the optimizer after backward"):
        loss.backward()


def test_a_module_that_does_not_repeat_itself_is_reported() -> None:
    class Fickle(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Fickle.calls += 1
            return x.exp() if self.calls == 1 else x[:1].exp()

    model, x = nn.Sequential(Fickle()), rows().requires_grad_()
    capture = Capture(model)
    with capture.step(replaying("0"), 0, 0):
        loss = model(x).sum()
    with pytest.raises(SavedTensorError, match="must do the same thing again"):
        loss.backward()


@pytest.mark.parametrize("path", ["0.nothing", "list"])
def test_a_module_that_cannot_be_replayed_is_refused(path: str) -> None:
    model = nn.Sequential(Quiet())
    model.add_module("list", nn.ModuleList())
    with pytest.raises(UnknownNameError, match=path), Capture(model).step(replaying(path), 0, 0):
        pass


def test_fused_operators_are_refused() -> None:
    policy = with_fused_operators(replaying("0"))
    with (
        pytest.raises(CodecError, match="ask for one of the two"),
        Capture(Block()).step(policy, 0, 0),
    ):
        pass


def test_convolutions_inside_replayed_calls_are_not_chunked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, ran = products.conv2d, []

    def conv2d(*arguments: Any, **keywords: Any) -> Tensor:
        ran.append(arguments[0].shape)
        return whole(*arguments, **keywords)

    monkeypatch.setattr(weight_gradient, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(products, "conv2d", conv2d)
    model, x = nn.Sequential(nn.Conv2d(3, 3, 3)), torch.randn(4, 3, 8, 8)
    policy = with_chunked_operators(plain_policy())
    step(model, policy, lambda m: m(x).square().sum())
    assert len(ran) == 1
    found = step(model, replaying("0", policy=policy), lambda m: m(x).square().sum())
    assert len(ran) == 1
    expected = step(model, plain_policy(), lambda m: m(x).square().sum())
    assert all(map(same_bits, expected.tensors, found.tensors))


def test_parameters_are_read_until_the_last_replay() -> None:
    x, free = rows(), []
    model = nn.Sequential(Quiet(), Quiet())
    capture = Capture(model)
    for layer in (model[1].down, model[1].up, model[0].down, model[0].up):
        layer.weight.register_post_accumulate_grad_hook(
            lambda _: free.append([capture.parameter_reads.is_free(b.up.bias) for b in model])
        )
    with capture.step(replaying("0", "1"), 0, 0), capture.parameter_reads.watching():
        loss = model(x).sum()
    capture.parameter_reads.begin_backward(loss)
    assert not any(capture.parameter_reads.is_free(p) for p in model.parameters())
    loss.backward()
    assert free[0] == [False, False]
    assert free[2] == [False, True]
    assert all(capture.parameter_reads.is_free(p) for p in model.parameters())


class Failing(nn.Module):
    """Raises in its n-th call, a replayed one included: its class counts."""

    calls = 0

    def __init__(self, failing_call: int) -> None:
        super().__init__()
        Failing.calls, self.failing_call = 0, failing_call
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.layer(x).exp(), 0.5)
        Failing.calls += 1
        if self.calls == self.failing_call:
            raise ArithmeticError("as asked")
        return self.layer(y)


@pytest.mark.parametrize("failing_call", [1, 2])
def test_an_error_in_forward_or_backward_leaves_nothing_behind(failing_call: int) -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Failing(failing_call)), rows()
    before, seen = pickle.dumps(model), []
    model[0].register_forward_hook(lambda *call: seen.append(weakref.ref(call[2])))
    capture = Capture(model, PlainStore())
    random_states = []

    def run() -> None:
        with capture.step(replaying("0", "1", "1.layer"), 0, 0):
            loss = model(x).sum()
        random_states.append(torch.get_rng_state())
        loss.backward()

    with pytest.raises(ArithmeticError, match="as asked"):
        run()
    assert len(random_states) == failing_call - 1
    assert all(torch.equal(torch.get_rng_state(), state) for state in random_states)
    gc.collect()
    assert capture.stats.held_bytes == capture.stats.plain_bytes == 0
    assert [reference() for reference in seen] == [None]
    assert all("forward" not in part.__dict__ for part in model.modules())
    model[0]._forward_hooks.clear()
    model[0]._forward_hooks_always_called.clear()
    assert pickle.dumps(model) == before


def test_copies_made_inside_have_no_trace() -> None:
    model = nn.Sequential(Quiet())
    own = lambda x: x  # noqa: E731
    model[0].up.forward = own  # someone else's patch, which comes back
    names = list(model.state_dict())
    with Capture(model).step(replaying("0", "0.up"), 0, 0):
        assert list(model.state_dict()) == names
        twin = copy.deepcopy(model[0])
    assert "forward" not in model[0].__dict__
    assert model[0].up.forward is own
    assert twin.forward.__func__ is Quiet.forward
    assert twin.forward.__self__ is twin


# --- any nesting ------------------------------------------------------------------------------


def test_a_mean_that_stayed_what_it_was_is_not_moved_by_a_replay() -> None:
    """The first call adds a mean of 0 to one of 0; replayed after the second, it would decay it."""
    model = nn.Sequential(nn.Identity(), nn.BatchNorm1d(2))
    even, uneven = torch.tensor([[1.0, -2.0], [-1.0, 2.0]]), torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    weights = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    batch = even.requires_grad_(), uneven.requires_grad_()

    def loss_of(module: nn.Module) -> Tensor:
        return sum(((module[1](x * 1) * weights).sum() for x in batch), torch.zeros(()))  # type: ignore[index]

    done = assert_exact(model, ["1"], loss_of)
    assert done.replays == (("1", 1), ("1", 0))


class Random(nn.Module):
    """Children in a row, with a shortcut where asked."""

    def __init__(self, children: list[nn.Module], shortcut: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(children)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for part in self.parts:
            y = part(y)
        return x + y if self.shortcut else y


_LEAVES: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(8, 8),
    lambda: nn.BatchNorm1d(8),
    lambda: nn.Dropout(0.5),
    lambda: nn.GELU(),
    lambda: nn.ReLU(),
    lambda: nn.LayerNorm(8),
]
_MODULES = st.recursive(
    st.sampled_from(_LEAVES).map(lambda make: make()),
    lambda inner: st.builds(Random, st.lists(inner, min_size=1, max_size=3), st.booleans()),
    max_leaves=8,
)


@given(_MODULES, st.data())
@settings(max_examples=at_most(40, 10), deadline=None)
def test_any_nesting_is_exact(inner: nn.Module, data: st.DataObject) -> None:
    model = Random([nn.Linear(8, 8), inner, inner], shortcut=True)
    callable_paths = [n for n, m in model.named_modules() if not isinstance(m, nn.ModuleList)]
    paths = data.draw(st.sets(st.sampled_from(callable_paths)))
    x = torch.randn(4, 8)
    done = assert_exact(model, paths, lambda m: m(x).square().sum())
    assert {path for path, _ in done.replays} <= paths
    assert len(set(done.replays)) == len(done.replays), "no call is replayed twice"
