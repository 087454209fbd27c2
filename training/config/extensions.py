"""Code of a user's own, outside the checkout: packages that the command itself names, and that
nothing else may name.

A class of such a package may stand in a `_target_`, and its folder `conf`, where it has one, joins
Hydra's search path. A configuration file, a checkpoint or a weights file that names a package runs
nothing: it may come from anywhere.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path

from common.errors import UserError

KEY = "extensions"
ENVIRONMENT = "FASTLATENT_EXTENSIONS"
"""For those who always use the same ones: names separated by commas."""
admitted: set[str] = set()
"""The packages that commands of this process have named."""


def named_by(words: Iterable[str]) -> list[str]:
    """Names in `extensions=[a,b]` among a command's words, and in the environment variable."""
    values = [word.partition("=")[2] for word in words if word.lstrip("+").partition("=")[0] == KEY]
    names = [
        name.strip(" '\"")
        for value in (*values, os.environ.get(ENVIRONMENT, ""))
        for name in value.strip("[]").split(",")
    ]
    return list(dict.fromkeys(name for name in names if name))


def admit(words: Iterable[str]) -> list[str]:
    """Admits the packages that `words` name, and returns overrides that add their `conf` folders to
    the search path.

    ValueError if one cannot be imported. Nothing of a package is imported yet.
    """
    folders = []
    for name in named_by(words):
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
        if spec is None or not spec.submodule_search_locations:
            raise UserError(
                f"{KEY}=[{name}]: there is no package {name} that Python can import; install it, "
                "or put the folder that holds it on PYTHONPATH."
            )
        admitted.add(name)
        folders += [Path(place) / "conf" for place in spec.submodule_search_locations]
    places = ",".join(f"'file://{folder.resolve()}'" for folder in folders if folder.is_dir())
    return [f"hydra.searchpath=[{places}]"] if places else []


def is_admitted(target: object) -> bool:
    """Whether `target`, the path of a class, lies in a package that a command of this process has
    named."""
    return str(target).partition(".")[0] in admitted
