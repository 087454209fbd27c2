"""The machine: which device, whether it is deterministic; its versions, hardware, and the state of
the code."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from common.errors import UserError
from common.files import ROOT
from training.config.schema import TrainConfig
from training.config.secrets import redact_words
from training.distributed.ranks import Ranks

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "hydra-core",
    "omegaconf",
    "webdataset",
    "diffusers",
    "safetensors",
    "wandb",
)


def connect(cfg: TrainConfig) -> tuple[Ranks, torch.device]:
    """Finds the processes of a run and the device of this one, and connects them.

    ValueError if the launcher contradicts the configuration, the batch cannot be shared, or the
    others cannot be reached.
    """
    ranks = Ranks.from_environment()
    refuse_contradictions(cfg)
    ranks.check_batch(cfg.batch_size, cfg.accumulation_steps)
    device = ranks.device(pick_device(cfg.runtime.device.value))
    parallel = cfg.runtime.parallel
    alone = parallel.mode.value not in ("auto", "none")  # one process on the path of many
    ranks.connect(device, timedelta(minutes=parallel.timeout_minutes), parallel.nccl, alone)
    return ranks, device


def pick_device(name: str) -> torch.device:
    """ValueError if a GPU was asked for and there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "runtime.device=cuda, but PyTorch sees no NVIDIA GPU; use runtime.device=auto or cpu."
        )
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def set_deterministic(on: bool) -> None:
    """Has PyTorch take deterministic algorithms only, cuBLAS included, or whichever it likes."""
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(on)


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Versions, hardware and the state of the code."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    threads = f"{cpu_name()}, {torch.get_num_threads()} threads"
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else threads
    program = Path(sys.argv[0])
    argv = [
        str(program.relative_to(ROOT) if program.is_relative_to(ROOT) else program),
        *redact_words(sys.argv[1:]),
    ]
    return {"versions": versions, "hardware": hardware, "git": git_state(), "argv": argv}


def cpu_name() -> str:
    """The CPU's name where Linux tells it, otherwise its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def git_state() -> dict[str, Any] | None:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "uncommitted_changes": bool(git("status", "--porcelain", "-uno")),
        }
    except (OSError, subprocess.CalledProcessError):
        return None


def refuse_contradictions(cfg: TrainConfig) -> None:
    """ValueError for a launcher's variables that say something else than the runtime keys; both
    would be believed."""
    found = os.environ.get("ACCELERATE_MIXED_PRECISION", "")
    wanted = cfg.runtime.precision.value
    theirs = "no" if wanted == "fp32" else wanted
    if found not in ("", theirs, wanted):
        raise UserError(
            f"ACCELERATE_MIXED_PRECISION={found}, but runtime.precision={wanted}; change one "
            f"(accelerate launch --mixed_precision {theirs})."
        )
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM"):
        if os.environ.get(name, "false").lower() in ("true", "1"):
            raise UserError(
                f"{name} is set, and would be ignored; unset it and use runtime.parallel.mode."
            )
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper()
    if backend != "NO" and not cfg.runtime.compile:
        raise UserError(
            f"ACCELERATE_DYNAMO_BACKEND={backend}, but runtime.compile=false; change one of them."
        )
