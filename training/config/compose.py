"""Composing the configuration, and one clear sentence for every way to get it wrong.

The spine is typed by `schema.py`. Components (model, data, objective, optim, logger, encoder) are plain yaml with a
`_target_`, checked by `build.py` against the target's own signature.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import hydra
import omegaconf
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from accel.text import printable
from training.config import extensions
from training.config.precompute import PrecomputeConfig
from training.config.schema import TrainConfig
from training.config.secrets import redact_words, redacted, scrubbed

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
SPELLINGS = {
    "data=resident (or digits, synthetic): the data group chooses the loader": "training.loader",
    "data=resident data.path=<folder>: latents are made once by precompute_latents.py": "data.use_latent",
    "accumulation_steps=<n>": "gradient_accumulation_steps grad_accum_steps training.gradient_accumulation_steps",
    "runtime.precision=bf16": "use_amp amp mixed_precision precision training.mixed_precision",
    "runtime.compile=true": "compile use_compile torch_compile",
    "runtime.gradient_checkpointing=true": "gradient_checkpointing use_checkpoint",
    "runtime.tf32=true": "allow_tf32 tf32",
    "runtime.device=cuda": "device",
    "total_samples=<epochs times samples in the set>": "epochs num_epochs",
    "total_samples=<steps times batch_size>": "steps max_steps max_train_steps",
    "optim.lr=<rate>": "lr learning_rate",
    "optim.weight_decay=<rate>": "weight_decay",
    "batch_size=<n> (it is the global one)": "global_batch_size train_batch_size",
    "ema.half_life_samples=<n>": "ema_decay",
    "save_every=<steps>": "ckpt_every",
    "run_dir=<folder>": "output_dir results_dir",
    "logger=wandb": "use_wandb report_to",
}
"""Our spelling -> keys that people know for it from guides and other trainers."""
NO_NAME = re.compile(r"null|true|false|[-+]?(inf|nan|[\d.][\d_.e+-]*)", re.IGNORECASE)
"""What Hydra takes for a value of another type where it expects the name of a file."""
MOST_BRACKETS = 100
FOREIGN = {theirs: ours for ours, keys in SPELLINGS.items() for theirs in keys.split()}


def unlocked(kind: type) -> DictConfig:
    """The schema of a frozen dataclass, open for merging; `OmegaConf.to_object` gives the frozen object."""

    def unlock(node: DictConfig, schema: type) -> None:
        OmegaConf.set_readonly(node, False)
        for f in fields(schema):
            if isinstance(f.default_factory, type) and is_dataclass(f.default_factory):
                unlock(node[f.name], f.default_factory)

    schema = OmegaConf.structured(kind)
    unlock(schema, kind)
    return schema


def register() -> None:
    """Makes the schemas known to Hydra; the primary yaml files start from them."""
    store = ConfigStore.instance()
    store.store(name="train_schema", node=unlocked(TrainConfig))
    store.store(name="precompute_schema", node=unlocked(PrecomputeConfig))


register()


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
    """Composes and checks a configuration as the command line would; for scripts, notebooks and tests.

    ValueError, in one sentence with key, value and fix, for every mistake in `overrides`.
    """
    words = list(overrides or [])
    refuse_words(words)
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            full = hydra_compose(config_name, overrides=[*words, *extensions.admit(words)], return_hydra_config=True)
        source = OmegaConf.masked_copy(full, [str(key) for key in full if key != "hydra"])
        return settle(source, full.hydra.runtime.choices, words)
    except Exception as error:
        if not of_library(error):
            raise
        raise ValueError(explain(error, words, config_name)) from error


def of_library(error: BaseException) -> bool:
    """Whether Hydra or OmegaConf refused a word, or broke on one."""
    origin = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    broke = any(origin.is_relative_to(Path(str(library.__file__)).parent) for library in (hydra, omegaconf))
    return broke or isinstance(error, HydraException | OmegaConfBaseException)


def composed_by_hydra(source: DictConfig) -> Composed:
    """The same for a function that `hydra.main` called."""
    return settle(source, HydraConfig.get().runtime.choices, list(HydraConfig.get().overrides.task))


def settle(source: DictConfig, choices: Mapping[str, Any], overrides: list[str]) -> Composed:
    """Refuses unknown keys, resolves, types, freezes and checks."""
    kind = TrainConfig if "model" in source else PrecomputeConfig
    named = extensions.named_by(overrides)
    if unasked := [name for name in source.get("extensions") or [] if name not in named]:
        raise ValueError(
            f"extensions={unasked} comes from a file, and only the command itself may say whose code it runs; put "
            f"extensions=[{','.join(unasked)}] on the command line, or set {extensions.ENVIRONMENT}."
        )
    source["extensions"] = named
    cfg = typed(kind, source, overrides)
    cfg.check()
    chosen = {str(k): str(v) for k, v in choices.items() if "hydra/" not in str(k)}
    return Composed(cfg, chosen, redact_words(overrides), redacted(OmegaConf.to_container(source, resolve=False)))


def refuse_unknown(node: DictConfig, schema: type, prefix: str = "") -> None:
    """ValueError for a key that the schema lacks: `+junk=1` gets past Hydra, not past this."""
    known = {f.name: f for f in fields(schema)}
    for name in node:
        if name not in known:
            raise ValueError(
                f"{prefix}{name}={node[name]}: there is no such key; {nearest(str(name), list(known), prefix)}."
            )
        nested = known[str(name)].default_factory
        if isinstance(nested, type) and is_dataclass(nested):
            refuse_unknown(node[name], nested, f"{prefix}{name}.")


def refuse_words(overrides: list[str]) -> None:
    """ValueError for a spelling of other trainers, for a group without a choice, and for what Hydra breaks on."""
    for override in overrides:
        key, equals, value = override.lstrip("+~").partition("=")
        if not override.strip():
            raise ValueError("one word of the command is empty; give key=value.")
        refuse_deep(override)
        nameless = NO_NAME.fullmatch(value) and not (key == "experiment" and value == "null")
        if nameless and key and "." not in key and (CONF / key).is_dir():
            options = sorted(file.stem for file in (CONF / key).glob("*.yaml"))
            raise ValueError(f"{key}={value}: a run needs one; choose one of {', '.join(options)}.")
        if equals and key in FOREIGN:
            raise ValueError(f"{key}={value} is not spelled so here; use {FOREIGN[key]}.")


def refuse_deep(word: str) -> None:
    """ValueError for brackets inside brackets that no key has; Hydra and OmegaConf recurse into each."""
    if word.count("[") + word.count("{") > MOST_BRACKETS:
        raise ValueError(f"{word[:60]}…: more than {MOST_BRACKETS} brackets; no key takes so many.")


def refuse_not_finite(node: Any) -> None:
    """ValueError for NaN and infinity, which no key takes; a comparison in a check lets NaN pass."""
    todo = [("", OmegaConf.to_container(node, resolve=True))]
    while todo:
        key, value = todo.pop()
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key}={value} is no finite number; give one.")
        children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        todo += [(f"{key}.{name}".lstrip("."), child) for name, child in children]


def as_yaml(node: Any) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(node))


def from_yaml(text: str) -> Any:
    """Plain containers, with interpolations as they are written."""
    return OmegaConf.to_container(OmegaConf.create(text), resolve=False)


@contextmanager
def one_sentence() -> Iterator[None]:
    """Turns a mistake in the configuration or the input into one message and exit code 1.

    What we tell users is a ValueError from a `raise` of our own; any other exception is ours to mend and keeps its
    traceback. FASTLATENT_TRACEBACK=1 keeps all of them. Inside are functions that `hydra.main` calls, too, so Hydra's
    own exceptions are explained here as well.
    """
    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        origin = traceback.extract_tb(error.__traceback__)[-1]
        ours = Path(origin.filename).is_relative_to(ROOT) and "site-packages" not in Path(origin.filename).parts
        deliberate = ours and (origin.line or "").startswith("raise ")
        library = of_library(error)
        if os.environ.get("FASTLATENT_TRACEBACK") == "1" or not (library or deliberate):
            raise
        program = "precompute_latents" if "precompute" in Path(sys.argv[0]).name else "train"
        message = scrubbed(explain(error, sys.argv[1:], program) if library else str(error))
        print(f"error: {printable(message)}", file=sys.stderr)
        sys.exit(1)


def explain(error: Exception, words: list[str], config_name: str) -> str:
    """Hydra's or OmegaConf's message on the overrides `words`, as key, value and fix."""
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    text, detail = str(error).strip(), str(cause).strip().splitlines()[0]
    key = getattr(cause, "full_key", None) or ""

    def as_given(key: str) -> str:
        """`key=value` as it was typed, or the key alone if it came from a file."""
        return next((word for word in reversed(words) if word.lstrip("+~").partition("=")[0] == key), key)

    if override := getattr(cause, "override", None):
        return not_read(str(override))
    if found := re.search(r"Could not find '([^']+)/([^'/]+)'", text):
        group, name = found.groups()
        options = [line.strip() for line in text.splitlines() if line.startswith("\t") and "=" not in line]
        return f"{group}={name}: there is no such file in conf/{group}; choose one of {', '.join(options)}."
    if found := re.match(r"Could not append to config. An item is already at '([^']+)'", text):
        return f"{as_given(found[1])}: the key is there already; leave out the +."
    if found := re.match(r"Could not override '([^']+)'", text):
        return f"{as_given(found[1])}: there is no such key; {nearest(found[1], known_keys(config_name))}"
    if found := re.search(r"Key '(\w+)' (?:is )?not in", f"{detail}\n{text}"):
        where = f" ({text.split(':')[0]})" if text.startswith("In ") else ""
        name = key or found[1]
        return f"{as_given(name)}: there is no such key; {nearest(name, known_keys(config_name))}{where}."
    if isinstance(cause, OmegaConfBaseException | OverflowError):
        return f"{as_given(key) or text.splitlines()[0]}: {detail.removesuffix('.')}."
    if isinstance(error, HydraException | OmegaConfBaseException):
        return " ".join(text.split())
    return f"{' '.join(words)}: these words cannot be read ({' '.join(text.split())}); `--help` lists all keys."


def not_read(word: str) -> str:
    """A sentence without the value, which may hold a secret between signs that no redaction expects."""
    name = word.partition("=")[0]
    return f"{name}: the word that begins so cannot be read; put the value into two kinds of quotes: {name}=\"'…'\"."


def nearest(name: str, known: list[str], prefix: str = "") -> str:
    """The fix for an unknown key: the one that was probably meant, or where to look."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {prefix}{close[0]}?" if close else "`--help` lists all keys"


