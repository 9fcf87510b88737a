"""What an observed step tells is what happened in it, and observing leaves nothing behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.core.policy import (
    KEEP,
    Method,
    Need,
    Policy,
    Reading,
    coded_policy,
    exact_policy,
    plain_policy,
    with_fused_operators,
    with_planned_operators,
)
from daf.memory.recycling_allocator import RecyclingAllocator, unsupported_reason
from daf.memory.statistics import stats
from daf.profiling.step_observer import Observer
from daf.saved_tensors import packer
from daf.saved_tensors.observation import MethodTime, Observation, ObservedTensor
from daf.saved_tensors.packed_tensor import SavedTensor
from daf.step.dry_run import dry_run

TIGHTEST = coded_policy(1)


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def observe(
    model: nn.Module,
    x: Tensor,
    policy: Policy,
    loss_fn: Callable[[nn.Module, Tensor], Tensor] = mean_square,
    capture: Capture | None = None,
) -> Observation:
    capture = capture or Capture(model)
    observer = Observer(capture, len(x))
    with observer.watching():
        with capture.step(policy, 0, 0, 0, x, watcher=observer):
            loss = loss_fn(model, x)
        observer.begin_backward()
        loss.backward()
    return observer.found


def of(found: Observation, module: str, need: Need | None = None) -> list[ObservedTensor]:
    return [
        each
        for each in found.saves
        if each.site.module == module and (need is None or each.need is need)
    ]


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.behind = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(F.relu(self.norm(self.convolution(x)) + x))


class ChangesItsInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2.0)


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


class Cube(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Cubed.apply(x)  # type: ignore[no-any-return,no-untyped-call]


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(x)))


def images(count: int = 4, channels: int = 8, size: int = 16) -> Tensor:
    return torch.randn(count, channels, size, size)


def norm_chain() -> nn.Module:
    return nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(2048, 2048), nn.Dropout(0.5), nn.Linear(2048, 8))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "norm": norm_chain,
    "residual": lambda: nn.Sequential(nn.Conv2d(8, 8, 1), Residual(8), Residual(8)),
    "dropout": dropping,
    "custom": lambda: nn.Sequential(nn.Conv2d(8, 8, 1), Cube(), nn.Conv2d(8, 8, 1)),
    "in place": lambda: nn.Sequential(nn.Conv2d(8, 8, 1), ChangesItsInput(), nn.Conv2d(8, 8, 1)),
}


@pytest.mark.parametrize("policy", [plain_policy(), TIGHTEST], ids=["plain", "tightest"])
@pytest.mark.parametrize("name", MODELS)
def test_moments_are_in_order_whatever_the_model(name: str, policy: Policy) -> None:
    model = MODELS[name]()
    found = observe(model, images(), policy)
    count = len(found.peak_bytes)
    assert count == len(found.gradient_bytes)
    assert 0 < found.forward < count
    assert found.saves
    assert found.calls
    for each in found.saves:
        assert 0 <= each.saved < found.forward <= each.read <= each.released < count
        assert each.saved <= each.dies <= count
        assert each.storage_bytes >= each.tensor_bytes > 0
    for call in found.calls:
        assert 0 <= call.first_moment <= call.last_moment < found.forward
        if call.parent >= 0:
            outer = found.calls[call.parent]
            assert outer.first_moment <= call.first_moment
            assert call.last_moment <= outer.last_moment
    assert found.gradient_bytes == sorted(found.gradient_bytes)
    assert found.gradient_bytes[found.forward] == 0
    whole = sum(each.nbytes for each in model.parameters())
    assert found.gradient_bytes[-1] <= whole
    # In that model nothing is read any more once the first gradient exists.
    assert (found.gradient_bytes[-1] > 0) == (name != "in place")


@pytest.mark.parametrize("name", MODELS)
def test_an_observed_step_gives_the_gradient_of_a_plain_one(name: str) -> None:
    model, x = MODELS[name](), images()
    random_state = torch.get_rng_state()
    observe(model, x, plain_policy())
    found = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    model.zero_grad()
    torch.set_rng_state(random_state)
    mean_square(model, x).backward()
    expected = [each.grad for each in model.parameters()]
    assert len(found) == len(expected)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_what_only_autograd_holds_is_dead_and_what_the_program_holds_is_not() -> None:
    kept: list[Tensor] = []

    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            kept.append(x)
            return torch.tanh(x)

    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256), Keeps(), nn.Linear(256, 8))
    found = observe(model, torch.randn(64, 256), plain_policy())
    first = of(found, "1")[0]  # the input of the second linear: nobody else needs it afterwards
    assert first.saved < first.dies < found.forward
    last = of(found, "3")[0]  # what tanh made and saved itself
    assert last.saved < last.dies <= found.forward


def test_the_program_s_own_reference_keeps_memory_from_dying() -> None:
    kept: list[Tensor] = []

    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            kept.append(torch.tanh(x))
            return kept[-1]

    for keeps in (True, False):
        middle = Keeps() if keeps else nn.Tanh()
        model = nn.Sequential(nn.Linear(256, 256), middle, nn.Linear(256, 8))
        found = observe(model, torch.randn(64, 256), plain_policy())
        (input_of_last,) = of(found, "2", Need.LINEAR)
        count = len(found.peak_bytes)
        # A storage that outlives the step dies after its last moment.
        assert (input_of_last.dies == count) == keeps
        assert keeps or input_of_last.dies <= found.forward


def test_a_saved_tensor_shared_by_two_operators_is_one_storage() -> None:
    found = observe(
        nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8)),
        torch.randn(64, 256),
        plain_policy(),
    )
    (result,) = of(found, "1")
    (following,) = of(found, "2", Need.LINEAR)
    assert result.storage == following.storage
    assert result.dies == following.dies
    assert following.read < result.read  # backward goes from the end


def test_reading_begins_a_moment_and_later_layers_are_read_first() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh())
    found = observe(model, torch.randn(64, 256), plain_policy())
    reads = [(each.read, each.site.module) for each in found.saves if each.site.module[0] != "<"]
    assert [module for _, module in sorted(reads)] == ["3", "2", "1"]
    assert len({moment for moment, _ in reads}) == 3


def test_calls_nest_and_shared_modules_are_called_twice() -> None:
    model = nn.Sequential(Shared(), nn.Linear(64, 64))
    found = observe(model, torch.randn(32, 64), plain_policy())
    assert [each.module for each in found.calls] == ["", "0", "0.inner", "0.inner", "1"]
    assert [each.parent for each in found.calls] == [-1, 0, 1, 1, 0]
    inner = [each.call for each in found.saves if each.site.module == "0.inner"]
    assert set(inner) <= {2, 3}
    assert 3 in inner
    assert all(each.output_bytes == 32 * 64 * 4 for each in found.calls)
    # The batch is the caller's: it is no input that a replay would have to hold.
    assert found.calls[0].inputs == found.calls[1].inputs == found.calls[2].inputs == []
    assert [nbytes for _, nbytes in found.calls[4].inputs] == [32 * 64 * 4]
    (input_of_last,) = of(found, "1", Need.LINEAR)
    assert found.calls[4].inputs[0][0] == input_of_last.storage


def test_calls_whose_inputs_are_changed_in_place_cannot_be_replayed() -> None:
    found = observe(MODELS["in place"](), images(), plain_policy())
    replayable = {each.module: each.replayable for each in found.calls}
    assert replayable == {"": True, "0": True, "1": False, "2": True}


def test_an_input_changed_by_a_later_module_condemns_the_earlier_call() -> None:
    class Forks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reads = nn.Sigmoid()
            self.changes = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            y = x + 1.0
            return self.reads(y) * 2.0 + self.changes(y)

    found = observe(nn.Sequential(nn.Linear(64, 64), Forks()), torch.randn(8, 64), plain_policy())
    assert {each.module for each in found.calls if not each.replayable} == {"1.reads", "1.changes"}


def test_gradients_are_counted_from_the_moment_they_exist() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 8))
    model[0].weight.requires_grad_(False)
    found = observe(model, torch.randn(16, 64), plain_policy())
    last = model[2].weight.nbytes + model[2].bias.nbytes
    tanh = next(each for each in found.saves if each.site.module == "1")
    assert found.gradient_bytes[tanh.read] == last
    assert max(found.gradient_bytes) == last  # the first bias's comes after the last read


def test_normalisation_s_followers_name_the_codes_they_are_computed_from() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 1), Residual(8))
    found = observe(model, images(), TIGHTEST)
    (behind,) = of(found, "1.behind", Need.LINEAR)
    (norm,) = of(found, "1.norm", Need.NORM)
    assert behind.treatment.method is Method.REDERIVE
    assert behind.parents is not None
    assert norm.site in behind.parents
    assert norm.parents is None
    known = {each.site for each in found.saves}
    assert behind.parents <= known


def test_codes_are_timed_by_method_and_small_tensors_left_out_of_speeds() -> None:
    found = observe(norm_chain(), images(32), TIGHTEST)
    coded = [each for each in found.saves if each.treatment.method is Method.ROTATED]
    assert coded
    assert found.encode[Method.ROTATED].nbytes == sum(each.tensor_bytes for each in coded)
    assert found.decode[Method.ROTATED].ms > 0
    assert found.encode[Method.ROTATED].ms > 0
    assert found.step_ms > 0
    time = MethodTime()
    time.add((1 << 18) - 1, 3.0)
    assert (time.nbytes, time.ms, time.timed_bytes, time.timed_ms) == ((1 << 18) - 1, 3.0, 0, 0.0)
    time.add(1 << 18, 2.0)
    assert (time.timed_bytes, time.timed_ms) == (1 << 18, 2.0)


def test_custom_functions_are_kept_and_cannot_be_treated_as_linear() -> None:
    found = observe(MODELS["custom"](), images(), TIGHTEST)
    custom = [each for each in found.saves if each.site.operator == "autograd.Function"]
    assert [each.treatment for each in custom] == [KEEP]
    assert custom[0].need is Need.EXACT
    assert custom[0].site.module == "1"


def hooks(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    modules = sum(len(getattr(each, kind)) for each in model.modules() for kind in kinds)
    parameters = sum(
        len(getattr(each, "_post_accumulate_grad_hooks", None) or ()) for each in model.parameters()
    )
    return modules + parameters


def test_hooks_go_even_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh())

    def failing(model: nn.Module, x: Tensor) -> Tensor:
        model(x)
        raise KeyError("in the loss")

    with pytest.raises(KeyError, match="in the loss"):
        observe(model, torch.randn(4, 64), plain_policy(), failing)
    assert hooks(model) == 0
    observe(model, torch.randn(4, 64), plain_policy())
    assert hooks(model) == 0


needs_account = pytest.mark.skipif(
    unsupported_reason() is not None, reason=str(unsupported_reason())
)


@needs_account
@pytest.mark.parametrize("policy", [plain_policy(), TIGHTEST], ids=["plain", "tightest"])
@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_kept_alive_after_the_step(
    name: str, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packer, "SMALL_BYTES", 1)
    model, x = MODELS[name](), images()
    gc.collect()
    already = {id(each) for each in saved_tensors()}  # what other tests' models keep for good
    with RecyclingAllocator():
        capture = Capture(model)

        def step() -> Observation:
            observer = Observer(capture, len(x))
            with observer.watching():
                with capture.step(policy, 0, 0, 0, x, watcher=observer):
                    loss = mean_square(model, x)
                observer.begin_backward()
                loss.backward()
            return observer.found

        step()  # what kernels keep for good comes to stay
        model.zero_grad()
        capture.release_scratch()
        before = stats()["live_bytes.current"]
        found = step()
        model.zero_grad()
        capture.release_scratch()
        assert stats()["live_bytes.current"] == before
        assert max(found.peak_bytes) > x.nbytes
    gc.collect()
    assert {id(each) for each in saved_tensors()} <= already


def saved_tensors() -> list[SavedTensor]:
    return [each for each in gc.get_objects() if type(each) is SavedTensor]


@needs_account
def test_peaks_are_what_the_account_saw_moment_by_moment() -> None:
    model, x = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Tanh()), torch.randn(512, 1024)
    with RecyclingAllocator():
        observe(model, x, plain_policy())
        model.zero_grad()
        found = observe(model, x, plain_policy())
        size = x.nbytes
        tanh = next(each for each in found.saves if each.site.module == "1")
        # Linear's result alone; tanh's beside it from the moment that saves it.
        assert found.peak_bytes[0] < size / 100
        assert found.peak_bytes[tanh.saved - 1] == pytest.approx(size, rel=0.02)
        assert found.peak_bytes[tanh.saved] == pytest.approx(2 * size, rel=0.02)
        assert max(found.peak_bytes[: found.forward]) >= 2 * size
        model.zero_grad()


# --- fused and chunked operators ------------------------------------------------------------------


def fused_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
    )


def observe_fused(policy: Policy) -> Observation:
    model, x = fused_network(), torch.randn(16, 3, 16, 16)
    capture = Capture(model)
    chunk_bytes = 16 * 1024
    policy = with_planned_operators(policy, chunk_bytes)
    dry_run(capture, model, policy, x, mean_square)
    for _ in range(2):
        found = observe(model, x, policy, capture=capture)
    assert [each.pattern for each in capture.fusions()] == ["batch_norm + relu"]
    return found


def test_a_fused_norm_is_read_in_place_and_its_mask_is_held_beside() -> None:
    found = observe_fused(coded_policy(2))
    (norm,) = of(found, "1")
    elements = 16 * 8 * 16 * 16
    assert norm.site.operator == "batch_norm"
    assert norm.reading is Reading.IN_PLACE
    assert norm.treatment.bits == 2
    assert norm.beside_bytes >= elements // 8  # a bit an element, in whole blocks
    assert norm.held_bytes >= elements * 2 // 8
    # Its input's memory already holds the result.
    assert norm.dies == norm.saved
    # Of the two coded tensors the loss's is timed; the norm's own was coded by the operator.
    assert found.encode[Method.ROTATED].nbytes == norm.tensor_bytes


def test_the_convolution_behind_is_read_in_chunks_from_the_norm_s_code() -> None:
    found = observe_fused(coded_policy(2))
    (norm,), (convolution,) = of(found, "1"), of(found, "3")
    assert convolution.reading is Reading.CHUNKS
    assert convolution.parents == {norm.site}
    assert convolution.held_bytes == 0
    assert norm.saved < convolution.saved < convolution.read < norm.read


@pytest.mark.parametrize("policy", [coded_policy(2), with_fused_operators(exact_policy())])
def test_who_could_tell_is_seen_whether_it_is_coded_or_kept(policy: Policy) -> None:
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU6())
    behind = (nn.Conv2d(8, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 8, 3, padding=1))
    model, x = nn.Sequential(*layers, *behind), torch.randn(16, 3, 16, 16)
    policy = with_planned_operators(policy, 16 * 1024)
    capture = Capture(model)
    dry_run(capture, model, policy, x, mean_square)
    found = observe(model, x, policy, capture=capture)
    (norm,), (gelu,) = of(found, "1"), of(found, "4")
    bounded, smooth = (of(found, place)[0] for place in "35")
    assert (bounded.teller, smooth.teller) == (norm.site, gelu.site)
    assert bounded.parents is smooth.parents is norm.teller is gelu.teller is None
    assert gelu.reading is Reading.APART
    is_coded = policy.name == "2-bit"
    assert (bounded.treatment.method is Method.REDERIVE) is not is_coded
    assert smooth.treatment.method is Method.REDERIVE


@pytest.mark.parametrize("layer", [nn.LayerNorm(64), nn.GroupNorm(8, 64)])
def test_a_norm_behind_a_kept_activation_is_told_by_none(layer: nn.Module) -> None:
    """Nothing derives a normalisation's input; its own code, and that one's noise, stay.

    Neither where the normalisation is fused nor where its saves are any operator's.
    """
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), layer, nn.Linear(64, 64))
    x = torch.randn(64, 64)
    policy = with_planned_operators(with_fused_operators(exact_policy()), 16 * 1024)
    capture = Capture(model)
    dry_run(capture, model, policy, x, mean_square)
    found = observe(model, x, policy, capture=capture)
    (gelu,), (norm, *_), (behind,) = of(found, "1"), of(found, "2"), of(found, "3")
    assert gelu.treatment == KEEP
    assert (norm.need, norm.teller) == (Need.NORM, None)
    assert norm.held_bytes > 0
    is_fused = isinstance(layer, nn.LayerNorm)
    assert (behind.treatment.method is Method.REDERIVE) is is_fused


def test_a_fused_norm_that_keeps_its_input_writes_elsewhere() -> None:
    found = observe_fused(plain_policy())
    (norm,) = of(found, "1")
    assert norm.treatment == KEEP
    assert norm.dies > norm.saved
    assert norm.beside_bytes > 0


def test_looking_on_fuses_as_much_as_not_looking() -> None:
    """The observer's own hooks are no readers of a normalisation's result."""
    found = observe_fused(coded_policy(1))
    assert not [each for each in found.saves if each.site.operator == "relu"]
