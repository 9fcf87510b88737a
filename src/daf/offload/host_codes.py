"""Codes of a device's tensors that wait on the host, packed by the device or the processor.

Either the device packs and the code travels, or raw data travel and a processor's thread packs
them: the same bytes in one layout. :class:`Routes` chooses from measured rates. After DAF (arXiv
2507.07149, collaborative packing through a unified layout), where the split is fixed.
"""

import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from daf.codecs.codes import ValueCode
from daf.codecs.layout import in_memory_order
from daf.core.code_format import code_bytes
from daf.core.errors import PlatformError, SavedTensorError
from daf.core.policy import Method, Treatment
from daf.core.units import format_bytes, parse_optional_bytes, pinned_bytes
from daf.kernels.devices import can_code_on, is_processor, is_recorded
from daf.kernels.normalisation import Channels
from daf.memory.domain import device_of
from daf.offload.routing import Route, Routes, Sent
from daf.pool.host_planes import HostPlanes, HostStore, encode_on_host, words_for

_MIB = 2**20
_ASK_AGAIN_S = 0.0002


class HostMemoryWarning(RuntimeWarning):
    """The host has no room for more codes; they stay on the device instead."""


@dataclass(frozen=True, slots=True)
class HostOptions:
    """How much may wait on the host, and pass through each device (bytes)."""

    limit_bytes: int  # of codes, rounded up to powers of two as PyTorch's pinned allocator does
    staging_bytes: int = 32 * _MIB  # of codes on a device
    raw_bytes: int = 32 * _MIB  # of raw data on their way out


def host_options(model: nn.Module, host_bytes: str | int | None) -> HostOptions | None:
    """Return how much of a GPU's codes may wait in host memory; None: none.

    UnitError: the bytes cannot be read. PlatformError: the model is on no GPU that can code.
    """
    if (limit_bytes := parse_optional_bytes(host_bytes)) is None:
        return None
    device = device_of(model)
    if is_processor(device):
        raise PlatformError(
            f"asked for host_bytes={host_bytes!r} of a model on {device}, whose codes are in host "
            "memory already; leave host_bytes out, or move the model to a GPU"
        )
    if not can_code_on(device):
        raise PlatformError(
            f"asked for host_bytes={host_bytes!r} of a model on {device}, where nothing is coded "
            "without Triton; install daf-train[gpu], or leave host_bytes out"
        )
    return HostOptions(limit_bytes)


@dataclass(frozen=True, slots=True)
class _Place:
    store: HostStore
    routes: Routes