def known_keys(config_name: str) -> list[str]:
    """All keys of the default configuration, dotted."""

    def walk(node: Any, prefix: str) -> Iterator[str]:
        for name, value in node.items():
            yield f"{prefix}{name}"
            if isinstance(value, dict):
                yield from walk(value, f"{prefix}{name}.")

    with initialize_config_dir(str(CONF), version_base="1.3"):
        default = OmegaConf.to_container(hydra_compose(config_name), resolve=False)
    return list(walk(default, ""))


Words = TypeVar("Words")


def from_words(schema: type[Words], words: list[str], help_text: str) -> Words:
    """A frozen dataclass from `key=value` words, for commands that compose nothing. `--help` prints and exits.

    Every such command takes `extensions=[…]` too, for models and encoders of the user's own.
    """
    if any(word in ("-h", "--help") for word in words):
        print(help_text.strip() + "\n\nKeys:\n" + as_yaml(OmegaConf.structured(schema)) + "extensions: []")
        sys.exit(0)
    for word in words:
        if "=" not in word:
            raise ValueError(f"{word} is not of the form key=value; `--help` lists the keys.")
        refuse_deep(word)
    extensions.admit(words)
    given = OmegaConf.create({})
    for word in words:
        if not word.startswith(f"{extensions.KEY}="):
            try:
                given.merge_with_dotlist([word])
            except Exception as error:  # of YAML and OmegaConf; they name no word
                raise ValueError(not_read(word)) from error
    return typed(schema, given, words)


def typed(schema: type[Words], given: Any, words: list[str]) -> Words:
    """A frozen dataclass with the values of a mapping; the rest are its defaults.

    ValueError, in one sentence, for a key that the schema lacks or a value of another type; `words` are what was typed.
    """
    node = given if isinstance(given, DictConfig) else OmegaConf.create(dict(given))
    refuse_unknown(node, schema)
    try:
        refuse_not_finite(node)
        return cast(Words, OmegaConf.to_object(OmegaConf.merge(unlocked(schema), node)))
    except (OmegaConfBaseException, OverflowError) as error:  # the latter: a whole number above all floats
        raise ValueError(explain(error, words, "train")) from error
