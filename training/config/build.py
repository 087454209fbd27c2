"""From config nodes to objects: the one place where a `_target_` becomes code, and what may.

Extensions are packages of a user's own, outside the checkout. Only the command itself can name one:
a configuration file, a checkpoint or a weights file that names a package runs nothing, for it may
come from anywhere. A class of such a package may stand in a `_target_`, and its folder `conf`,
where it has one, joins Hydra's search path.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import json
import os
import typing
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from common.errors import UserError
from training.config.schema import describe_bound
from training.config.words import update_target

EXTENSIONS_KEY = "extensions"
EXTENSIONS_VARIABLE = "FASTLATENT_EXTENSIONS"
"""For those who always use the same ones: names separated by commas."""
admitted_packages: set[str] = set()
"""The packages that commands of this process have named."""
TARGET_PACKAGES = ("accel", "data", "models", "training")
OUTSIDE_TARGETS = tuple(f"torch.optim.{name}" for name in ("Adafactor", "Adam", "AdamW", "SGD"))
"""What a `_target_` may name outside our packages, in full."""


def resolve_target(target: str, key: str) -> type:
    """The class that `target` names; ValueError unless that very module defines it, and the module
    is one of ours or of an admitted extension, or it is an outsider.

    The object itself is judged, not its path: `models.denoiser.torch.load` starts like one of ours
    and is not.
    """
    refusal = UserError(
        f"{key}._target_={target} is not allowed: it must be a class defined in one of "
        f"{', '.join(TARGET_PACKAGES)}, in a package that extensions=[…] on this command line names, or "
        f"one of {', '.join(OUTSIDE_TARGETS)}."
    )
    module_name, _, name = update_target(str(target)).rpartition(".")
    if target not in OUTSIDE_TARGETS and module_name.split(".")[0] not in (
        *TARGET_PACKAGES,
        *admitted_packages,
    ):
        raise refusal

    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except ModuleNotFoundError as error:
        if error.name and module_name.startswith(error.name):
            raise refusal from None
        raise UserError(
            f"{key}._target_={target} needs the package {error.name}; install it."
        ) from error
    ours = inspect.isclass(found) and found.__module__ == module_name and found.__qualname__ == name
    if not (ours or target in OUTSIDE_TARGETS):
        raise refusal
    return typing.cast(type, found)


def build(
    node: Mapping[str, Any], key: str, /, *args: Any, kind: type = object, **runtime: Any
) -> Any:
    """Builds what `node` describes, a `kind`: `_target_` called with the node's other keys and with
    `runtime`.

    Before the call the keys are checked against the target's signature: unknown, missing and
    mistyped ones are a ValueError that names `key`, the value and the fix. Nested nodes are built
    first; `_partial_: true` in one of them gives a partial. Runtime arguments that the signature
    lacks are an error of ours, not of the user.
    """
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise UserError(
            f"{key} has no _target_; choose one of the group's files, for example {key}=<name>."
        )
    target = resolve_target(node["_target_"], key)
    if not issubclass(target, kind):
        raise UserError(
            f"{key}._target_={node['_target_']} is no {kind.__name__}, which {key} must be."
        )
    given = check_arguments(target, node, key, set(runtime), positional=len(args))
    try:
        return target(*args, **given, **runtime)
    except ValueError as error:
        if node["_target_"] in OUTSIDE_TARGETS:
            raise UserError(f"{key}: {error}; {target.__name__} refuses that value.") from error
        raise


def build_nested(node: Mapping[str, Any], key: str) -> Any:
    """Builds a node inside another: an object, or a partial that lacks arguments."""
    rest = {name: value for name, value in node.items() if name != "_partial_"}
    if not node.get("_partial_"):
        return build(rest, key)
    target = resolve_target(node["_target_"], key)
    return partial(target, **check_arguments(target, rest, key, partially=True))


def check_arguments(
    target: type,
    node: Mapping[str, Any],
    key: str,
    supplied: Collection[str] = (),
    *,
    positional: int = 0,
    partially: bool = False,
) -> dict[str, Any]:
    """The node's keys as arguments of `target`: checked by its signature, nested nodes built.

    `supplied` are arguments that the program gives, beside the first `positional` ones.
    """
    parameters = list(inspect.signature(target).parameters.values())[positional:]
    free = {
        p.name: p.default is p.empty
        for p in parameters
        if p.name not in supplied and p.kind is not p.VAR_KEYWORD  # which the program gives
    }
    given = {name: value for name, value in node.items() if name != "_target_"}
    for name in given:
        if name not in free:
            close = difflib.get_close_matches(name, free, n=1)
            takes = f"it takes {', '.join(free) or 'no arguments'}."
            hint = f"did you mean {key}.{close[0]}?" if close else takes
            raise UserError(
                f"{key}.{name}={given[name]}: {target.__name__} has no argument {name}; {hint}"
            )
    missing = [name for name, required in free.items() if required and name not in given]
    if missing and not partially:
        raise UserError(
            f"{key} lacks {', '.join(missing)}: {target.__name__} needs it; set "
            f"{key}.{missing[0]}=<value>."
        )
    hints = typing.get_type_hints(target.__init__, include_extras=True)
    return {n: check_argument(value, hints.get(n, Any), f"{key}.{n}") for n, value in given.items()}


def check_argument(value: Any, annotation: Any, key: str) -> Any:
    """`value` as the annotated type, as JSON has it: whole numbers become floats, and lists tuples.

    A node is built. ValueError for a value that the type does not allow.
    """
    if isinstance(value, Mapping) and "_target_" in value:
        return build_nested(value, key)
    from pydantic import ConfigDict, TypeAdapter, ValidationError  # here, for a quick `--help`

    how = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)
    try:
        return TypeAdapter(annotation, config=how).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        raise UserError(f"{key}={value} must be {describe_bound(error.errors()[0])}.") from None


def find_extension_names(words: Iterable[str]) -> list[str]:
    """Names in `extensions=[a,b]` among a command's words, and in the environment variable."""
    start = f"{EXTENSIONS_KEY}="
    given = [word.lstrip("+") for word in words]
    values = [word.removeprefix(start) for word in given if word.startswith(start)]
    values.append(os.environ.get(EXTENSIONS_VARIABLE, ""))
    names = [name.strip(" []'\"") for name in ",".join(values).split(",")]
    return list(dict.fromkeys(filter(None, names)))


def admit_extensions(words: Iterable[str]) -> list[str]:
    """Admits the packages that `words` name, and returns overrides that add their `conf` folders to
    the search path.

    ValueError if one cannot be imported. Nothing of a package is imported yet.
    """
    folders = []
    for name in find_extension_names(words):
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
        if spec is None or not spec.submodule_search_locations:
            raise UserError(
                f"{EXTENSIONS_KEY}=[{name}]: there is no package {name} that Python can import; "
                "install it, or put the folder that holds it on PYTHONPATH."
            )
        admitted_packages.add(name)
        folders += [Path(place) / "conf" for place in spec.submodule_search_locations]
    places = ",".join(f"'file://{folder.resolve()}'" for folder in folders if folder.is_dir())
    return [f"hydra.searchpath=[{places}]"] if places else []


def is_admitted(target: object) -> bool:
    """Whether `target`, the path of a class, lies in a package that a command of this process has
    named."""
    return str(target).partition(".")[0] in admitted_packages
