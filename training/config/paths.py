"""Paths that a command cannot start with, found before torch is imported.

Only what is plain without reading: whoever opens a file says what is wrong in it.
"""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from common.errors import UserError
from training.config.schema import PrecomputeConfig, SamplingConfig, TrainConfig

OF_SETS = ("data.resident.ResidentLatents", "data.streamed.StreamedLatents")
"""Loaders whose `path` is a latent set."""


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
    if data.get("_target_") in OF_SETS:
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
