"""A device made of threads: packs with the processor's kernels, copies when it pleases."""

from __future__ import annotations

import random
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from daf.execution.packing import Codes, encode_on_host
from daf.execution.transfers import Transfers
from daf.kernels import cpu
from daf.plan import Treatment
from daf.store.codec import element_type
from daf.store.layout import in_memory_order

GARBAGE = 0x5A


class LateTransfers:
    """Copies on a thread of their own, in order and after a while; until then there is garbage."""

    def __init__(self, latest_s: float = 0.002) -> None:
        self._link, self._queue = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._random = random.Random(0)
        self._latest_s = latest_s
        self.copied_bytes = 0

    def out(self, source: Tensor) -> tuple[Tensor, Any]:
        return self._copy(source)

    def back(self, source: Tensor) -> tuple[Tensor, Any]:
        return self._copy(source)

    def is_done(self, ticket: Future[None]) -> bool:
        return ticket.done()

    def before_use(self, copy: Tensor, ticket: Future[None]) -> None:
        ticket.result()

    def mark(self) -> Any:
        """The simulated device works at once, but tells later."""
        delay_s = self._latest_s * self._random.random()
        return self._queue.submit(time.sleep, delay_s)

    def _copy(self, source: Tensor) -> tuple[Tensor, Future[None]]:
        # As a stream has it: what is copied is what was there when it was asked for.
        content = source.detach().clone()
        copy = torch.empty_like(content)
        copy.view(torch.uint8).fill_(GARBAGE)
        self.copied_bytes += content.nbytes
        delay_s = self._latest_s * self._random.random()

        def arrive() -> None:
            time.sleep(delay_s)
            copy.copy_(content)

        return copy, self._link.submit(arrive)


class SimulatedDevice:
    """``packing.Device`` and ``bench.pack.Bed`` at once."""

    def __init__(self, latest_s: float = 0.002) -> None:
        self.late = LateTransfers(latest_s)
        self.transfers: Transfers = self.late
        self.place = torch.device("cpu")
        self.encoded: list[int] = []

    @property
    def device(self) -> SimulatedDevice:
        return self

    def finish(self) -> None:
        """Everything but copies is done when it returns."""

    def encode(self, tensor: Tensor, treatment: Treatment, key: int) -> Codes:
        self.encoded.append(tensor.numel())
        return encode_on_host(in_memory_order(tensor), treatment, key)

    def decode(self, codes: Codes, treatment: Treatment, key: int, out: Tensor) -> None:
        cpu.decode_rotated(
            *(codes.planes.data_ptr(), codes.headers.data_ptr(), out.numel()),
            *(treatment.bits, treatment.bits, treatment.rounds, key),
            *(out.data_ptr(), element_type(out.dtype), 1),
        )
