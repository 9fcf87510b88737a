"""CUB in ``daf bench reduce``: through a CuPy that is made up, and through the real one."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from daf_bench.kernels import reductions
from torch import Tensor

STREAM = 0x5EED  # PyTorch's current one, by its address


class Array:
    """What CuPy makes of a tensor: the same memory, and reductions that it notes."""

    def __init__(self, tensor: Tensor, cupy: FakeCupy) -> None:
        self.tensor, self._cupy = tensor, cupy

    def min(self) -> Tensor:
        self._cupy.reductions.append(("min", self._cupy.current))
        return self.tensor.min()

    def max(self) -> Tensor:
        self._cupy.reductions.append(("max", self._cupy.current))
        return self.tensor.max()


class FakeCupy(ModuleType):
    """As much of it as is used: CUB's switch, DLPack, streams of somebody else's."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.__spec__ = ModuleSpec("cupy", None)
        self.accelerators: list[str] = []
        self.arrays: list[Array] = []
        self.reductions: list[tuple[str, int]] = []
        self.current = 0
        self._core = SimpleNamespace(set_routine_accelerators=self.accelerators.extend)
        from_external = lambda stream: _Stream(self, stream.cuda_stream)  # noqa: E731
        self.cuda = SimpleNamespace(Stream=SimpleNamespace(from_external=from_external))

    def from_dlpack(self, tensor: Tensor) -> Array:
        self.arrays.append(Array(tensor, self))
        return self.arrays[-1]


class _Stream:
    """Current while it is entered, however often."""

    def __init__(self, cupy: FakeCupy, address: int) -> None:
        self._cupy, self._address = cupy, address

    def __enter__(self) -> None:
        self._cupy.current = self._address

    def __exit__(self, *_error: object) -> None:
        self._cupy.current = 0


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    found = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", found)
    here = SimpleNamespace(cuda_stream=STREAM)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: here)
    return found


def on_gpu(values: Tensor) -> Any:
    """A tensor of the processor's that says it were a GPU's."""
    device = torch.device("cuda")
    return SimpleNamespace(shape=values.shape, device=device, view=values.view)


def test_cub_reduces_the_same_memory_twice_on_pytorch_s_stream(cupy: FakeCupy) -> None:
    values = torch.randn(1, 1, 1000)
    work = reductions._cub(on_gpu(values))
    assert set(work) == {reductions.CUB}
    assert cupy.accelerators == ["cub"]
    (array,) = cupy.arrays
    assert array.tensor.shape == (1000,)
    assert array.tensor.data_ptr() == values.data_ptr()
    assert cupy.reductions == []
    for _ in range(2):
        assert work[reductions.CUB]() == tuple(torch.aminmax(values))
    assert cupy.reductions == 2 * [("min", STREAM), ("max", STREAM)]


def test_it_is_not_compared_for_channels_nor_on_a_processor(cupy: FakeCupy) -> None:
    assert reductions._cub(on_gpu(torch.randn(3, 7, 11))) == {}
    assert reductions._cub(torch.randn(1, 1, 1000)) == {}
    assert (cupy.accelerators, cupy.arrays) == ([], [])
    assert not any("cub" in note for note in reductions._notes(torch.device("cpu"), 1))


def test_where_cupy_is_missing_the_result_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions, "find_spec", lambda _: None)
    assert reductions._cub(on_gpu(torch.randn(1, 1, 1000))) == {}
    assert (
        reductions._notes(torch.device("cpu"), 1)[-1] == "cub: not compared, CuPy is not installed"
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("elements", [1000, 2**22 + 3])
def test_on_a_gpu_cub_gives_pytorch_s_ranges(elements: int) -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed: cupy-cuda12x or cupy-cuda13x")
    values = torch.randn(1, 1, elements, device="cuda")
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            found: Any = reductions._cub(values)[reductions.CUB]()
        torch.cuda.synchronize()
        assert [float(end) for end in found] == [float(end) for end in torch.aminmax(values)]
