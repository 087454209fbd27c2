"""Checkpoints: written whole or not at all, verified before they are loaded.

`checkpoints/step-N/` holds `model.safetensors`, `ema.safetensors`, `training.pt` (optimizer and generators, read with
`weights_only=True`), `state.json` (counters, and what is needed to rebuild the model) and `manifest.json` (sizes and
sha256 of the others). Written as `step-N.tmp`, synced, renamed.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from data.manifest import sync_folder, write_atomically
from data.shards import file_sha256
from training.ranks import SINGLE, Ranks
from training.state import TrainState, gathered

FORMAT = 1


class Checkpoints:
    """The checkpoints of one run, `folder/step-N` for N = the number of steps done."""

    def __init__(self, folder: Path, keep: int, ranks: Ranks = SINGLE) -> None:
        self.folder, self.keep, self.ranks = folder, keep, ranks

    def found(self) -> list[Path]:
        """Complete checkpoints, oldest first. A kill in mid-write leaves a `.tmp` folder, which does not count."""
        steps = [p for p in self.folder.glob("step-*") if p.name.removeprefix("step-").isdecimal()]
        return sorted(steps, key=lambda p: int(p.name.removeprefix("step-")))

    def save(self, state: TrainState, identity: dict[str, Any]) -> Path:
        """Writes one checkpoint, removes those beyond `keep`, and returns its folder.

        `identity` describes the run (model and its arguments, latent spec, ledger); it is stored in `state.json`. All
        processes call it: sharded tensors are gathered, the first one writes, the others wait for it.
        """
        content = gathered(state.state_dict(), self.ranks.first)
        final = self.folder / f"step-{state.step}"
        self.ranks.agreed(lambda: str(self.write(state.step, content, identity)))
        return final

    def write(self, step: int, content: dict[str, Any], identity: dict[str, Any]) -> Path:
        final, temporary = self.folder / f"step-{step}", self.folder / f"step-{step}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file({k: v.contiguous() for k, v in content["model"].items()}, temporary / "model.safetensors")
        save_file(content["ema"], temporary / "ema.safetensors")
        training = {name: content[name] for name in ("optimizer", "techniques", "rng")}
        torch.save(training, temporary / "training.pt")
        described = {
            "format": FORMAT,
            "counters": content["counters"],
            "loader": content["loader"],
            "window": content["window"],
        }
        (temporary / "state.json").write_text(json.dumps(described | identity, indent=1) + "\n")
        files = {}
        for file in sorted(temporary.iterdir()):
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
            files[file.name] = {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
        write_atomically(temporary / "manifest.json", json.dumps(files, indent=1) + "\n")
        if final.exists():  # only a resumed run that saved this step again and was killed before it went on
            shutil.rmtree(final)
        temporary.rename(final)
        sync_folder(self.folder)
        for old in self.found()[: -self.keep]:
            shutil.rmtree(old)
        return final

    def load_latest(self, state: TrainState, identity: dict[str, Any]) -> Path | None:
        """Loads the newest checkpoint that verifies and returns its folder; None if there is none.

        One that does not verify is renamed to `step-N.corrupt`, with a warning, and the one before is tried. ValueError
        if there were some and none verifies: starting over is for the user to decide.
        """
        folder = self.ranks.agreed(self.newest_verified)
        if folder is not None:
            load_verified(folder, description(folder), state, identity)
        return folder

    def newest_verified(self) -> Path | None:
        found = self.found()
        for folder in reversed(found):
            if problem := damage(folder):
                quarantine = folder.with_name(folder.name + ".corrupt")
                shutil.rmtree(quarantine, ignore_errors=True)
                folder.rename(quarantine)
                warnings.warn(f"{folder}: {problem}; moved to {quarantine.name}, trying the one before.", stacklevel=3)
                continue
            return folder
        if found:
            raise ValueError(f"{self.folder} holds no checkpoint that verifies; start over in a new run_dir.")
        return None


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint; None if every file has the size and hash that its manifest says."""
    try:
        files = json.loads((folder / "manifest.json").read_text())
        for name, expected in files.items():
            file = folder / name
            if file.stat().st_size != expected["bytes"] or file_sha256(file) != expected["sha256"]:
                return f"{name} does not match its sha256"
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:  # any other OSError is no damage
        return f"it is incomplete ({error})"
    return None


def read_description(folder: Path) -> dict[str, Any]:
    """`state.json` of a checkpoint, after the whole checkpoint was verified; ValueError otherwise."""
    if problem := damage(folder):
        raise ValueError(f"{folder} is no usable checkpoint: {problem}. Choose another step of the same run.")
    return description(folder)


def description(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "state.json").read_text())


def load(folder: Path, state: TrainState, identity: dict[str, Any]) -> None:
    """Loads a checkpoint; ValueError if it is damaged or belongs to another model or data set."""
    load_verified(folder, read_description(folder), state, identity)


def load_verified(folder: Path, described: dict[str, Any], state: TrainState, identity: dict[str, Any]) -> None:
    for name in ("model", "data"):
        if described[name] != json.loads(json.dumps(identity[name])):
            raise ValueError(
                f"{folder} was made with another {name}: {difference(described[name], identity[name])}. "
                f"Use a new run_dir, or init_from={folder} to start from its weights."
            )
    training = torch.load(folder / "training.pt", map_location="cpu", weights_only=True)
    state.load_state_dict(
        {
            "model": load_file(folder / "model.safetensors"),
            "ema": load_file(folder / "ema.safetensors"),
            **training,
            "loader": described["loader"],
            "window": described["window"],
            "counters": described["counters"],
        }
    )


def latest_checkpoint(folder: str) -> Path:
    """The newest checkpoint of a run folder, or the checkpoint itself; ValueError if there is none."""
    given = Path(folder).expanduser()
    found = Checkpoints(given / "checkpoints", keep=1).found() or ([given] if (given / "state.json").is_file() else [])
    if not found:
        raise ValueError(f"run_dir={folder} is neither a run folder with a checkpoint nor a checkpoint.")
    return found[-1]


def difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The keys in which two flat descriptions differ, with both values."""
    keys = sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k))
    return ", ".join(f"{k} was {old.get(k)}, is {new.get(k)}" for k in keys)


def resolve_weights(path: str) -> Path:
    """The safetensors file that `init_from` means: the file itself, or the EMA of a checkpoint or of a run's latest."""
    given = Path(path).expanduser()
    if given.suffix == ".safetensors" and given.is_file():
        return given
    try:
        return latest_checkpoint(path) / "ema.safetensors"
    except ValueError:
        raise ValueError(f"init_from={path} is neither a .safetensors file, a run folder nor a checkpoint.") from None
