"""A process that a benchmark starts and tells what to do.

Commands are lines of words on standard input, answers JSON lines on standard output, and what the
process is to be is one JSON argument. Each such process has a high-water mark of its own.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import IO, Any

import psutil

from daf.core.errors import DafError
from daf_bench.harness.cgroup import LimitedGroup

# glibc's thresholds as a session with a budget sets them (memory/allocator.py).
RETURNING_FREED_BLOCKS: Mapping[str, str] = MappingProxyType(
    {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
)


class ContestantError(DafError, RuntimeError):
    """A contestant's process ended instead of answering."""


class TooLateError(ContestantError):
    """A contestant had not answered when its time was up, and was ended."""


class Child:
    """The parent's handle on one process.

    Args:
        module: what ``python -m`` runs.
        description: the process's only argument, as JSON.
        label: its name in messages.
        environment: instead of this process's own.
        group: the memory cgroup that it is born into.

    ``until_s`` may be set to the moment (``time.monotonic``) at which waiting for it ends.
    """

    def __init__(
        self,
        module: str,
        description: Mapping[str, Any],
        label: str,
        *,
        environment: Mapping[str, str] | None = None,
        group: LimitedGroup | None = None,
    ) -> None:
        self._label = label
        self.until_s: float | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(description)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            preexec_fn=group.enter if group else None,
        )

    def ask(self, command: str, *words: object) -> dict[str, Any]:
        """Send a command; wait for its answer.

        Raises:
            ContestantError: the process ended instead.
            TooLateError: ``until_s`` came first; the process was killed.
        """
        stdin, stdout = self._pipes()
        try:
            stdin.write(" ".join([command, *map(str, words)]) + "\n")
            stdin.flush()
            self._wait(command, stdout)
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ContestantError(
                f"{self._label!r} ended with code {self.end()} when asked to {command!r}; "
                "its own message is on standard error"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _wait(self, command: str, stdout: IO[str]) -> None:
        if self.until_s is None:
            return
        left_s = max(0.0, self.until_s - time.monotonic())
        if not select.select([stdout], [], [], left_s)[0]:  # an answer is one line: all or nothing
            self._kill()
            raise TooLateError(f"{self._label!r} had not answered {command!r} when time was up")

    def _kill(self) -> None:
        """The process with those that it started, such as compilers."""
        for each in [*psutil.Process(self._process.pid).children(recursive=True), self._process]:
            try:
                each.kill()
            except psutil.NoSuchProcess:  # it ended by itself
                continue

    def end(self) -> int:
        """End the process; -9 is a kill by the system."""
        for pipe in self._pipes():
            try:
                pipe.close()
            except BrokenPipeError:  # what it never read
                continue
        return self._process.wait()

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout


def serve(answer: Callable[..., dict[str, Any]]) -> None:
    """What the process does: answer every line of words until standard input ends."""
    for line in sys.stdin:
        print(json.dumps(answer(*line.rstrip("\n").split(" "))), flush=True)
