"""Modules that change between calls and steps: counters, caches, late paths, hooks, modes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from daf_bench.conformance.case import CaseList, Work
from daf_bench.conformance.situations.building import (
    CLASSES,
    EXAMPLES,
    WIDTH,
    classified,
    labelled,
    network,
)
from daf_bench.conformance.situations.random_modules import Block, Stack, stacked

CASES = CaseList()
CAUGHT = ("SavedTensorError", "ReplayError", "UnrepeatableError")


class CountedScale(Block):
    """Scales by how often it was called; a plain attribute."""

    def __init__(self) -> None:
        super().__init__(self._count)
        self.calls = 0

    def _count(self) -> float:
        self.calls += 1
        return 1.0 + 0.1 * (self.calls % 3)


@CASES.add("call_counter", right_errors=CAUGHT)
def call_counter() -> Work:
    """A number of calls decides what is computed."""
    blocks = [CountedScale(), CountedScale()]

    def again() -> None:
        for block in blocks:
            block.calls = 0

    return stacked(*blocks, reset=again)


class Alternating(Block):
    """Takes another path in every other call."""

    def __init__(self) -> None:
        super().__init__()
        self.is_odd = False

    def forward(self, values: Tensor) -> Tensor:
        """Return the values, or the block's."""
        self.is_odd = not self.is_odd
        return super().forward(values) if self.is_odd else values * 1.5


@CASES.add("alternating_path", right_errors=CAUGHT)
def alternating_path() -> Work:
    """Every other call takes another path."""
    blocks = [Alternating(), Alternating()]

    def again() -> None:
        for block in blocks:
            block.is_odd = False

    return stacked(*blocks, reset=again)


class Cached(nn.Module):
    """Positions made once for each length, kept in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Tensor] = {}
        self.block = Block()

    def forward(self, values: Tensor) -> Tensor:
        """Return the block's values, moved by cached ones."""
        width = values.shape[-1]
        if width not in self.kept:
            self.kept[width] = torch.linspace(0, 1, width).sin()
        moved: Tensor = self.block(values + self.kept[width])
        return moved


@CASES.add("cache_of_positions")
def cache_of_positions() -> Work:
    """A cache that is filled in the first call."""
    return stacked(Cached(), Cached())


class Memoised(Block):
    """Keeps its last output, and mixes it in (detached)."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, values: Tensor) -> Tensor:
        """Return values mixed with those of the call before."""
        found = super().forward(values)
        before, self.last = self.last, found.detach().mean(0)
        return found if before is None else found + 0.1 * before


@CASES.add("mixes_last_output", right_errors=CAUGHT)
def mixes_last_output() -> Work:
    """An attribute carries the batch before into this one."""
    block = Memoised()
    return stacked(block, Block(), carried=lambda: block.last)


@CASES.add("keeps_activations")
def keeps_activations() -> Work:
    """An auxiliary loss reads what a module kept of its forward pass."""

    class Keeping(Block):
        def forward(self, values: Tensor) -> Tensor:
            self.kept = super().forward(values)
            return self.kept

    model = Stack(Keeping(), Keeping())

    def loss(model: Any, batch: Any) -> Tensor:
        main = classified(model, batch)
        return main + 0.01 * sum(each.kept.square().mean() for each in model.blocks)

    return Work(model, labelled(), loss)


@CASES.add("weight_norm")
def weight_norm() -> Work:
    """A parametrization by direction and length."""
    return stacked(Block(), nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)))


@CASES.add("orthogonal")
def orthogonal() -> Work:
    """A parametrization by the matrix exponential."""
    small = nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, 16))
    return stacked(Block(), nn.Sequential(small, nn.Linear(16, WIDTH)))


class Late(Block):
    """Reads its normalised values twice from a step on."""

    is_open = False

    def forward(self, values: Tensor) -> Tensor:
        """Return the block's values, and more once it is open."""
        inner = self.norm(values)
        moved: Tensor = self.down(F.gelu(self.up(inner)))
        return values + moved + (0.1 * inner if self.is_open else 0)


def _opens(*blocks: Any) -> Any:
    def before(step: int) -> None:
        for block in blocks:
            block.is_open = step >= 2

    return before


@CASES.add("late_path")
def late_path() -> Work:
    """A path that opens at the third step."""
    blocks = [Late(), Late()]
    return stacked(*blocks, before=_opens(*blocks))


class LateNorm(nn.Module):
    """Convolution, batch norm and ReLU; the norm is read beside the ReLU from a step on."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv, self.out = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, CLASSES)
        self.is_open = False

    def forward(self, images: Tensor) -> Tensor:
        """Return scores."""
        inner = self.norm(self.into(images))
        found = self.conv(F.relu(inner) + (0.1 * inner if self.is_open else 0))
        scores: Tensor = self.out(found.mean((2, 3)))
        return scores


def _pictures() -> tuple[Tensor, Tensor]:
    return torch.randn(EXAMPLES, 3, 8, 8), torch.randint(0, CLASSES, (EXAMPLES,))


@CASES.add("late_path_behind_batch_norm")
def late_path_behind_batch_norm() -> Work:
    """The same behind what fuses."""
    model = LateNorm()
    return Work(model, _pictures(), classified, before=_opens(model))


@CASES.add("late_hook")
def late_hook() -> Work:
    """A forward hook that is added at the third step, and reads a norm's output."""
    model = LateNorm()
    seen: list[Tensor] = []

    def before(step: int) -> None:
        if step == 2:
            model.norm.register_forward_hook(lambda _m, _i, out: seen.append(out.detach().mean()))

    return Work(model, _pictures(), classified, before=before)


