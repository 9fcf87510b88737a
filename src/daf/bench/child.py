"""A process that a benchmark starts and tells what to do.

Commands are lines of words on standard input, answers JSON lines on standard output, and what the
process is to be is one JSON argument. Each such process has a high-water mark of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import IO, Any

from daf.errors import DafError
from daf.memory.cgroup import LimitedGroup


class ContestantError(DafError, RuntimeError):
    """A contestant's process ended instead of answering."""


class Child:
    """The parent's handle on one process.

    Args:
        module: what ``python -m`` runs.
        description: the process's only argument, as JSON.
        label: its name in messages.
        environment: instead of this process's own.
        group: the memory cgroup that it is born into.
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
        """
        stdin, stdout = self._pipes()
        try:
            stdin.write(" ".join([command, *map(str, words)]) + "\n")
            stdin.flush()
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
