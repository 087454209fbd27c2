"""Checks the words of a command line: refuses words that are not key=value, refuses another
trainer's key (such as learning_rate) with a message that names fastlatent's key, and explains words
that Hydra cannot parse."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

from common.errors import UserError
from common.files import ROOT

CONF_FOLDER = ROOT / "conf"
SPELLINGS_FILE = Path(__file__).with_name("spellings.yaml")
NOT_A_FILE_NAME = re.compile(
    r"null|true|false|[-+]?(inf|nan|[\d.][\d_.e+-]*)|[\[{].*", re.IGNORECASE
)
"""Matches a value that Hydra parses as null, a bool, a number, a list or a mapping, such as true or
20; such a value cannot be the name of a file in conf/."""
MAX_BRACKETS = 100
"""Largest number of opening brackets in one word of a command. No key needs more. Hydra and
OmegaConf recurse once per bracket, so more brackets could exceed Python's recursion limit."""
HYDRA_FLAG = re.compile(
    "-(h|r|m|sc)|--(help|hydra-help|version|resolve|run|multirun|shell-completion)"
)
"""Matches Hydra's options that have no value, such as --help."""
HYDRA_SETTING = re.compile(
    "-(c|p|cp|cn|cd|i)|--(cfg|package|config-(path|name|dir)|experimental-rerun|info)"
)
"""Matches Hydra's options that have a value, such as --config-dir; the value follows after = or in
the next word of the command."""
HYDRA_CALL = re.compile(
    r"(bool|choice|float|glob|int|interval|range|shuffle|sort|str|tag|extend_list|json_str)\(.*\)",
    re.S,
)
OPEN_MAPPING = "runtime.parallel.nccl"
"""The configuration key whose value is a mapping with any keys. On the command line, Hydra requires
a + before a key that the mapping does not have yet."""
TYPE_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "a mapping such as {NAME: value}",
    NoneType: "null",
}
NEEDS_QUOTES = re.compile(r"[^\x00-\x7f]|[~=()#!&;<>^`]")
"""Matches characters that Hydra accepts only in quotes."""


@cache
def read_spellings() -> dict[str, Any]:
    return yaml.safe_load(SPELLINGS_FILE.read_text())


def list_foreign(commands: str) -> dict[str, str]:
    """Returns key of another trainer -> how to write the setting in fastlatent, with {} for the
    value. `commands` is "training", or "drawing" for the commands that draw samples. For "unknown":
    a key that there is not, or group=file -> the end of a sentence about it."""
    table = read_spellings()[commands]
    return {key: spelling for spelling, keys in table.items() for key in keys.split()}


def fill_spelling(spelling: str, value: str) -> str:
    """Returns `spelling`, a value of `list_foreign`, with {} replaced by `value`. If the file of
    spellings lists values of the setting's key, first translates the other trainer's value to that
    of fastlatent, such as float32 to fp32."""
    choices = read_spellings()["values"].get(spelling.partition("=")[0], {})
    matches = (
        name
        for name, patterns in choices.items()
        if any(fnmatchcase(value.lower(), pattern) for pattern in patterns.split())
    )
    return spelling.replace("{}", next(matches, "{}")).replace("{}", value or "<value>")


def refuse_words(words: list[str]) -> None:
    """Raises UserError for a word that is not of the form key=value, for a key of another trainer,
    and for a configuration group whose value names no file, such as model=null."""
    foreign = list_foreign("training")
    files = [file for file in CONF_FOLDER.glob("*/*.yaml") if file.stem in words]
    refuse_form(words, {file.stem: f"{file.parent.name}={file.stem}" for file in files} | foreign)
    for word in words:
        key, _, value = word.lstrip("+~").partition("=")
        # For a configuration group, such as model, refuse a value that Hydra parses as null, a
        # number or a list: Hydra's own error does not say that a file's name is missing.
        allowed = key == "experiment" and value == "null"
        nameless = NOT_A_FILE_NAME.fullmatch(value) and not allowed
        if nameless and key and "." not in key and (CONF_FOLDER / key).is_dir():
            raise UserError(
                f"{key}={value}: a run needs one; choose one of {', '.join(list_choices(key))}."
            )
    refuse_foreign(words, foreign)


def refuse_foreign(words: list[str], foreign: Mapping[str, str]) -> None:
    """Raises UserError for a key of another trainer; the message says how to write the setting in
    fastlatent. `foreign` maps a key of another trainer to fastlatent's spelling, with {} for the
    value, such as lr -> optim.lr={}."""
    for word in words:
        key, equals, value = word.lstrip("+~").partition("=")
        spelling = foreign.get(f"{key}={value}") or foreign.get(key)
        if equals and spelling:
            ours = fill_spelling(spelling, value)
            raise UserError(f"{key}={value} is not spelled so here; use {ours}.")


