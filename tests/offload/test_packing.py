"""Codes that wait on the host: the same whoever packs, never read too early, within bounds."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_device import SimulatedDevice, decode_words
from torch import Tensor

from daf.core.code_format import MINMAX_BITS, ROTATED_BITS, code_bytes, words_per_plane
from daf.core.errors import SavedTensorError
from daf.core.policy import Method, Treatment
from daf.core.units import pinned_bytes
from daf.kernels import devices
from daf.offload import host_codes
from daf.offload.host_codes import HostCodes, HostMemoryWarning, HostOptions
from daf.offload.routing import Route, Sent
from daf.pool.host_planes import encode_on_host

TWO_BITS = Treatment(Method.ROTATED, 2)
TREATMENTS = (
    *(Treatment(Method.ROTATED, bits) for bits in ROTATED_BITS),
    *(Treatment(Method.MINMAX, bits) for bits in MINMAX_BITS),
)
ROUTES = st.sampled_from(Route)
FEW = settings(max_examples=15, deadline=None)
PLENTY = 1 << 40


@pytest.fixture(autouse=True)
def own_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated device changes who codes the processor's tensors."""
    monkeypatch.setattr(devices, "_backends", dict(devices._backends))


class Given:
    """Routes that are known."""

    is_watching = False

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = iter(routes)
        self.packed_bytes: list[int] = []

    def begin_pass(self, most_raw_bytes: float) -> None: ...

    def take(self) -> Route:
        return next(self._routes)

    def note(self, sent: Sent) -> None: ...

    def end_forward(self) -> None: ...

    def processor_took(self, raw_bytes: int, taken_ms: float) -> None:
        assert taken_ms > 0
        self.packed_bytes.append(raw_bytes)


def codes_on(
    device: SimulatedDevice,
    routes: Sequence[Route],
    staging_bytes: int = PLENTY,
    limit_bytes: int = PLENTY,
    raw_bytes: int = PLENTY,
) -> tuple[HostCodes, Given]:
    given_routes = Given(routes)
    options = HostOptions(limit_bytes, staging_bytes, raw_bytes)
    host = HostCodes(options, make_store=device.store, make_routes=lambda _: given_routes)
    return host, given_routes


def tensors(sizes: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(sizes))
    return [torch.randn(size, generator=generator) for size in sizes]


def decoded(tensor: Tensor, key: int, treatment: Treatment = TWO_BITS) -> Tensor:
    out, words = torch.empty_like(tensor), encode_on_host(tensor, treatment, key)
    split = treatment.bits * words_per_plane(tensor.numel())
    decode_words(words[:split], words[split:], treatment, key, out)
    return out


def restored(code: Any, size: int) -> Tensor:
    out = torch.full((size,), torch.nan)
    code.decode(out)
    return out


@FEW
@given(
    st.lists(st.tuples(st.integers(1, 3000), ROUTES), min_size=1, max_size=8),
    st.sampled_from(TREATMENTS),
    st.integers(0, 4000),
    st.data(),
)
def test_whoever_packs_the_same_comes_back(given_, treatment, staging_bytes, data) -> None:
    device = SimulatedDevice()
    sizes, routes = [size for size, _ in given_], [route for _, route in given_]
    sources = tensors(sizes)
    host, known = codes_on(device, routes, staging_bytes)
    codes = [
        host.values(tensor, treatment, 7 + place, None) for place, tensor in enumerate(sources)
    ]
    total = sum(code_bytes(size, treatment.bits) for size in sizes)
    assert host.stored_bytes == host.stored_peak_bytes == host.taken_bytes == total
    for place in data.draw(st.permutations(range(len(codes)))):
        expected = decoded(sources[place], 7 + place, treatment)
        for _ in range(data.draw(st.integers(1, 2))):
            assert torch.equal(restored(codes[place], sizes[place]), expected)
        codes[place] = None
    gc.collect()
    assert (host.stored_bytes, host.device_bytes) == (0, 0)
    assert len(device.codec.encoded) == routes.count(Route.GPU_PACKS)
    assert len(known.packed_bytes) == routes.count(Route.CPU_PACKS)


def assert_whoever_packs_the_bytes_are_the_same(sizes: Sequence[int], codec: Any = None) -> None:
    """Of every width of every method, headers and what pads the last words included."""
    for treatment, dtype in itertools.product(TREATMENTS, (torch.float32, torch.bfloat16)):
        device = SimulatedDevice(latest_s=0.0, codec=codec)
        host, known = codes_on(device, list(Route) * len(sizes))
        for key, source in enumerate(each.to(dtype) for each in tensors([*sizes])):
            codes = [host.values(source, treatment, key, None) for _ in Route]
            with codes[0].planes.pinned() as one, codes[1].planes.pinned() as two:
                assert torch.equal(one.region, two.region), treatment
                assert torch.equal(one.headers, two.headers), treatment
        assert len(known.packed_bytes) == len(sizes)


