"""A run's settings: one immutable value, kept in the run's folder; also the command's options."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from daf.budget.request import AUTO, parse_budget
from daf.core.errors import RunFolderError, UnknownNameError
from daf.core.units import parse_bytes
from daf.planning.planner import policy_names
from daf.training.checkpoint_clock import read_pace
from daf.training.data import DATA
from daf.training.models import MODELS
from daf.training.task import Goal

OPTIMIZERS = ("sgd", "adamw")
MEMORY_FORMATS = ("channels_last", "contiguous")
NO_BUDGET = "none"
_SPLITS = {"auto": "auto", "always": True, "never": False}
_OPERATORS = {"auto": "auto", "pytorch": "pytorch"}


def read_budget(text: str) -> int | float | str | None:
    """Parse ``--budget`` (``none``: None); raises UnitError unless ``parse_budget`` reads it."""
    if text.strip().lower() == NO_BUDGET:
        return None
    request = parse_budget(text)
    assert request is not None
    return AUTO if request.is_auto else request.nbytes or request.fraction


def read_bits(text: str) -> int | str:
    """Parse ``--bits``: 1 to 8, ``exact`` or ``plain``; raises UnknownNameError for others."""
    if text in ("exact", "plain"):
        return text
    if not text.isdigit() or not 1 <= int(text) <= 8:
        raise UnknownNameError(f"unknown --bits {text!r}; known: 1 to 8, exact, plain")
    return int(text)


def _one_of(option: str, known: Mapping[str, Any]) -> Callable[[str], Any]:
    """Return what parses an option of so many values; it raises UnknownNameError for others."""
    return lambda text: known[checked_choice(option, text, tuple(known))]


@dataclass(frozen=True, slots=True)
class Option:
    """How the command line asks for a setting."""

    help: str
    names: tuple[str, ...] = ()  # instead of --SETTING
    least: float | None = None  # the least number
    most: float | None = None
    parse: Callable[[str], Any] | None = None  # from the text typed to the value kept
    is_argument: bool = False  # given by place
    of_plan: bool = False  # ``daf plan`` takes it too
    may_change: bool = False  # by a resumed run: no finished step depends on it


def _train_only(default: Any, help: str, *names: str, **how: Any) -> Any:
    return dataclasses.field(default=default, metadata={"option": Option(help, names, **how)})


def _shared(default: Any, help: str, *names: str, **how: Any) -> Any:
    return _train_only(default, help, *names, of_plan=True, **how)


def option_of(field: dataclasses.Field[Any]) -> Option:
    """Return how the command line asks for a field of ``TrainSettings``."""
    option: Option = field.metadata["option"]
    return option


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """What decides a run's result, and how often memory is sampled; fields' helps explain it."""

    model: str = _shared(dataclasses.MISSING, f"{MODELS.help()}.", is_argument=True)
    data: str = _shared(
        "digits", f"{DATA.help()}; files and folders as NAME:PATH.", is_argument=True
    )
    budget: int | float | str | None = _shared(
        None,
        "For the whole process, or a GPU: bytes such as 700MB, a fraction of the machine such as "
        "0.5, 'auto' for what it can spare; 'none' trains plainly.",
        parse=read_budget,
    )
    device: str = _shared(
        "cpu",
        "Where to train: cpu, cuda or cuda:1. On a GPU the budget is of what PyTorch reserves "
        "there.",
    )
    batch_size: int = _shared(128, "Examples per step.", least=1)
    epochs: int = _train_only(1, "Passes over the training data.", least=1, may_change=True)
    max_steps: int | None = _train_only(None, "Stop after so many steps.", least=1, may_change=True)
    seed: int = _shared(0, "Of weights, order, augmentation and codes.", least=0, most=2**63 - 1)
    optimizer: str | None = _shared(None, f"{' or '.join(OPTIMIZERS)}; by default sgd for images.")
    learning_rate: float | None = _train_only(
        None, "By default 0.05 (sgd) or 0.0003 (adamw).", "--lr", least=0.0
    )
    momentum: float = _train_only(0.9, "Of sgd.", least=0.0)
    weight_decay: float | None = _train_only(
        None, "By default 0.0005 (sgd) or 0.01 (adamw).", least=0.0
    )
    memory_format: str = _shared(
        "channels_last", f"Of images and their models: {' or '.join(MEMORY_FORMATS)}."
    )
    threads: int | None = _shared(
        None, "Compute threads; 1 repeats a run, of one plan, bit for bit.", least=1, most=1024
    )
    bits: int | str | None = _shared(
        None,
        "Fix the plan: 1 to 8 bits, 'exact' or 'plain'; by default it is chosen.",
        parse=read_bits,
    )
    fused: bool = _train_only(
        False, "Fuse operators without a budget; under one the planner does so itself.", "--fused"
    )
    policy: str | None = _shared(
        None,
        f"How the plan is chosen: {', '.join(policy_names())}. By default optimal; the others are "
        "published strategies, to compare with.",
    )
    tolerance: float | None = _shared(
        None,
        "The most relative error that codes may add: 0 only treats exactly. By default as little "
        "as two bits everywhere would, or what the budget takes.",
        least=0.0,
    )
    pool_bytes: int | None = _shared(
        None,
        "The most that codes may hold, such as 50MB; beyond it they lose their least important "
        "bits. By default the budget alone bounds them.",
        parse=parse_bytes,
    )
    pool_evicts: Literal["planes", "activations"] = _shared(
        "planes",
        "What codes lose beyond that: planes of bits, or whole activations.",
        parse=_one_of("--pool-evicts", {"planes": "planes", "activations": "activations"}),
    )
    pool_growth_bytes: int | None = _shared(
        None,
        "Let their pool grow by steps of this size, such as 100MB; by default by demand.",
        "--pool-growth",
        parse=parse_bytes,
    )
    host_bytes: int | None = _shared(
        None,
        "How much pinned host memory a GPU's codes may wait in, such as 4GB, until backward wants "
        "them. By default they stay on the GPU.",
        parse=parse_bytes,
    )
    release_gradients: bool = _train_only(
        False,
        "Update each parameter inside backward and free its gradient at once, in steps whose batch "
        "is not cut.",
        "--release-gradients",
    )
    sensitivity: str | None = _shared(
        None,
        "Folder of an earlier run of this model, or its sensitivity.json: what was measured there "
        "is where this run begins.",
    )
    cache: bool = _shared(
        True,
        "Begin with what an earlier run of the same job measured within about this budget, and "
        "keep what this one does, in $DAF_CACHE or the user's caches.",
        may_change=True,
    )
    rollback: bool = _train_only(
        True, "Go back to the last good state, with wider codes, if the run diverges; once."
    )
    allow_batchnorm_split: bool = _shared(
        False, "Allow smaller batches inside a step though batch norm sees them."
    )
    split: bool | Literal["auto"] = _shared(
        "auto",
        "Cut a batch into parts where a few examples prove them to add up to it (auto); always: "
        "they do, by your word; or never.",
        parse=_one_of("--split", _SPLITS),
    )
    operators: Literal["auto", "pytorch"] = _shared(
        "auto",
        f"{' or '.join(_OPERATORS)}: fuse operators where that pays and was proven, or run "
        "PyTorch's own.",
        parse=_one_of("--operators", _OPERATORS),
    )
    goal: Goal | None = _shared(  # noqa: RUF009 - an enumeration is immutable
        None, "What to train for, where the model does not say it."
    )
    lora: int | None = _shared(
        None,
        "Freeze a model of Transformers and train low-rank differences of this rank in its "
        "attention (LoRA, by PEFT), written to adapter/ in the run's folder too.",
        least=1,
    )
    augment: bool | None = _train_only(None, "Crop and flip images; by default for CIFAR.")
    image_size: int | None = _shared(None, "Pixels per side; by default the data's own.", least=1)
    context: int | None = _shared(
        None, "Bytes per window of text (128), or tokens per sentence (64).", least=1
    )
    tokenizer: str | None = _shared(
        None, "Folder of a model whose tokenizer cuts sentences; by default bytes."
    )
    leave_out_unreadable: bool = _shared(
        False, "Leave out images that cannot be read, and say which.", "--leave-out-unreadable"
    )
    checkpoint_every: str | None = _train_only(
        None,
        "A time or steps, such as 30s, 10min or 500steps; by default 10min, and at most 1 % of the "
        "time. Ends of epochs count beside it.",
        parse=read_pace,
        may_change=True,
    )
    memory_interval_ms: float = _train_only(
        50.0, "How often memory is sampled.", least=1.0, most=3.6e6, may_change=True
    )
    history: bool = _train_only(
        False,
        "Record who asks for memory in one step, as history.pickle.",
        "--history",
        may_change=True,
    )

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "TrainSettings":
        """Return settings from JSON; raises RunFolderError if another version wrote it."""
        goal = value.get("goal")
        try:
            return TrainSettings(**{**value, "goal": None if goal is None else Goal(goal)})
        except (TypeError, ValueError) as error:
            raise RunFolderError(
                f"the run's settings are not ones this version knows ({error}); "
                "resume with the version that began the run"
            ) from error

    def resumed_with(self, asked: Mapping[str, Any]) -> "TrainSettings":
        """Return these with ``asked``, or raise RunFolderError: finished steps depend on one."""
        changing = {each.name for each in dataclasses.fields(self) if option_of(each).may_change}
        for name, value in asked.items():
            found = getattr(self, name)
            if value != found and name not in changing:
                raise RunFolderError(
                    f"asked to resume with {name} = {value!r}, but the run was begun with "
                    f"{found!r}; leave it out to resume, or begin another run with another --out"
                )
        return dataclasses.replace(self, **{k: v for k, v in asked.items() if k in changing})


def checked_choice(what: str, value: str, known: tuple[str, ...]) -> str:
    """Return ``value`` if it is one of ``known``, else raise UnknownNameError."""
    if value not in known:
        raise UnknownNameError(f"unknown {what} {value!r}; known: {', '.join(known)}")
    return value
