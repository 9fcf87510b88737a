"""A device made of threads: codes with the processor's kernels, copies when it pleases."""

from __future__ import annotations

import random
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from daf.codecs.cpu import element_type
from daf.codecs.layout import in_memory_order
from daf.core.policy import Method, Treatment
from daf.kernels.cpu import flat
from daf.pool.host_planes import HostPlanes, HostStore

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
    code = (planes.data_ptr(), headers.data_ptr(), out.numel(), treatment.bits)
    target = (out.data_ptr(), element_type(out.dtype), 1)
    if treatment.method is Method.ROTATED:
        flat.decode_rotated(*code, treatment.bits, treatment.rounds, key, *target)
    else:
        flat.decode_minmax(*code, *target)


class ProcessorCodec:
    """What ``store.device_codec`` is to a GPU: codes of plain tensors' values, counted."""

    def __init__(self) -> None:
        self.encoded: list[int] = []
        codec = self

        class DeviceValueCode:
            def __init__(
                self, store: HostStore, tensor: Tensor, treatment: Treatment, key: int, _: None
            ) -> None:
                planes = store.allocate_planes(tensor.numel(), treatment.bits)
                self._hold(planes, treatment, key)
                codec.encoded.append(tensor.numel())
                source = in_memory_order(tensor)
                with planes.writing() as there:
                    assert there.headers is not None
                    elements = (source.data_ptr(), element_type(tensor.dtype), tensor.numel())
                    target = (there.region.data_ptr(), there.headers.data_ptr(), 1)
                    if treatment.method is Method.ROTATED:
                        flat.encode_rotated(
                            *elements, treatment.bits, treatment.rounds, key, *target
                        )
                    else:
                        flat.encode_minmax(*elements, treatment.bits, key, *target)

            @classmethod
            def packed_elsewhere(
                cls, planes: HostPlanes, _tensor: Tensor, treatment: Treatment, key: int
            ) -> Any:
                code = cls.__new__(cls)
                code._hold(planes, treatment, key)
                return code

            def _hold(self, planes: HostPlanes, treatment: Treatment, key: int) -> None:
                self.planes, self.treatment, self.key = planes, treatment, key

            def decode(self, out: Tensor) -> None:
                with self.planes.pinned() as there:
                    assert there.headers is not None
                    decode_words(there.region, there.headers, self.treatment, self.key, out)

        self.DeviceValueCode = DeviceValueCode


class SimulatedDevice:
    """``bench.pack.Bed``."""

    def __init__(self, latest_s: float = 0.002) -> None:
        self.late = LateTransfers(latest_s)
        self.place = torch.device("cpu")
        self.codec = ProcessorCodec()
        self.stores: list[HostStore] = []

    def store(self, place: torch.device, staging_bytes: int) -> HostStore:
        self.stores.append(HostStore(place, staging_bytes, transfers=self.late))
        return self.stores[-1]

    def finish(self) -> None:
        """Everything but copies is done when it returns."""
        self.late._link.submit(int).result()
        self.late._queue.submit(int).result()
