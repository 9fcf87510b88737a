"""Damage to a run's files: kinds, of which each draws where and how."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_OTHER_VALUES = (None, True, -1, 0, 1e300, float("nan"), "", "a", [], [1], {}, {"a": 1}, 2**70)


def drawn_damage(draw: random.Random, folder: Path) -> str:
    """Damage one of the folder's files, or several; return what was done."""
    done = []
    for _ in range(1 if draw.random() < 0.8 else draw.randrange(2, 4)):
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        if not files:
            break
        path = draw.choice(files)
        kind = draw.choice(_KINDS)
        kind(draw, path)
        done.append(f"{kind.__name__[1:]} of {path.relative_to(folder)}")
    return ", ".join(done)


def _flips(draw: random.Random, path: Path) -> None:
    content = bytearray(path.read_bytes())
    # Headers are short, and the beginning of a file.
    end = len(content) if draw.random() < 0.7 else min(len(content), 400)
    for _ in range(draw.choice((1, 1, 1, 2, 8, 64)) if content else 0):
        content[draw.randrange(end)] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def _cut(draw: random.Random, path: Path) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size + 1))


def _hole(draw: random.Random, path: Path) -> None:
    """A block of zeros, as a file system leaves after power was lost."""
    content = bytearray(path.read_bytes())
    start = draw.randrange(len(content) + 1)
    end = min(len(content), start + draw.choice((16, 512, 4096)))
    content[start:end] = bytes(end - start)
    path.write_bytes(content)


def _garbage(draw: random.Random, path: Path) -> None:
    with path.open("ab") as file:
        file.write(draw.randbytes(draw.choice((1, 10, 5000))))


def _insertion(draw: random.Random, path: Path) -> None:
    content = path.read_bytes()
    place = draw.randrange(len(content) + 1)
    path.write_bytes(content[:place] + draw.randbytes(draw.randrange(1, 20)) + content[place:])


def _removal(draw: random.Random, path: Path) -> None:
    del draw
    path.unlink()


def _folder(draw: random.Random, path: Path) -> None:
    del draw
    path.unlink()
    path.mkdir()


def _pipe(draw: random.Random, path: Path) -> None:
    del draw
    path.unlink()
    os.mkfifo(path)


def _link(draw: random.Random, path: Path) -> None:
    path.unlink()
    path.symlink_to(draw.choice(("nowhere", "/dev/zero", "/dev/null", "/etc/passwd", path.name)))


def _exchange(draw: random.Random, path: Path) -> None:
    """Another file's content."""
    others = [each for each in path.parent.iterdir() if each.is_file() and each != path]
    if others:
        shutil.copyfile(draw.choice(sorted(others)), path)


def _line(draw: random.Random, path: Path) -> None:
    """A line taken out, doubled or moved."""
    lines = path.read_bytes().splitlines(keepends=True)
    if lines:
        line = lines.pop(draw.randrange(len(lines)))
        for _ in range(draw.randrange(3)):
            lines.insert(draw.randrange(len(lines) + 1), line)
    path.write_bytes(b"".join(lines))


def _values(draw: random.Random, path: Path) -> None:
    """A JSON value of another type or number, or a key less."""
    content = path.read_bytes()
    try:
        if path.suffix == ".json":
            path.write_text(json.dumps(_changed(draw, json.loads(content)), indent=2))
        elif path.suffix == ".jsonl":
            lines = content.splitlines()
            place = draw.randrange(len(lines))
            lines[place] = json.dumps(_changed(draw, json.loads(lines[place]))).encode()
            path.write_bytes(b"\n".join(lines) + b"\n")
        elif path.suffix == ".safetensors":
            length = int.from_bytes(content[:8], "little")
            header = json.loads(content[8 : 8 + length])
            changed = json.dumps(_changed(draw, header)).encode()
            path.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + length :])
    except (ValueError, UnicodeDecodeError):  # it was damaged before
        _flips(draw, path)


def _changed(draw: random.Random, value: Any) -> Any:
    """Return ``value`` with one entry replaced, renamed or taken out."""
    holder, key = draw.choice(list(_entries(value)) or [([value], 0)])
    if isinstance(holder, dict) and draw.random() < 0.3:
        content = holder.pop(key)
        if draw.random() < 0.5:
            holder[f"{key}s"] = content
    elif isinstance(holder[key], (int, float)) and draw.random() < 0.5:
        holder[key] = holder[key] + draw.choice((1, -1, 0.5, 1000))
    else:
        holder[key] = draw.choice(_OTHER_VALUES)
    return value


def _entries(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of every value within."""
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _entries(value[key])


_KINDS: tuple[Callable[[random.Random, Path], None], ...] = (
    *(_flips, _flips, _flips, _cut, _cut, _hole, _values, _values, _values),
    *(_garbage, _insertion, _removal, _folder, _pipe, _link, _exchange, _line),
)
