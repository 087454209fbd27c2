"""Refuses paths of a configuration that do not exist, or lack the files that they should hold."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

from common.config.schema import PrecomputeConfig, SamplingConfig, TrainConfig
from common.config.words import ask_similar
from common.errors import UserError

MAX_SIBLINGS = 1000
"""Largest number of files of a folder among which a message looks for a similar name."""
LATENT_FILE = re.compile(
    r"[^/].*\.(npy|npz|pt|pth)|/latents\.npy|/.*_(features|labels)"
    r"|(?!/.*(_te(_outputs)?|statistics)\.\w+$)(.*\.safetensors|/.*\.npz)"
)
"""Matches the name of a file in which another tool stores latents, or with a slash before it that
of an entry of a folder of such files; encoding/foreign.py reads them."""
LATENT_SET_LOADERS = ("data.resident.ResidentLatents", "data.streamed.StreamedLatents")
"""`_target_` of each loader whose argument `path` is the folder or URL of a latent set."""


def refuse_paths(cfg: TrainConfig | PrecomputeConfig) -> None:
    """Raises UserError if a path in the configuration of a run or an encoding job does not exist
    or lacks the expected files, or if an output folder is a file."""
    if isinstance(cfg, PrecomputeConfig):
        refuse_missing("source", cfg.source, "name a folder of images, or tars")
        refuse_missing("held_out", cfg.held_out, "name a folder of images, or tars")
        refuse_missing("reuse", cfg.reuse, "name the out of an earlier command", "job.json")
        refuse_file("out", cfg.out)
        return
    refuse_file("run_dir", cfg.run_dir)
    if cfg.resume not in ("auto", "never"):
        remedy = (
            "name a run, a checkpoint such as runs/<name>/checkpoints/step-400, or use auto or "
            "never"
        )
        refuse_missing("resume", cfg.resume, remedy, "state.json", "checkpoints", "step-*")

    # Check `init_from` only for a new run, because a resumed run no longer needs it.
    started = cfg.run_dir and any((Path(cfg.run_dir).expanduser() / "checkpoints").glob("step-*"))
    refuse_no_weights("init_from", None if started else cfg.init_from)
    if cfg.fd_every:
        refuse_missing("fd.reference", cfg.fd.reference, "name a folder of images")
        refuse_missing("fd.inception", cfg.fd.inception, "name the file of its weights")
    data = cfg.data if isinstance(cfg.data, dict) else {}
    if data.get("_target_") in LATENT_SET_LOADERS:
        refuse_no_set("data.path", data.get("path"))


def refuse_drawing(cfg: Any) -> None:
    """Raises UserError for settings with which sampling is impossible, and for a path without
    weights; `cfg` is a `DrawConfig` of sampling/draw.py."""
    cfg.check()
    names = {field.name for field in fields(SamplingConfig)}
    given = {k: value for k, value in vars(cfg).items() if k in names and value is not None}
    SamplingConfig(**given).check(prefix="")
    refuse_no_weights(cfg.key, cfg.path)


def refuse_no_weights(key: str, path: str | None) -> None:
    """Raises UserError if a local `path` is neither a run with a checkpoint, nor a checkpoint, nor
    a .safetensors file. `key` is the configuration key that holds the path, for the message."""
    names = () if str(path).endswith(".safetensors") else ("checkpoints", "state.json", "step-*")
    refuse_missing(
        key, path, "name a run that has a checkpoint, a checkpoint, or a .safetensors file", *names
    )


def refuse_no_set(key: str, path: Any) -> None:
    """Raises UserError if a local `path` lacks the manifest.json of a finished latent set. `key`
    is the configuration key that holds the path, for the message."""
    place = Path(os.path.expanduser(str(path)))
    target = place.resolve()
    other = Path("latents", target.name if target.is_dir() else target.stem)
    is_job = (place / "job.json").exists() or other.resolve() == target

    # Name a new folder as `out` if this path is there and has files that are no job's.
    words = f"source=<images> out={path}"
    if place.exists() and not is_job:
        words = f"source={path} out={other}"
    job = f"python precompute_latents.py {words}"
    remedy = f"name a folder that `{job}` has finished (the same command continues)"

    # Latents of another tool need no encoding, but another command.
    names = [place.name, *(f"/{file.name}" for file in place.glob("*"))]
    if not is_job and any(map(LATENT_FILE.fullmatch, names)):
        while other.exists():  # the import wants a new folder
            other = other.with_name(f"{other.name}_new")
        remedy = (
            f"import it with `python -m scripts.import_latents source={path} encoder=<its encoder> "
            f"scale=<its factor> out={other}` (labels=<file> or classes=none if it has no labels), "
            f"then set {key}={other}"
        )
    refuse_missing(key, path, remedy, "manifest.json")


def refuse_missing(key: str, path: Any, remedy: str, *names: str) -> None:
    """Raises UserError if the local path does not exist, or is a folder in which no entry matches
    any of the glob patterns `names`. `remedy` ends the message. URLs and `pipe:` commands are not
    checked."""
    if not isinstance(path, str) or "://" in path or path.startswith("pipe:"):
        return
    place = os.path.expanduser(path)
    if not os.path.exists(place):  # Path.exists would raise an error for too long a name
        folder, name = os.path.split(place.rstrip("/"))
        siblings: list[str] = []
        with suppress(OSError), os.scandir(folder or ".") as entries:
            siblings = [entry.name for entry in islice(entries, MAX_SIBLINGS)]
        question = ask_similar(name, siblings)
        hint = f" ({question})" if question else ""
        raise UserError(f"{key}={path} does not exist{hint}; {remedy}.")
    if names and not any(any(Path(place).glob(name)) for name in names):
        raise UserError(f"{key}={path} has no {' and no '.join(names)}; {remedy}.")


def refuse_file(key: str, path: str | None) -> None:
    """Raises UserError if the output folder `path` is a file or inside a file, if a name in the
    path has over 255 bytes, or if the path begins with `~user` and there is no such user."""
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