def refuse_form(words: list[str], foreign: Mapping[str, str]) -> None:
    """Raises UserError for a word that is not `key=value`; the message suggests how to write the
    word. `foreign` maps a key of another trainer to fastlatent's spelling, with {} for the value,
    such as lr -> optim.lr={}."""
    for before, word, behind in zip(["", *words], words, [*words[1:], ""], strict=False):
        if not word.strip():
            raise UserError("one word of the command is empty; give key=value.")
        if word.count("[") + word.count("{") > MAX_BRACKETS:
            raise UserError(
                f"{word[:60]}…: more than {MAX_BRACKETS} brackets; no key needs so many."
            )
        key, equals, value = word.partition("=")
        name = key.strip(" -").replace("-", "_")
        if key.startswith("~") or (equals and name and key[0] not in " -" and key[-1] != " "):
            continue

        if not equals and behind and "=" not in behind and not behind.startswith("--"):
            word = f"{word} {behind}"
            value = behind
        fault = " is not of the form key=value"
        if key.startswith("-"):
            fault = ": keys are given as key=value, without dashes"
        ours = f"{name}={value.strip() or '<value>'}"
        if name in foreign:
            ours = fill_spelling(foreign[name], value or "true")
        is_key = re.fullmatch(r"[a-z_][\w.]+", name)
        remedy = f"write {ours}" if is_key else "`--help` lists the keys"

        # A shell splits a value at its spaces, and then a word follows that is no key.
        start, given, _ = before.partition("=")
        no_key = not equals and not key.startswith("-") and not re.search("[._]", name)
        if before.count("[") > before.count("]") or (given and no_key and name not in foreign):
            first = f"a key is written {ours}; " if is_key else ""
            remedy = f'{first}quote a value with spaces for the shell, "{start}=…"'
        raise UserError(f"{word}{fault}; {remedy}.")


def select_overrides(words: list[str]) -> list[str]:
    """Returns the words of a command without Hydra's options, such as -m and --config-dir, and
    without the options' values."""
    return [
        word
        for before, word in zip(["", *words], words, strict=False)
        if not HYDRA_FLAG.fullmatch(word)
        and not HYDRA_SETTING.fullmatch(word.partition("=")[0])
        and not HYDRA_SETTING.fullmatch(before)
    ]


def quote(word: str) -> str:
    """Returns the override `word` with its value in quotes if Hydra cannot parse the value without
    quotes, such as run_dir=läufe/ä. Puts ++ before a key of the mapping `OPEN_MAPPING`, so that
    Hydra accepts a new key."""
    key, _, value = word.partition("=")
    if key.startswith(OPEN_MAPPING):
        word = f"++{word}"
        key = f"++{key}"
    if word.startswith("-") or not value.isprintable() or re.search(r"['\"\\]", value):
        return word
    if value[:1] in ("[", "{"):
        entry = r"[^\[\]{},:\s][^\[\]{},:]*" if value[0] == "{" else r"[^\[\]{},\s][^\[\]{},]*"
        return f"{key}=" + re.sub(entry, lambda m: m[0] if m[0].isascii() else f"'{m[0]}'", value)
    if "," in value or not NEEDS_QUOTES.search(value) or HYDRA_CALL.fullmatch(value):
        return word
    return f"{key}='{value.strip()}'"


def describe_unreadable(word: str) -> str:
    """Returns a sentence for the user about a word that Hydra cannot parse. The sentence omits the
    word's value, which may hold a secret in a form that `redact_text` does not know."""
    name, _, value = word.partition("=")
    if value.rstrip().endswith(","):
        return f"{name}: its value ends with a comma; leave that out."
    return (
        f"{name}: the word that begins so cannot be read; put the value into two kinds of quotes: "
        f"{name}=\"'…'\"."
    )


def suggest_key(name: str, known: list[str]) -> str:
    """Returns the end of a message about the unknown key `name`: the question whether the user
    means a similar key of the list `known`, or, if none is similar, a hint at `--help`."""
    variable = re.search(r"NCCL_\w+$", name)
    if variable:
        return f"did you mean {OPEN_MAPPING}.{variable[0]}?"
    public = [key for key in known if not re.search(r"(^|\.)(_|defaults$)", key)]
    nested = [key for key in public if key.endswith(f".{name}")]
    if nested:
        return f"did you mean {nested[0]}?"
    return ask_similar(name, public) or "`--help` lists all keys."


def ask_similar(name: str, known: Iterable[str], count: int = 1) -> str:
    """Returns the question whether the user means one of the at most `count` names in `known` that
    are most similar to `name`; "" if none is similar."""
    names = {key.lower(): key for key in known}
    close = difflib.get_close_matches(name.lower(), names, n=count)
    return f"did you mean {' or '.join(names[key] for key in close)}?" if close else ""


def list_choices(group: str) -> list[str]:
    """Lists the options of a configuration group: the names of the files in conf/<group>/."""
    files = (CONF_FOLDER / group).glob("*.yaml") if group.isidentifier() else ()
    return sorted(file.stem for file in files)


def find_given_word(key: str, words: list[str]) -> str:
    """Returns the last word of the command that sets `key`; if no word sets it, returns `key`
    itself."""
    matches = (word for word in reversed(words) if word.lstrip("+~").partition("=")[0] == key)
    return next(matches, key).removeprefix("++" if key.startswith(OPEN_MAPPING) else "")


def describe_type(schema: type, key: str) -> str:
    """Returns text for the user about the type of a key of the dataclass `schema`, with the default
    as an example. Returns "" if `schema` lacks the key: a key such as model.depth belongs to a
    component."""
    *parents, last = key.split(".")
    node: Any = schema()
    for name in parents:
        node = getattr(node, name, None)
    if not is_dataclass(node) or not hasattr(node, last):
        return ""
    hint = get_type_hints(type(node))[last]
    default = getattr(node, last)
    if is_dataclass(default):
        return f"set key by key, such as {key}.{fields(default)[0].name}=<value>"
    alternatives = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    types = " or ".join(map(name_type, alternatives))
    if default is None or isinstance(default, bool | Enum) or default in ({}, []):
        return types
    # Delete quotes and spaces from a list, so that the user can type the list in a shell.
    return f"{types}, such as {str(default).translate({39: None, 32: None})}"


def name_type(hint: Any) -> str:
    """Returns the name of a type for messages to the user, such as "a whole number"."""
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(choice.value for choice in hint)}"
    if get_origin(hint) is list:
        return f"a list, each entry {name_type(get_args(hint)[0])}"
    return TYPE_NAMES.get(get_origin(hint) or hint, "a value")
