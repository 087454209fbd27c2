"""Rewrites errors of Hydra and OmegaConf as one sentence with key, value and fix."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import fields
from functools import cache

from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from common.config.schema import PrecomputeConfig, TrainConfig
from common.config.words import (
    CONF_FOLDER,
    ask_similar,
    describe_type,
    describe_unreadable,
    fill_spelling,
    find_given_word,
    list_choices,
    list_foreign,
    suggest_key,
)
from common.trees import list_nodes

UNKNOWN_KEY = re.compile(r"\ACould not override '([^']+)'|Key '([^']+)' (?:is )?not in")
FAULT_IN_FILE = re.compile(r"\A(In '[^']+'): .*\n(.*)\n\s*full_key: (\S+)")


def explain(error: Exception, words: list[str], schema: type) -> str:
    """Returns a sentence for the user about an error of Hydra or OmegaConf. `words` are the words
    of the command, `schema` is the dataclass of its configuration."""
    cause = error.__cause__ or error
    override = getattr(cause, "override", None)
    if override:
        return describe_unreadable(str(override))
    text = str(error).strip()
    sentence = explain_word(text, words)
    if sentence:
        return sentence

    # Take the key that OmegaConf's error names, without a list index such as [0]; "" if it names no
    # key.
    key = re.sub(r"\[.*", "", getattr(cause, "full_key", None) or "")
    unknown = UNKNOWN_KEY.search(f"{text}\n{cause}")
    if unknown:
        name = unknown[1] or key or unknown[2]
        place = f" ({text.split(':')[0]})" if text.startswith("In ") else ""
        fix = suggest_fix(name, schema, words)
        return f"{find_given_word(name, words)}: there is no such key; {fix}{place}"
    in_file = FAULT_IN_FILE.search(text)
    if in_file:
        expected = describe_type(schema, in_file[3])
        return f"{in_file[3]}: {in_file[2]}; it must be {expected} ({in_file[1]})."
    if isinstance(cause, OmegaConfBaseException):
        return explain_value(cause, key, words, schema)
    message = " ".join(text.split())
    if isinstance(error, HydraException | OmegaConfBaseException):
        return message
    return f"{' '.join(words)}: these words cannot be read ({message}); `--help` lists all keys."


def explain_word(text: str, words: list[str]) -> str | None:
    """Returns a sentence for the user about three errors of Hydra: a value with commas, which Hydra
    takes for a sweep (several runs), a configuration group that lacks the chosen option, and a +
    before a key that exists. None for other errors."""
    sweep = re.match(r"Ambiguous value for argument '(([^=]*)=.*)'", text)
    if sweep:
        name = sweep[2]
        remedy = f"write {name}=[…] for a list, {name}=\"'…'\" for text, a point in a number"
        if list_choices(name):
            remedy = "choose one"
        return f"{sweep[1]}: commas stand between the values of a sweep, which needs -m; {remedy}."

    # Take the group's options from Hydra's message, which lists each on a line of its own, after a
    # tab.
    missing = re.search("Could not (?:find|load) '([^'/]+)/([^']+)'", text)
    if missing:
        group, name = missing.groups()
        if name == "sweeper/optuna":
            return "hydra/sweeper: Optuna is not installed; run `pip install -e '.[sweep]'`."
        lines = text.splitlines()
        options = [line.strip() for line in lines if line.startswith("\t") and "=" not in line]
        options = options or list_choices(group)
        fix = (
            list_foreign("unknown").get(f"{group}={name}")
            or ask_similar(name, options, count=3)
            or f"choose one of {', '.join(options)}."
        )
        if group == "data":
            fix += " For your own latents use data=resident data.path=<folder>."
        return f"{group}={name}: there is no such file in conf/{group}; {fix}"

    existing = re.match("Could not append to config. An item is already at '([^']+)'", text)
    if not existing:
        return None
    return f"{find_given_word(existing[1], words)}: the key is there already; leave out the +."


def explain_value(cause: Exception, key: str, words: list[str], schema: type) -> str:
    """Returns a sentence for the user about the value of `key` if it has the wrong type, or
    contains an interpolation `${…}` that cannot be resolved."""
    word = find_given_word(key, words)
    unresolved = isinstance(cause, InterpolationResolutionError)
    expected = "" if unresolved else describe_type(schema, key)
    if expected and word != key:
        return f"{word} must be {expected}."
    detail = str(cause).strip().splitlines()[0]
    blamed = word or next((word for word in words if "${" in word), detail)
    detail = detail.removeprefix("KeyError raised while resolving interpolation: ").strip('".')
    return f"{blamed}: {detail}{f'; it must be {expected}' if expected else ''}."


def suggest_fix(key: str, schema: type, words: list[str]) -> str:
    """Returns the end of a sentence about a key that the configuration lacks. It names an option of
    a configuration group that has the key, the command to which the key belongs, or a similar
    key. `words` are the words of the command: an option that one of them has chosen is not to be
    replaced."""
    other = {TrainConfig: "precompute_latents", PrecomputeConfig: "train"}.get(schema)
    # The commands without Hydra have no groups, so a similar key is all that helps.
    groups = [field.name for field in fields(schema)]
    if other is None:
        return suggest_key(key, groups)

    remedy = list_foreign("unknown").get(key)
    if remedy:
        return fill_spelling(remedy, find_given_word(key, words).partition("=")[2])
    choices_by_key = map_keys_to_choices()
    choices = choices_by_key.get(key)
    if choices:
        chosen = tuple(f"{group}=" for group in (key.partition(".")[0], "experiment"))
        named = " or ".join(choices[:2])
        others = " (and others)" if len(choices) > 2 else ""
        is_chosen = any(word.startswith(chosen) for word in words)
        return f"{named}{others} has it." if is_chosen else f"{choices[0]} has it; add {named}."
    if list_choices(key):
        return f"it is a group of {other}.py."
    tree = OmegaConf.to_container(OmegaConf.structured(schema))
    known = [name for name, _ in list_nodes(tree)]
    known += [name for name in choices_by_key if name.partition(".")[0] in groups]
    return suggest_key(key, known)


@cache
def map_keys_to_choices() -> dict[str, list[str]]:
    """Returns a dict: dotted key in the files of conf/<group>/ -> the options whose file has this
    key, such as model=dit_s."""
    choices_by_key = defaultdict(list)
    for file in sorted(CONF_FOLDER.glob("*/*.yaml")):
        group = file.parent.name
        if group == "experiment":
            continue
        keys = list_nodes(OmegaConf.to_container(OmegaConf.load(file)), f"{group}.")
        for key in dict(keys):
            choices_by_key[key].append(f"{group}={file.stem}")
    return choices_by_key
