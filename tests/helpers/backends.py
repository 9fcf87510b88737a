"""Whose kernels code the processor's tensors, for tests that let these stand for a device's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from daf.kernels import devices


def coding_by(
    patch: pytest.MonkeyPatch, load: Callable[[], Any], *, in_host_memory: bool = False
) -> None:
    """The processor's tensors are coded by this backend, until the patch is undone."""
    patch.setitem(devices._backends, "cpu", devices._Entry(load, in_host_memory))


def coding_by_triton(patch: pytest.MonkeyPatch) -> None:
    """Codes of the processor's tensors lie in a device's pages, made by Triton, interpreted."""
    coding_by(patch, devices._triton)


def coding_natively(patch: pytest.MonkeyPatch) -> None:
    """The processor's tensors are the processor's again."""
    coding_by(patch, lambda: devices._native, in_host_memory=True)
