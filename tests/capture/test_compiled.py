"""Models with compiled parts: these stay whole graphs, and what they save is kept as it is."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from daf.capture.capture import Capture
from daf.capture.compiled_calls import without_our_modes
from daf.core.errors import NonFiniteLossError, UnknownNameError
from daf.core.policy import Method, policy_for
from daf.sensitivity.prior import PriorObserver
from daf.session.session import Session
from daf.torch_compat.compiled_modules import CompiledModules
from daf.torch_compat.compiler import as_the_user_wants, eagerly
from daf.torch_compat.operator_mode import OperatorMode

# PyTorch's own, of its compiler and what that imports.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)

HOWS = ("torch.compile(part)", "part.compile()", "torch.compile(model)", "model.compile()")
Backend = Callable[..., Any] | str


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.wide = nn.Linear(64, 256)
        self.narrow = nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


class Called(nn.Module):
    """Calls a function that was compiled by itself."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Counting:
    """A backend that runs graphs as they are, and counts them; no attribute is a model's state."""

    __slots__ = ("graphs",)

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return sys.modules["torch._dynamo"].lookup_backend("aot_eager")(graph, inputs)


@pytest.fixture
def backend() -> Iterator[Counting]:
    torch.compiler.reset()
    yield Counting()
    torch.compiler.reset()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 64), Block(), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 10)
    )


def compiled(how: str, backend: Backend) -> nn.Module:
    found = model()
    if how == "part.compile()":
        found[1].compile(backend=backend)
    elif how == "torch.compile(part)":
        found[1] = torch.compile(found[1], backend=backend)  # type: ignore[assignment]
    elif how == "model.compile()":
        found.compile(backend=backend)
    else:
        return torch.compile(found, backend=backend)  # type: ignore[return-value]
    return found


def batch(device: str = "cpu") -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(256, 64).to(device), torch.randint(10, (256,)).to(device)


def loss_of(trained: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(trained(given[0]), given[1])


def losses(trained: nn.Module, steps: int = 3, device: str = "cpu", **options: Any) -> list[float]:
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    with Session(trained, optimizer, options.pop("budget", None), **options) as session:
        return [session.step(batch(device), loss_of).loss for _ in range(steps)]


def plain_losses(trained: nn.Module, steps: int = 3, device: str = "cpu") -> list[float]:
    optimizer, found = torch.optim.SGD(trained.parameters(), lr=0.1), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(trained, batch(device))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"bits": "exact"}, marks=pytest.mark.thorough),
        {"bits": "exact", "release_gradients": True},
    ],
)
def test_graphs_are_those_of_plain_training_and_so_are_losses(
    how: str, options: dict[str, Any], backend: Counting
) -> None:
    expected = plain_losses(compiled(how, backend))
    plain_graphs = backend.graphs
    assert plain_graphs > 0
    torch.compiler.reset()
    backend.graphs = 0
    assert losses(compiled(how, backend), **options) == expected
    assert backend.graphs == plain_graphs
    torch.compiler.reset()
    assert losses(model(), bits="exact") == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("how", HOWS)
def test_what_a_compiled_part_saves_is_kept_and_the_rest_is_coded(
    how: str, backend: Counting, code_everything: None
) -> None:
    check_saves(compiled(how, backend), how, batch())


def check_saves(trained: nn.Module, how: str, given: tuple[Tensor, Tensor]) -> None:
    capture = Capture(trained)
    with capture.step(policy_for(2), 0, 0, batch=given):
        loss = loss_of(trained, given)
    loss.backward()
    inside = [site for site in capture.sites() if site.site.operator == "autograd.Function"]
    assert inside
    assert {site.treatment.method for site in inside} <= {Method.KEEP, Method.PACK}
    outside = {site.treatment.method for site in capture.sites() if site not in inside}
    coded = {Method.ROTATED, Method.MASK} if "part" in how else set()
    assert outside & {Method.ROTATED, Method.MASK} == coded
    hooks = [module for module in trained.modules() if module._forward_hooks]
    assert not hooks
    gradients = [each.grad for each in trained.parameters()]
    assert all(each is not None and each.isfinite().all() for each in gradients)


@pytest.mark.parametrize("how", HOWS)
def test_where_numbers_cease_to_be_finite_is_told_of_modules_that_have_hooks(
    how: str, backend: Counting
) -> None:
    trained = compiled(how, backend)
    with torch.no_grad():
        next(trained.parameters()).mul_(1e6)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    with (
        Session(trained, optimizer, None) as session,
        pytest.raises(NonFiniteLossError, match=r"the output of module '(_orig_mod\.)?0'"),
    ):
        session.step((batch()[0] * 1e36, batch()[1]), loss_of)
    assert backend.graphs == 1  # where it began is looked for eagerly


