"""Data sets by name: ``digits``, those of other distributions, and the user's own loaders."""

from pathlib import Path
from typing import Any

from daf.core.errors import DataError
from daf.training.names import Names
from daf.training.task import DataSet

DATA = Names("data", "daf.data", {"digits": "daf.training.data.digits:load_digits"})


def load_data(
    name: str,
    *,
    image_size: int | None = None,
    context: int | None = None,
    tokenizer: str | None = None,
    leave_out_unreadable: bool = False,
) -> DataSet:
    """Read the data set called ``name`` into memory.

    Args:
        name: an installed name, or ``package.module:loader``, with ``:PATH`` behind it for a
            loader with an argument ``path``. A loader returns a ``DataSet`` and takes those of
            the following that its signature names.
        image_size: pixels per side of a batch's images; None: the data's own.
        context: bytes per window of text, or tokens per sentence; None: the data's own.
        tokenizer: folder of a model whose tokenizer splits sentences; None: byte by byte.
        leave_out_unreadable: leave out images that cannot be read, instead of refusing the data.

    Raises:
        UnknownNameError: ``name`` is not known.
        DataError: the data are missing, damaged, do not come in that size or take no such option.
    """
    found = DATA.find(name)
    options = {
        "image_size": image_size,
        "context": context,
        "tokenizer": tokenizer,
        "leave_out_unreadable": leave_out_unreadable or None,
    }
    given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    taken = found.parameters()
    if found.path:
        given["path"] = Path(found.path)
    elif "path" in taken:
        raise DataError(f"asked for {name!r} without saying where; give {name}:PATH")
    for key, value in given.items():
        if key not in taken:
            option = "path" if key == "path" else f"--{key.replace('_', '-')}"
            raise DataError(f"asked for {name!r} with {option} {value}, which it does not take")
    data: DataSet = found.factory(**given)
    return data