@dataclass(eq=False)
class HostCodes:
    """A capture's codes on the host; every device has its own store and routes."""

    _options: HostOptions
    make_store: Callable[..., HostStore] = HostStore
    make_routes: Callable[[HostStore], Routes] = lambda store: Routes(store.transfers)
    on_moved: Callable[[], None] = lambda: None  # device_bytes may have grown

    def __post_init__(self) -> None:
        self._places: dict[torch.device, _Place] = {}
        self._processor = ThreadPoolExecutor(1, thread_name_prefix="daf-pack")
        self._lock = threading.Lock()
        self._raw_bytes = 0  # on devices, for the processor to pack
        self._warned = False

    @property
    def limit_bytes(self) -> int:
        """The most bytes that may wait on the host."""
        return self._options.limit_bytes

    def allow(self, staging_bytes: int, raw_bytes: int) -> None:
        """Set the bounds of what passes through each device, from the next tensor on."""
        self._options = replace(self._options, staging_bytes=staging_bytes, raw_bytes=raw_bytes)
        for place in self._all():
            place.store.staging_bytes = staging_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes that pass through devices, raw data still being copied included."""
        return self._raw_bytes + sum(place.store.device_bytes for place in self._all())

    @property
    def stored_bytes(self) -> int:
        """Bytes of the codes that wait on the host, or are on their way."""
        return sum(place.store.stored_bytes for place in self._all())

    @property
    def stored_peak_bytes(self) -> int:
        """The most ``stored_bytes`` since ``reset_peak``."""
        return sum(place.store.stored_peak_bytes for place in self._all())

    @property
    def taken_bytes(self) -> int:
        """Bytes taken in total."""
        return sum(place.store.taken_bytes for place in self._all())

    def reset_peak(self) -> None:
        """Restart the peak from what is there now."""
        for place in self._all():
            place.store.reset_peak()

    def drop_staged(self) -> None:
        """Free all device memory whose content can be fetched again."""
        for place in self._all():
            place.store.drop_staged()

    def wait_until_packed(self) -> None:
        """Wait until the processor has packed all that it was given."""
        self._processor.submit(int).result()  # one thread, in order

    def _all(self) -> list[_Place]:
        with self._lock:
            return list(self._places.values())

    def begin_pass(self) -> None:
        """Begin a forward pass."""
        for place in self._all():
            place.routes.begin_pass(self._options.raw_bytes)

    def room(self, tensor: Tensor, count: int, bits: int) -> HostStore | None:
        """Return a store to write ``bits`` planes in; None: they must stay on their device."""
        if is_recorded(tensor):  # a graph would copy to memory that has another owner by then
            return None
        wanted = pinned_bytes(code_bytes(count, bits))
        pinned = sum(place.store.pinned_bytes for place in self._all())
        if pinned + wanted > self._options.limit_bytes:
            self._explain()
            return None
        return self._place(tensor.device).store

    def values(
        self,
        tensor: Tensor,
        treatment: Treatment,
        key: int,
        channels: Channels | None,
        **options: Any,
    ) -> ValueCode | None:
        """Encode as :class:`ValueCode`, whose arguments these are; None: stay on the device."""
        if (store := self.room(tensor, tensor.numel(), treatment.bits)) is None:
            return None
        routes = self._place(tensor.device).routes
        either = treatment.method in (Method.ROTATED, Method.MINMAX) and channels is None
        either = either and options.get("output") is None and options.get("rows") is None
        if either and routes.take() is Route.CPU_PACKS:
            planes = self._sent_raw(store, routes, tensor, treatment, key)
            if planes is not None:
                return ValueCode.packed_elsewhere(planes, tensor, treatment, key)
        is_timed = either and routes.is_watching
        before = store.transfers.mark() if is_timed else None
        code = ValueCode(store, tensor, treatment, key, channels, **options)
        if is_timed and store.last_copy is not None:
            after = store.transfers.mark()
            what = (Route.GPU_PACKS, tensor.numel(), tensor.nbytes, treatment)
            routes.note(Sent(*what, before, after, store.last_copy))
        return code

    def _sent_raw(
        self, store: HostStore, routes: Routes, tensor: Tensor, treatment: Treatment, key: int
    ) -> HostPlanes | None:
        room = self._options.raw_bytes - self._raw_bytes
        if not store.home.is_current or tensor.nbytes > room:
            return None  # it travels raw only from home, in whose order its memory is freed
        source, before = in_memory_order(tensor.detach()), store.transfers.mark()
        try:
            words = words_for(source.numel(), treatment.bits, pinned=source.is_cuda)
            raw, ticket = store.transfers.out(source)
        except RuntimeError:  # no pinned memory is left
            return None
        with self._lock:
            self._raw_bytes += source.nbytes
        leaving = _Leaving(source, raw, ticket)
        work = partial(encode_on_host, raw, treatment, key, words)
        packing = self._processor.submit(self._packed, leaving, store, routes, work)
        if routes.is_watching:
            what = (Route.CPU_PACKS, tensor.numel(), tensor.nbytes, treatment)
            routes.note(Sent(*what, before, before, ticket))
        self.on_moved()
        return store.packed_elsewhere(tensor.numel(), treatment.bits, packing)

    def _packed(
        self, leaving: "_Leaving", store: HostStore, routes: Routes, work: Callable[[], Tensor]
    ) -> Tensor:
        nbytes = leaving.raw.nbytes
        try:
            while not store.transfers.is_done(leaving.ticket):
                time.sleep(_ASK_AGAIN_S)
            leaving.check()
        finally:
            leaving.source = None
            with self._lock:
                self._raw_bytes -= nbytes
        begin_s = time.perf_counter()
        words = work()
        routes.processor_took(nbytes, 1000.0 * (time.perf_counter() - begin_s))
        return words

    def _place(self, device: torch.device) -> _Place:
        with self._lock:
            found = self._places.get(device)
        if found is None:
            store = self.make_store(device, self._options.staging_bytes)
            found = _Place(store, self.make_routes(store))
            store.on_moved, store.on_read = self.on_moved, found.routes.end_forward
            with self._lock:
                self._places[device] = found
        return found

    def _explain(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"codes take all of the host memory that they may, "
                f"{format_bytes(self._options.limit_bytes)}; more of them stay on the device (this "
                "is said once); allow more host memory, or fewer bits",
                HostMemoryWarning,
                stacklevel=2,
            )


class _Leaving:
    """Raw data on their way, which nobody may change before they are copied."""

    def __init__(self, source: Tensor, raw: Tensor, ticket: Any) -> None:
        self.source: Tensor | None = source
        self.raw, self.ticket, self.version = raw, ticket, source._version

    def check(self) -> None:
        """Raise SavedTensorError if the data changed meanwhile: codes are of what was saved."""
        assert self.source is not None
        if self.source._version != self.version:
            raise SavedTensorError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation while it was copied to the host to be coded there; do not "
                "change it in place between forward and backward, or clone it before"
            )