def test_sensitivity_s_first_guess_puts_no_hooks_inside(backend: Counting) -> None:
    trained = compiled("part.compile()", backend)
    observer = PriorObserver(trained)
    with observer.watching():
        loss_of(trained, batch()).backward()
    assert set(observer.by_module) == {"0", "3", "4"}
    assert backend.graphs == 1


def test_no_parameter_is_free_before_what_cannot_be_seen_through_has_run() -> None:
    trained = compiled("part.compile()", "eager")  # whose nodes look like any others
    capture = Capture(trained)
    reads, bias = capture.parameter_reads, trained[1].narrow.bias
    with capture.step(policy_for("exact"), 0, 0, batch=batch()), reads.watching():
        loss = loss_of(trained, batch())
    reads.begin_backward(loss)
    assert not reads.is_free(bias)
    loss.backward()
    assert reads.is_free(bias)


def test_a_session_under_a_budget_plans_measures_and_trains(backend: Counting) -> None:
    """With everything on: observed steps, sensitivities, replays to choose from."""
    trained = compiled("part.compile()", backend)
    expected = plain_losses(compiled("torch.compile(part)", backend), 12)
    found = losses(trained, 12, budget="4GB")
    assert found == pytest.approx(expected, rel=0.02)
    assert found[-1] < found[0]


@pytest.mark.parametrize(("how", "path"), [(HOWS[0], "1"), (HOWS[1], "1"), (HOWS[1], "1.wide")])
def test_what_is_compiled_is_not_run_again(how: str, path: str, backend: Counting) -> None:
    trained = compiled(how, backend)
    policy = replace(policy_for("exact"), replayed=frozenset({path}))
    with (
        pytest.raises(UnknownNameError, match=r"not compiled|no module"),
        Capture(trained).step(policy, 0, 0, batch=batch()),
    ):
        pass


def test_a_call_that_calls_compiled_functions_runs_again_eagerly(
    backend: Counting, code_everything: None
) -> None:
    found = []
    for replayed in (frozenset(), frozenset({"1"})):
        torch.manual_seed(0)
        function = torch.compile(lambda x: F.gelu(x) * 2, backend=backend)
        trained = nn.Sequential(nn.Linear(64, 64), Called(function), nn.Linear(64, 10))
        capture = Capture(trained)
        policy = replace(policy_for("exact"), replayed=replayed)
        with capture.step(policy, 0, 0, batch=batch()):
            loss = loss_of(trained, batch())
        loss.backward()
        assert [path for path, _ in capture.replays] == sorted(replayed)
        found.append([each.grad for each in trained.parameters()])
    assert backend.graphs == 0
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_a_function_compiled_by_itself_runs_eagerly_inside_and_as_ever_outside(
    backend: Counting,
) -> None:
    function = torch.compile(lambda x: F.gelu(x) * 2, backend=backend)
    trained = nn.Sequential(nn.Linear(64, 64), Called(function), nn.Linear(64, 10))
    expected = copy.deepcopy(trained)
    assert losses(trained) == pytest.approx(plain_losses(expected), rel=1e-6)
    backend.graphs = 0
    losses(trained, 1)
    assert backend.graphs == 0
    function(torch.ones(3, 3, 3, requires_grad=True))
    assert backend.graphs == 1


def test_the_user_s_own_stance_is_kept_inside(backend: Counting) -> None:
    trained = compiled("part.compile()", backend)
    with torch.compiler.set_stance("force_eager"):
        losses(trained, 1)
        assert backend.graphs == 0
    losses(trained, 1)
    assert backend.graphs == 1


def test_the_outermost_compiled_modules_are_found() -> None:
    inner, outer = nn.Sequential(nn.Linear(2, 2)), nn.Sequential()
    outer.add_module("one", nn.Sequential(inner, nn.ReLU()))
    outer.add_module("onetwo", nn.Linear(2, 2))
    every = list(outer.named_modules())
    assert list(CompiledModules(outer).hookable()) == every
    assert list(CompiledModules(outer).replayable()) == every
    inner.compile(backend="eager")
    assert CompiledModules(outer).attributes == {inner: "_compiled_call_impl"}
    assert [path for path, _ in CompiledModules(outer).hookable()] == ["", "one", "one.1", "onetwo"]
    assert [path for path, _ in CompiledModules(outer).replayable()] == ["one.1", "onetwo"]
    outer.one.compile(backend="eager")
    outer.onetwo = torch.compile(outer.onetwo, backend="eager")  # type: ignore[assignment]
    found = CompiledModules(outer)
    assert found.attributes == {outer.one: "_compiled_call_impl", outer.onetwo: "forward"}
    assert [path for path, _ in found.hookable()] == ["", "onetwo"]
    outer.compile(backend="eager")
    assert CompiledModules(outer).attributes == {outer: "_compiled_call_impl"}
    assert not list(CompiledModules(outer).hookable())


