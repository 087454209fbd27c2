"""Paths that a command cannot start with, found before torch is imported.

Only what is plain without reading: whoever opens a file says what is wrong in it.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from training.config.precompute import PrecomputeConfig
from training.config.schema import SamplingConfig, TrainConfig

OF_SETS = ("data.resident.ResidentLatents", "data.streamed.StreamedLatents")
"""Loaders whose `path` is a latent set."""


def refuse_paths(cfg: TrainConfig | PrecomputeConfig) -> None:
    """ValueError for a path of a run, or of an encoding job, that is not what it must be."""
    if isinstance(cfg, PrecomputeConfig):
        refuse_missing("source", cfg.source, "name a folder of images, or tars")
        refuse_file("out", cfg.out)
        return
    refuse_file("run_dir", cfg.run_dir)
    if cfg.resume not in ("auto", "never") and not holds(cfg.resume, "manifest.json", "checkpoints"):
        raise ValueError(
            f"resume={cfg.resume} is no checkpoint; name one, such as runs/<name>/checkpoints/step-400, or use auto or "
            f"never."
        )
    refuse_no_weights("init_from", cfg.init_from)
    if cfg.fd_every:
        refuse_missing("fd.reference", cfg.fd.reference, "name a folder of images")
        refuse_missing("fd.inception", cfg.fd.inception, "name the file of its weights")
    data = cfg.data if isinstance(cfg.data, dict) else {}
    if data.get("_target_") in OF_SETS:
        refuse_no_set("data.path", data.get("path"))


def refuse_drawing(cfg: Any) -> None:
    """ValueError for settings or a path that nothing can be drawn with; `cfg` is a `DrawConfig`."""
    cfg.check()
    names = [field.name for field in fields(SamplingConfig) if getattr(cfg, field.name, None) is not None]
    SamplingConfig(**{name: getattr(cfg, name) for name in names}).check(prefix="")
    refuse_no_weights("weights" if cfg.weights else "run_dir", cfg.weights or cfg.run_dir)


def refuse_no_weights(key: str, path: str | None) -> None:
    """ValueError for a path at which there can be no weights."""
    if path is None or holds(path, "checkpoints", "manifest.json"):
        return
    if not path.endswith(".safetensors") or not Path(path).expanduser().is_file():
        raise ValueError(
            f"{key}={path} is neither a .safetensors file, a checkpoint, nor a run that has one; name the folder "
            f"in which `checkpoints` lies."
        )


def refuse_no_set(key: str, path: Any) -> None:
    """ValueError for a local path at which there is no latent set."""
    if isinstance(path, str) and is_local(path) and not holds(path, "manifest.json"):
        raise ValueError(
            f"{key}={path} has no manifest.json; name a folder that `python precompute_latents.py source=<images> "
            f"out={path}` has finished (the same command again continues)."
        )


def refuse_no_run(path: str, key: str = "") -> None:
    """ValueError for a path at which there is no run."""
    if not holds(path, "config.yaml"):
        raise ValueError(f"{key}{path} is no run folder: it has no config.yaml; name the run_dir of a run.")


def refuse_missing(key: str, path: str | None, remedy: str) -> None:
    """ValueError for a local path at which there is nothing."""
    if path is not None and is_local(path) and not Path(path).expanduser().exists():
        raise ValueError(f"{key}={path} is not there; {remedy}.")


def refuse_file(key: str, path: str | None) -> None:
    """ValueError for a folder to write to that is a file, or lies below one."""
    folder = Path(path or ".").expanduser()
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise ValueError(f"{key}={path} cannot be a folder, for {place} is a file; choose another.")


def is_local(path: str) -> bool:
    return "://" not in path and not path.startswith("pipe:")


def holds(path: str, *names: str) -> bool:
    """Whether `path` is a folder that has an entry of one of these names."""
    return any((Path(path).expanduser() / name).exists() for name in names)
