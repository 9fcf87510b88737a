"""Evaluation between steps: whole where it fits, in proven parts where it does not."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from daf.core.errors import BudgetError, SplitError
from daf.memory import process_memory
from daf.memory.process_limit import MemoryKeeper
from daf.memory.recycling_allocator import unsupported_reason
from daf.step.evaluation import Evaluation
from daf.step.splitting import Split, Splitting

pytestmark = pytest.mark.skipif(
    unsupported_reason() is not None, reason="needs redirected allocations"
)
MIB = 2**20
EXAMPLES = 256
# The convolution's output takes 32 MiB, its activation as much again.
AMPLE, SCARCE, HOPELESS = 160 * MIB, 44 * MIB, 8 * MIB
Batch = tuple[Tensor, Tensor]


class Evaluated:
    """Evaluates a network on 256 images in a process with so much room; ``parts``: their sizes."""

    def __init__(self, split: Split = "auto") -> None:
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        self.model = nn.Sequential(*layers, nn.Linear(128, 10)).eval()
        self.batch = torch.randn(EXAMPLES, 3, 32, 32), torch.randint(10, (EXAMPLES,))
        self.parts: list[int] = []
        self._keeper = MemoryKeeper()
        self._evaluation = Evaluation(self.model, Splitting(split), self._keeper)

    def plainly(self, fn: Callable[[nn.Module, Batch], Any]) -> Any:
        with torch.no_grad():
            return fn(self.model, self.batch)

    def within(self, room_bytes: int, fn: Callable[[nn.Module, Batch], Any]) -> Any:
        def counted(model: nn.Module, part: Batch) -> Any:
            self.parts.append(len(part[0]))
            return fn(model, part)

        gc.collect()
        self.parts.clear()
        self._keeper.open()
        self._keeper.flush()
        budget = process_memory.resident_bytes() + room_bytes
        self._keeper.bound(budget, budget)
        try:
            return self._evaluation.run(self.batch, counted, budget)
        finally:
            self._keeper.close()


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def right_and_all(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return (model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1])


def scores(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    return {"scores": model(batch[0])}


def test_what_fits_runs_once_and_whole() -> None:
    evaluated = Evaluated()
    assert torch.equal(evaluated.within(AMPLE, mean_loss), evaluated.plainly(mean_loss))
    assert evaluated.parts == [EXAMPLES]


def test_parts_of_a_mean_of_counts_and_of_rows_join_to_the_whole() -> None:
    evaluated = Evaluated()
    mean = evaluated.within(SCARCE, mean_loss)
    torch.testing.assert_close(mean, evaluated.plainly(mean_loss))
    assert max(evaluated.parts[-2:]) < EXAMPLES
    right, count = evaluated.within(SCARCE, right_and_all)
    assert (int(right), count) == tuple(map(int, evaluated.plainly(right_and_all)))
    rows = evaluated.within(SCARCE, scores)["scores"]
    torch.testing.assert_close(rows, evaluated.plainly(scores)["scores"])


def test_the_size_that_fitted_is_tried_first_the_next_time() -> None:
    evaluated = Evaluated()
    evaluated.within(SCARCE, mean_loss)
    fitted = evaluated.parts[-1]
    evaluated.within(SCARCE, mean_loss)
    assert evaluated.parts == [fitted] * (EXAMPLES // fitted)


def test_what_couples_examples_is_refused_by_name_instead_of_cut() -> None:
    def deviation(model: nn.Module, batch: Batch) -> Tensor:
        scores: Tensor = model(batch[0])
        return (scores - scores.mean(0)).square().mean()

    with pytest.raises(BudgetError, match="do not join to the whole's") as refused:
        Evaluated().within(SCARCE, deviation)
    assert refused.value.least_bytes is not None


def test_split_false_is_obeyed() -> None:
    with pytest.raises(BudgetError, match="not cut further"):
        Evaluated(split=False).within(SCARCE, mean_loss)


def test_a_mean_over_labels_that_count_is_never_joined_by_examples() -> None:
    evaluated = Evaluated()
    evaluated.batch[1][: EXAMPLES // 4] = -100  # as cross_entropy ignores
    with pytest.raises((SplitError, BudgetError)):
        evaluated.within(SCARCE, mean_loss)


def test_random_states_and_buffers_are_as_before_a_refused_try() -> None:
    evaluated = Evaluated()

    def drawn(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        draw = torch.rand(())
        model(batch[0])
        return draw, 1

    torch.manual_seed(7)
    expected = torch.rand(())
    torch.manual_seed(7)
    with pytest.raises(BudgetError):
        evaluated.within(HOPELESS, drawn)
    assert torch.equal(torch.rand(()), expected)


def test_other_errors_are_the_users_own() -> None:
    def fails(model: nn.Module, batch: Batch) -> Tensor:
        raise RuntimeError("not of memory")

    with pytest.raises(RuntimeError, match="not of memory"):
        Evaluated().within(AMPLE, fails)


def test_a_refusal_in_user_code_says_whose_limit_it_is() -> None:
    keeper = MemoryKeeper()
    keeper.open()
    try:
        budget = process_memory.resident_bytes() + 32 * MIB
        keeper.bound(budget, budget)
        with pytest.raises(
            RuntimeError, match=r"DAF's limit: .* MB for tensors .*raise the budget"
        ):
            torch.ones(64 * MIB, dtype=torch.uint8)
    finally:
        keeper.close()
