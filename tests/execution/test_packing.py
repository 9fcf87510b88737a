"""Codes on their way to the host and back: the same whoever packs, never read too early."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import closing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_device import SimulatedDevice
from torch import Tensor

from daf.errors import BudgetError, CodecError
from daf.execution.collaborate import Route
from daf.execution.packing import Packer, code_bytes, encode_on_host
from daf.plan import KEEP, Method, Treatment

TWO_BITS = Treatment(Method.ROTATED, 2)
ROUTES = st.sampled_from(Route)
FEW = settings(max_examples=15, deadline=None)


def tensors(sizes: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(sizes))
    return [torch.randn(size, generator=generator) for size in sizes]


def decoded(device: SimulatedDevice, tensor: Tensor, key: int, treatment: Treatment) -> Tensor:
    out = torch.empty_like(tensor)
    device.decode(encode_on_host(tensor, treatment, key), treatment, key, out)
    return out


@FEW
@given(st.lists(st.tuples(st.integers(1, 3000), ROUTES), min_size=1, max_size=8), st.integers(1, 4))
def test_whoever_packs_the_same_comes_back(given_, bits) -> None:
    device, treatment = SimulatedDevice(), Treatment(Method.ROTATED, bits)
    given_tensors = tensors([size for size, _ in given_])
    staging = max(code_bytes(size, bits) for size, _ in given_)
    with closing(Packer(device, treatment, 7, staging)) as packer:
        for place, (tensor, (_, route)) in enumerate(zip(given_tensors, given_, strict=True)):
            assert packer.save(tensor, route) == place
        total = packer.wait_until_packed()
        assert total == sum(code_bytes(size, bits) for size, _ in given_)
        for place in reversed(range(len(given_))):
            out = torch.full_like(given_tensors[place], torch.nan)
            packer.restore(place, out)
            expected = decoded(device, given_tensors[place], 7 + place, treatment)
            assert torch.equal(out, expected)
    routes = [route for _, route in given_]
    assert len(device.encoded) == routes.count(Route.GPU_PACKS)
    assert {job.saved_index for job in packer.jobs} == {
        place for place, route in enumerate(routes) if route is Route.CPU_PACKS
    }


@pytest.mark.parametrize("route", Route)
def test_what_travels_is_codes_or_raw_data(route: Route) -> None:
    device, (tensor,) = SimulatedDevice(), tensors([10_000])
    with closing(Packer(device, TWO_BITS, 0, 10**6)) as packer:
        packer.save(tensor, route)
        coded = packer.wait_until_packed()
        out = coded if route is Route.GPU_PACKS else tensor.nbytes
        assert device.late.copied_bytes == out
        packer.restore(0, torch.empty_like(tensor))
    assert device.late.copied_bytes == out + coded
    assert coded < tensor.nbytes / 12


def test_a_tensor_may_be_written_over_once_it_was_saved() -> None:
    device, (tensor,) = SimulatedDevice(latest_s=0.05), tensors([5000])
    expected = decoded(device, tensor, 0, TWO_BITS)
    with closing(Packer(device, TWO_BITS, 0, 10**6)) as packer:
        packer.save(tensor, Route.CPU_PACKS)
        tensor.zero_()
        out = torch.empty_like(tensor)
        packer.restore(0, out)
    assert torch.equal(out, expected)


def test_as_many_are_fetched_ahead_as_there_is_room_for() -> None:
    device, given_tensors = SimulatedDevice(), tensors([4096] * 6)
    one = code_bytes(4096, 2)
    with closing(Packer(device, TWO_BITS, 0, 3 * one)) as packer:
        for tensor in given_tensors:
            packer.save(tensor, Route.GPU_PACKS)
        packer.wait_until_packed()
        device.late.mark = lambda: Future()  # not decoded, as far as the host knows
        for place in (5, 4, 3):
            packer.restore(place, torch.empty(4096))
        assert device.late.copied_bytes == (6 + 3) * one
    device, seen = SimulatedDevice(), []
    device.late.mark = done
    with closing(Packer(device, TWO_BITS, 0, 3 * one)) as packer:
        for tensor in given_tensors:
            packer.save(tensor, Route.GPU_PACKS)
        packer.wait_until_packed()
        for place in reversed(range(6)):
            before = device.late.copied_bytes
            packer.restore(place, torch.empty(4096))
            seen.append((device.late.copied_bytes - before) // one)
    assert seen == [4, 1, 1, 0, 0, 0]  # three, and with each that is restored one more


def done() -> Future[None]:
    ticket: Future[None] = Future()
    ticket.set_result(None)
    return ticket


def test_a_tensor_comes_back_once() -> None:
    device, (tensor,) = SimulatedDevice(), tensors([4096])
    with closing(Packer(device, TWO_BITS, 0, 10**6)) as packer:
        packer.save(tensor, Route.CPU_PACKS)
        packer.restore(0, torch.empty(4096))
        with pytest.raises(CodecError, match="asked for tensor 0 once more"):
            packer.restore(0, torch.empty(4096))


def test_an_order_that_leaves_no_room_is_an_error_and_others_are_served() -> None:
    device, given_tensors = SimulatedDevice(), tensors([4096] * 3)
    one = code_bytes(4096, 2)
    with closing(Packer(device, TWO_BITS, 0, 2 * one)) as packer:
        for tensor in given_tensors:
            packer.save(tensor, Route.CPU_PACKS)
        with pytest.raises(CodecError, match="asked for tensor 0 while later ones"):
            packer.restore(0, torch.empty(4096))
        for place in (1, 0, 2):
            out = torch.empty(4096)
            packer.restore(place, out)
            assert torch.equal(out, decoded(device, given_tensors[place], place, TWO_BITS))


def test_what_no_staging_area_holds_and_what_is_no_code_is_refused() -> None:
    device, (tensor,) = SimulatedDevice(), tensors([4096])
    for treatment in (KEEP, Treatment(Method.MINMAX, 8)):
        with pytest.raises(CodecError, match=f"asked to pack by {treatment.method}"):
            Packer(device, treatment, 0, 100)
    with closing(Packer(device, TWO_BITS, 0, 100)) as packer:
        packer.save(tensor, Route.GPU_PACKS)
        with pytest.raises(BudgetError, match="through 100"):
            packer.restore(0, torch.empty(4096))
