"""What only a GPU can show of codes: streams that race for pages, graphs that are recorded.

Memory that falls free is poisoned at once, in home's order, and whoever reads or writes begins
late: who was not waited for finds poison.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from writing import writing

from daf.capture.capture import Capture
from daf.codecs.coder import Coder
from daf.core.code_format import code_bytes, plane_bytes
from daf.core.code_tables import rotated_error
from daf.core.policy import Method, Treatment, plain_policy, policy_for, with_fused_operators
from daf.pool.device_pool import DevicePagedStore, DeviceStores
from daf.pool.host_planes import HostPlanes, HostStore
from daf.pool.store import PlainStore
from daf.torch_compat.stream_order import HomeStream

pytest.importorskip("triton", reason="triton is not installed: daf-train[gpu]")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

DEVICE = torch.device("cuda", torch.cuda.current_device())
ELEMENTS, PARTS = 2**20, 16
FOUR_BITS = Treatment(Method.ROTATED, 4)
LATE_CYCLES = 300_000  # a fraction of a millisecond
POISON = 0xA5


def poison(home: HomeStream, sizes: Iterable[int]) -> None:
    """Write over blocks of these bytes that fell free: PyTorch's allocator gives the same again."""
    with home.at_home():
        taken = [torch.empty(size, dtype=torch.uint8, device=DEVICE) for size in sizes]
        for each in taken:
            each.fill_(POISON)


def is_done_late() -> None:
    """What is asked of the current stream from here on."""
    torch.cuda._sleep(LATE_CYCLES)


# --- codes ----------------------------------------------------------------------------------

Made = tuple[Tensor, Any, torch.cuda.Event]  # values, their code, when it was there


def coded(made: Coder, writer: torch.cuda.Stream, turn: int) -> Made:
    with torch.cuda.stream(writer):
        is_done_late()
        values = torch.randn(ELEMENTS + turn, device=DEVICE)
        code = made.values(values, FOUR_BITS, turn, None, weight=1.0, tag=0)
        return values, code, writer.record_event()


def largest_error(made: Made, reader: torch.cuda.Stream) -> Tensor:
    """Of its parts, each relative to its own energy: poison in one of them is not averaged out."""
    values, code, is_made = made
    with torch.cuda.stream(reader):
        reader.wait_event(is_made)
        values.record_stream(reader)
        is_done_late()
        out = torch.empty_like(values)
        code.decode(out)
        errors = (out - values)[:ELEMENTS].square().view(PARTS, -1).mean(1)
        return (errors / values[:ELEMENTS].square().view(PARTS, -1).mean(1)).max()


def planes_everywhere(pool: DevicePagedStore, code: Any) -> int:
    """How many planes every run still has."""
    with pool.home.at_home(), code.planes.pinned() as there:
        return there.kept if there.full_runs == there.runs else there.kept - 1


def block_sizes(living: Iterable[Made]) -> Counter[int]:
    """Bytes of the blocks that PyTorch's allocator has lent for codes."""
    blocks = [code.planes for _, code, _ in living]
    lent = (
        tensor for each in blocks for tensor in (each._stays, each.table, *each._may_go.values())
    )
    return Counter(tensor.nbytes for tensor in lent)


