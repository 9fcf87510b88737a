"""The kernels without Python: on an emulated Arm processor, and watched by the sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from recorder import Recorder
from test_golden import small_digests
from vector_cases import record_all

from daf.core.code_format import Predicate
from daf.kernels.cpu.instruction_sets import instruction_sets

NATIVE = Path(__file__).parent / "native"
ENVIRONMENT = {"TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=0"}
THREADS = 3
JOBS_OF_A_BUILD = str(max(1, (os.cpu_count() or 1) // 2))

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux"),
]


class UnavailableError(Exception):
    """This machine lacks a tool."""


@dataclass(frozen=True)
class Way:
    """How to build the program and what to run it under; alternatives are tried in turn."""

    compiler: str
    options: str
    definitions: tuple[str, ...] = ()
    emulators: tuple[str, ...] = ()
    sets: tuple[str, ...] = instruction_sets()


WAYS = {
    "aarch64": Way(
        "aarch64-linux-gnu-g++",
        "-O3 -static",
        ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"),
        ("qemu-aarch64-static", "qemu-aarch64"),
        ("neon", "portable"),
    ),
    # Not use-after-scope: it takes the compiler longer than everything else.
    "address": Way(
        "c++",
        "-O1 -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all "
        "-fno-sanitize-address-use-after-scope",
    ),
    "thread": Way("c++", "-O1 -fsanitize=thread"),
}


@dataclass(frozen=True)
class Program:
    """A program that was built, and the words that start it."""

    way: Way
    start: list[str]

    def run(self, *words: object) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **ENVIRONMENT}
        environment.pop("LD_PRELOAD", None)
        command = [*self.start, *map(str, words)]
        return subprocess.run(
            command, capture_output=True, text=True, env=environment, check=False, timeout=300
        )

    def agrees(self, case_count: int, *words: object) -> None:
        """Run it; every instruction set must have passed every case."""
        done = self.run(*words)
        said = f"ok: {case_count} cases on {' '.join(self.way.sets)}\n"
        assert (done.returncode, done.stdout) == (0, said), done.stderr[-4000:]


def tool(*names: str) -> str:
    """The first of these that is on the path or beside this Python."""
    path = os.pathsep.join([os.environ["PATH"], str(Path(sys.executable).parent)])
    for name in names:
        if found := shutil.which(name, path=path):
            return found
    raise UnavailableError(f"needs {' or '.join(names)}")


def build(way: Way, folder: Path) -> Program:
    folder.mkdir()
    compiler, cmake, ninja = tool(way.compiler), tool("cmake"), tool("ninja")
    start = [tool(*way.emulators)] if way.emulators else []
    empty = folder / "empty.cpp"
    empty.write_text("int main() {}")
    probe = [compiler, *way.options.split(), empty, "-o", folder / "empty"]
    if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        raise UnavailableError(f"{way.compiler} cannot build with {way.options}")
    settings = [f"-DCMAKE_CXX_COMPILER={compiler}", f"-DCMAKE_CXX_FLAGS={way.options}"]
    generator = ["-GNinja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    configure = [cmake, "-S", NATIVE, "-B", folder, *generator, *settings, *way.definitions]
    for command in (configure, [cmake, "--build", folder, "--parallel", JOBS_OF_A_BUILD]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return Program(way, [*start, str(folder / "vectors")])


@pytest.fixture(scope="module")
def builds(tmp_path_factory) -> Iterator[dict[str, Future[Program]]]:
    """All ways at once, so that one that waits for its longest file holds nobody up."""
    folder = tmp_path_factory.mktemp("native")
    with ThreadPoolExecutor(len(WAYS)) as pool:
        yield {name: pool.submit(build, way, folder / name) for name, way in WAYS.items()}


@pytest.fixture(params=WAYS)
def program(request, builds) -> Program:
    try:
        return builds[request.param].result()
    except UnavailableError as problem:
        pytest.skip(str(problem))


@pytest.fixture(scope="module")
def vectors(tmp_path_factory, cases, golden) -> tuple[Path, int]:
    """A file of cases, the golden vectors among them, and how many they are."""
    path = tmp_path_factory.mktemp("vectors") / "cases"
    with path.open("wb") as file, np.errstate(all="ignore"):
        recorder = Recorder(file)
        assert small_digests(cases, recorder) == golden["small"]
        record_all(recorder, cases)
    return path, recorder.case_count


def test_every_instruction_set_equals_the_oracle(program, builds, vectors) -> None:
    path, case_count = vectors
    program.agrees(case_count, "file", path, THREADS)


@pytest.mark.parametrize("program", ["aarch64", "address"], indirect=True)
def test_hostile_bytes_stay_within_their_memory(program) -> None:
    program.agrees(3000, "fuzz", 3000, 20260101, THREADS)


class FlippingRecorder(Recorder):
    """Expects one bit of the output to be another."""

    def _write(self, operation, content, **given) -> None:
        output = content["output"].copy()
        output.reshape(-1)[-1:].view(np.uint8)[-1] ^= 1
        super()._write(operation, content | {"output": output}, **given)


class ShorteningRecorder(Recorder):
    """Gives the output one word too little room."""

    def _write(self, operation, content, **given) -> None:
        super()._write(operation, content | {"output": content["output"][:, :-1]}, **given)


@pytest.mark.parametrize(
    ("recorder", "complaint"),
    [(FlippingRecorder, "output: byte 31 is"), (ShorteningRecorder, "beside the output")],
)
def test_a_difference_is_found(program, cases, tmp_path, recorder, complaint) -> None:
    with (tmp_path / "cases").open("wb") as file:
        recorder(file).encode_mask(cases.smooth(250), Predicate.ABOVE, 0.0, 0.0)
    done = program.run("file", tmp_path / "cases", 1)
    assert done.returncode == 1
    assert complaint in done.stderr
