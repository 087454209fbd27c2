"""Builds objects from configuration nodes: only this file imports the class that a `_target_`
names.

A `_target_` may name a class of fastlatent, or of an extension: a user's own package, outside of
the checkout. An extension is admitted only if the command line or the environment variable
`EXTENSIONS_VARIABLE` names it. A configuration file, a checkpoint or a weights file cannot admit
one, because such a file may come from anywhere. The folder `conf` of an admitted extension, if it
has one, joins Hydra's search path.
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

from common.config.schema import describe_bound
from common.errors import UserError
from common.trees import flatten

EXTENSIONS_KEY = "extensions"
EXTENSIONS_VARIABLE = "FASTLATENT_EXTENSIONS"
"""Name of the environment variable that lists extensions (importable packages), separated by
commas."""
admitted_packages: set[str] = set()
"""Names of the extensions whose classes a `_target_` may name in this process; `admit_extensions`
adds them."""
TARGET_PACKAGES = ("accel", "data", "models", "training")
OUTSIDE_TARGETS = tuple(f"torch.optim.{name}" for name in ("Adafactor", "Adam", "AdamW", "SGD"))
"""Classes outside of `TARGET_PACKAGES` that a `_target_` may name."""


def resolve_target(target: str, key: str) -> type:
    """Imports and returns the class that `target`, a dotted path, names. UserError unless `target`
    is in `OUTSIDE_TARGETS`, or a module of `TARGET_PACKAGES` or of an admitted extension defines
    the class.

    The function checks the imported object, not only its path: `models.denoiser.torch.load` begins
    with the name of an allowed module, but that module does not define `torch.load`. `key` is the
    place of the `_target_` in the configuration, for messages.
    """
    refusal = UserError(
        f"{key}._target_={target} is not allowed: it must be a class defined in one of "
        f"{', '.join(TARGET_PACKAGES)}, in a package that extensions=[…] on this command line "
        f"names, or one of {', '.join(OUTSIDE_TARGETS)}."
    )
    module_name, _, name = str(target).rpartition(".")
    package = module_name.split(".")[0]
    outside = target in OUTSIDE_TARGETS
    if not outside and package not in TARGET_PACKAGES and package not in admitted_packages:
        raise refusal

    try:
        kind = getattr(importlib.import_module(module_name), name, None)
    except ModuleNotFoundError as error:
        if error.name and module_name.startswith(error.name):
            raise refusal from None
        raise UserError(
            f"{key}._target_={target} needs the package {error.name}; install it."
        ) from error
    ours = inspect.isclass(kind) and kind.__module__ == module_name and kind.__qualname__ == name
    if not (ours or outside):
        raise refusal
    return typing.cast(type, kind)


def build(
    node: Mapping[str, Any], key: str, /, *args: Any, kind: type = object, **runtime: Any
) -> Any:
    """Builds and returns the object that `node` describes, which must be an instance of `kind`. The
    arguments of the class that `_target_` names are `args`, the node's other keys, and `runtime`.

    First the function checks the node's keys against the signature of the class. An unknown or
    missing key, or a value of another type, raises a UserError that names `key` (the node's place
    in the configuration), the value and the fix. The function builds nested nodes before the outer
    one; a nested node with `_partial_: true` becomes a functools.partial of its class. An argument
    in `runtime` that the signature lacks raises a TypeError, not a UserError, because it is a
    mistake of the calling code, not of the user.
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
    arguments = check_arguments(target, node, key, set(runtime), positional=len(args))
    try:
        return target(*args, **arguments, **runtime)
    except ValueError as error:
        if node["_target_"] in OUTSIDE_TARGETS:
            raise UserError(f"{key}: {error}; {target.__name__} refuses that value.") from error
        raise


