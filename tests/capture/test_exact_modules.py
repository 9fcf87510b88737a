"""``bits="exact"``: every module of torch.nn gives plain PyTorch's gradients, bit for bit."""

from __future__ import annotations

import pytest
import torch
from exactness import Case, assert_exact
from module_cases import CASES, SKIPPED
from torch import nn

from daf.core.policy import Method

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("code_everything")]

NUMBERED = [
    pytest.param(case, id=f"{name}-{place}")
    for name, cases in CASES.items()
    if hasattr(nn, name)  # the oldest version of torch lacks the newest modules
    for place, case in enumerate(cases)
]
LOW_PRECISION = [
    "Conv2d",
    "Linear",
    "BatchNorm2d",
    "LayerNorm",
    "ReLU",
    "LeakyReLU",
    "Hardtanh",
    "ReLU6",
    "Dropout",
    "MaxPool2d",
    "GELU",
    "MultiheadAttention",
    "GroupNorm",
    "Sequential",
]


def test_no_module_of_torch_is_forgotten() -> None:
    known = set(CASES) | set(SKIPPED)
    assert set(nn.modules.__all__) == {name for name in known if hasattr(nn, name)}


@pytest.mark.parametrize("case", NUMBERED)
def test_gradients_equal_plain_bit_for_bit(case: Case) -> None:
    assert_exact(case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", LOW_PRECISION)
def test_other_float_types_too(name: str, dtype: torch.dtype) -> None:
    for case in CASES[name]:
        assert_exact(case, dtype)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("ReLU", Method.MASK),
        ("ReLU6", Method.MASK),
        ("LeakyReLU", Method.MASK),
        ("Threshold", Method.MASK),
        ("Dropout", Method.MASK),
        ("MaxPool2d", Method.PACK),
        ("MaxPool2d", Method.DROP),
        ("MaxPool3d", Method.PACK),
        ("AvgPool2d", Method.DROP),
        ("ReflectionPad2d", Method.DROP),
        ("NLLLoss", Method.DROP),
        ("Embedding", Method.PACK),
        ("AdaptiveMaxPool2d", Method.PACK),
        ("MultiheadAttention", Method.MASK),
    ],
)
def test_the_lossless_treatment_is_really_used(name: str, method: Method) -> None:
    reports = assert_exact(CASES[name][0]).sites
    assert method in {report.treatment.method for report in reports}
