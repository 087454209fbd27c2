"""What Hydra and OmegaConf say of a mistake, as one sentence with key, value and fix."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from typing import Any

from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from training.config.schema import PrecomputeConfig, TrainConfig
from training.config.words import (
    CONF_FOLDER,
    describe_type,
    describe_unreadable,
    find_given_word,
    list_choices,
    suggest_key,
)

UNKNOWN_KEY = re.compile(r"\ACould not override '([^']+)'|Key '([^']+)' (?:is )?not in")
FAULT_IN_FILE = re.compile(r"\A(In '[^']+'): .*\n(.*)\n\s*full_key: (\S+)")


def explain(error: Exception, words: list[str], schema: type) -> str:
    """Hydra's or OmegaConf's message on the words for a `schema`, as key, value and fix."""
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    override = getattr(cause, "override", None)
    if override:
        return describe_unreadable(str(override))
    text = str(error).strip()
    told = explain_word(text, words)
    if told:
        return told

    # What OmegaConf blames, without the place in a list; empty if it names no key.
    key = re.sub(r"\[.*", "", getattr(cause, "full_key", None) or "")
    unknown = UNKNOWN_KEY.search(f"{text}\n{cause}")
    if unknown:
        name = unknown[1] or key or unknown[2]
        where = f" ({text.split(':')[0]})" if text.startswith("In ") else ""
        fix = suggest_fix(name, schema)
        return f"{find_given_word(name, words)}: there is no such key; {fix}{where}"
    in_file = FAULT_IN_FILE.search(text)
    if in_file:
        wanted = describe_type(schema, in_file[3])
        return f"{in_file[3]}: {in_file[2]}; it must be {wanted} ({in_file[1]})."
    if isinstance(cause, OmegaConfBaseException):
        return explain_value(cause, key, words, schema)
    told = " ".join(text.split())
    if isinstance(error, HydraException | OmegaConfBaseException):
        return told
    return f"{' '.join(words)}: these words cannot be read ({told}); `--help` lists all keys."


def explain_word(text: str, words: list[str]) -> str | None:
    """The sentence for a sweep, for a choice that there is not, or for a key that is there
    already."""
    sweep = re.match(r"Ambiguous value for argument '(([^=]*)=.*)'", text)
    if sweep:
        name = sweep[2]
        remedy = f"write {name}=[…] for a list, {name}=\"'…'\" for text, a point in a number"
        if list_choices(name):
            remedy = "choose one"
        return f"{sweep[1]}: commas stand between the values of a sweep, which needs -m; {remedy}."
    missing = re.search("Could not (?:find|load) '([^'/]+)/([^']+)'", text)
    if missing:
        group, name = missing.groups()
        lines = text.splitlines()
        options = [line.strip() for line in lines if line.startswith("\t") and "=" not in line]
        choices = ", ".join(options or list_choices(group))
        own = "; latents of your own are data=resident data.path=<folder>"
        return (
            f"{group}={name}: there is no such file in conf/{group}; choose one of {choices}"
            f"{own if group == 'data' else ''}."
        )
    known = re.match("Could not append to config. An item is already at '([^']+)'", text)
    return (
        known and f"{find_given_word(known[1], words)}: the key is there already; leave out the +."
    )


def explain_value(cause: Exception, key: str, words: list[str], schema: type) -> str:
    """The sentence for a value of another type, or with an interpolation that leads nowhere."""
    word = find_given_word(key, words)
    unresolved = isinstance(cause, InterpolationResolutionError)
    wanted = "" if unresolved else describe_type(schema, key)
    if wanted and word != key:
        return f"{word} must be {wanted}."
    detail = str(cause).strip().splitlines()[0]
    blamed = word or next((given for given in words if "${" in given), detail)
    detail = detail.removeprefix("KeyError raised while resolving interpolation: ").strip('".')
    return f"{blamed}: {detail}{f'; it must be {wanted}' if wanted else ''}."


def suggest_fix(key: str, schema: type) -> str:
    """The fix for a key that the configuration lacks."""
    other = {TrainConfig: "precompute_latents", PrecomputeConfig: "train"}.get(schema)
    groups = [field.name for field in fields(schema)]
    if other is None:
        return suggest_key(key, groups)
    choices = map_keys_to_choices()
    having = choices.get(key)
    if having:
        return f"{having[0]} has it; add {' or '.join(having[:2])}."
    if list_choices(key):
        return f"it is a group of {other}.py."
    own = OmegaConf.to_container(OmegaConf.structured(schema))
    known = [name for name, _ in flatten_tree(own)]
    return suggest_key(key, known + [name for name in choices if name.partition(".")[0] in groups])


@cache
def map_keys_to_choices() -> dict[str, list[str]]:
    """Each key in the files of a group, dotted -> the choices that have it, such as model=dit_s."""
    found = defaultdict(list)
    for file in sorted(CONF_FOLDER.glob("*/*.yaml")):
        group = file.parent.name
        keys = flatten_tree(OmegaConf.to_container(OmegaConf.load(file)), f"{group}.")
        for key in dict(keys) if group != "experiment" else ():
            found[key].append(f"{group}={file.stem}")
    return found


def flatten_tree(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All values inside of a tree of mappings and lists, and their dotted keys."""
    entries = dict(enumerate(node)) if isinstance(node, list) else node
    if isinstance(entries, dict):
        for name, value in entries.items():
            yield f"{prefix}{name}", value
            yield from flatten_tree(value, f"{prefix}{name}.")
