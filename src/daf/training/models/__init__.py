"""The model zoo: from a name, or ``package.module:factory``, to a model.

A factory receives those facts about the data that its signature names: ``classes`` and
``image_size`` for images, ``vocabulary`` and ``context`` for text, ``channels`` for image models.
Import and build are two steps, because the floor is measured between them.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from torch import nn

from daf.core.errors import DataError, UnknownNameError


class Goal(StrEnum):
    """What a model is trained to do."""

    CLASSIFY = "classify"
    DENOISE = "denoise"
    CAUSAL = "causal"  # predict the next byte
    MASKED = "masked"  # predict masked bytes
    JUDGE = "judge"  # a sentence's class or score


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model that can be built, its code imported; ``goal`` None: the data decides."""

    name: str
    factory: Callable[..., Any]
    goal: Goal | None

    def build(self, facts: Mapping[str, int]) -> nn.Module:
        """Build the model from the data's ``facts``.

        Raises:
            UnknownNameError: the factory needs arguments that data do not have, or returns no
                module.
        """
        try:
            named = inspect.signature(self.factory).parameters
        except ValueError as error:
            raise UnknownNameError(f"{self.name!r} does not tell its arguments: {error}") from error
        missing = [
            name
            for name, parameter in named.items()
            if name not in facts
            and parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        if missing:
            raise UnknownNameError(
                f"the factory of {self.name!r} needs {', '.join(missing)}, but the data only tell "
                f"{', '.join(facts)}; give those arguments a default"
            )
        model = self.factory(**{name: facts[name] for name in named if name in facts})
        if not isinstance(model, nn.Module):
            raise UnknownNameError(
                f"{self.name!r} returned {type(model).__name__}; "
                "a factory returns a torch.nn.Module"
            )
        return model


@dataclass(frozen=True, slots=True)
class _Entry:
    module: str
    goal: Goal


_ZOO: Mapping[str, _Entry] = {
    "resnet18": _Entry("resnet", Goal.CLASSIFY),
    "resnet20": _Entry("resnet_cifar", Goal.CLASSIFY),
    "resnet50": _Entry("resnet", Goal.CLASSIFY),
    "densenet121": _Entry("densenet", Goal.CLASSIFY),
    "mobilenet_v2": _Entry("mobilenet", Goal.CLASSIFY),
    "unet": _Entry("unet", Goal.DENOISE),
    "bert_small": _Entry("language", Goal.MASKED),
    "gpt2": _Entry("language", Goal.CAUSAL),
}
MODEL_NAMES = tuple(_ZOO)
_PRETRAINED = "pretrained:"


def find_model(name: str) -> Recipe:
    """Import the code of a model, without building it.

    Args:
        name: one of ``MODEL_NAMES``, ``pretrained:FOLDER`` for an encoder that ``transformers``
            saved there, or ``package.module:factory``, found from the current directory too.

    Raises:
        UnknownNameError: no such model, module or factory.
        DataError: the model needs a package or a file that is missing.
    """
    if name.startswith(_PRETRAINED):
        return Recipe(name, _pretrained_factory(Path(name.removeprefix(_PRETRAINED))), Goal.JUDGE)
    if ":" in name:
        return Recipe(name, _user_factory(name), None)
    if name not in _ZOO:
        raise UnknownNameError(_unknown(name))
    entry = _ZOO[name]
    return Recipe(name, getattr(_own_module(name, entry.module), name), entry.goal)


def _own_module(name: str, module: str) -> Any:
    try:
        return importlib.import_module(f"{__name__}.{module}")
    except ModuleNotFoundError as error:
        raise DataError(
            f"model {name!r} needs the package {error.name!r}, which is not installed; "
            f"try: pip install 'daf-train[{error.name}]'"
        ) from error


def _pretrained_factory(folder: Path) -> Callable[..., Any]:
    if not (folder / "config.json").is_file():
        raise DataError(
            f"asked for pretrained:{folder}, but there is no config.json in it; "
            "name a folder that transformers' save_pretrained wrote"
        )
    language = _own_module(f"{_PRETRAINED}{folder}", "language")

    def judge(classes: int) -> Any:
        return language.pretrained_judge(folder, classes)

    return judge


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name.lower().replace("-", "_"), MODEL_NAMES, 1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return (
        f"unknown model {name!r}; {hint}Known: {', '.join(MODEL_NAMES)}, or package.module:factory"
    )


def _user_factory(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UnknownNameError(
            f"asked for model {name!r}, but there is no module {error.name!r}; "
            f"looked in {here} and the installed packages"
        ) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        near = difflib.get_close_matches(attribute, dir(module), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UnknownNameError(f"module {module_name!r} has no factory {attribute!r}{hint}")
    return factory  # type: ignore[no-any-return]
