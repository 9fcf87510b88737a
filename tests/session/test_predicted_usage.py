"""What the planner predicts for a full-size step, and what the account then sees."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from daf.capture.capture import Capture
from daf.core.policy import Policy, Reading
from daf.memory.recycling_allocator import unsupported_reason
from daf.memory.statistics import reset_peaks, stats
from daf.operators.chunked import weight_gradient
from daf.planning.candidate import Candidate
from daf.planning.options import Allowed
from daf.planning.table import Table, kept_selection, lawful, level_selection, make_table
from daf.session.session import Session

MIB = 2**20
needs_limit = pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.last = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.second(F.relu(self.norm(self.first(x))))
        return F.relu(self.last(inner) + x)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.behind = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.behind(x))))


def plain_network() -> tuple[nn.Module, Tensor]:
    layers: list[nn.Module] = []
    for channels in (3, 16, 16, 16):
        layers += [nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers, *head(16)), torch.randn(32, 3, 32, 32)


def bounded_network() -> tuple[nn.Module, Tensor]:
    layers: list[nn.Module] = []
    for channels in (3, 16, 16, 16):
        layers += [nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU6()]
    return nn.Sequential(*layers, *head(16)), torch.randn(32, 3, 32, 32)


def residual_network() -> tuple[nn.Module, Tensor]:
    stem = nn.Conv2d(3, 16, 3, padding=1)
    return nn.Sequential(stem, Residual(16), Residual(16), *head(16)), torch.randn(32, 3, 32, 32)


def pooled_network() -> tuple[nn.Module, Tensor]:
    layers = (nn.Conv2d(3, 32, 3, padding=1), nn.GELU(), nn.MaxPool2d(2), nn.Dropout(0.2))
    return nn.Sequential(*layers, Residual(32), *head(32)), torch.randn(32, 3, 32, 32)


def transformer() -> tuple[nn.Module, Tensor]:
    blocks = (Block(64), Block(64), nn.LayerNorm(64))
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(64 * 64, 10)), torch.randn(32, 64, 64)


def head(channels: int) -> tuple[nn.Module, ...]:
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


class Step:
    """A session that was prepared on a batch four times as large as the largest probe."""

    def __init__(
        self, make: Callable[[], tuple[nn.Module, Tensor]], *, fused: bool = False
    ) -> None:
        torch.manual_seed(0)
        self.model, self.x = make()
        optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.session = Session(self.model, optimizer, "8GB")
        self.session.prepare(self.x, squares)
        self.session._keeper.open()
        self.profile = self.session.profile
        if fused:
            with self.session._keeper.unbounded():
                self.profile = self.session._plan_controller.step_profiles.profile(
                    self.session._context(self.x, squares), 10**10, own=self.profile
                )

    def predicted(self, level: str) -> tuple[np.ndarray, Policy]:
        """(moments,) bytes beside what is resident before the step; and the policy."""
        measured = self.profile
        assert measured is not None
        table = make_table(measured, measured.batch_size, Allowed(replay=False))
        selection = _selection(table, level)
        usage = table.usage_of(selection)[:-1]
        plan = Candidate(table, selection).as_plan(10**12, level)
        return usage - measured.resident_bytes - measured.optimizer_bytes, plan.policy

    def measured_peak(self, policy: Policy) -> int:
        """Live and pool bytes at the peak of a step, beyond those before it."""
        session = self.session
        for _ in range(2):  # the first leaves what kernels keep for good
            self.model.zero_grad()
            session._capture.release_scratch()
            session._keeper.flush()
            before = stats()["live_bytes.current"] + stats()["external_bytes.current"]
            peak = _Highest(session._capture)
            with session._keeper.unbounded():
                peak.run(policy, self.model, self.x)
        self.model.zero_grad()
        return peak.nbytes - before


def _selection(table: Table, level: str) -> list[int]:
    """One level everywhere; or ``"mixed"``: every other family kept, the others coded."""
    if level != "mixed":
        return level_selection(table, level)
    kept, coded = kept_selection(table), level_selection(table, "2")
    pairs = zip(kept, coded, strict=True)
    return lawful(table, [pair[place % 2] for place, pair in enumerate(pairs)])


class _Highest:
    """The highest sum of live and pool bytes, looked at between all operators and all reads."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self.nbytes = 0

    def run(self, policy: Policy, model: nn.Module, x: Tensor) -> None:
        reset_peaks()
        with self._capture.step(policy, 0, 0, 0, x, watcher=self):
            loss = squares(model, x)
        loss.backward()
        self.moment()

    def now_s(self) -> float:
        return 0.0

    def moment(self) -> None:
        account = stats()
        highest = account["live_bytes.peak"] + account["external_bytes.current"]
        self.nbytes = max(self.nbytes, highest)
        reset_peaks()

    def saved(self, save: object) -> None:
        self.moment()

    def reading(self, saved: object) -> None:
        self._capture.release_scratch()
        self.moment()

    def has_read(self, saved: object, ms: float) -> None:
        self.moment()


@needs_limit
@pytest.mark.parametrize("make", [plain_network, residual_network, pooled_network, transformer])
def test_a_step_four_times_the_probe_peaks_as_predicted(
    make: Callable[[], tuple[nn.Module, Tensor]],
) -> None:
    step = Step(make)
    with step.session:
        found = {}
        for level in ("keep", "exact", "2"):
            usage, policy = step.predicted(level)
            measured = step.measured_peak(policy)
            found[level] = measured
            # Beyond the prediction only as far as the planner's own margin allows.
            assert measured <= 1.03 * usage.max() + MIB, (level, measured, usage.max())
            # And the prediction is no blind bound: what it says is really held.
            assert measured >= 0.85 * usage.max() - MIB, (level, measured, usage.max())
        # What operators need in passing cannot be coded; it is most of the peak in some models.
        assert found["2"] < 0.9 * found["keep"]
        assert found["2"] < found["exact"] <= found["keep"] + MIB


@needs_limit
@pytest.mark.parametrize(
    "make",
    [
        *(
            pytest.param(each, marks=pytest.mark.thorough)
            for each in (plain_network, bounded_network)
        ),
        *(residual_network, transformer),
    ],
)
def test_fused_and_chunked_steps_peak_as_predicted_too(
    make: Callable[[], tuple[nn.Module, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk_bytes = 256 * 1024  # an eighth of the largest activations here
    monkeypatch.setattr(weight_gradient, "CHUNK_BYTES", chunk_bytes)
    step = Step(make, fused=True)
    with step.session:
        assert step.profile is not None
        assert any(each.pattern for each in step.profile.fusions)
        assert any(each.reading is Reading.CHUNKS for each in step.profile.savings)
        found = {}
        for level in ("keep", "exact", "mixed", "8", "2"):
            usage, policy = step.predicted(level)
            assert policy.fused
            assert policy.chunk_bytes == chunk_bytes
            found[level] = measured = step.measured_peak(policy)
            assert measured <= 1.03 * usage.max() + MIB, (level, measured, usage.max())
            assert measured >= 0.85 * usage.max() - MIB, (level, measured, usage.max())
        assert found["2"] < found["8"] < found["exact"] <= found["keep"] + MIB
        # Inputs of convolutions and linear layers, from those of normalisations and GELU.
        assert found["exact"] < (0.78 if make is transformer else 0.85) * found["keep"]
