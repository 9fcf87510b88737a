"""Archives and pickles that lie about what they hold, or would run code."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from daf_bench.faults.on_disk.lies import Lie, mutated

_NAMES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")


class _Call:
    """Pickled as a call of a function."""

    def __init__(self, function: Callable[..., Any], arguments: Any, state: Any = None) -> None:
        self._reduced = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self._reduced


def _batch(protocol: int = 2, **changes: Any) -> bytes:
    whole: dict[str, Any] = {"data": np.zeros((4, 3072), np.uint8), "labels": [0, 1, 2, 3]}
    named = {key.encode(): value for key, value in (whole | changes).items()}
    return pickle.dumps(named, protocol)


def _batches(draw: random.Random, folder: Path, evil: bytes) -> str:
    for name in _NAMES:
        (folder / name).write_bytes(_batch())
    (folder / draw.choice(_NAMES)).write_bytes(evil)
    return f"cifar10:{folder}"


def _code(draw: random.Random, folder: Path) -> str:
    function, arguments = draw.choice(
        (
            (os.system, ("touch run_by_a_pickle",)),
            (eval, ("open('run_by_a_pickle', 'w')",)),
            (np.load, ("/etc/passwd",)),
            (getattr, ("", "join")),
        )
    )
    return _batches(draw, folder, _batch(draw.randrange(2, 5), data=_Call(function, arguments)))


def _large_array(draw: random.Random, folder: Path) -> str:
    shape = (draw.choice((10**5, 10**7, 10**12)), 3072)
    evil = _Call(np.ndarray, (shape, np.dtype("u1")))
    return _batches(draw, folder, _batch(data=evil))


def _array_state(draw: random.Random, folder: Path) -> str:
    rebuild = np.empty(0).__reduce__()[0]
    kinds = (np.dtype("u1"), np.dtype("O"), np.dtype("f8"), np.dtype("i4,f8"), None, 7)
    shapes = ((4, 3072), (-1, 3072), (2**62, 2**62), (10**6, 3072), (), "ab", None, (4.0, 3072))
    contents = (bytes(4 * 3072), b"\x41" * 8, [1] * 12288, None, "x")
    state = (1, draw.choice(shapes), draw.choice(kinds[1:]), False, draw.choice(contents))
    state = draw.choice((state, state[:2], ("a", *state), 3))
    evil = _Call(rebuild, (np.ndarray, (0,), b"b"), state)
    return _batches(draw, folder, _batch(data=evil))


def _raw_opcodes(draw: random.Random, folder: Path) -> str:
    depth = draw.randrange(10**4, 10**6)
    size = draw.randrange(10**9, 10**13)
    twice = b"q\x01h\x01\x86" * draw.randrange(30, 70)  # a pair of itself, again and again
    evil = draw.choice(
        (
            b"\x80\x05\x8e" + struct.pack("<Q", size) + b"x.",
            b"\x80\x05\x96" + struct.pack("<Q", size) + b"x.",
            b"\x80\x02Nr" + struct.pack("<I", draw.randrange(2**28, 2**31)) + b".",
            b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b".",
            b"\x80\x02}" + b"K\x01\x85" + twice + b"K\x02s.",
            b"\x80\x02}(" + b"]" * 40 * 10**6,
            b"\x80\x02I" + b"9" * depth + b"\n.",
            b"\x80\x04\x95" + struct.pack("<Q", size) + b"N.",
        )
    )
    return _batches(draw, folder, evil)


def _wrong_labels(draw: random.Random, folder: Path) -> str:
    bad = draw.choice((10, -1, 10**9, 10**30, 2.5, float("nan"), "a", None, [0], True, [[]] * 9))
    labels: Any = [0, 1, 2, 3]
    labels[draw.randrange(4)] = bad
    labels = draw.choice((labels, labels[:3], {"a": 1}, None)) if draw.random() < 0.3 else labels
    return _batches(draw, folder, _batch(labels=labels))


def _mutated_batch(draw: random.Random, folder: Path) -> str:
    return _batches(draw, folder, mutated(draw, _batch(draw.randrange(2, 5))))


def _arrays(audio: bool) -> dict[str, Any]:
    if audio:
        clips, which = np.zeros((4, 8000), np.int16), np.arange(4)
        return {"audio": clips, "label": which, "speaker": which // 2}
    images, labels = np.zeros((8, 32, 32, 3), np.uint8), np.arange(8) % 10
    return {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels}


def _saved(draw: random.Random, folder: Path, **changes: Any) -> str:
    audio = any(name in ("audio", "label", "speaker") for name in changes)
    path = folder / "data.npz"
    save = draw.choice((np.savez, np.savez_compressed))
    save(path, **(_arrays(audio) | changes), allow_pickle=True)
    return f"{'spoken' if audio else 'cifar10'}:{path}"


def _wrong_numbers(draw: random.Random, folder: Path) -> str:
    name, count = draw.choice((("y_train", 8), ("y_test", 8), ("label", 4)))
    bad: Any = draw.choice(
        (
            np.full(count, draw.choice((-7, 10, 10**9, 2**62))),
            np.full(count, draw.choice((np.nan, np.inf, 1.5))),
            np.full(count, 2**63 + 1, np.uint64),
            np.array(["a"] * count),
            np.zeros((count, 2), np.int64),
            np.zeros(count + 1, np.int64),
            np.zeros(0, np.int64),
            np.array([_Call(os.system, ("touch run_by_a_pickle",))] * count, dtype=object),
        )
    )
    return _saved(draw, folder, **{name: bad})


def _wrong_shape(draw: random.Random, folder: Path) -> str:
    shape = draw.choice(
        ((0, 32, 32, 3), (8, 32, 16, 3), (8, 3072), (8,), (), (8, 0, 0, 3), (8, 16, 16, 3))
    )
    kind = draw.choice((np.uint8, np.float32, np.int64))
    return _saved(draw, folder, **{draw.choice(("x_train", "x_test")): np.zeros(shape, kind)})


def _bomb(draw: random.Random, folder: Path) -> str:
    path = folder / "bomb.npz"
    audio = draw.random() < 0.5
    arrays = _arrays(audio)
    name = "audio" if audio else "x_train"
    count = draw.randrange(10**5, 6 * 10**5)
    shape, kind = ((count, 512), "<i2") if audio else ((count, 32, 32, 1), "|u1")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for key, array in arrays.items():
            if key != name:
                archive.writestr(f"{key}.npy", _npy(array.dtype.str, array.shape, array.tobytes()))
        with archive.open(f"{name}.npy", "w") as member:
            member.write(_npy(kind, shape, b""))
            for _ in range(count):
                member.write(bytes(1024))
    return f"{'spoken' if audio else 'cifar10'}:{path}"


def _npy(kind: str, shape: tuple[int, ...], content: bytes, text: str | None = None) -> bytes:
    file = io.BytesIO()
    header = text or repr({"descr": kind, "fortran_order": False, "shape": shape})
    padded = header.encode().ljust(118 if len(header) < 118 else len(header) + 1) + b"\n"
    file.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(padded)) + padded + content)
    return file.getvalue()


def _lying_header(draw: random.Random, folder: Path) -> str:
    kinds = ("|u1", "<i8", "<f8", "|O", "<U1000000", "|V0", "<U0", "|S0", "nonsense")
    shapes = ((10**13,), (2 * 10**10,), (-5, 32, 32, 3), (8, 2**40, 2**40), (8, 32, 32, 4))
    text = draw.choice((None, None, None, "__import__('os')", "(" * 5000, "{" * 100, "1" * 9000))
    evil = _npy(draw.choice(kinds), draw.choice(shapes), b"\0" * 100, text)
    path = folder / "header.npz"
    arrays = _arrays(audio=False)
    whole = {key: _npy(each.dtype.str, each.shape, each.tobytes()) for key, each in arrays.items()}
    with zipfile.ZipFile(path, "w") as archive:
        for key, content in (whole | {draw.choice(("x_train", "y_test", "classes")): evil}).items():
            archive.writestr(f"{key}.npy", content)
    return f"cifar10:{path}"


def _crowd(draw: random.Random, folder: Path) -> str:
    path = folder / "crowd.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(draw.randrange(2000, 20000)):
            archive.writestr(str(number), b"")
    return f"{draw.choice(('cifar10', 'spoken'))}:{path}"


def _mutated_archive(draw: random.Random, folder: Path) -> str:
    data = _saved(draw, folder, **draw.choice(({}, {"label": np.arange(4)})))
    path = Path(data.partition(":")[2])
    path.write_bytes(mutated(draw, path.read_bytes()))
    return data


def _other_method(draw: random.Random, folder: Path) -> str:
    data = _saved(draw, folder)
    path = Path(data.partition(":")[2])
    content = bytearray(path.read_bytes())
    place = content.index(b"PK\x01\x02")
    offset, value = draw.choice(((10, 99), (10, 14), (10, 12), (8, 1)))  # method, or encrypted
    content[place + offset] = value
    path.write_bytes(content)
    return data


LIES = (
    *(Lie(each) for each in (_code, _large_array, _array_state, _raw_opcodes, _wrong_labels)),
    *(Lie(each) for each in (_wrong_numbers, _wrong_shape, _bomb, _lying_header, _crowd)),
    *(Lie(each, must_be_refused=False) for each in (_mutated_batch, _mutated_archive)),
    Lie(_other_method),
)
