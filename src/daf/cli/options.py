"""The options that ``daf train`` and ``daf plan`` share, and their parsers."""

from __future__ import annotations

from typing import Annotated

import typer

from daf.budget import AUTO, parse_budget
from daf.core.errors import UnknownNameError
from daf.planning.planner import policy_names
from daf.training.data import DATA
from daf.training.models import MODELS
from daf.training.settings import MEMORY_FORMATS, OPTIMIZERS
from daf.training.task import Goal

Model = Annotated[str | None, typer.Argument(help=f"{MODELS.help()}.")]
Data = Annotated[str, typer.Argument(help=f"{DATA.help()}; files and folders as NAME:PATH.")]
Budget = Annotated[
    str | None,
    typer.Option(
        help="For the whole process, or a GPU: bytes such as 700MB, a fraction of the machine such "
        "as 0.5, 'auto' for what it can spare; 'none' trains plainly."
    ),
]
Device = Annotated[
    str,
    typer.Option(
        help="Where to train: cpu, cuda or cuda:1. On a GPU the budget is of what PyTorch reserves "
        "there."
    ),
]
BatchSize = Annotated[int, typer.Option(min=1, help="Examples per step.")]
Seed = Annotated[int, typer.Option(min=0, help="Of weights, order, augmentation and codes.")]
Optimizer = Annotated[
    str | None, typer.Option(help=f"{' or '.join(OPTIMIZERS)}; by default sgd for images.")
]
LearningRate = Annotated[
    float | None, typer.Option("--lr", min=0.0, help="By default 0.05 (sgd) or 0.0003 (adamw).")
]
Momentum = Annotated[float, typer.Option(min=0.0, help="Of sgd.")]
WeightDecay = Annotated[
    float | None, typer.Option(min=0.0, help="By default 0.0005 (sgd) or 0.01 (adamw).")
]
MemoryFormat = Annotated[
    str, typer.Option(help=f"Of images and their models: {' or '.join(MEMORY_FORMATS)}.")
]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Compute threads; 1 repeats a run bit for bit.")
]
Bits = Annotated[
    str | None,
    typer.Option(help="Fix the plan: 1 to 8 bits, 'exact' or 'plain'; by default it is chosen."),
]
Fused = Annotated[
    bool,
    typer.Option(
        "--fused", help="Fuse operators without a budget; under one the planner does so itself."
    ),
]
Policy = Annotated[
    str | None,
    typer.Option(
        help=f"How the plan is chosen: {', '.join(policy_names())}. By default optimal; the others "
        "are published strategies, to compare with."
    ),
]
Tolerance = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="The most relative error that codes may add: 0 only treats exactly. By default as "
        "little as two bits everywhere would, or what the budget takes.",
    ),
]
PoolBytes = Annotated[
    str | None,
    typer.Option(
        help="The most that codes may hold, such as 50MB; beyond it they lose their least "
        "important bits. By default the budget alone bounds them."
    ),
]
HostBytes = Annotated[
    str | None,
    typer.Option(
        help="How much pinned host memory a GPU's codes may wait in, such as 4GB, until backward "
        "wants them. By default they stay on the GPU."
    ),
]
ReleaseGradients = Annotated[
    bool,
    typer.Option(
        "--release-gradients",
        help="Update each parameter inside backward and free its gradient at once, in steps "
        "whose batch is not cut.",
    ),
]
Sensitivity = Annotated[
    str | None,
    typer.Option(
        help="Folder of an earlier run of this model, or its sensitivity.json: what was measured "
        "there is where this run begins."
    ),
]
AllowSplit = Annotated[
    bool, typer.Option(help="Allow smaller batches inside a step though batch norm sees them.")
]
GoalOption = Annotated[
    Goal | None, typer.Option(help="What to train for, where the model does not say it.")
]
Augment = Annotated[
    bool | None,
    typer.Option("--augment/--no-augment", help="Crop and flip images; by default for cifar10."),
]
ImageSize = Annotated[
    int | None, typer.Option(min=1, help="Pixels per side; by default the data's own.")
]
Context = Annotated[
    int | None,
    typer.Option(min=1, help="Bytes per window of text (128), or tokens per sentence (64)."),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(help="Folder of a model whose tokenizer cuts sentences; by default bytes."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

_NO_BUDGET = "none"


def read_budget(text: str) -> int | float | str | None:
    """Parse ``--budget``: bytes, a fraction, ``"auto"``, or None for ``none``.

    Raises:
        UnitError: the text is none of these.
    """
    if text.strip().lower() == _NO_BUDGET:
        return None
    request = parse_budget(text)
    assert request is not None
    return AUTO if request.is_auto else request.nbytes or request.fraction


def read_bits(text: str | None) -> int | str | None:
    """Parse ``--bits``: 1 to 8, ``exact``, ``plain``, or None for the planner's choice.

    Raises:
        UnknownNameError: the text is none of these.
    """
    if text is None or text in ("exact", "plain"):
        return text
    if not text.isdigit() or not 1 <= int(text) <= 8:
        raise UnknownNameError(f"unknown --bits {text!r}; known: 1 to 8, exact, plain")
    return int(text)
