"""Models by name: ``resnet18``, those of other distributions, and the user's own factories."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from daf.core.errors import UnknownNameError
from daf.training.names import Found, Names
from daf.training.task import Goal

_OWN = {
    "resnet18": "daf.training.models.resnet:resnet18",
    "config_json": "daf.training.config_json:random_model",
}
MODELS = Names("model", "daf.models", _OWN)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model that can be built, its code imported; ``goal`` None: the data decides."""

    found: Found
    goal: Goal | None

    def build(self, facts: Mapping[str, int]) -> nn.Module:
        """Build the model from those of the data's ``facts`` that its factory names.

        Image data have ``classes``, ``channels`` and ``image_size``; texts ``vocabulary`` and
        ``context``; sentences these and ``classes``. The name's part ``:PATH`` is ``path``. Raises
        UnknownNameError if the factory needs other arguments, or returns no module.
        """
        name, parameters = self.found.reference, self.found.parameters()
        known: dict[str, Any] = dict(facts)
        if self.found.path:
            known["path"] = self.found.path
        missing = [
            key
            for key, parameter in parameters.items()
            if key not in known
            and parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        if missing:
            raise UnknownNameError(
                f"the factory of {name!r} needs {', '.join(missing)}, but the data only have "
                f"{', '.join(facts)}; give those arguments a default"
            )
        model = self.found.factory(**{key: known[key] for key in parameters if key in known})
        if not isinstance(model, nn.Module):
            raise UnknownNameError(
                f"{name!r} returned {type(model).__name__}; a factory returns a torch.nn.Module"
            )
        return model


def find_model(name: str) -> Recipe:
    """Import the code of a model, without building it: the floor is measured in between.

    ``name``: an installed one, or ``package.module:factory``, found from the current directory too;
    with ``:PATH`` behind it for a factory with an argument ``path``. Raises UnknownNameError for
    others, and DataError if a package is not installed.
    """
    found = MODELS.find(name)
    if found.path and "path" not in found.parameters():
        raise UnknownNameError(f"asked for model {name!r}, whose factory takes no path")
    return Recipe(found, getattr(found.factory, "goal", None))
