"""The pool and its tree, built with sanitizers: many thousand random operations each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from thoroughness import at_most

NATIVE = Path(__file__).parent / "native"
SOURCES = Path(__file__).parents[2] / "csrc"
CORE = ("pool/pool.cpp", "pool/account.cpp", "pool/pages.cpp", "pool/region.cpp")

pytestmark = pytest.mark.skipif(
    sys.platform == "win32" or shutil.which("c++") is None, reason="needs a C++ compiler"
)


WITH_ADDRESSES = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def outcome_of(
    test: str, folder: Path, options: list[str], core: Sequence[str] = CORE
) -> tuple[int, str, str]:
    """Build the test with these sources of the pool, run it, and return its code and words."""
    program, empty = folder / test, folder / "empty.cpp"
    empty.write_text("int main() {}")
    compiler = ["c++", "-std=c++20", "-O1", "-g1", "-Wall", "-Wextra", *options, f"-I{SOURCES}"]
    if subprocess.run([*compiler, empty, "-o", program], check=False).returncode != 0:
        pytest.skip(f"this compiler cannot build with {options[0]}")
    # One file that includes all: the compiler reads the headers once, in half of the time.
    sources = [NATIVE / f"{test}.cpp", *(SOURCES / name for name in core)]
    whole = folder / "whole.cpp"
    whole.write_text("".join(f'#include "{each}"\n' for each in sources))
    subprocess.run([*compiler, whole, "-lpthread", "-o", program], check=True)
    environment = dict(os.environ, TSAN_OPTIONS="halt_on_error=1")
    environment.pop("LD_PRELOAD", None)
    asked = [program, str(at_most(100_000, 40_000)), "7"]
    done = subprocess.run(asked, capture_output=True, text=True, env=environment, timeout=300)
    return done.returncode, done.stdout, done.stderr[-4000:]


@pytest.mark.parametrize(
    "options",
    [pytest.param(WITH_ADDRESSES, id="address"), pytest.param(["-fsanitize=thread"], id="thread")],
)
def test_threads_never_see_each_other_s_pages(tmp_path: Path, options: list[str]) -> None:
    code, said, error = outcome_of("pool_stress", tmp_path, options)
    assert (code, said) == (0, "ok\n"), error


def test_the_tree_orders_as_a_multimap_and_keeps_its_rules(tmp_path: Path) -> None:
    code, said, error = outcome_of("tree_model", tmp_path, WITH_ADDRESSES, ["pool/region.cpp"])
    assert (code, said) == (0, "ok\n"), error
