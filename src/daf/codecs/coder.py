"""The coder: makes codes in the host's store, a device's pages, or host memory for a device."""

from typing import Any, Protocol

from torch import Tensor

from daf.codecs.codes import ElementsCode, ValueCode
from daf.codecs.registry import RegisteredCode, encoder_named
from daf.core.policy import Treatment
from daf.kernels.devices import is_coded_on_device
from daf.kernels.normalisation import Channels, ElementCode
from daf.pool.device_pool import DeviceStores
from daf.pool.store import Store


class Host(Protocol):
    """Host memory that holds codes of a device's tensors."""

    def room(self, tensor: Tensor, count: int, bits: int) -> Any | None:
        """Return a store for ``bits`` planes of ``count`` elements; None if there is no room."""

    def values(
        self,
        tensor: Tensor,
        treatment: Treatment,
        key: int,
        channels: Channels | None,
        **options: Any,
    ) -> ValueCode | None:
        """Encode a dense tensor's floats, on the device or the processor; None: no room."""


class Coder:
    """Makes codes of host tensors in ``store``, of a device's in ``devices`` or in ``host``."""

    def __init__(
        self, store: Store, devices: DeviceStores | None = None, host: Host | None = None
    ) -> None:
        self._store, self._host = store, host
        self._devices = DeviceStores() if devices is None else devices

    def elements(
        self, tensor: Tensor, bits: int, code: ElementCode, *, on_host: bool = False, **options: Any
    ) -> ElementsCode | None:
        """Encode every element of a dense tensor; None if one is known not to be finite."""
        store = self._place(tensor, bits, on_host)
        return ElementsCode.encode(store, tensor, bits, code, **options)

    def unwritten_mask(self, tensor: Tensor, *, on_host: bool = False) -> ElementsCode:
        """Allocate one bit for every element; the caller fills the planes."""
        return ElementsCode.unwritten_mask(self._place(tensor, 1, on_host), tensor.numel())

    def values(
        self,
        tensor: Tensor,
        treatment: Treatment,
        key: int,
        channels: Channels | None,
        **options: Any,
    ) -> ValueCode:
        """Encode a dense tensor's floats; arguments and options are those of :class:`ValueCode`."""
        arguments = (tensor, treatment, key, channels)
        if treatment.on_host and self._host is not None and is_coded_on_device(tensor):
            found = self._host.values(*arguments, **options)
            if found is not None:
                return found
        return ValueCode(self._place(tensor, treatment.bits, False), *arguments, **options)

    def registered(self, tensor: Tensor, treatment: Treatment, key: int) -> RegisteredCode | None:
        """Encode by a registered codec; None: the tensor is kept as it is."""
        store = self._place(tensor, treatment.bits, False)
        return encoder_named(treatment.codec)(store, tensor, treatment, key)

    def _place(self, tensor: Tensor, bits: int, on_host: bool) -> Any:
        if not is_coded_on_device(tensor):
            return self._store
        if on_host and self._host is not None:
            found = self._host.room(tensor, tensor.numel(), bits)
            if found is not None:
                return found
        return self._devices.on(tensor.device)