def test_codes_of_one_stream_are_read_on_another() -> None:
    """While others take the pages that fall free, and planes go; the host waits for none of it."""
    devices, streams = DeviceStores(), [torch.cuda.Stream() for _ in range(4)]
    made, pool = Coder(PlainStore(), devices), devices.on(DEVICE)
    living: deque[Made] = deque()
    found: list[tuple[int, Tensor]] = []
    for turn in range(400):
        living.append(coded(made, streams[turn % 4], turn))
        before = block_sizes(living)
        if len(living) > 5:
            planes = planes_everywhere(pool, living[0][1])
            found.append((planes, largest_error(living.popleft(), streams[(turn // 7) % 4])))
        if turn % 7 == 6:
            assert pool.give_back(plane_bytes(ELEMENTS, 1)) > 0
        poison(pool.home, (before - block_sizes(living)).elements())
    torch.cuda.synchronize()
    assert {planes for planes, _ in found} >= {3, 4}
    assert [
        (planes, float(error))
        for planes, error in found
        if not float(error) < 1.1 * rotated_error(4, planes)
    ] == []


# --- codes that wait on the host ------------------------------------------------------------


def written(store: HostStore, writer: torch.cuda.Stream, name: int) -> HostPlanes:
    """Words that all say the name."""
    with torch.cuda.stream(writer):
        planes = store.allocate_planes(ELEMENTS, 2)
        with writing(planes) as there:
            is_done_late()
            for part in parts_of(there):
                part.fill_(name)
    return planes


def wrong_words(planes: HostPlanes, reader: torch.cuda.Stream, name: int) -> Tensor:
    """How many do not."""
    with torch.cuda.stream(reader), planes.pinned() as there:
        is_done_late()
        return torch.stack([(part != name).sum() for part in parts_of(there)]).sum()


def parts_of(there: Any) -> Iterator[Tensor]:
    yield there.region
    yield there.headers


def staged_sizes(store: HostStore) -> Counter[int]:
    """Bytes of the blocks that PyTorch's allocator has lent for words that pass through."""
    records = store._live.values()
    return Counter(each.on_device.nbytes for each in records if each.on_device is not None)


def test_words_that_wait_on_the_host_are_read_on_another_stream() -> None:
    """Copies beside the streams, while staged words are let go of and their memory is reused."""
    one = code_bytes(ELEMENTS, 2)
    store, streams = HostStore(DEVICE, 4 * one), [torch.cuda.Stream() for _ in range(4)]
    wrong: list[Tensor] = []
    for turn in range(30):
        living = []
        for name in range(12):
            before = staged_sizes(store)
            living.append(written(store, streams[(turn + name) % 4], name))
            poison(store.home, (before - staged_sizes(store)).elements())
        for name in reversed(range(12)):
            before = staged_sizes(store)
            wrong.append(wrong_words(living.pop(), streams[(turn + name // 5) % 4], name))
            if (turn + name) % 7 == 6:
                store.drop_staged()
            poison(store.home, (before - staged_sizes(store)).elements())
    torch.cuda.synchronize()
    assert [int(each) for each in wrong] == [0] * (30 * 12)
    assert store.fetched_bytes >= 30 * (12 - 4) * one
    assert (store.device_bytes, store.stored_bytes) == (0, 0)


# --- what is recorded, and autocast ---------------------------------------------------------


def test_what_a_graph_records_is_kept() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(DEVICE)
    x = torch.randn(128, 64, device=DEVICE)
    capture = Capture(model, PlainStore())

    def step() -> None:
        model.zero_grad(set_to_none=False)
        with capture.step(policy_for(2), 0, 0):
            loss = model(x).square().mean()
        loss.backward()

    model(x).sum().backward()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    assert {site.treatment.method for site in capture.sites()} == {Method.KEEP}
    graph.replay()
    recorded = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    model.zero_grad(set_to_none=False)
    model(x).square().mean().backward()
    for ours, each in zip(recorded, model.parameters(), strict=True):
        assert each.grad is not None
        assert torch.allclose(ours, each.grad, rtol=1e-4, atol=1e-6)


def test_rows_are_normalised_under_autocast_as_pytorch_has_it() -> None:
    """What is float32 stays so: a residual stream behind layers that autocast makes half."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256)).to(DEVICE)
    x = torch.randn(512, 256, device=DEVICE)
    weight = torch.randn(512, 256, device=DEVICE)
    capture, found = Capture(model, PlainStore()), []
    for policy in (plain_policy(), with_fused_operators(plain_policy())):
        for step_index in range(2):
            given = x.clone().requires_grad_()
            with capture.step(policy, 0, step_index), torch.autocast("cuda", torch.bfloat16):
                hidden = model(given * 1)
                loss = (hidden.float() * weight).sum()
            (gradient,) = torch.autograd.grad(loss, given)
        found.append((hidden.dtype, gradient))
    assert any(report.pattern for report in capture.fusions() if report.operator == "layer_norm")
    assert found[0][0] == found[1][0] == torch.bfloat16
    assert torch.allclose(found[0][1], found[1][1], rtol=1e-3, atol=1e-4)
