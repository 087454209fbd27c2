"""Composes the configuration, and turns every mistake in it into one clear sentence.

`schema.py` defines the types of all keys except those of components (model, data, objective, optim,
logger, encoder). A component is plain YAML with a `_target_`; `build.py` checks its keys against
the signature of the class that `_target_` names.
"""

from __future__ import annotations

import math
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from common.config import build
from common.config.explain import explain
from common.config.help import format_help
from common.config.paths import refuse_paths
from common.config.schema import PrecomputeConfig, TrainConfig, find_direction
from common.config.secrets import redact, redact_text, redact_words
from common.config.words import (
    CONF_FOLDER,
    describe_unreadable,
    find_given_word,
    list_choices,
    list_foreign,
    quote,
    refuse_foreign,
    refuse_form,
    refuse_words,
)
from common.errors import UserError, describe_machine_fault
from common.files import read_object
from common.output import tolerate_broken_output
from common.require_python import STOPPED
from common.text import escape_unprintable, is_shift
from common.trees import list_nodes

SCHEMAS = {"train": TrainConfig, "precompute_latents": PrecomputeConfig}
"""Name of a primary configuration file in conf/, without .yaml -> the dataclass that defines its
keys and their types."""
MANY_IMAGES = 20_000
"""Number of images from which experiment=photos takes the largest of its models."""


@cache
def make_mutable_schema(kind: type) -> DictConfig:
    """Returns OmegaConf's structured config of the frozen dataclass `kind`, but writable, so that
    values can be merged into it; `OmegaConf.to_object` then turns it into the frozen dataclass.

    The config is made once. Callers must not change it; `OmegaConf.merge` changes a copy."""
    schema = OmegaConf.structured(kind)
    nodes = [schema]
    for node in nodes:
        OmegaConf.set_readonly(node, False)
        nodes += [child for child in node.values() if isinstance(child, DictConfig)]
    return schema


# conf/train.yaml uses this resolver for the folder of a sweep.
OmegaConf.register_new_resolver(
    "or_else", lambda value, other: other if value is None else os.path.expanduser(value)
)


def name_recipe(data: str, optim: str, model: str) -> str:
    """Returns the name of the file in conf/recipe for these choices: `<data>_<optim>_<size>`, where
    the size is the end of the model's name, such as xs of mamba_xs; `none` if there is no such
    file. conf/train.yaml calls the function as a resolver."""
    name = f"{data}_{optim}_{model.rpartition('_')[2]}"
    return name if name in list_choices("recipe") else "none"


OmegaConf.register_new_resolver("recipe", name_recipe)


def choose_by_size(path: str | None, *values: Any) -> Any:
    """Returns one of three values for a model of the latent set at `path`: for a CPU; for a GPU; or
    for a GPU and at least `MANY_IMAGES` images. conf/experiment/photos.yaml calls the function as a
    resolver."""
    import torch  # imported here, so that `--help` stays quick

    if path is None or not torch.cuda.is_available():
        return values[0]
    file = Path(path).expanduser() / "manifest.json"
    images = read_object(file)["count"] if file.is_file() else 0
    return values[1 + (images >= MANY_IMAGES)]


OmegaConf.register_new_resolver("by_size", choose_by_size)
# conf/hydra/sweeper/search.yaml uses this resolver for the direction of the search.
OmegaConf.register_new_resolver("direction_of", find_direction)
# Store the schemas under the names by which the primary files in conf/ include them.
for name, kind in SCHEMAS.items():
    ConfigStore.instance().store(name=f"{name}_schema", node=make_mutable_schema(kind))


class Composed(NamedTuple):
    """A checked configuration, with the files of conf/ and the overrides from which it was
    composed."""

    cfg: Any
    """The `TrainConfig` or `PrecomputeConfig`, resolved and frozen."""
    choices: dict[str, str]
    """Configuration group, such as model -> the chosen file of conf/<group>/."""
    overrides: list[str]
    """Overrides of the command line, such as `batch_size=32`, with secrets redacted."""
    source: dict[str, Any]
    """The composed configuration as nested dicts, for files and logs: interpolations such as
    ${seed} stay unresolved, and secrets are redacted."""


def compose(overrides: Sequence[str] = (), config_name: str = "train") -> Composed:
    """Composes and checks a configuration in the same way as the command line does; for scripts,
    notebooks and tests.

    `config_name` is a key of `SCHEMAS`. Any mistake in `overrides` raises a UserError whose
    message names key, value and fix.
    """
    words = list(overrides)
    refuse_words(words)
    try:
        with initialize_config_dir(str(CONF_FOLDER), version_base="1.3"):
            all_overrides = [*map(quote, words), *build.admit_extensions(words)]
            full = hydra_compose(config_name, overrides=all_overrides, return_hydra_config=True)
        source = OmegaConf.masked_copy(full, [str(key) for key in full if key != "hydra"])
        return resolve_config(source, full.hydra.runtime.choices, words)
    except Exception as error:
        if not is_library_error(error):
            raise
        raise UserError(explain(error, words, SCHEMAS[config_name])) from error


