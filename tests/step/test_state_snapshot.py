"""What a step that went wrong leaves: nothing."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from daf.step.state_snapshot import StepSnapshot


def test_a_step_that_is_tried_again_finds_buffers_and_generators_as_they_were() -> None:
    """Whoever draws in a forward pass draws the same: masks, augmentation, depths that are left."""

    def drawn() -> tuple[float, float, float]:
        return torch.rand(()).item(), float(np.random.rand()), random.random()

    model = nn.BatchNorm1d(4)
    before = StepSnapshot(model)
    first = drawn()
    model(torch.randn(8, 4))
    assert model.running_mean is not None
    assert model.running_mean.abs().sum() > 0
    before.restore()
    assert drawn() == first
    assert model.running_mean.abs().sum() == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_on_a_gpu_it_drops_the_same() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).to(device)
    given = torch.randn(32, 64, device=device)
    before = StepSnapshot(model)
    first = model(given)
    before.restore()
    assert torch.equal(model(given), first)
