"""Composing the configuration, and one clear sentence for every way to get it wrong.

The spine is typed by `schema.py`. Components (model, data, objective, optim, logger, encoder) are
plain yaml with a `_target_`, checked by `build.py` against the target's own signature.
"""

from __future__ import annotations

import math
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
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

from common.errors import UserError, describe_machine_fault
from common.terminal import tolerate_broken_output
from common.text import escape_unprintable
from training.config import build
from training.config.explain import explain, flatten_tree
from training.config.schema import PrecomputeConfig, SamplingConfig, TrainConfig
from training.config.secrets import redact, redact_text, redact_words
from training.config.words import (
    CONF_FOLDER,
    FOREIGN_DRAWING_KEYS,
    describe_unreadable,
    quote,
    refuse_foreign,
    refuse_form,
    refuse_words,
    update_targets,
)

SCHEMAS = {"train": TrainConfig, "precompute_latents": PrecomputeConfig}
"""Name of a primary file in conf/ -> what it is checked against."""
LATENT_SET_LOADERS = ("data.resident.ResidentLatents", "data.streamed.StreamedLatents")
"""Loaders whose `path` is a latent set."""


def make_mutable_schema(kind: type) -> DictConfig:
    """The schema of a frozen dataclass, open for merging; `OmegaConf.to_object` gives the frozen
    object."""
    schema = OmegaConf.structured(kind)
    todo = [schema]
    for node in todo:
        OmegaConf.set_readonly(node, False)
        todo += [child for child in node.values() if isinstance(child, DictConfig)]
    return schema


for name, kind in SCHEMAS.items():  # Hydra's primary files start from them
    ConfigStore.instance().store(name=f"{name}_schema", node=make_mutable_schema(kind))


class Composed(NamedTuple):
    """A checked configuration and where it came from."""

    cfg: Any
    """`TrainConfig` or `PrecomputeConfig`; resolved and frozen."""
    choices: dict[str, str]
    """Group -> chosen file."""
    overrides: list[str]
    source: dict[str, Any]
    """As composed, with interpolations unresolved and secrets redacted: fit to be written down."""


def compose(overrides: list[str] | None = None, config_name: str = "train") -> Composed:
    """Composes and checks a configuration as the command line would; for scripts, notebooks and
    tests.

    ValueError, in one sentence with key, value and fix, for every mistake in `overrides`.
    """
    words = list(overrides or [])
    refuse_words(words)
    try:
        with initialize_config_dir(str(CONF_FOLDER), version_base="1.3"):
            read = [*map(quote, words), *build.admit_extensions(words)]
            full = hydra_compose(config_name, overrides=read, return_hydra_config=True)
        source = OmegaConf.masked_copy(full, [str(key) for key in full if key != "hydra"])
        return resolve_config(source, full.hydra.runtime.choices, words)
    except Exception as error:
        if not is_library_error(error):
            raise
        raise UserError(explain(error, words, SCHEMAS[config_name])) from error


