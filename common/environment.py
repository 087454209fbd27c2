"""Describes the machine of a run (its device, rates of its GPU, versions, the code's commit), and
prepares the process and the folder of a run."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from common.config.schema import TrainConfig
from common.config.secrets import redact_words
from common.distributed.ranks import Ranks
from common.errors import UserError
from common.files import ROOT
from common.memory import GIB, count_host_bytes, read_text

REPORTED_PACKAGES = (
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


class Card(NamedTuple):
    """Peak rate and memory of one GPU model."""

    name: str
    """Part of the driver's name for this GPU model, such as "H100 PCIe" of "NVIDIA H100 PCIe"."""
    flops_16bit: float
    """Peak FLOP/s of dense matrix products in bf16 or fp16."""
    memory: float
    """Memory in bytes."""
    capability: tuple[int, int] = (0, 0)
    """Compute capability; (0, 0) for a GPU model that is not in `CARDS`."""


CARDS_FILE = Path(__file__).with_name("cards.yaml")
CARDS = {
    key: Card(row["name"], 1e12 * row["tflops"], GIB * row["gib"], tuple(row["capability"]))
    for key, row in yaml.safe_load(CARDS_FILE.read_text()).items()
}
"""Short name of a GPU model, such as h100 -> its rate and memory."""


def connect(cfg: TrainConfig) -> tuple[Ranks, torch.device]:
    """Finds the ranks of a run and the device of this rank, and joins the process group.

    Raises UserError if the launcher's environment variables contradict the configuration, the
    ranks cannot share the batch evenly, or this rank cannot reach the other ranks.
    """
    ranks = Ranks.from_environment()
    refuse_contradictions(cfg)
    ranks.check_batch(cfg.batch_size, cfg.accumulation_steps)
    device = ranks.device(pick_device(cfg.runtime.device))
    parallel = cfg.runtime.parallel
    # Even a single process needs a process group if the user sets a parallel mode.
    even_alone = parallel.mode not in ("auto", "none")
    ranks.connect(device, timedelta(minutes=parallel.timeout_minutes), parallel.nccl, even_alone)
    return ranks, device


def pick_device(name: str) -> torch.device:
    """Returns the device that `runtime.device` names. Raises UserError for "cuda" if PyTorch sees
    no GPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "runtime.device=cuda, but PyTorch sees no NVIDIA GPU; use runtime.device=auto or cpu."
        )
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def seed(cfg: TrainConfig) -> None:
    """Seeds PyTorch's random generators. With `deterministic`, also makes PyTorch and cuBLAS use
    deterministic algorithms only; otherwise allows all algorithms."""
    torch.manual_seed(cfg.seed)
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(cfg.deterministic)


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Returns versions, hardware, the commit of the code, and the command line without secrets."""
    versions = {"python": platform.python_version()}
    for package in REPORTED_PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    hardware = get_device_name(device)
    if device.type == "cpu":
        hardware = f"{read_cpu_name()}, {torch.get_num_threads()} threads"
    program = Path(sys.argv[0])
    argv = [
        str(program.relative_to(ROOT) if program.is_relative_to(ROOT) else program),
        *redact_words(sys.argv[1:]),
    ]
    return {"versions": versions, "hardware": hardware, "git": read_git_state(), "argv": argv}


def read_cpu_name() -> str:
    """Reads the CPU's name from /proc/cpuinfo; without one returns the architecture."""
    text = read_text(Path("/proc/cpuinfo"))
    match = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def read_git_state() -> dict[str, Any] | None:
    """Returns the commit of the code, and whether tracked files differ from that commit; None if
    git is not installed or the code is no git checkout."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--abbrev=40"]
    try:
        git = subprocess.run([*command, "--dirty"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    commit, _, changed = git.stdout.strip().partition("-")
    return {"commit": commit, "uncommitted_changes": bool(changed)}


def refuse_contradictions(cfg: TrainConfig) -> None:
    """Raises UserError if environment variables of `accelerate launch` contradict the runtime
    keys, because train.py follows the runtime keys alone."""
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "")
    precision = cfg.runtime.precision
    accelerate_name = "no" if precision == "fp32" else precision
    if launched not in ("", accelerate_name, precision):
        raise UserError(
            f"ACCELERATE_MIXED_PRECISION={launched}, but runtime.precision={precision}; change one "
            f"(accelerate launch --mixed_precision {accelerate_name})."
        )

    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM"):
        if os.environ.get(name, "false").lower() in ("true", "1"):
            raise UserError(
                f"{name} is set, but train.py ignores it; unset it and use runtime.parallel.mode."
            )

    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper()
    if backend != "NO" and not cfg.runtime.compile:
        raise UserError(
            f"ACCELERATE_DYNAMO_BACKEND={backend}, but runtime.compile=false; change one of them."
        )


def find_card(hardware: str) -> Card:
    """Returns the entry of the table `CARDS` for the GPU model `hardware`: memory and peak FLOP/s.
    UserError if the table does not have this model."""
    if hardware not in CARDS:
        raise UserError(f"hardware={hardware} is not known; choose one of {', '.join(CARDS)}.")
    return CARDS[hardware]


def match_card(name: str) -> Card | None:
    """Finds the GPU model by the driver's name, such as "NVIDIA H100 80GB HBM3"; None if `CARDS`
    lacks it."""
    # Do not match names such as "RTX 4090 Laptop" or "H100 NVL": these models have other rates than
    # the RTX 4090 and the H100 of `CARDS`.
    if re.search(r"Laptop|NVL|MIG|\b(Ti|D)\b", name):
        return None
    matches = [card for card in CARDS.values() if re.search(rf"\b{card.name}\b", name)]
    return max(matches, key=lambda card: len(card.name), default=None)


def find_peak_flops(device: torch.device, precision: str) -> float | None:
    """Returns the peak FLOP/s of `device` for 16-bit matrix products; None if it is unknown or
    `precision` is not bf16 or fp16.

    With fp8 some products run in 8 and others in 16 bits, so a utilisation relative to either peak
    misleads.
    """
    if device.type != "cuda" or precision not in ("bf16", "fp16"):
        return None
    card = match_card(torch.cuda.get_device_name(device))
    return card.flops_16bit if card else None


def get_device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def memory_of(device: torch.device) -> int:
    """Returns the size of a GPU's memory in bytes; for the CPU, the size of the host's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return count_host_bytes()


def choose_folder(choices: Mapping[str, str]) -> Path:
    """Returns a path that does not exist yet, `runs/<date>-<time>-<model>-<runtime>`; if it exists,
    because another run started in the same second, with a number at the end."""
    chosen = f"{choices.get('model', 'model')}-{choices.get('runtime', 'runtime')}"
    # Replace characters that a folder name may not have: the name of a configuration file in a
    # group may contain a slash.
    chosen = re.sub(r"[^A-Za-z0-9_.-]", "-", chosen)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{chosen}"
    folder = Path("runs") / name
    number = 1
    while folder.exists():
        folder = Path("runs") / f"{name}-{number}"
        number += 1
    return folder
