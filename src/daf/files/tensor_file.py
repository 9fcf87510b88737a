"""Safetensors files, written as a stream (https://github.com/huggingface/safetensors).

The library's writer copies every tensor first, which would raise the peak at each checkpoint.
Format: eight bytes of header length, a JSON header, the data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from daf.core.errors import RunFolderError

_TYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8


def write_tensors(
    file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Write CPU tensors of any layout; raises RunFolderError for dtypes that the format lacks."""
    # Wide types first, so that every tensor starts at a multiple of its element size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name in order:
        end = offset + tensors[name].numel() * tensors[name].element_size()
        header[name] = {
            "dtype": _type_name(name, tensors[name].dtype),
            "shape": list(tensors[name].shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        _write_data(file, tensors[name])


def _type_name(name: str, dtype: torch.dtype) -> str:
    if dtype not in _TYPE_NAMES:
        raise RunFolderError(f"tensor {name!r} has type {dtype}, which safetensors cannot hold")
    return _TYPE_NAMES[dtype]


def _write_data(file: BinaryIO, tensor: Tensor) -> None:
    if tensor.numel():
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        file.write(flat.numpy().data)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Map tensors, and read metadata; raises RunFolderError if the file is missing or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise RunFolderError(f"cannot read {path}: {error}") from error
