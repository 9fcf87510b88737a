"""Budgets of a device's memory that fall at any moment: the bound holds, and what went is told.

On a simulated device (``simulated_memory``). Examples are in ``test_device_budget``.
"""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from backends import coding_by
from direct_copies import DirectCopies
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_kernels import PagedBackend, pages_of
from simulated_memory import NOBODY_S_BYTES, SimulatedDevice, SimulatedMemory
from thoroughness import at_most
from torch import Tensor, nn
from writing import writing

from daf.budget.governor import RESERVE_BYTES, Governor
from daf.budget.limits import bounds_of
from daf.core.code_format import code_bytes
from daf.core.errors import BudgetError
from daf.core.plan import Plan
from daf.kernels.triton.planes import DevicePlanes
from daf.memory.device_limit import DeviceKeeper
from daf.memory.recycling_allocator import unsupported_reason
from daf.pool.device_pool import DevicePagedStore, DevicePlaneTensor
from daf.pool.host_planes import HostPlanes, HostStore
from daf.session.budget_controller import BudgetController
from daf.session.session import Session

MIB = 2**20
CPU = torch.device("cpu")
# Of a live allocation's own: blocks come in whole pages.
ROUNDING_BYTES = MIB // 4
BLANK = cast(Plan, SimpleNamespace(predicted_peak_bytes=0))

needs_account = pytest.mark.skipif(unsupported_reason() is not None, reason="no account here")


# --- a pool, a host store and their keeper --------------------------------------------------


class HostCopies(DirectCopies):
    """To memory that is not the simulated device's."""

    def out(self, source: Tensor) -> tuple[Tensor, None]:
        copied = bytearray(source.numpy().tobytes())  # large arrays of NumPy's are in the account
        return torch.frombuffer(copied, dtype=source.dtype).reshape(source.shape), None


@dataclass
class Code:
    """Planes that hold a number throughout, of which so many never go."""

    name: int
    planes: DevicePlaneTensor | HostPlanes
    stays: int

    def check(self) -> None:
        with self.planes.pinned() as there:
            check_content(there, self.name)
            assert there.kept >= self.stays

    @property
    def may_lose(self) -> bool:
        with self.planes.pinned() as there:
            return there.kept > self.stays


def check_content(planes: DevicePlanes, name: int) -> None:
    for plane in range(planes.kept):
        assert all((page == name).all() for page in pages_of(planes, plane))


def refused(memory: SimulatedMemory, error: RuntimeError) -> None:
    """It was for want of memory, or it is raised again."""
    if not memory.is_refusal(error, memory.refusals()):
        raise error


