"""Bytes a second of coding, copying, disk: of a step that did enough, else a synthetic tensor."""

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from daf.codecs.coder import Coder
from daf.core.policy import Method, Treatment
from daf.core.profile import DeviceSpeeds, Profile
from daf.kernels import Codec
from daf.kernels.devices import can_code_on
from daf.kernels.normalisation import ElementCode
from daf.memory.process_memory import CPU
from daf.offload.spill import SpillOptions
from daf.planning.options import Allowed
from daf.planning.table import lawful, level_selection, make_table
from daf.pool.store import PlainStore
from daf.saved_tensors.observation import MethodTime, Observation

Code = Any  # a Values or a Mask of coder

PROBE_ELEMENTS = 1 << 20
DISK_PROBE_BYTES = 1 << 24
LINK_PROBE_BYTES = 1 << 22
ENOUGH_BYTES = 1 << 20
_REPEATS = 3


def device_speeds(
    observation: Observation,
    spill: SpillOptions | None,
    known: DeviceSpeeds | None = None,
    device: torch.device = CPU,
    room_bytes: int = 0,
) -> DeviceSpeeds:
    """Return the speeds for one model's profile.

    Args:
        observation: a step under codes.
        spill: where a temporary file of 16 MiB is written and read; None: the disk counts as fast
            as copying, and spilling must not be planned.
        known: the model's speeds for methods that this step did not use, as fused operators do.
        device: where the model is.
        room_bytes: most bytes for measuring; a few megabytes are used in any case.
    """
    encode, decode, copy = _probed(device, _probe_elements(device, room_bytes))
    if known is not None:
        encode, decode = encode | dict(known.encode), decode | dict(known.decode)
    disk_write, disk_read = _disk(spill.directory) if spill else (copy, copy)
    return DeviceSpeeds(
        encode=encode | _seen(observation.encode),
        decode=decode | _seen(observation.decode),
        copy=copy,
        disk_write=disk_write,
        disk_read=disk_read,
        link=_link(device),
    )


def _seen(times: Mapping[Method, MethodTime]) -> dict[Method, float]:
    return {
        method: 1000.0 * each.timed_bytes / each.timed_ms
        for method, each in times.items()
        if each.timed_bytes >= ENOUGH_BYTES and each.timed_ms > 0 and method is not Method.KEEP
    }


def _probe_elements(device: torch.device, room_bytes: int) -> int:
    """Return elements of 4 MiB; on a GPU up to 64 if four such tensors fit, to hide latency."""
    elements = PROBE_ELEMENTS
    if device.type != "cpu":
        while elements < 16 * PROBE_ELEMENTS and 2 * 16 * elements <= room_bytes:
            elements *= 2
    return elements


@cache
def _probed(
    device: torch.device, elements: int
) -> tuple[dict[Method, float], dict[Method, float], float]:
    """Return (encode, decode, copy) on one tensor; no codes' speeds where nothing codes."""
    tensor = torch.linspace(-1.0, 1.0, elements, device=device, dtype=torch.float32)
    out = torch.empty_like(tensor)
    encode: dict[Method, float] = {}
    decode: dict[Method, float] = {}

    def probe(method: Method, make: Callable[[], Code], restore: Callable[[Code], None]) -> None:
        code = make()
        encode[method] = _speed(out, make)
        decode[method] = _speed(out, lambda: restore(code))

    if can_code_on(device):
        coder = Coder(PlainStore())
        for treatment in (Treatment(Method.ROTATED, 2), Treatment(Method.MINMAX, 8)):
            make = partial(coder.values, tensor, treatment, 0, None, weight=1.0, tag=0)
            probe(treatment.method, make, lambda code: code.decode(out))
        mask = partial(coder.elements, tensor, 1, ElementCode(Codec.MASK))
        probe(Method.MASK, mask, lambda code: code.decode(out, low=0.0, high=1.0))
    return encode, decode, _speed(out, lambda: out.copy_(tensor))


def _speed(out: Tensor, work: Callable[[], object]) -> float:
    """Return bytes a second of ``work``, which writes ``out``, as large as its input, last."""
    return out.nbytes / min(_seconds(work, out) for _ in range(_REPEATS))


def _seconds(work: Callable[[], object], out: Tensor | None = None) -> float:
    _wait_for(out)
    start_s = time.perf_counter()
    work()
    _wait_for(out)
    return max(1e-9, time.perf_counter() - start_s)


def _wait_for(out: Tensor | None) -> None:
    """Wait for the device: reading an element needs all work queued before."""
    if out is not None:
        out[-1].item()


@cache
def _link(device: torch.device) -> float:
    """Return the speed from pinned memory to a device; 0 on the CPU."""
    if device.type == "cpu":
        return 0.0
    here = torch.empty(LINK_PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(here, device=device)
    return _speed(there, lambda: there.copy_(here, non_blocking=True))


@cache
def _disk(directory: str | Path | None) -> tuple[float, float]:
    """Return (write, read) through the disk, as far as its cache can be bypassed."""
    content = os.urandom(DISK_PROBE_BYTES)
    with tempfile.TemporaryFile(dir=directory) as file:

        def write() -> None:
            file.seek(0)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

        def read() -> None:
            file.seek(0)
            file.read()

        written = DISK_PROBE_BYTES / _seconds(write)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return written, DISK_PROBE_BYTES / _seconds(read)


# A factor outside this range is a disturbed measurement.
LOWEST, HIGHEST = 0.25, 3.0


def calibrated(profile: Profile, examples: int, coded_ms: float) -> Profile:
    """Return the profile with code speeds corrected by one small step.

    Speeds measured tensor by tensor miss a real step's operators and cache contents.

    ``coded_ms``: forward and backward of ``examples`` with one bit at every site.
    """
    table = make_table(profile, examples, Allowed(replay=False))
    modelled_ms = table.cost_of(lawful(table, level_selection(table, "1")))
    added_ms = coded_ms - profile.forward_backward_ms(examples)
    if modelled_ms <= 0:
        return profile
    factor = min(HIGHEST, max(LOWEST, added_ms / modelled_ms))
    speeds = replace(
        profile.speeds,
        encode=_slower(profile.speeds.encode, factor),
        decode=_slower(profile.speeds.decode, factor),
    )
    return replace(profile, speeds=speeds)


def _slower(speeds: Mapping[Method, float], factor: float) -> dict[Method, float]:
    return {method: speed / factor for method, speed in speeds.items()}
