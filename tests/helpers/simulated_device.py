"""A device made of threads: codes with the processor's kernels, copies when it pleases."""

from __future__ import annotations

import random
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from daf.core.policy import Treatment
from daf.kernels import PageFields
from daf.kernels.cpu.backend import CpuBackend
from daf.kernels.devices import register_backend
from daf.kernels.normalisation import CodedValues, Decoding, Encoding
from daf.kernels.triton.planes import DevicePlanes
from daf.pool.host_planes import HostStore
from daf.pool.views import PlaneView

GARBAGE = 0x5A


class Arrival:
    """A ticket: when the copy began and ended, once it has."""

    def __init__(self) -> None:
        self.begin_s = self.end_s = 0.0
        self.done: Future[None] = Future()


class LateTransfers:
    """Copies on a thread of their own, in order and after a while; until then there is garbage."""

    def __init__(self, latest_s: float = 0.002) -> None:
        self._link, self._queue = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._random = random.Random(0)
        self._latest_s = latest_s
        self.copied_bytes = 0
        self.refuses = False

    def out(self, source: Tensor) -> tuple[Tensor, Arrival]:
        if self.refuses:
            raise RuntimeError("simulated: no pinned memory")
        # As a stream has it: what is copied is what was there when it was asked for.
        content = source.detach().clone()
        copy = torch.empty_like(content)
        return copy, self._copied(content, copy)

    def back(self, source: Tensor, target: Tensor) -> Arrival:
        return self._copied(source, target)

    def is_done(self, ticket: Arrival) -> bool:
        return ticket.done.done()

    def order(self, ticket: Arrival) -> None:
        ticket.done.result()

    def mark(self) -> Arrival:
        """The simulated device works at once, but tells later."""
        ticket = Arrival()
        ticket.begin_s = ticket.end_s = time.perf_counter()
        self._after_a_while(self._queue, ticket, lambda: None)
        return ticket

    def duration_ms(self, ticket: Arrival) -> float:
        ticket.done.result()
        return 1000.0 * (ticket.end_s - ticket.begin_s)

    def elapsed_ms(self, first: Arrival, last: Arrival) -> float:
        return 1000.0 * (last.end_s - first.end_s)

    def _copied(self, source: Tensor, target: Tensor) -> Arrival:
        target.view(torch.uint8).fill_(GARBAGE)
        self.copied_bytes += source.nbytes
        ticket = Arrival()

        def arrive() -> None:
            ticket.begin_s = time.perf_counter()
            target.copy_(source)
            ticket.end_s = time.perf_counter()

        self._after_a_while(self._link, ticket, arrive)
        return ticket

    def _after_a_while(self, thread: ThreadPoolExecutor, ticket: Arrival, work: Any) -> None:
        delay_s = self._latest_s * self._random.random()

        def run() -> None:
            time.sleep(delay_s)
            work()
            ticket.done.set_result(None)

        thread.submit(run)


def decode_words(
    planes: Tensor, headers: Tensor, treatment: Treatment, key: int, out: Tensor
) -> None:
    """Fill a dense tensor with what a code of its values says."""
    words = torch.cat([planes.flatten(), headers.flatten()])
    fields = PageFields.flat(words.data_ptr(), out.numel(), treatment.bits)
    code = CodedValues(PlaneView(fields), treatment, key, out.numel())
    CpuBackend().decode_values(code, Decoding(out))


class ProcessorCodec(CpuBackend):
    """The processor's kernels where a device's stand, on planes without pages, counted."""

    def __init__(self) -> None:
        self.encoded: list[int] = []

    def encode_values(self, code: CodedValues, encoding: Encoding) -> bool:
        self.encoded.append(encoding.source.numel())
        return super().encode_values(code._replace(planes=_view(code.planes)), encoding)

    def decode_values(self, code: CodedValues, decoding: Decoding) -> None:
        super().decode_values(code._replace(planes=_view(code.planes)), decoding)


def _view(planes: DevicePlanes) -> PlaneView:
    """Of planes that lie one after the other, headers behind."""
    assert planes.headers is not None
    start = planes.region.data_ptr()
    assert planes.headers.data_ptr() == start + planes.region.nbytes
    return PlaneView(PageFields.flat(start, planes.elements, planes.bits))


class SimulatedDevice:
    """``daf_bench.offload.run.Bed``; the processor's tensors are coded as its own from now on."""

    def __init__(self, latest_s: float = 0.002, codec: Any = None) -> None:
        self.late = LateTransfers(latest_s)
        self.place = torch.device("cpu")
        self.codec = codec or ProcessorCodec()
        register_backend("cpu", lambda: self.codec)
        self.stores: list[HostStore] = []

    def store(self, place: torch.device, staging_bytes: int) -> HostStore:
        self.stores.append(HostStore(place, staging_bytes, transfers=self.late))
        return self.stores[-1]

    def finish(self) -> None:
        """Everything but copies is done when it returns."""
        self.late._link.submit(int).result()
        self.late._queue.submit(int).result()