def fill_defaults(node: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Returns dotted key -> value of nested nodes, with the constructor's default for each argument
    that a node leaves out: two nodes describe the same object if the results are equal."""
    values = dict(node)
    if "_target_" in node:
        parameters = inspect.signature(resolve_target(node["_target_"], key)).parameters
        values = {n: p.default for n, p in parameters.items() if p.default is not p.empty} | values
    filled: dict[str, Any] = {}
    for name, value in values.items():
        if values.get(f"{name}_every") == 0:
            continue  # a part that no block has, such as attention
        if inspect.isclass(value):
            value = {"_target_": f"{value.__module__}.{value.__qualname__}", "_partial_": True}
        if isinstance(value, Mapping):
            value = fill_defaults(value, f"{key}.{name}")
        filled[name] = list(value) if isinstance(value, tuple) else value
    return flatten(filled)


def check_arguments(
    target: type,
    node: Mapping[str, Any],
    key: str,
    supplied: Collection[str] = (),
    *,
    positional: int = 0,
    partially: bool = False,
) -> dict[str, Any]:
    """Checks the node's keys against the signature of `target`, and returns the keyword arguments
    as name -> value; objects replace the nested nodes from which they are built.

    The node must not set arguments that the calling code passes: the names in `supplied` and the
    first `positional` parameters. If `partially` is true, the node may lack required arguments.
    """
    # `settable` maps the name of each parameter that the node may set to a bool: True if the
    # parameter has no default, so that the node must set it.
    parameters = list(inspect.signature(target).parameters.values())[positional:]
    settable = {
        p.name: p.default is p.empty
        for p in parameters
        if p.name not in supplied and p.kind is not p.VAR_KEYWORD
    }
    values = {name: value for name, value in node.items() if name != "_target_"}
    for name in values:
        if name not in settable:
            close = difflib.get_close_matches(name, settable, n=1)
            takes = f"it takes {', '.join(settable) or 'no arguments'}."
            hint = f"did you mean {key}.{close[0]}?" if close else takes
            raise UserError(
                f"{key}.{name}={values[name]}: {target.__name__} has no argument {name}; {hint}"
            )

    missing = [name for name, required in settable.items() if required and name not in values]
    if missing and not partially:
        raise UserError(
            f"{key} lacks {', '.join(missing)}: {target.__name__} needs it; set "
            f"{key}.{missing[0]}=<value>."
        )
    hints = typing.get_type_hints(target.__init__, include_extras=True)
    return {
        name: check_argument(value, hints.get(name, Any), f"{key}.{name}")
        for name, value in values.items()
    }


def check_argument(value: Any, annotation: Any, key: str) -> Any:
    """Converts a value of the configuration to the type `annotation` of its argument, by pydantic's
    strict rules for JSON: an integer may become a float, and a list a tuple.

    For a nested node with a `_target_`, the function builds the object and returns it, or, if the
    node has `_partial_: true`, a functools.partial of its class. UserError for a value that the
    type does not allow.
    """
    if isinstance(value, Mapping) and "_target_" in value:
        node = {name: entry for name, entry in value.items() if name != "_partial_"}
        if not value.get("_partial_"):
            return build(node, key)
        target = resolve_target(node["_target_"], key)
        return partial(target, **check_arguments(target, node, key, partially=True))

    # imported here, because the import is slow and `--help` does not need it
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    rules = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)
    try:
        return TypeAdapter(annotation, config=rules).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        raise UserError(f"{key}={value} must be {describe_bound(error.errors()[0])}.") from None


def find_extension_names(words: Iterable[str]) -> list[str]:
    """Returns the names of extensions, without duplicates: those in `extensions=[a,b]` among the
    words of a command line, and those in the environment variable `EXTENSIONS_VARIABLE`."""
    start = f"{EXTENSIONS_KEY}="
    overrides = [word.lstrip("+") for word in words]
    values = [word.removeprefix(start) for word in overrides if word.startswith(start)]
    values.append(os.environ.get(EXTENSIONS_VARIABLE, ""))
    names = [name.strip(" []'\"") for name in ",".join(values).split(",")]
    return list(dict.fromkeys(filter(None, names)))


def admit_extensions(words: Iterable[str]) -> list[str]:
    """Allows `_target_` to name classes of the packages that `extensions=[…]` among `words`, or the
    environment variable `EXTENSIONS_VARIABLE`, names; does not import the packages.

    Returns Hydra overrides that add the packages' `conf` folders to Hydra's search path, [] if no
    package has one. UserError if Python cannot find a package.
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
    """Says whether `target`, the dotted path of a class, lies in an admitted extension."""
    return str(target).partition(".")[0] in admitted_packages
