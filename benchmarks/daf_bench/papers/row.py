"""A row of the papers' table: one mechanism, figure, baseline or open question of a paper."""

from __future__ import annotations

from dataclasses import dataclass

DAF, SAGE = "DAF", "SAGE"


@dataclass(frozen=True, slots=True)
class Ours:
    """A number of ours, read from a committed result and never typed.

    ``file`` is its name in ``benchmarks/results`` without suffix, ``key`` is one of its
    ``figures``, ``words`` say what the number is.
    """

    file: str
    key: str
    words: str


@dataclass(frozen=True, slots=True)
class PaperRow:
    """What a paper has, where it is here, and how to do it again.

    ``where`` is a path from the root of the repository; ``command`` does it again; ``published``
    is the number or the claim; ``differs`` says what is different here, and why.
    """

    paper: str
    what: str
    where: str
    command: str
    published: str
    differs: str
    ours: tuple[Ours, ...] = ()