class Bed:
    """What a session puts together, without a model: codes, activations, a budget."""

    def __init__(self, device: SimulatedDevice, budget: int) -> None:
        self.device = device
        self.memory = SimulatedMemory(torch.device("cuda:0"), device)
        self.store = DevicePagedStore(CPU)
        assert (
            self.store.anchor.numel() == 1
        )  # made now: blocks so small are refused to nobody here
        self.host = HostStore(CPU, 3 * MIB, transfers=HostCopies())
        self.keeper = DeviceKeeper(self.memory, self.store.give_back)
        governor = Governor(budget, bounds=bounds_of(self.memory))
        self.controller = BudgetController(governor, self.keeper, self.host.drop_staged)
        self.codes: list[Code] = []
        self.activations: list[Tensor] = []
        self.names = 0
        self.begin_step()

    @property
    def limit_bytes(self) -> int:
        assert self.controller.budget_bytes is not None
        return self.controller.budget_bytes

    def begin_step(self) -> None:
        self.controller.look(urgent=False)
        self.controller.bound(BLANK)

    def take_code(self, count: int, bits: int, stays: int, *, on_host: bool) -> None:
        """Where it is refused, nothing was left that could have gone."""
        self.names += 1
        stays = bits if on_host else min(stays, bits)
        store = self.host if on_host else self.store
        importance = [float(self.names % 5 + bits - plane) for plane in range(bits)]
        options: dict[str, Any] = {"minimum_bits": stays, "importance": importance}
        try:
            planes = store.allocate_planes(count, bits, **options)
        except RuntimeError as error:
            refused(self.memory, error)
            least = code_bytes(count, stays)
            assert self.memory.allocated_bytes() + least + ROUNDING_BYTES > self.limit_bytes
            if on_host:
                assert self.host.device_bytes == 0
            else:
                assert not any(code.may_lose for code in self.lossy)
            return
        with writing(planes) as there:
            for plane in range(there.kept):
                for page in pages_of(there, plane):
                    page[:] = self.names
        self.codes.append(Code(self.names, planes, stays))

    @property
    def lossy(self) -> list[Code]:
        return [code for code in self.codes if isinstance(code.planes, DevicePlaneTensor)]

    def take_activation(self, nbytes: int) -> None:
        try:
            self.activations.append(torch.empty(nbytes, dtype=torch.uint8))
        except RuntimeError as error:
            refused(self.memory, error)
            in_use = self.memory.allocated_bytes()
            assert in_use + nbytes + ROUNDING_BYTES > self.limit_bytes

    def free(self, which: int) -> None:
        if self.activations and which % 2:
            del self.activations[which % len(self.activations)]
        elif self.codes:
            del self.codes[which % len(self.codes)]

    def read(self, which: int) -> None:
        """What left the device for the host needs room to come back."""
        if not self.codes:
            return
        code = self.codes[which % len(self.codes)]
        try:
            code.check()
        except RuntimeError as error:
            refused(self.memory, error)
            assert isinstance(code.planes, HostPlanes)

    def check_codes(self) -> None:
        for code in self.lossy:
            code.check()

    def move_budget(self, percent: int, others_percent: int, reading: int) -> None:
        """The user asks for so much of what is held now, and other processes take or leave memory
        there. A code may be read meanwhile: that one stays as it is.
        """
        budget = max(MIB, percent * self.memory.held_bytes() // 100)
        room_bytes = self.device.total_bytes - NOBODY_S_BYTES
        others_bytes = (room_bytes - RESERVE_BYTES) * others_percent // 100
        held_bytes, lent_bytes = self.memory.held_bytes(), self.store.lent_bytes
        before_bytes, moves = self.limit_bytes, len(self.controller.history)
        lossy = self.lossy
        read = lossy[reading % len(lossy)] if lossy and reading else None
        with ExitStack() as stack:
            there = stack.enter_context(read.planes.pinned()) if read else None
            self.device.others_bytes = others_bytes
            self.controller.look(urgent=False)
            self.controller.ask(budget)
            assert self.limit_bytes <= budget
            assert self.limit_bytes <= max(1, room_bytes - others_bytes)
            if self.limit_bytes < before_bytes:
                assert self.host.device_bytes == 0
            has_moved = len(self.controller.history) > moves
            if has_moved and self.memory.held_bytes() > self.limit_bytes:  # nothing more may go
                assert not any(code.may_lose for code in lossy if code is not read)
            assert self.memory.held_bytes() <= max(held_bytes, self.limit_bytes)
            told = sum(change.evicted_bytes for change in self.controller.history[moves:])
            assert told == lent_bytes - self.store.lent_bytes
            if there is not None:
                assert read is not None
                check_content(there, read.name)

    def update(self, percent: int) -> None:
        """Nothing is refused, and what was predicted stays within the bound where it fits.

        It takes so much of the room beside what is in use, or of a MiB where there is less.
        """
        room_bytes = self.limit_bytes - self.memory.allocated_bytes() - ROUNDING_BYTES
        fits = room_bytes >= MIB and percent <= 100
        nbytes = percent * max(room_bytes, MIB) // 100
        held_bytes = self.memory.held_bytes()
        with self.keeper.unbounded(nbytes):
            self.memory.reset_peak()
            torch.empty(nbytes, dtype=torch.uint8)
            if fits:
                assert self.memory.peak_bytes() <= max(held_bytes, self.limit_bytes)


SIZES = st.integers(MIB // 2, 6 * MIB)
COUNTS = st.integers(MIB, 4 * MIB)
OTHERS = st.sampled_from([0, 96, 97, 98, 99, 100, 105])  # percent of what they may take
WIDTHS = st.integers(1, 4)
CODES = st.tuples(st.just("code"), COUNTS, WIDTHS, WIDTHS)
TRAVELLING = st.tuples(st.just("travelling code"), COUNTS, WIDTHS, WIDTHS)
EVENTS = st.one_of(
    CODES,
    TRAVELLING,
    st.tuples(st.just("activation"), SIZES),
    st.tuples(st.just("free"), st.integers(0, 7)),
    st.tuples(st.just("read"), st.integers(0, 7)),
    st.tuples(st.just("move"), st.integers(20, 130), OTHERS, st.integers(0, 3)),
    st.tuples(st.just("move"), st.integers(60, 100), st.just(0), st.integers(0, 3)),
    st.tuples(st.just("update"), st.integers(50, 120)),
    st.tuples(st.just("step")),
)


@needs_account
@settings(max_examples=40, deadline=None)
@given(
    st.integers(4 * MIB, 16 * MIB),
    st.tuples(TRAVELLING, TRAVELLING, CODES, CODES, CODES, CODES),
    st.lists(EVENTS, min_size=10, max_size=30),
)
def test_no_more_is_held_than_the_budget_in_force_whatever_happens(budget, codes, events) -> None:
    with SimulatedDevice(total_bytes=512 * MIB) as device:
        bed = Bed(device, budget)
        for kind, *numbers in (*codes, *events):
            held_bytes = bed.memory.held_bytes()
            bed.memory.reset_peak()
            if kind.endswith("code"):
                bed.take_code(*numbers, on_host=kind.startswith("travelling"))
            elif kind == "activation":
                bed.take_activation(*numbers)
            elif kind == "free":
                bed.free(*numbers)
            elif kind == "read":
                bed.read(*numbers)
            elif kind == "step":
                bed.begin_step()
            elif kind == "move":
                bed.move_budget(*numbers)
            else:
                bed.update(*numbers)
                bed.memory.reset_peak()
            # What was held when the budget fell stays where none of it may go; it grows no more.
            assert bed.memory.peak_bytes() <= max(held_bytes, bed.limit_bytes)
        bed.check_codes()
        bed.codes.clear()
        bed.activations.clear()
        assert bed.store.lent_bytes == bed.host.device_bytes == 0
        bed.keeper.close()
        assert device.share == 1.0


# --- sessions -------------------------------------------------------------------------------

LAYERS, TOKENS, WIDTH = 4, 2048, 256
LEARNING_RATE = 0.01


def model() -> nn.Sequential:
    """Saves 16 MiB, in tensors of 2 MiB."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 8))


def batch() -> Tensor:
    """One example, so that it is never cut."""
    return torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))


def session_in(trained: nn.Module, budget: int, bits: int | None) -> Session:
    optimizer = torch.optim.SGD(trained.parameters(), lr=LEARNING_RATE)
    return Session(trained, optimizer, budget, bits=bits, sensitivity=False)


def loss_of(trained: nn.Module, part: Tensor) -> Tensor:
    return trained(part).square().mean()


@cache
def measured(bits: int | None) -> str:
    """What a session knows after three steps, where nothing was scarce."""
    with session_in(model(), 64 * MIB, bits) as session:
        for _ in range(3):
            session.step(batch(), loss_of)
        return json.dumps(session.state_dict())


Move = tuple[int, int, bool]


class Falling:
    """A session whose budget moves behind a layer, in forward or in backward."""

    def __init__(self, device: SimulatedDevice, memory: SimulatedMemory, session: Session) -> None:
        self.device, self.memory, self.session = device, memory, session
        self.pool, self.batch = session._capture.devices, batch()
        self.moves: dict[str, Move] = {}
        self.step_bytes = 0
        self.since: int | None = None  # the least that was held since the last move
        self.evicted_before = 0
        for place, layer in enumerate(session.model):
            layer.register_forward_hook(partial(self._forward, f"forward {place}"))
        run = session._gradient.run

        def attempt(*arguments: Any, **keywords: Any) -> float:
            self.evicted_before = self._evicted_bytes()
            return run(*arguments, **keywords)

        session._gradient.run = attempt  # type: ignore[method-assign]

    def _evicted_bytes(self) -> int:
        return sum(each.evicted_bytes for each in self.pool.all())

    @property
    def limit_bytes(self) -> int:
        assert self.session.budget_bytes is not None
        return self.session.budget_bytes

    def _forward(self, name: str, _layer: nn.Module, _inputs: Any, out: Tensor) -> None:
        self._pass(name)
        if out.requires_grad:
            out.register_hook(lambda _: self._pass(name.replace("forward", "backward")))

    def _pass(self, name: str) -> None:
        """No more is held than may be, or than was when it fell."""
        if self.since is not None:
            assert self.memory.held_bytes() <= max(self.since, self.limit_bytes)
            self.since = min(self.since, self.memory.held_bytes())
        if name in self.moves:
            self._move(*self.moves.pop(name))

    def _move(self, percent: int, left_percent: int, comes_back: bool) -> None:
        """To so much of what it is; others leave so much of that, beside what they are left."""
        held_bytes, evicted = self.memory.held_bytes(), self._evicted_bytes()
        moves, before_bytes = len(self.session.budget_history), self.limit_bytes
        left_bytes = left_percent * before_bytes // 100 + RESERVE_BYTES
        self.device.others_bytes = self.device.total_bytes - NOBODY_S_BYTES - left_bytes
        asked_bytes = self.session.budget = max(MIB, percent * before_bytes // 100)
        changes = self.session.budget_history[moves:]
        assert self.limit_bytes <= min(asked_bytes, left_bytes)
        told = sum(change.evicted_bytes for change in changes)
        assert (told > 0) is (self._evicted_bytes() > evicted)
        self.since = self.memory.held_bytes()
        assert self.since <= held_bytes or self.since <= self.limit_bytes
        if changes and self.since > self.limit_bytes:  # all has gone that may
            assert self.pool.give_back(MIB) == 0
        if comes_back:
            self.device.others_bytes, self.since = 0, None
            self.session.budget = self.step_bytes

    def step(self, budget: int, moves: dict[str, Move]) -> None:
        """It ends within its budget, or is refused and leaves everything as it was."""
        self.device.others_bytes, self.since, self.step_bytes = 0, None, budget
        self.session.budget = budget
        self.moves, session = dict(moves), self.session
        parameters = list(session.model.parameters())
        before = [each.detach().numpy().copy() for each in parameters]
        evicted = session.evicted_bytes
        try:
            report = session.step(self.batch, loss_of)
        except BudgetError as error:
            least_bytes = error.least_bytes or 0
            for each, value in zip(parameters, before, strict=True):
                assert (each.detach().numpy() == value).all()
                assert each.grad is None
            assert least_bytes > self.limit_bytes
            return
        assert math.isfinite(report.loss)
        assert report.budget_bytes == self.limit_bytes
        assert report.evicted_bytes == self._evicted_bytes() - self.evicted_before
        assert session.evicted_bytes == evicted + report.evicted_bytes
        for each, value in zip(parameters, before, strict=True):
            assert each.grad is not None
            assert np.isfinite(each.grad.numpy()).all()  # PyTorch's could be refused memory
            assert (each.detach().numpy() != value).any()
        if self.since is None:
            assert report.peak_bytes <= budget
            assert report.overrun_bytes == 0


PLACES = [f"{way} {place}" for way in ("forward", "backward") for place in range(3, 2 * LAYERS)]
MOVES = st.tuples(st.integers(40, 110), st.sampled_from([300, 300, 90, 70]), st.booleans())
STEPS = st.lists(
    st.tuples(
        st.integers(9 * MIB, 18 * MIB), st.dictionaries(st.sampled_from(PLACES), MOVES, max_size=3)
    ),
    min_size=2,
    max_size=3,
)


@needs_account
@settings(max_examples=at_most(6, 3), deadline=None)
@given(st.sampled_from([3, 3, 3, None]), STEPS)
def test_a_step_ends_within_its_budget_or_is_refused_whole(bits, steps) -> None:
    with pytest.MonkeyPatch.context() as patch, SimulatedDevice() as device:
        coding_by(patch, PagedBackend)
        memory = SimulatedMemory(torch.device("cuda:0"), device)
        patch.setattr("daf.session.arguments.memory_of", lambda _: memory)
        state = json.loads(measured(bits))
        with session_in(model(), 64 * MIB, bits) as session:
            session.load_state_dict(state)
            falling = Falling(device, memory, session)
            for budget, moves in steps:
                falling.step(budget, moves)
        assert device.share == 1.0
