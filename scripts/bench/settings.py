"""What is measured: sizes that are stated once, so that results can be compared."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, fields, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from common.errors import UserError
from training.config.compose import compose, from_words

if TYPE_CHECKING:
    import torch

LATENTS = [
    "data=synthetic",
    "data.channels=4",
    "data.height=32",
    "data.width=32",
    "data.count=50000",
]
TINY_MODEL = ["model=ssd_mlp_xs", "model.dim=64", "model.depth=2", "model.head_dim=32"]
TINY_LATENTS = [
    "data=synthetic",
    "data.channels=4",
    "data.height=8",
    "data.width=8",
    "data.count=256",
]
SETTINGS = {
    "tiny": [*TINY_MODEL, *TINY_LATENTS, "data.num_classes=10", "batch_size=16"],
    "s256": ["model=ssd_mlp_s", *LATENTS, "batch_size=256"],
    "s32": ["model=ssd_mlp_s", *LATENTS, "batch_size=32"],
    "b256": ["model=ssd_mlp_b", *LATENTS, "batch_size=256"],
}
"""Name -> overrides. s: 33 M parameters; b: 126 M (the size of DiT-B/2); 32×32×4 latents, 50,000
samples."""
CONSTANT = ["schedule.kind=constant", "schedule.warmup_samples=0"]
"""So that the short stretches that are compared train at the full rate."""
DURATIONS = {"tiny": (2, 3), "s256": (8, 5), "s32": (20, 5), "b256": (4, 5)}
"""Name -> steps in a repeat, repeats."""
SCRATCH = "tmp"
AGAIN = (None, "all", "failed")


@dataclass(frozen=True)
class BenchConfig:
    """Keys that all measuring commands have; 0 and null mean the setting's own."""

    setting: str | None = None
    """tiny, s256, s32 or b256; null: s256 on a GPU, tiny without one."""
    steps: int = 0
    """Steps in one repeat."""
    repeats: int = 0
    loss_steps: int = 0
    """Steps after which final losses are compared; 0: as many as one repeat has."""
    inductor: bool = True
    """False leaves out rows that compile with Inductor, which takes minutes on a CPU."""
    name: str | None = None
    """What the results are called; null: <command>_<setting>."""
    out: str = "bench"
    """The folder that keeps the results."""
    again: str | None = None
    """all, or failed: measures rows that this code has measured on this machine before, or that
    failed then."""
    until: float = inf
    """Unix time by which a row must end to be begun; `bench gpu` sets it."""
    limit_s: float = inf
    """Seconds after which a row is ended, from its beginning; `bench gpu` sets it, and ends it."""


Keys = TypeVar("Keys")
Config = TypeVar("Config", bound=BenchConfig)


def own_and_others(schema: type[Keys], words: list[str], help_text: str) -> tuple[Keys, list[str]]:
    """Reads the words that set a key of `schema`, and returns the others, which are overrides of
    the training's."""
    own = {f.name for f in fields(schema)}  # pyright: ignore[reportArgumentType]
    others = [word for word in words if "=" in word and word.partition("=")[0] not in own]
    return from_words(schema, [word for word in words if word not in others], help_text), others


def parse(
    schema: type[Config], command: str, words: list[str], help_text: str
) -> tuple[Config, list[str]]:
    """The command's own keys, completed from the setting, and the training overrides, the setting's
    first.

    A group that the words choose (data=digits) replaces what the setting says of it.
    """
    import torch

    cfg, theirs = own_and_others(schema, words, help_text)
    setting = cfg.setting or ("s256" if torch.cuda.is_available() else "tiny")
    if setting not in SETTINGS:
        raise UserError(
            f"setting={setting}: there is no such setting; choose one of {', '.join(SETTINGS)}."
        )
    for key in ("steps", "repeats", "loss_steps"):
        if getattr(cfg, key) < 0:
            raise UserError(
                f"{key}={getattr(cfg, key)} must be at least 1, or 0 for the setting's own."
            )
    if cfg.again not in AGAIN:
        raise UserError(f"again={cfg.again}: choose all, failed, or leave it out.")
    steps = cfg.steps or DURATIONS[setting][0]
    cfg = replace(
        cfg,
        setting=setting,
        steps=steps,
        repeats=cfg.repeats or DURATIONS[setting][1],
        loss_steps=cfg.loss_steps or steps,
        name=cfg.name or f"{command}_{setting}",
    )
    chosen = tuple(
        f"{word.partition('=')[0]}{mark}"
        for word in theirs
        if "." not in word
        for mark in ("=", ".")
    )
    # model=… brings its own model.dim
    kept = [word for word in SETTINGS[setting] if not word.startswith(chosen)]
    overrides = [*kept, *CONSTANT, *theirs]
    compose(overrides)  # a mistake is told before anything is measured
    return cfg, overrides


def scratch(cfg: BenchConfig) -> Path:
    """A new folder for what a benchmark writes, on the disk of its results; the queue clears what
    is left there."""
    parent = Path(cfg.out).expanduser() / SCRATCH
    parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(dir=parent))


def device_of(overrides: list[str]) -> torch.device:
    """The device on which a run with these overrides would train."""
    from training.environment import pick_device

    return pick_device(compose(overrides).cfg.runtime.device.value)
