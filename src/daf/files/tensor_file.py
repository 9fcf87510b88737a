"""Safetensors files with checksums, written as a stream (https://github.com/huggingface/safetensors).

The library's writer copies every tensor first, which would raise the peak at each checkpoint.
Format: eight bytes of header length, a JSON header, the data. Of ours, the metadata hold the
checksum of every tensor's bytes, and one of the whole header.
"""

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from daf.core.errors import DamagedFileError, RunFolderError
from daf.files.atomic import open_regular

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
_LONGEST_HEADER = 100_000_000  # bytes, the library's own limit
_METADATA = "__metadata__"
_OF_TENSORS, _OF_HEADER = "daf_crc32_of_tensors", "daf_crc32_of_header"
_UNKNOWN = "0" * 8  # of the same length as every checksum


def write_tensors(
    file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Write tensors of any layout to an empty file that can seek; RunFolderError: other dtypes."""
    # Wide types first, so that every tensor starts at a multiple of its element size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    offset = 0
    for name in order:
        dtype, shape = tensors[name].dtype, list(tensors[name].shape)
        if dtype not in _TYPE_NAMES:
            raise RunFolderError(f"tensor {name!r} has type {dtype}, which safetensors cannot hold")
        end = offset + tensors[name].numel() * tensors[name].element_size()
        header[name] = {"dtype": _TYPE_NAMES[dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    file.write(_header_text(header, dict.fromkeys(order, _UNKNOWN)))
    checksums = {}
    for name in order:
        data = _bytes_of(tensors[name])
        file.write(data)
        checksums[name] = f"{zlib.crc32(data):08x}"
    file.seek(0)
    file.write(_header_text(header, checksums))


def _header_text(header: dict[str, Any], checksums: Mapping[str, str]) -> bytes:
    header[_METADATA][_OF_TENSORS] = json.dumps(checksums)
    header[_METADATA][_OF_HEADER] = _checksum_of(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _checksum_of(header: Mapping[str, Any]) -> str:
    metadata = {name: text for name, text in header[_METADATA].items() if name != _OF_HEADER}
    return f"{zlib.crc32(json.dumps({**header, _METADATA: metadata}).encode()):08x}"


def _bytes_of(tensor: Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Map tensors, and read metadata, of a file that ``write_tensors`` wrote.

    Raises DamagedFileError if a checksum is missing or not the data's, or there is no such file.
    """
    try:
        metadata = _checked_metadata(path)
        checksums = json.loads(metadata.pop(_OF_TENSORS))
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, KeyError, RecursionError) as error:
        raise DamagedFileError(f"cannot read {path}: {error}") from error
    for name, tensor in tensors.items():
        if f"{zlib.crc32(_bytes_of(tensor)):08x}" != checksums.get(name):
            raise DamagedFileError(f"cannot read {path}: tensor {name!r} is damaged")
    return tensors, metadata


def _checked_metadata(path: Path) -> dict[str, str]:
    """Return the metadata less the header's checksum; raises OSError or ValueError if damaged."""
    with open_regular(path) as file:
        nbytes = int.from_bytes(file.read(8), "little")
        if nbytes > min(os.fstat(file.fileno()).st_size, _LONGEST_HEADER):
            raise ValueError("it was cut, or the length of its header is damaged")
        header = json.loads(file.read(nbytes))
    metadata = header.get(_METADATA) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or _OF_HEADER not in metadata:
        raise ValueError("it has no checksum: it is damaged, or another version's")
    if metadata.pop(_OF_HEADER) != _checksum_of(header):
        raise ValueError("its header does not have its checksum any more")
    return metadata