def test_whoever_packs_the_bytes_are_the_same() -> None:
    assert_whoever_packs_the_bytes_are_the_same((1, 255, 256, 3000))


@pytest.mark.thorough
def test_they_are_those_of_a_gpu_s_kernels_too() -> None:
    """Interpreted, in a process of its own."""
    pytest.importorskip("triton", reason="triton is not installed: daf-train[gpu]")
    program = """
import sys
sys.path += ["../helpers", "../helpers/models"]
from test_packing import assert_whoever_packs_the_bytes_are_the_same
from daf.kernels.triton.backend import TritonBackend
assert_whoever_packs_the_bytes_are_the_same((600,), TritonBackend())
    """
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    place = Path(__file__).parent
    subprocess.run([sys.executable, "-c", program], env=environment, cwd=place, check=True)


@pytest.mark.parametrize("route", Route)
def test_what_travels_is_codes_or_raw_data(route: Route) -> None:
    device, (tensor,) = SimulatedDevice(), tensors([10_000])
    host, _ = codes_on(device, [route], staging_bytes=0)
    code = host.values(tensor, TWO_BITS, 0, None)
    host.wait_until_packed()
    device.finish()
    coded = code_bytes(10_000, 2)
    out_bytes = coded if route is Route.GPU_PACKS else tensor.nbytes
    assert device.late.copied_bytes == out_bytes
    device.stores[0].drop_staged()
    restored(code, 10_000)
    assert device.late.copied_bytes == out_bytes + coded
    assert coded < tensor.nbytes / 12


def test_the_processor_s_tensor_is_what_it_was_when_it_was_saved() -> None:
    """Written over while it is copied, it could be anything: that is an error, as PyTorch has it.

    Written over afterwards, or with the device's code made already, it does not matter.
    """
    device, (tensor,) = SimulatedDevice(latest_s=0.05), tensors([5000])
    expected = decoded(tensor, 0)
    host, _ = codes_on(device, [Route.CPU_PACKS, Route.CPU_PACKS, Route.GPU_PACKS])
    early = host.values(tensor.clone(), TWO_BITS, 0, None)
    host.wait_until_packed()
    late = host.values(tensor, TWO_BITS, 0, None)
    there = host.values(tensor, TWO_BITS, 0, None)
    assert host.device_bytes == tensor.nbytes + code_bytes(5000, 2)
    tensor.zero_()
    assert torch.equal(restored(early, 5000), expected)
    assert torch.equal(restored(there, 5000), expected)
    with pytest.raises(SavedTensorError, match="while it was copied to the host"):
        restored(late, 5000)
    del late, early, there
    assert host.device_bytes == 0


def test_raw_data_leave_only_within_their_bound_and_are_packed_there_otherwise() -> None:
    device, sources = SimulatedDevice(latest_s=0.05), tensors([4096] * 3)
    host, known = codes_on(device, [Route.CPU_PACKS] * 3, raw_bytes=2 * 4 * 4096)
    codes = [host.values(each, TWO_BITS, 0, None) for each in sources]
    host.wait_until_packed()
    assert (known.packed_bytes, device.codec.encoded) == ([4 * 4096] * 2, [4096])
    for code, source in zip(codes, sources, strict=True):
        assert torch.equal(restored(code, 4096), decoded(source, 0))


def test_what_finds_no_room_on_the_host_stays_and_is_told_once() -> None:
    device, (tensor,) = SimulatedDevice(), tensors([4096])
    one = pinned_bytes(code_bytes(4096, 2))
    host, _ = codes_on(device, [Route.GPU_PACKS] * 3, limit_bytes=2 * one)
    held = [host.values(tensor, TWO_BITS, 0, None) for _ in range(2)]
    with pytest.warns(HostMemoryWarning, match="take all of the host memory"):
        assert host.values(tensor, TWO_BITS, 0, None) is None
    assert host.room(tensor, 4096, 1) is None  # warnings are errors: this is not said again
    held.pop()
    assert host.room(tensor, 4096, 1) is not None


def test_where_no_pinned_memory_is_left_the_device_holds_its_code() -> None:
    device, (tensor,) = SimulatedDevice(), tensors([4096])
    device.late.refuses = True
    host, known = codes_on(device, [Route.GPU_PACKS, Route.CPU_PACKS], staging_bytes=0)
    codes = [host.values(tensor, TWO_BITS, 3, None) for _ in range(2)]
    host.drop_staged()
    assert host.device_bytes == 2 * code_bytes(4096, 2)
    for code in codes:
        assert torch.equal(restored(code, 4096), decoded(tensor, 3))
    assert (device.late.copied_bytes, known.packed_bytes) == (0, [])


def test_while_a_graph_is_recorded_nothing_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    device, (tensor,) = SimulatedDevice(), tensors([4096])
    host, _ = codes_on(device, [])
    monkeypatch.setattr(host_codes, "is_recorded", lambda _: True)
    assert host.values(tensor, TWO_BITS, 0, None) is None
