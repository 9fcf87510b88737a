"""Texts and tables that are none, or never end."""

from __future__ import annotations

import os
import random
from pathlib import Path

from daf_bench.faults.on_disk.lies import Lie, mutated

_ROWS = {
    "sst2": "a film that moved me\t1\n",
    "mrpc": "1\t702\t703\tThe first.\tThe second.\n",
    "stsb": "main\tx\t2012\t0001\t2.5\tA plane lands.\tA bird sits.\n",
}


def _pipe(draw: random.Random, folder: Path) -> str:
    os.mkfifo(folder / "pipe")
    return f"{draw.choice(('text', 'spoken', 'cifar10'))}:{folder / 'pipe'}"


def _device(draw: random.Random, folder: Path) -> str:
    del folder
    device = draw.choice(("zero", "null", "urandom", "full"))
    return f"{draw.choice(('text', 'spoken', 'cifar10'))}:/dev/{device}"


def _holes(draw: random.Random, folder: Path) -> str:
    path = folder / "holes"
    path.touch()
    os.truncate(path, draw.randrange(10**9, 10**12))
    return f"{draw.choice(('text', 'spoken', 'cifar10'))}:{path}"


def _folder(draw: random.Random, folder: Path) -> str:
    (folder / "inside").mkdir()
    return f"{draw.choice(('text', 'spoken', 'cifar10'))}:{folder / 'inside'}"


def _short(draw: random.Random, folder: Path) -> str:
    path = folder / "short.txt"
    path.write_bytes(draw.randbytes(draw.randrange(1000)))
    return f"text:{path}"


def _table(draw: random.Random, folder: Path) -> tuple[str, Path]:
    """Write a whole table; return its kind and its training part."""
    kind = draw.choice(sorted(_ROWS))
    for name in ("train.tsv", "dev.tsv"):
        (folder / name).write_text(_ROWS[kind] * 20)
    return kind, folder / "train.tsv"


def _mutated_table(draw: random.Random, folder: Path) -> str:
    kind, path = _table(draw, folder)
    path.write_bytes(mutated(draw, path.read_bytes()))
    return f"{kind}:{folder}"


def _wrong_values(draw: random.Random, folder: Path) -> str:
    kind, path = _table(draw, folder)
    bad = draw.choice(("nan", "inf", "-1", "10", "1e9", "", "one", "2\u0661", "1" * 5000))
    good = {"sst2": "\t1\n", "mrpc": "1\t", "stsb": "2.5"}[kind]
    row = _ROWS[kind].replace(good, good.replace(good.strip(), bad), 1)
    header = 1 if kind == "mrpc" else 0
    rows = [_ROWS[kind]] * 20
    rows.insert(draw.randrange(header, 20), row)
    path.write_text("".join(rows))
    return f"{kind}:{folder}"


def _endless_line(draw: random.Random, folder: Path) -> str:
    kind, path = _table(draw, folder)
    path.write_bytes(b"a" * draw.randrange(2 * 10**6, 5 * 10**7))
    return f"{kind}:{folder}"


def _table_elsewhere(draw: random.Random, folder: Path) -> str:
    kind, path = _table(draw, folder)
    path.unlink()
    path.symlink_to(draw.choice(("/etc/passwd", "/dev/zero", "train.tsv")))
    return f"{kind}:{folder}"


LIES = (
    *(Lie(each) for each in (_pipe, _device, _holes, _folder, _short, _wrong_values)),
    *(Lie(each) for each in (_endless_line, _table_elsewhere)),
    Lie(_mutated_table, must_be_refused=False),
)
