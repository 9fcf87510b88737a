"""Saved tensors that become codes on the host and come back, beside the computation.

Forward gives every tensor to :meth:`Packer.save` with the :class:`Route` that
``collaborate.split`` chose for it: the device packs and codes travel, or raw data
travel and a thread of the processor packs them. Both write the same bytes, so
that backward does not care: :meth:`Packer.restore` decodes on the device what
was fetched in reverse order, each as early as the staging area has room.

What it needs of a device is a :class:`Device`; :class:`TritonDevice` is a GPU.
After DAF (arXiv 2507.07149, collaborative packing through a unified layout).
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from daf.errors import CodecError
from daf.execution.collaborate import Job, Prefetcher, Route
from daf.execution.transfers import CudaTransfers, Transfers
from daf.kernels import block_count, cpu, header_bytes, plane_bytes, words_per_plane
from daf.plan import Method, Treatment
from daf.store.codec import element_type
from daf.store.layout import in_memory_order

_ASK_AGAIN_S = 0.0002


class Codes(NamedTuple):
    """Planes (bits, words) and headers (blocks,) of one tensor, int32, flat."""

    planes: Tensor
    headers: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.planes.nbytes + self.headers.nbytes


class Device(Protocol):
    """Where tensors are computed, and what packs and unpacks them there."""

    @property
    def transfers(self) -> Transfers:
        """Copies to the host and back."""

    def encode(self, tensor: Tensor, treatment: Treatment, key: int) -> Codes:
        """Codes of a dense tensor, on the device."""

    def decode(self, codes: Codes, treatment: Treatment, key: int, out: Tensor) -> None:
        """Write a dense tensor from codes on the device."""


class TritonDevice:
    """A GPU, by Triton's kernels.

    Raises:
        PlatformError: there is no such device.
        KernelError: Triton is not installed.
    """

    def __init__(self, device: torch.device) -> None:
        from daf.kernels import gpu, gpu_planes  # needs triton, which processors alone do not

        self.transfers: Transfers = CudaTransfers(device)
        self._gpu = gpu
        self._planes = gpu_planes

    def encode(self, tensor: Tensor, treatment: Treatment, key: int) -> Codes:
        """On the current stream."""
        count, place = tensor.numel(), tensor.device
        planes = self._planes.allocate_flat(count, treatment.bits, place, headers=True)
        self._gpu.encode_rotated(in_memory_order(tensor), planes, treatment.rounds, key)
        assert planes.headers is not None
        return Codes(planes.region, planes.headers)

    def decode(self, codes: Codes, treatment: Treatment, key: int, out: Tensor) -> None:
        """On the current stream."""
        planes = self._planes.flat_planes(*codes, out.numel(), treatment.bits)
        self._gpu.decode_rotated(planes, treatment.rounds, key, in_memory_order(out))


@dataclass(slots=True)
class _Parcel:
    """One tensor on its way: its codes on the host when ``packed`` is done, then fetched."""

    key: int
    nbytes: int
    packed: Future[Codes] | None
    fetched: tuple[Codes, list[Any]] | None = None
    is_restored: bool = False


class Packer:
    """Packs the tensors of one forward pass, and brings them back in its backward pass.

    Close it afterwards (``contextlib.closing``).

    ``jobs`` tells when the processor packed what (ms since ``begin``), for the timeline.

    Args:
        device: where the tensors are.
        treatment: *rotated*, the same for all.
        key: names the run in the codes' random rotations.
        staging_bytes: the most that fetched codes may hold on the device, until decoded there.
    """

    def __init__(self, device: Device, treatment: Treatment, key: int, staging_bytes: int) -> None:
        if treatment.method is not Method.ROTATED:
            raise CodecError(f"asked to pack by {treatment.method}; use rotated")
        self._device = device
        self._treatment = treatment
        self._key = key
        self._staging_bytes = staging_bytes
        self._parcels: list[_Parcel] = []
        self._prefetcher: Prefetcher | None = None
        self._decoding: deque[tuple[int, Any]] = deque()  # asked of the device, with tickets
        self._processor = ThreadPoolExecutor(1, thread_name_prefix="daf-pack")
        self._begin_s = time.perf_counter()
        self.jobs: list[Job] = []

    def close(self) -> None:
        """Stop packing; what is not restored by then is lost."""
        self._processor.shutdown(wait=True, cancel_futures=True)

    # --- forward ----------------------------------------------------------------------------

    def save(self, tensor: Tensor, route: Route) -> int:
        """Send a dense float tensor on its way; returns the number to restore it by."""
        index, transfers = len(self._parcels), self._device.transfers
        key = self._key + index
        if route is Route.GPU_PACKS:
            codes = self._device.encode(tensor, self._treatment, key)
            sent = [transfers.out(part) for part in codes]
            packed = self._processor.submit(self._arrived, sent)
        else:
            raw = transfers.out(in_memory_order(tensor))
            packed = self._processor.submit(self._packed, index, raw, key)
        nbytes = code_bytes(tensor.numel(), self._treatment.bits)
        self._parcels.append(_Parcel(key, nbytes, packed))
        return index

    def wait_until_packed(self) -> int:
        """All codes are on the host; returns their bytes."""
        waited = [parcel.packed.result() for parcel in self._parcels if parcel.packed is not None]
        return sum(codes.nbytes for codes in waited)

    def _arrived(self, sent: list[tuple[Tensor, Any]]) -> Codes:
        self._await([ticket for _, ticket in sent])
        return Codes(*(copy for copy, _ in sent))

    def _packed(self, index: int, raw: tuple[Tensor, Any], key: int) -> Codes:
        copy, ticket = raw
        self._await([ticket])
        begin_ms = self._now_ms()
        codes = encode_on_host(copy, self._treatment, key)
        self.jobs.append(Job("cpu", index, begin_ms, self._now_ms()))
        return codes

    def _await(self, tickets: list[Any]) -> None:
        """On the packing thread, which has nothing else to do; in backward, for room."""
        while not all(map(self._device.transfers.is_done, tickets)):
            time.sleep(_ASK_AGAIN_S)

    def _now_ms(self) -> float:
        return 1000.0 * (time.perf_counter() - self._begin_s)

    # --- backward ---------------------------------------------------------------------------

    def restore(self, index: int, out: Tensor) -> None:
        """Decode one tensor into ``out``, dense and of the saved one's geometry.

        Tensors come back soonest in the reverse order of saving; in another order too, as long
        as the staging area has room for all that are fetched and not yet restored.

        Raises:
            BudgetError: one tensor's codes alone are larger than the staging area.
            CodecError: it was restored before, or the order leaves no room to fetch it.
        """
        parcel = self._parcels[index]
        if parcel.is_restored:
            raise CodecError(
                f"asked for tensor {index} once more; a packed one comes back once: run the "
                "forward pass again"
            )
        codes, tickets = self._fetched(index)
        for part, ticket in zip(codes, tickets, strict=True):
            self._device.transfers.before_use(part, ticket)
        self._device.decode(codes, self._treatment, parcel.key, out)
        self._decoding.append((index, self._device.transfers.mark()))
        parcel.fetched, parcel.packed, parcel.is_restored = None, None, True
        self._fetch()

    def _fetched(self, index: int) -> tuple[Codes, list[Any]]:
        """Waits for what is decoded now, if its room is needed."""
        self._fetch()
        while self._parcels[index].fetched is None and self._decoding:
            self._await([self._decoding[0][1]])
            self._fetch()
        fetched = self._parcels[index].fetched
        if fetched is None:
            raise CodecError(
                f"asked for tensor {index} while later ones fill the staging area of "
                f"{self._staging_bytes} bytes; restore those first, or enlarge it"
            )
        return fetched

    def _fetch(self) -> None:
        """Begin every fetch that there is room for, each when it is packed."""
        if self._prefetcher is None:
            sizes = [parcel.nbytes for parcel in self._parcels]
            self._prefetcher = Prefetcher(sizes, self._staging_bytes)
        while self._decoding and self._device.transfers.is_done(self._decoding[0][1]):
            self._prefetcher.release(self._decoding.popleft()[0])
        for index in self._prefetcher.to_start():
            parcel = self._parcels[index]
            assert parcel.packed is not None
            back = [self._device.transfers.back(part) for part in parcel.packed.result()]
            parcel.fetched = Codes(*(copy for copy, _ in back)), [ticket for _, ticket in back]


def code_bytes(count: int, bits: int) -> int:
    """Of planes and headers."""
    return plane_bytes(count, bits) + header_bytes(count)


def encode_on_host(tensor: Tensor, treatment: Treatment, key: int) -> Codes:
    """Codes of a dense tensor on the host, on all of PyTorch's threads; pinned where it is."""
    count = tensor.numel()
    sizes = (treatment.bits, words_per_plane(count)), (block_count(count),)
    pinned = tensor.is_pinned()  # from where a device copies by itself
    codes = Codes(*(torch.empty(size, dtype=torch.int32, pin_memory=pinned) for size in sizes))
    cpu.encode_rotated(
        *(tensor.data_ptr(), element_type(tensor.dtype), count),
        *(treatment.bits, treatment.rounds, key),
        *(codes.planes.data_ptr(), codes.headers.data_ptr(), torch.get_num_threads()),
    )
    return codes
