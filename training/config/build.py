"""From config nodes to objects: the one place where a `_target_` becomes code, and what may.

Extensions are packages of a user's own, outside the checkout. Only the command itself can name one:
a configuration file, a checkpoint or a weights file that names a package runs nothing, for it may
come from anywhere. A class of such a package may stand in a `_target_`, and its folder `conf`,
where it has one, joins Hydra's search path.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import types
import typing
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from common.errors import UserError

EXTENSIONS = "extensions"
ENVIRONMENT = "FASTLATENT_EXTENSIONS"
"""For those who always use the same ones: names separated by commas."""
admitted: set[str] = set()
"""The packages that commands of this process have named."""
PACKAGES = ("accel", "data", "models", "training")
OUTSIDERS = tuple(f"torch.optim.{name}" for name in ("Adafactor", "Adam", "AdamW", "SGD"))
"""What a `_target_` may name outside our packages, in full."""


MOVED = {"training.process.loggers": "training.loggers"}
"""Modules that had another name in a released version -> where they are now; configurations may
still name them."""


def resolve_target(target: str, key: str) -> type:
    """The class that `target` names; ValueError unless that very module defines it, and the module
    is one of ours or of an admitted extension, or it is an outsider.

    The object itself is judged, not its path: `models.denoiser.torch.load` starts like one of ours
    and is not.
    """
    refusal = (
        f"{key}._target_={target} is not allowed: it must be a class defined in one of "
        f"{', '.join(PACKAGES)}, in a package that extensions=[…] on this command line names, or "
        f"one of {', '.join(OUTSIDERS)}."
    )
    if not isinstance(target, str):
        raise UserError(refusal)
    module_name, _, name = target.rpartition(".")
    module_name = MOVED.get(module_name, module_name)
    if (
        target not in OUTSIDERS
        and module_name.split(".")[0] not in PACKAGES
        and not is_admitted(target)
    ):
        raise UserError(refusal)
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except ModuleNotFoundError as error:
        if error.name and module_name.startswith(error.name):
            raise UserError(refusal) from None
        raise UserError(
            f"{key}._target_={target} needs the package {error.name}; install it."
        ) from error
    ours = inspect.isclass(found) and found.__module__ == module_name and found.__qualname__ == name
    if not (ours or target in OUTSIDERS):
        raise UserError(refusal)
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
    built = built_arguments(target, node, key, supplied=set(runtime), skip=len(args))
    try:
        return target(*args, **built, **runtime)
    except ValueError as error:
        if node["_target_"] in OUTSIDERS:
            raise UserError(f"{key}: {error}; {target.__name__} refuses that value.") from error
        raise


def built_arguments(
    target: type,
    node: Mapping[str, Any],
    key: str,
    *,
    partially: bool = False,
    supplied: set[str],
    skip: int,
) -> dict[str, Any]:
    """The node's other keys, checked, and those among them built that are nodes themselves."""
    given = {
        k: v for k, v in node.items() if k != "_target_" and not (partially and k == "_partial_")
    }
    checked = check_arguments(target, given, key, partially=partially, supplied=supplied, skip=skip)
    nested = {
        name: value
        for name, value in checked.items()
        if isinstance(value, Mapping) and "_target_" in value
    }
    return checked | {name: build_nested(value, f"{key}.{name}") for name, value in nested.items()}


def build_nested(node: Mapping[str, Any], key: str) -> Any:
    if not node.get("_partial_"):
        return build({k: v for k, v in node.items() if k != "_partial_"}, key)
    target = resolve_target(node["_target_"], key)
    return partial(
        target, **built_arguments(target, node, key, partially=True, supplied=set(), skip=0)
    )


def check_arguments(
    target: type, given: dict[str, Any], key: str, *, partially: bool, supplied: set[str], skip: int
) -> dict[str, Any]:
    """`given` with its types settled by the target's signature."""
    parameters = dict(list(inspect.signature(target).parameters.items())[skip:])
    for name, value in given.items():
        if name in supplied or name not in parameters:
            names = [n for n in parameters if n not in supplied]
            close = difflib.get_close_matches(name, names, n=1)
            hint = (
                f"did you mean {key}.{close[0]}?"
                if close
                else f"it takes {', '.join(names) or 'no arguments'}."
            )
            raise UserError(
                f"{key}.{name}={value}: {target.__name__} has no argument {name}; {hint}"
            )
    required = [n for n, p in parameters.items() if p.default is p.empty]
    missing = [n for n in required if n not in given and n not in supplied]
    if missing and not partially:
        raise UserError(
            f"{key} lacks {', '.join(missing)}: {target.__name__} needs it; set "
            f"{key}.{missing[0]}=<value>."
        )
    hints = typing.get_type_hints(target.__init__)
    return {
        name: check_type(value, hints.get(name, Any), f"{key}.{name}")
        for name, value in given.items()
    }


def check_type(value: Any, annotation: Any, key: str) -> Any:
    """`value` as the annotated type (whole numbers become floats, lists tuples where asked);
    ValueError otherwise."""
    try:
        return converted(value, annotation)
    except TypeError:
        choices = typing.get_args(annotation) if typing.get_origin(annotation) is Literal else ()
        expected = (
            f"one of {', '.join(map(str, choices))}"
            if choices
            else f"of type {type_name(annotation)}"
        )
        raise UserError(f"{key}={value} is not {expected}; give a value that is.") from None


def converted(value: Any, annotation: Any) -> Any:
    """`value` as `annotation`; TypeError if it does not fit. Types that YAML cannot hold accept
    nested nodes only."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if annotation is Any or (isinstance(value, Mapping) and "_target_" in value):
        return value
    if origin in (typing.Union, types.UnionType):
        # an int for `float | int` stays an int
        for member in sorted(arguments, key=lambda member: member is float):
            try:
                return converted(value, member)
            except TypeError:
                continue
    elif origin is Literal:
        if value in arguments:
            return value
    elif origin in (tuple, list) and isinstance(value, list | tuple):
        members = (
            [arguments[0]] * len(value)
            if origin is list or arguments[1:] == (...,)
            else list(arguments)
        )
        if len(members) == len(value):
            return origin(converted(v, a) for v, a in zip(value, members, strict=True))
    elif annotation is float and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:  # a whole number above all floats
            raise TypeError from None
    elif (
        inspect.isclass(annotation)
        and isinstance(value, annotation)
        and isinstance(value, bool) == (annotation is bool)
    ):
        return value
    raise TypeError


def type_name(annotation: Any) -> str:
    return (
        annotation.__name__
        if inspect.isclass(annotation)
        else str(annotation).replace("typing.", "")
    )


def named_by(words: Iterable[str]) -> list[str]:
    """Names in `extensions=[a,b]` among a command's words, and in the environment variable."""
    values = [
        word.partition("=")[2] for word in words if word.lstrip("+").partition("=")[0] == EXTENSIONS
    ]
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
                f"{EXTENSIONS}=[{name}]: there is no package {name} that Python can import; "
                "install it, or put the folder that holds it on PYTHONPATH."
            )
        admitted.add(name)
        folders += [Path(place) / "conf" for place in spec.submodule_search_locations]
    places = ",".join(f"'file://{folder.resolve()}'" for folder in folders if folder.is_dir())
    return [f"hydra.searchpath=[{places}]"] if places else []


def is_admitted(target: object) -> bool:
    """Whether `target`, the path of a class, lies in a package that a command of this process has
    named."""
    return str(target).partition(".")[0] in admitted