@CASES.add("late_changing_hook")
def late_changing_hook() -> Work:
    """A hook added at the third step changes an output."""
    model = Stack(Block(), Block())

    def before(step: int) -> None:
        if step == 2:
            model.blocks[0].norm.register_forward_hook(lambda _m, _i, out: out * 1.5)

    return Work(model, labelled(), classified, before=before)


@CASES.add("backward_hook")
def backward_hook() -> Work:
    """A full backward hook scales a gradient."""
    model = Stack(Block(), Block())
    model.blocks[0].register_full_backward_hook(lambda _m, into, _out: (into[0] * 0.5,))
    return Work(model, labelled(), classified)


@CASES.add("tensor_hook")
def tensor_hook() -> Work:
    """A hook on an activation's gradient."""

    class Hooked(Block):
        def forward(self, values: Tensor) -> Tensor:
            found = super().forward(values)
            if found.requires_grad:
                found.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
            return found

    return stacked(Hooked(), Block())


@CASES.add("checkpoint_inside")
def checkpoint_inside() -> Work:
    """PyTorch's own recomputation inside the model."""

    class Checkpointed(Block):
        def forward(self, values: Tensor) -> Tensor:
            found: Tensor = checkpoint(super().forward, values, use_reentrant=False)
            return found

    return stacked(Checkpointed(), Block(), Checkpointed())


@CASES.add("checkpoint_with_dropout")
def checkpoint_with_dropout() -> Work:
    """The same with masks drawn inside."""

    class Checkpointed(Block):
        def forward(self, values: Tensor) -> Tensor:
            found: Tensor = checkpoint(self.dropped, values, use_reentrant=False)
            return found

        def dropped(self, values: Tensor) -> Tensor:
            return F.dropout(Block.forward(self, values), 0.2)

    return stacked(Checkpointed(), Checkpointed())


@CASES.add("checkpoint_reentrant")
def checkpoint_reentrant() -> Work:
    """The older, reentrant kind."""

    class Checkpointed(Block):
        def forward(self, values: Tensor) -> Tensor:
            found: Tensor = checkpoint(super().forward, values, use_reentrant=True)
            return found

    return stacked(Checkpointed(), Checkpointed())


@CASES.add("autocast_around")
def autocast_around() -> Work:
    """The loss runs under autocast."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return classified(model, batch)

    return Work(Stack(Block(), Block()), labelled(), loss, precision=torch.bfloat16)


@CASES.add("autocast_inside")
def autocast_inside() -> Work:
    """A part runs under autocast."""

    class Half(Block):
        def forward(self, values: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(values).float()

    return stacked(Half(), Block(), precision=torch.bfloat16)


@CASES.add("training_mode_changes")
def training_mode_changes() -> Work:
    """Dropout is switched off at the third step."""
    model = Stack(Block(), nn.Dropout(0.3))
    return Work(model, labelled(), classified, before=lambda step: model.train(step < 2) and None)


@CASES.add("thaws_later")
def thaws_later() -> Work:
    """Frozen parameters that train from the third step on."""
    model = Stack(Block(), Block())

    def before(step: int) -> None:
        model.blocks[0].requires_grad_(step >= 2)

    def optimizer(model: nn.Module, rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=rate)

    return Work(model, labelled(), classified, before=before, optimizer=optimizer)


@CASES.add("early_exit")
def early_exit() -> Work:
    """The data decide how deep the batch goes: refused or right."""

    class Exits(Stack):
        def forward(self, features: Tensor) -> Tensor:
            values = self.into(features)
            for block in self.blocks:
                values = block(values)
                if values.mean() > 0:
                    break
            scores: Tensor = self.out(values)
            return scores

    return Work(Exits(Block(), Block(), Block()), labelled(), classified)


@CASES.add("module_called_thrice")
def module_called_thrice() -> Work:
    """One block is called three times (ALBERT)."""
    block = Block()
    return stacked(block, block, block)


@CASES.add("module_called_by_itself")
def module_called_by_itself() -> Work:
    """A module that calls itself."""

    class Recursive(Block):
        def forward(self, values: Tensor, depth: int = 3) -> Tensor:
            found = super().forward(values)
            return self(found, depth - 1) if depth else found

    return stacked(Recursive())


@CASES.add("mixup_by_python")
def mixup_by_python() -> Work:
    """The loss draws a share by Python's generator."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        share = random.betavariate(0.4, 0.4)
        scores = model(share * batch[0] + (1 - share) * batch[0].flip(0))
        other = F.cross_entropy(scores, batch[1].flip(0))
        return share * F.cross_entropy(scores, batch[1]) + (1 - share) * other

    return Work(network(), labelled(), loss)


@CASES.add("negatives_by_numpy")
def negatives_by_numpy() -> Work:
    """The loss draws negatives by NumPy's generator."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        scores = model(batch[0])
        wrong = torch.from_numpy(np.random.randint(0, CLASSES, (len(scores), 2)))
        margin = scores.gather(1, batch[1][:, None]) - scores.gather(1, wrong)
        return F.softplus(-margin).mean()

    return Work(network(), labelled(), loss)
