"""Calls of ReLU and its bounded relative are read whatever way they are written."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from daf.operators.batch_norm.observation import Rectifier, read_rectifier

X = torch.randn(3)


@pytest.mark.parametrize(
    ("operator", "arguments", "keywords", "expected"),
    [
        (F.relu, (X,), {}, Rectifier("relu")),
        (F.relu, (), {"input": X}, Rectifier("relu")),
        (F.relu, (X, True), {}, Rectifier("relu", math.inf, True)),
        (F.relu, (X,), {"inplace": True}, Rectifier("relu", math.inf, True)),
        (F.relu_, (X,), {}, Rectifier("relu_", math.inf, True)),
        (torch.relu, (X,), {}, Rectifier("relu")),
        (Tensor.relu_, (X,), {}, Rectifier("relu_", math.inf, True)),
        (F.relu6, (X,), {"inplace": False}, Rectifier("relu6", 6.0)),
        (F.relu6, (X, True), {}, Rectifier("relu6", 6.0, True)),
        (F.hardtanh, (X, 0.0, 6.0, True), {}, Rectifier("hardtanh", 6.0, True)),
        (F.hardtanh, (X,), {"min_val": 0, "max_val": 1}, Rectifier("hardtanh", 1.0)),
        (F.hardtanh_, (X, 0.0, 2.0), {}, Rectifier("hardtanh_", 2.0, True)),
    ],
)
def test_rectifiers_are_read(
    operator: Any, arguments: Any, keywords: Any, expected: Rectifier
) -> None:
    found = read_rectifier(operator, arguments, keywords)
    assert found is not None
    assert found[0] is X
    assert found[1] == expected
    assert found[1].is_bounded == (expected.most < math.inf)


@pytest.mark.parametrize(
    ("operator", "arguments", "keywords"),
    [
        (F.gelu, (X,), {}),
        (F.relu, (1.0,), {}),
        (F.relu, (), {}),
        (F.relu, (X, False, 1), {}),
        (F.hardtanh, (X,), {}),
        (F.hardtanh, (X, -1.0, 1.0), {}),
        (F.hardtanh, (X, 0.0, math.inf), {}),
        (F.hardtanh, (X, 0.0, -1.0), {}),
        (F.hardtanh, (X, 0.0), {"max_val": math.nan}),
        (F.hardtanh, (X, 0.0, 6.0, False, 1), {}),
    ],
)
def test_other_calls_are_none(operator: Any, arguments: Any, keywords: Any) -> None:
    assert read_rectifier(operator, arguments, keywords) is None
