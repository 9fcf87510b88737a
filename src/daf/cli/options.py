"""The options of ``daf train`` and ``daf plan``, from the fields of ``TrainSettings``."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from inspect import Parameter
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from daf.training.settings import TrainSettings, option_of

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

Command = TypeVar("Command", bound=Callable[..., None])


def takes_settings(command: Command, *, of_plan: bool = False) -> Command:
    """Declare the settings (``of_plan``: those of a plan) as options of ``command(**asked)``."""
    given = inspect.signature(command, eval_str=True).parameters.values()
    own = (each for each in given if each.kind is not Parameter.VAR_KEYWORD)
    named = (each.replace(kind=Parameter.KEYWORD_ONLY) for each in own)
    parameters = [*_settings(of_plan=of_plan), *named]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _settings(*, of_plan: bool) -> Iterator[Parameter]:
    types = get_type_hints(TrainSettings)
    for field in dataclasses.fields(TrainSettings):
        option = option_of(field)
        if of_plan and not option.of_plan:
            continue
        kind = str | None if option.parse or field.name == "model" else types[field.name]
        default = None if field.default is dataclasses.MISSING else field.default
        made = (
            typer.Argument(help=option.help)
            if option.is_argument
            else typer.Option(*option.names, min=option.least, max=option.most, help=option.help)
        )
        yield Parameter(
            field.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, made]
        )


def parsed(asked: Mapping[str, Any], *, resumes: bool = False) -> dict[str, Any]:
    """Return arguments of ``TrainSettings``; raises UnitError, UnknownNameError or BadParameter."""
    if not resumes and asked["model"] is None:
        raise typer.BadParameter("name a MODEL, such as resnet18")
    if not resumes and asked["budget"] is None:
        raise typer.BadParameter(
            "say --budget 700MB, --budget auto, or --budget none to train plainly"
        )
    values = dict(asked)
    for field in dataclasses.fields(TrainSettings):
        parse, text = option_of(field).parse, values.get(field.name)
        if parse and text is not None:
            values[field.name] = parse(text)
    return values