def test_modules_that_are_called_from_compiled_parts_and_others_have_no_hooks(
    backend: Counting,
) -> None:
    torch.manual_seed(0)
    part = Block()
    tail = part.narrow = nn.Linear(256, 64)
    part.compile(backend=backend)
    trained = nn.ModuleDict({"tail": tail, "b": nn.Sequential(part), "c": part})
    found = CompiledModules(trained)
    assert {path for path, _ in found.hookable()} == {"", "b"}
    assert not list(found.replayable())
    capture = Capture(trained)
    with capture.step(policy_for(2), 0, 0):
        loss = trained["c"](trained["tail"](torch.randn(256, 256))).sum()
    loss.backward()
    assert backend.graphs == 1


class Checkpointed(nn.Module):
    def __init__(self, inner: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found = checkpoint(self.inner, x, use_reentrant=False)
        assert isinstance(found, Tensor)
        return found


@pytest.mark.parametrize("what", ["function", "module"])
def test_what_a_checkpoint_runs_again_runs_as_it_did(what: str, backend: Counting) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        if what == "function":
            inner = torch.compile(lambda x: F.silu(F.gelu(x)) * x, backend=backend)
        else:
            inner = torch.compile(Block(), backend=backend)
        return nn.Sequential(nn.Linear(64, 64), Checkpointed(inner), nn.Linear(64, 10))

    expected = plain_losses(made())
    assert losses(made()) == pytest.approx(expected, rel=1e-6)


def test_a_model_can_be_copied_inside_a_step(backend: Counting) -> None:
    trained = compiled("torch.compile(part)", backend)
    capture = Capture(trained)
    with capture.step(policy_for(2), 0, 0):
        copied = copy.deepcopy(trained[3])
        loss_of(trained, batch()).backward()
    assert torch.equal(copied.weight, trained[3].weight)


def test_sessions_on_two_threads_leave_the_user_s_stance(backend: Counting) -> None:
    """Whichever ends first."""
    function = torch.compile(lambda x: x * 2, backend=backend)
    first, second = eagerly(), eagerly()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    function(torch.ones(3))
    assert backend.graphs == 0
    with as_the_user_wants():
        second.__exit__(None, None, None)
    function(torch.ones(3))
    assert backend.graphs == 1


def test_other_modes_stay_where_they_were() -> None:
    class Theirs(TorchFunctionMode):
        pass

    def stack() -> list[Any]:
        count = torch._C._len_torch_function_stack()
        return [torch._C._get_function_stack_at(index) for index in range(count)]

    lowest, highest = Theirs(), Theirs()
    with (
        lowest,
        OperatorMode(lambda function, given, named: function(*given, **named)) as ours,
        highest,
    ):
        assert stack() == [lowest, ours, highest]
        with suppress(ZeroDivisionError), without_our_modes():
            assert stack() == [lowest, highest]
            _ = 1 / 0
        assert stack() == [lowest, ours, highest]


# --- on a GPU -------------------------------------------------------------------------------

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.fixture
def inductor() -> Iterator[str]:
    """The backend that everybody has there, whose kernels are Triton's."""
    pytest.importorskip("triton", reason="triton is not installed: daf-train[gpu]")
    torch.compiler.reset()
    yield "inductor"
    torch.compiler.reset()


@on_a_gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(
    "options", [{}, {"bits": "exact"}, {"bits": "exact", "release_gradients": True}]
)
def test_on_a_gpu_losses_are_those_of_plain_training(
    how: str, options: dict[str, Any], inductor: str
) -> None:
    expected = plain_losses(compiled(how, inductor).to("cuda"), device="cuda")
    torch.compiler.reset()
    found = losses(compiled(how, inductor).to("cuda"), device="cuda", **options)
    assert found == pytest.approx(expected, rel=1e-5)


@on_a_gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.parametrize("how", HOWS)
def test_on_a_gpu_what_a_compiled_part_saves_is_kept_and_the_rest_is_coded(
    how: str, inductor: str, code_everything: None
) -> None:
    check_saves(compiled(how, inductor).to("cuda"), how, batch("cuda"))