def is_library_error(error: BaseException) -> bool:
    """Says whether the class of an error belongs to Hydra or OmegaConf, or code of these libraries
    raised the error."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    in_library = frame.f_globals.get("__name__", "").startswith(("hydra.", "omegaconf."))
    return in_library or isinstance(error, HydraException | OmegaConfBaseException)


def compose_from_hydra(source: DictConfig) -> Composed:
    """Checks and returns the configuration that `hydra.main` composed. UserError for an invalid
    value, and for a path in the configuration that does not exist or lacks the expected files (see
    `refuse_paths`)."""
    choices = HydraConfig.get().runtime.choices
    composed = resolve_config(source, choices, list_hydra_words())
    refuse_paths(composed.cfg)
    return composed


def list_hydra_words() -> Any:
    """Lists the overrides of the configuration that `hydra.main` composed, as they were typed: the
    list of OmegaConf has the values of variables in the place of words such as ${oc.env:HOME}."""
    return OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)


def resolve_config(
    source: DictConfig, choices: Mapping[str, Any], overrides: list[str]
) -> Composed:
    """Resolves the interpolations of a configuration, checks it and turns it into a frozen
    dataclass. UserError for an invalid value, if the command gives the length of a run twice, and
    if a file sets `extensions`: only the command line or the environment may name extensions."""
    kind = TrainConfig if "model" in source else PrecomputeConfig
    named = build.find_extension_names(overrides)
    from_file = [name for name in source.get("extensions") or [] if name not in named]
    if from_file:
        raise UserError(
            f"extensions={from_file} comes from a file, and only the command itself may say whose "
            f"code it runs; put extensions=[{','.join(from_file)}] on the command line, or set "
            f"{build.EXTENSIONS_VARIABLE}."
        )
    source["extensions"] = named
    if kind is TrainConfig:
        # Let the command's word for the length of a run win over those of files. A word such as
        # epochs=null says no length.
        keys = ("total_samples", "epochs", "budget_minutes")
        words = [find_given_word(key, overrides) for key in keys]
        given = [word for word in words if "=" in word and not word.endswith("=null")]
        if len(given) > 1:
            raise UserError(f"{' and '.join(given)} both say how long the run is; give one.")
        for key in keys[1:]:
            if given and key not in given[0]:
                source[key] = None
        # Record the shift of the times of samples, as later commands know no objective.
        sampling = source["sampling"]
        if sampling["shift"] is None:
            shift = (source["objective"] or {}).get("timestep_shift")
            # Leave it to the objective to refuse a value of its key.
            sampling["shift"] = shift if is_shift(shift) else 1.0
    cfg = apply_schema(kind, source, overrides)
    cfg.check()
    files = {str(group): str(file) for group, file in choices.items() if "hydra/" not in str(group)}
    return Composed(
        cfg, files, redact_words(overrides), redact(OmegaConf.to_container(source, resolve=False))
    )


def refuse_strange_numbers(node: Any) -> None:
    """Raises UserError if nested dicts and lists contain NaN or infinity, which a later check of a
    range may let pass, or an integer beyond 64 bits."""
    for key, value in list_nodes(node):
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{key}={value} is not finite; give a finite number.")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise UserError(
                f"{key}={str(value)[:40]} does not fit into 64 bits; give a smaller number."
            )


@contextmanager
def report_user_errors(config_name: str = "train") -> Iterator[None]:
    """If the `with` block raises a UserError, prints the error's message and exits with code 1; at
    Ctrl-C prints a line and exits with code 130. If the command cannot write to stdout or stderr,
    it continues.

    Two other kinds of exceptions also become a message: those of Hydra and OmegaConf, and those
    that mean that the machine has run out of memory, disk space or threads. Any other exception is
    a bug and keeps its traceback. With FASTLATENT_TRACEBACK=1 in the environment, every exception
    but Ctrl-C keeps its traceback. `config_name` is a key of `SCHEMAS`: the keys of that
    configuration are those that a message suggests.
    """
    with tolerate_broken_output():
        try:
            yield
        except KeyboardInterrupt:
            print(f"\n{STOPPED}", file=sys.stderr)
            sys.exit(130)
        except Exception as error:
            message = describe_failure(error, config_name)
            if message is None or os.environ.get("FASTLATENT_TRACEBACK") == "1":
                raise
            print(f"error: {escape_unprintable(redact_text(message))}", file=sys.stderr)
            sys.exit(1)


def describe_failure(error: Exception, config_name: str = "train") -> str | None:
    """Returns the message for the user about an exception; None if the exception is a bug, which
    needs its traceback. `config_name` is a key of `SCHEMAS`."""
    # Know Optuna's error by its words: it has no class of its own, and `hydra/launcher` may run the
    # trials in other processes, so that this one knows no trial that ended.
    if str(error) == "No trials are completed yet.":
        return "every trial of the sweep failed; the lines above say why."
    machine_fault = describe_machine_fault(error)
    if machine_fault is None and is_library_error(error):
        return explain(error, sys.argv[1:], SCHEMAS[config_name])
    return str(error) if isinstance(error, UserError) else machine_fault


Words = TypeVar("Words")


def parse_words(schema: type[Words], words: list[str], help_text: str) -> Words:
    """Parses the words `key=value` of a command that does not use Hydra, and returns them as an
    object of the frozen dataclass `schema`. If `--help` is one of the words, prints `help_text` and
    the keys, and exits.

    Every such command also accepts the key `extensions=[…]`, a list of packages with a user's own
    models and encoders.
    """
    if "-h" in words or "--help" in words:
        print(
            f"{format_help(help_text, schema())}\n{build.EXTENSIONS_KEY}=[]  Packages of your own"
        )
        sys.exit(0)

    # If the user types another trainer's name for a key, such as cfg_scale, refuse it and name the
    # command's own key, guidance. Leave out names that the command itself has as keys.
    keys = {field.name for field in fields(cast(Any, schema))}
    foreign = {
        foreign_key: spelling
        for foreign_key, spelling in list_foreign("drawing").items()
        if spelling.partition("=")[0] in keys - {foreign_key}
    }
    refuse_form(words, foreign)
    # Take a prompt as it was typed, with no grammar, unless it is a list of prompts.
    as_typed = re.compile(r"prompt=(?!\[.*\]$)")
    prompts = [word for word in words if "prompt" in keys and as_typed.match(word)]
    words = [word for word in words if word not in prompts]
    refuse_foreign(words, foreign)

    # precompute_latents.py needs two words to name an encoder's folder, encoder=local and
    # encoder.path=<folder>. Accept both words here and turn them into encoder=<folder>, the only
    # key for it in these commands.
    if "encoder" in keys:
        words = [
            re.sub("^encoder[.]path=", "encoder=", word)
            for word in words
            if word != "encoder=local"
        ]
    build.admit_extensions(words)

    values = OmegaConf.create({})
    for word in words:
        if word.partition("=")[0] == build.EXTENSIONS_KEY:
            continue
        try:
            values.merge_with_dotlist([word])
        except Exception as error:  # replaced, because OmegaConf's message does not name the word
            raise UserError(describe_unreadable(word)) from error
    cfg = apply_schema(schema, values, words)
    if prompts:
        cfg = replace(cast(Any, cfg), prompt=prompts[-1].partition("=")[2])
    return cfg


def apply_schema(schema: type[Words], values: Any, words: list[str]) -> Words:
    """Makes an object of the frozen dataclass `schema` from a mapping; missing keys get the
    dataclass's defaults.

    A key that the dataclass lacks, or a value of another type, raises a UserError. Its message
    quotes the word of `words`, the command line, that set the key.
    """
    node = OmegaConf.create(values)
    try:
        plain = OmegaConf.to_container(node, resolve=True)
        refuse_strange_numbers(plain)
        merged = OmegaConf.merge(make_mutable_schema(schema), cast("dict[str, Any]", plain))
        return cast(Words, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise UserError(explain(error, words, schema)) from error


def list_groups(config_name: str) -> dict[str, str]:
    """Returns group of configuration files that conf/<config_name>.yaml takes -> its default."""
    entries = parse_yaml((CONF_FOLDER / f"{config_name}.yaml").read_text())["defaults"]
    chosen = [entry for entry in entries if isinstance(entry, dict)]
    return {k: str(v or "null") for entry in chosen for k, v in entry.items() if " " not in k}


def to_yaml(node: Any) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(node))


def parse_yaml(text: str) -> Any:
    """Parses YAML into dicts and lists, and leaves interpolations such as `${seed}` as text."""
    return OmegaConf.to_container(OmegaConf.create(text), resolve=False)


def read_config(file: Path) -> dict[str, Any]:
    """Reads a YAML configuration into dicts and lists. UserError if the file holds no
    configuration, OSError if it cannot be read."""
    try:
        content = parse_yaml(file.read_text())
    except (OmegaConfBaseException, YAMLError, ValueError, RecursionError) as error:
        raise UserError(
            f"{file} cannot be read as YAML ({' '.join(str(error).split())[:300]}); restore it."
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"{file} holds no configuration; restore it.")
    return content
