"""Random operations against a model, sanitized and not; fewer on an emulated Arm processor."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from thoroughness import at_most

HERE = Path(__file__).parent / "native"
SOURCES = Path(__file__).parents[2] / "csrc"
CORE = (
    "allocator/allocator.cpp",
    "allocator/heap.cpp",
    "allocator/range.cpp",
    "allocator/redirections.cpp",
    "allocator/relocations.cpp",
)
MACHINES = ("x86_64", "aarch64")
ARM_COMPILER = "aarch64-linux-gnu-g++"

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in MACHINES or shutil.which("c++") is None,
    reason="needs Linux on x86-64 or aarch64 and a C++ compiler",
)


def build(folder: Path, options: list[str], command: str = "c++") -> Path:
    compiler = [command, "-std=c++20", "-O1", "-g1", "-Wall", "-Wextra", *options, f"-I{SOURCES}"]
    shared = [*compiler, "-fPIC", "-shared"]
    # Named as PyTorch's, oneDNN's and NumPy's, so that their slots are those that are redirected.
    names = {
        "fake_torch": "libc10.so",
        "fake_kernels": "libdnnl.so",
        "fake_arrays": "_multiarray_umath.so",
        "other_library": "libother.so",
    }
    for source, name in names.items():
        subprocess.run([*shared, HERE / f"{source}.cpp", "-o", folder / name], check=True)
    program = folder / "stress"
    libraries = [folder / name for name in names.values()]
    # One file that includes all: the compiler reads the headers once, in half of the time.
    sources, whole = [HERE / "stress.cpp", *(SOURCES / name for name in CORE)], folder / "whole.cpp"
    whole.write_text("".join(f'#include "{each}"\n' for each in sources))
    link = [f"-Wl,-rpath,{folder}", "-lpthread", "-ldl"]
    subprocess.run([*compiler, whole, *libraries, *link, "-o", program], check=True)
    return program


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["-fsanitize=address,undefined", "-fno-sanitize-recover=all"], id="address"),
        pytest.param(["-fsanitize=thread"], id="thread"),
    ],
)
def test_a_million_operations_agree_with_the_model(tmp_path: Path, options: list[str]) -> None:
    try:
        program = build(tmp_path, options)
    except subprocess.CalledProcessError:
        pytest.skip(f"this compiler cannot build with {options[0]}")
    environment = dict(os.environ, TSAN_OPTIONS="halt_on_error=1", ASAN_OPTIONS="detect_leaks=0")
    environment.pop("LD_PRELOAD", None)
    done = subprocess.run(
        [program, str(at_most(1_000_000, 40_000)), "7"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-4000:]


@pytest.mark.thorough
def test_many_beginnings_and_ends_agree_with_the_model(tmp_path: Path) -> None:
    """Redirecting and undoing it race with other threads, who win one time in fifty runs."""
    program = build(tmp_path, [])
    for seed in range(at_most(100, 3)):
        done = subprocess.run(
            [program, "20000", str(seed)], capture_output=True, text=True, timeout=300
        )
        assert (done.returncode, done.stdout) == (0, "ok\n"), (seed, done.stderr[-4000:])


@pytest.mark.thorough
def test_it_works_on_an_emulated_arm_processor(tmp_path: Path) -> None:
    """Relocation kinds and page handling differ there; operations are few, emulation being slow."""
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if emulator is None or shutil.which(ARM_COMPILER) is None:
        pytest.skip(f"needs {ARM_COMPILER} and qemu-aarch64 (scripts/arm-tools installs them)")
    program = build(tmp_path, [], ARM_COMPILER)
    command = [emulator, "-L", "/usr/aarch64-linux-gnu", str(program), "20000", "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-4000:]
