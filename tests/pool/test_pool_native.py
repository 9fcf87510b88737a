"""A hundred thousand random operations from three threads, built with the compiler's sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

STRESS = Path(__file__).parent / "native" / "pool_stress.cpp"
SOURCES = Path(__file__).parents[2] / "csrc"
CORE = ("pool/pool.cpp", "pool/account.cpp", "pool/pages.cpp", "pool/region.cpp")

pytestmark = pytest.mark.skipif(
    sys.platform == "win32" or shutil.which("c++") is None, reason="needs a C++ compiler"
)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["-fsanitize=address,undefined", "-fno-sanitize-recover=all"], id="address"),
        pytest.param(["-fsanitize=thread"], id="thread"),
    ],
)
def test_threads_never_see_each_other_s_pages(tmp_path: Path, options: list[str]) -> None:
    program, empty = tmp_path / "pool_stress", tmp_path / "empty.cpp"
    empty.write_text("int main() {}")
    compiler = ["c++", "-std=c++20", "-O1", "-g1", "-Wall", "-Wextra", *options, f"-I{SOURCES}"]
    if subprocess.run([*compiler, empty, "-o", program], check=False).returncode != 0:
        pytest.skip(f"this compiler cannot build with {options[0]}")
    sources = [STRESS, *(SOURCES / name for name in CORE)]
    subprocess.run([*compiler, *sources, "-lpthread", "-o", program], check=True)
    environment = dict(os.environ, TSAN_OPTIONS="halt_on_error=1")
    environment.pop("LD_PRELOAD", None)
    done = subprocess.run(
        [program, "100000", "7"], capture_output=True, text=True, env=environment, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-4000:]