def is_library_error(error: BaseException) -> bool:
    """Whether Hydra or OmegaConf refused a word, or broke on one."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    broke = frame.f_globals.get("__name__", "").startswith(("hydra.", "omegaconf."))
    return broke or isinstance(error, HydraException | OmegaConfBaseException)


def compose_from_hydra(source: DictConfig) -> Composed:
    """The same for a function that `hydra.main` called; ValueError, too, for a path that it cannot
    start with."""
    composed = resolve_config(
        source, HydraConfig.get().runtime.choices, list(HydraConfig.get().overrides.task)
    )
    refuse_paths(composed.cfg)
    return composed


def resolve_config(
    source: DictConfig, choices: Mapping[str, Any], overrides: list[str]
) -> Composed:
    """Resolves, types, freezes and checks; ValueError for extensions that a file names."""
    kind = TrainConfig if "model" in source else PrecomputeConfig
    named = build.find_extension_names(overrides)
    unasked = [name for name in source.get("extensions") or [] if name not in named]
    if unasked:
        raise UserError(
            f"extensions={unasked} comes from a file, and only the command itself may say whose "
            f"code it runs; put extensions=[{','.join(unasked)}] on the command line, or set "
            f"{build.EXTENSIONS_VARIABLE}."
        )
    source["extensions"] = named
    cfg = apply_schema(kind, source, overrides)
    cfg.check()
    chosen = {str(k): str(v) for k, v in choices.items() if "hydra/" not in str(k)}
    return Composed(
        cfg, chosen, redact_words(overrides), redact(OmegaConf.to_container(source, resolve=False))
    )


def refuse_strange_numbers(node: Any) -> None:
    """ValueError for NaN and infinity, which pass the comparisons of a check, and for whole numbers
    beyond 64 bits."""
    for key, value in flatten_tree(node):
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{key}={value} is no finite number; give one.")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise UserError(
                f"{key}={str(value)[:40]} does not fit into 64 bits; give a smaller number."
            )


@contextmanager
def report_user_errors() -> Iterator[None]:
    """Turns a mistake in the configuration or the input into one message and exit code 1.

    What we tell users is a UserError; any other exception is ours to mend and keeps its traceback,
    but for those of a machine that has no room left.
    FASTLATENT_TRACEBACK=1 keeps all of them. Inside are functions that `hydra.main` calls, too, so
    Hydra's own exceptions are explained here as well. What is printed inside may get lost, and ends
    nothing.
    """
    with tolerate_broken_output():
        try:
            yield
        except Exception as error:
            message = describe_failure(error)
            if message is None or os.environ.get("FASTLATENT_TRACEBACK") == "1":
                raise
            print(f"error: {escape_unprintable(redact_text(message))}", file=sys.stderr)
            sys.exit(1)


def describe_failure(error: Exception) -> str | None:
    """What a user is told of an exception; None for one that is ours to mend."""
    by_machine = describe_machine_fault(error)
    if by_machine is None and is_library_error(error):
        schema = PrecomputeConfig if "precompute" in Path(sys.argv[0]).name else TrainConfig
        return explain(error, sys.argv[1:], schema)
    return str(error) if isinstance(error, UserError) else by_machine


Words = TypeVar("Words")


def parse_words(schema: type[Words], words: list[str], help_text: str) -> Words:
    """A frozen dataclass from `key=value` words, for commands that compose nothing. `--help` prints
    and exits.

    Every such command takes `extensions=[…]` too, for models and encoders of the user's own.
    """
    if "-h" in words or "--help" in words:
        keys = to_yaml(OmegaConf.structured(schema))
        print(f"{help_text.strip()}\n\nKeys:\n{keys}{build.EXTENSIONS_KEY}: []")
        sys.exit(0)
    own = {field.name for field in fields(cast(Any, schema))}
    foreign = {
        theirs: ours
        for theirs, ours in FOREIGN_DRAWING_KEYS.items()
        if ours.partition("=")[0] in own - {theirs}
    }
    refuse_form(words, foreign)
    refuse_foreign(words, foreign)
    if "encoder" in own:  # the folder itself, which precompute_latents.py is told in two words
        words = [
            re.sub("^encoder[.]path=", "encoder=", word)
            for word in words
            if word != "encoder=local"
        ]
    build.admit_extensions(words)

    given = OmegaConf.create({})
    for word in words:
        if word.partition("=")[0] == build.EXTENSIONS_KEY:
            continue
        try:
            given.merge_with_dotlist([word])
        except Exception as error:  # of YAML and OmegaConf; they name no word
            raise UserError(describe_unreadable(word)) from error
    return apply_schema(schema, given, words)


def apply_schema(schema: type[Words], given: Any, words: list[str]) -> Words:
    """A frozen dataclass with the values of a mapping; the rest are its defaults.

    ValueError, in one sentence, for a key that the schema lacks or a value of another type; `words`
    are what was typed.
    """
    node = given if isinstance(given, DictConfig) else OmegaConf.create(dict(given))
    try:
        values = OmegaConf.to_container(node, resolve=True)
        refuse_strange_numbers(values)
        merged = OmegaConf.merge(make_mutable_schema(schema), cast("dict[str, Any]", values))
        return cast(Words, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise UserError(explain(error, words, schema)) from error


def to_yaml(node: Any) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(node))


def parse_yaml(text: str) -> Any:
    """Plain containers, with interpolations as they are written."""
    return OmegaConf.to_container(OmegaConf.create(text), resolve=False)


def read_config(file: Path) -> dict[str, Any]:
    """Reads a YAML file as plain containers, with the present names of classes; ValueError if it
    holds no configuration, OSError if it cannot be read."""
    try:
        found = parse_yaml(file.read_text())
    except (OmegaConfBaseException, YAMLError, ValueError, RecursionError) as error:
        raise UserError(
            f"{file} cannot be read as YAML ({' '.join(str(error).split())[:300]}); restore it."
        ) from error
    if not isinstance(found, dict):
        raise UserError(f"{file} holds no configuration; restore it.")
    return update_targets(found)


def refuse_paths(cfg: TrainConfig | PrecomputeConfig) -> None:
    """ValueError for a path of a run, or of an encoding job, that is not what it must be."""
    if isinstance(cfg, PrecomputeConfig):
        refuse_missing("source", cfg.source, "name a folder of images, or tars")
        refuse_file("out", cfg.out)
        return
    refuse_file("run_dir", cfg.run_dir)
    if cfg.resume not in ("auto", "never"):
        remedy = (
            "name a run, a checkpoint such as runs/<name>/checkpoints/step-400, or use auto or "
            "never"
        )
        refuse_missing("resume", cfg.resume, remedy, "state.json", "checkpoints", "step-*")
    started = cfg.run_dir and any((Path(cfg.run_dir).expanduser() / "checkpoints").glob("step-*"))
    # a run that goes on needs them no more
    refuse_no_weights("init_from", None if started else cfg.init_from)
    if cfg.fd_every:
        refuse_missing("fd.reference", cfg.fd.reference, "name a folder of images")
        refuse_missing("fd.inception", cfg.fd.inception, "name the file of its weights")
    data = cfg.data if isinstance(cfg.data, dict) else {}
    if data.get("_target_") in LATENT_SET_LOADERS:
        refuse_no_set("data.path", data.get("path"))


def refuse_drawing(cfg: Any) -> None:
    """ValueError for settings or a path that nothing can be drawn with; `cfg` is a `DrawConfig`."""
    cfg.check()
    names = [
        field.name for field in fields(SamplingConfig) if getattr(cfg, field.name, None) is not None
    ]
    SamplingConfig(**{name: getattr(cfg, name) for name in names}).check(prefix="")
    refuse_no_weights("weights" if cfg.weights else "run_dir", cfg.weights or cfg.run_dir)


def refuse_no_weights(key: str, path: str | None) -> None:
    """ValueError for a path at which there can be no weights."""
    names = () if str(path).endswith(".safetensors") else ("checkpoints", "state.json", "step-*")
    refuse_missing(
        key, path, "name a run that has a checkpoint, a checkpoint, or a .safetensors file", *names
    )


def refuse_no_set(key: str, path: Any) -> None:
    """ValueError for a local path at which there is no latent set."""
    job = f"python precompute_latents.py source=<images> out={path}"
    refuse_missing(
        key,
        path,
        f"name a folder that `{job}` has finished (the same command continues)",
        "manifest.json",
    )


def refuse_missing(key: str, path: Any, remedy: str, *names: str) -> None:
    """ValueError for a local path at which there is nothing, or a folder without any entry of these
    names."""
    if not isinstance(path, str) or "://" in path or path.startswith("pipe:"):
        return
    place = os.path.expanduser(path)
    if not os.path.exists(place):  # Path.exists raises where a name is too long
        raise UserError(f"{key}={path} does not exist; {remedy}.")
    if names and not any(any(Path(place).glob(name)) for name in names):
        raise UserError(f"{key}={path} has no {' and no '.join(names)}; {remedy}.")


def refuse_file(key: str, path: str | None) -> None:
    """ValueError for a folder to write to that is a file, or lies below one."""
    folder = Path(os.path.expanduser(path or "."))
    if str(folder).startswith("~"):
        raise UserError(f"{key}={path}: there is no such user; write the whole path.")
    if any(len(os.fsencode(name)) > 255 for name in folder.parts):
        raise UserError(
            f"{key}={path} cannot be a folder, for a name in it has over 255 bytes; choose a "
            "shorter one."
        )
    for place in (folder, *folder.parents):
        if os.path.exists(place) and not os.path.isdir(place):
            raise UserError(
                f"{key}={path} cannot be a folder, for {place} is a file; choose another."
            )
