"""What Hydra and OmegaConf say of a mistake, as one sentence with key, value and fix."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from training.config.precompute import PrecomputeConfig
from training.config.words import (
    CONF,
    as_given,
    choices_of,
    keys_of_choices,
    must_be,
    nearest,
    not_read,
)

QUOTES = '\'"."'


@dataclass(frozen=True)
class Refusal:
    """An exception of Hydra's or OmegaConf's on `words` for a `schema`."""

    error: Exception
    words: list[str]
    schema: type

    @cached_property
    def cause(self) -> Exception:
        return self.error.__cause__ if isinstance(self.error.__cause__, Exception) else self.error

    @cached_property
    def text(self) -> str:
        return str(self.error).strip()

    @cached_property
    def detail(self) -> str:
        """The first line of what was behind it."""
        return str(self.cause).strip().splitlines()[0]

    @cached_property
    def key(self) -> str:
        """The key that OmegaConf blames, without the place in a list; empty if it names none."""
        return re.sub(r"\[.*", "", getattr(self.cause, "full_key", None) or "")

    def given(self, key: str) -> str:
        return as_given(key, self.words)


def of_sweep(found: re.Match[str], refusal: Refusal) -> str:
    remedy = f"write {found[2]}=[…] for a list, {found[2]}=\"'…'\" for text, a point in a number"
    if choices_of(found[2]):
        remedy = "choose one"
    return f"{found[1]}: commas stand between the values of a sweep, which needs -m; {remedy}."


def of_missing_file(found: re.Match[str], refusal: Refusal) -> str:
    group, name = found.groups()
    lines = refusal.text.splitlines()
    options = [line.strip() for line in lines if line.startswith("\t") and "=" not in line]
    named = ", ".join(options or choices_of(group))
    more = "; latents of your own are data=resident data.path=<folder>" if group == "data" else ""
    return f"{group}={name}: there is no such file in conf/{group}; choose one of {named}{more}."


def of_known_key(found: re.Match[str], refusal: Refusal) -> str:
    return f"{refusal.given(found[1])}: the key is there already; leave out the +."


def of_unknown_override(found: re.Match[str], refusal: Refusal) -> str:
    fix = nearest_of(found[1], refusal.schema)
    return f"{refusal.given(found[1])}: there is no such key; {fix}"


def of_unknown_key(found: re.Match[str], refusal: Refusal) -> str:
    where = f" ({refusal.text.split(':')[0]})" if refusal.text.startswith("In ") else ""
    name = refusal.key or found[1]
    fix = nearest_of(name, refusal.schema)
    return f"{refusal.given(name)}: there is no such key; {fix}{where}"


def of_file(found: re.Match[str], refusal: Refusal) -> str:
    wanted = must_be(refusal.schema, found[3])
    return f"{found[3]}: {found[2]}; it must be {wanted} ({found[1]})."


Sentence = Callable[[re.Match[str], Refusal], str]
SENTENCES: dict[str, Sentence] = {
    r"\AAmbiguous value for argument '(([^=]*)=.*)'": of_sweep,
    r"Could not (?:find|load) '([^'/]+)/([^']+)'": of_missing_file,
    r"\ACould not append to config. An item is already at '([^']+)'": of_known_key,
    r"\ACould not override '([^']+)'": of_unknown_override,
    r"Key '(\w+)' (?:is )?not in": of_unknown_key,
    r"\A(In '[^']+'): .*\n(.*)\n\s*full_key: (\S+)": of_file,
}
"""What is found in Hydra's or OmegaConf's text -> what the user is told."""


def explain(error: Exception, words: list[str], schema: type) -> str:
    """Hydra's or OmegaConf's message on the words for a `schema`, as key, value and fix."""
    refusal = Refusal(error, words, schema)
    override = getattr(refusal.cause, "override", None)
    if override:
        return not_read(str(override))
    for pattern, sentence in SENTENCES.items():
        found = re.search(pattern, f"{refusal.text}\n{refusal.detail}")
        if found:
            return sentence(found, refusal)
    if isinstance(refusal.cause, OmegaConfBaseException):
        return of_value(refusal)
    told = " ".join(refusal.text.split())
    if isinstance(error, HydraException | OmegaConfBaseException):
        return told
    return f"{' '.join(words)}: these words cannot be read ({told}); `--help` lists all keys."


def of_value(refusal: Refusal) -> str:
    """The sentence for a value of another type, or with an interpolation that leads nowhere."""
    word = refusal.given(refusal.key)
    wanted = ""
    if not isinstance(refusal.cause, InterpolationResolutionError):
        wanted = must_be(refusal.schema, refusal.key)
    if wanted and word != refusal.key:
        return f"{word} must be {wanted}."
    interpolated = (given for given in refusal.words if "${" in given)
    blamed = word or next(interpolated, refusal.text.splitlines()[0])
    detail = refusal.detail.removeprefix("KeyError raised while resolving interpolation: ")
    more = f"; it must be {wanted}" if wanted else ""
    return f"{blamed}: {detail.strip(QUOTES)}{more}."


def nearest_of(key: str, schema: type) -> str:
    """The fix for a key that the configuration lacks."""
    group, _, inner = key.partition(".")
    choices = [choice for _, choice in keys_of_choices(inner, group) if choices_of(group)]
    if choices:
        having = [f"{group}={choice}" for choice in choices]
        return f"{having[0]} has it; add {' or '.join(having[:2])}."
    encodes = schema is PrecomputeConfig
    if choices_of(key):
        return f"it is a group of {'train.py' if encodes else 'precompute_latents.py'}."
    known = known_keys("precompute_latents" if encodes else "train")
    return nearest(key, known + [f"{group}.{key}" for group, _ in keys_of_choices(key)])


@cache
def known_keys(config_name: str) -> list[str]:
    """All keys of the default configuration, dotted."""

    def walk(node: Any, prefix: str) -> Iterator[str]:
        for name, value in node.items():
            yield f"{prefix}{name}"
            if isinstance(value, dict):
                yield from walk(value, f"{prefix}{name}.")

    with initialize_config_dir(str(CONF), version_base="1.3"):
        default = OmegaConf.to_container(compose(config_name), resolve=False)
    return list(walk(default, ""))
