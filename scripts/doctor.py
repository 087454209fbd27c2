"""Says in one screen what this machine has, what it lacks, which preset suits it, and which
accelerations it cannot switch on, with the reasons.

    python -m scripts.doctor
    python -m scripts.doctor measure=true
    python -m scripts.doctor kernels=true model=mamba_b data=synthetic batch_size=256
    python -m scripts.doctor cards=[a100,b200]

`kernels=true` tries the fused kernels as `python train.py` with the words behind it would, and says
what it would choose; it takes a minute. All findings come from the machine and from the techniques'
own checks, none from a list. `--json` prints them for programs.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Template

from accel.ledger import NO_GPU
from common.config.compose import compose
from common.errors import UserError
from common.files import ROOT
from common.text import LINE_WIDTH, format_table
from scripts.commands import end_command, split_words

if TYPE_CHECKING:
    import torch

CLOCKS = {
    "sm_clock_mhz": "clocks.sm",
    "memory_clock_mhz": "clocks.mem",
    "power_limit_w": "power.limit",
}
"""Name of a clock or of the power limit in the findings -> name of the field in nvidia-smi. The
clocks are momentary values: low on an idle GPU, and lowered by heat and power limits."""
NVIDIA_SMI_SECONDS = 10.0
"""Time limit, in seconds, for a call of nvidia-smi."""
PRESETS = ("fast", "production", "max", "lowmem")
"""Files of conf/runtime/ about which the page says what this machine cannot run of them."""


@dataclass(frozen=True)
class DoctorConfig:
    """Keys of the command."""

    measure: bool = False
    """Also measure rates, for some seconds: products by precision, memory traffic."""
    kernels: bool = False
    """Try the fused kernels of the run that the other words describe."""
    cards: list[str] = field(default_factory=list)
    """GPU models, such as h100, of which a table then says what they support; examines nothing."""
    json: bool = False
    """Print JSON."""


def diagnose(cfg: DoctorConfig, overrides: Sequence[str] = ()) -> None:
    """Prints the findings that `cfg` asks for. `overrides` are words of `train.py` for
    `kernels`."""
    if overrides and not cfg.kernels:
        raise UserError(f"{' '.join(overrides)}: words of a run go with kernels=true.")
    # Do not examine this machine for `cards`, which pretends other GPUs.
    if cfg.cards:
        if cfg.measure or cfg.kernels:
            raise UserError("cards=[…] measures nothing; leave out measure and kernels.")
        findings = compare_cards(cfg.cards)
        page = format_table(findings)
    else:
        findings = examine(cfg.measure)
        if cfg.kernels:
            findings["kernels"] = try_kernels([*overrides])
        page = format_findings(findings)
    print(json.dumps(findings, indent=1) if cfg.json else page, flush=True)


def examine(measure: bool) -> dict[str, Any]:
    """Returns the findings: facts about the machine, versions, lacking packages, presets, and each
    technique; with `measure` also the measured rates."""
    # Import torch only inside functions, so that --help does not wait for torch.
    from common.environment import describe_environment, pick_device
    from scripts.capabilities import find_capabilities, measure_rates

    device = pick_device("auto")
    reasons = find_capabilities(device)
    findings: dict[str, Any] = {
        "machine": describe_machine(device),
        "versions": describe_environment(device)["versions"],
        "lacking": find_lacking_packages(),
        "presets": {name: list_refused(name, reasons) for name in PRESETS},
        "techniques": [{"word": word, "reason": reason} for word, reason in reasons.items()],
    }
    if measure:
        findings["rates"] = measure_rates(device)
    return findings


def list_refused(preset: str, reasons: dict[str, str | None]) -> list[str]:
    """Lists the overrides by which `runtime=<preset>` asks for techniques that this machine cannot
    run; `reasons` maps each override to why, or None."""
    values = compose([f"runtime={preset}"]).cfg.runtime.values()
    words = [f"runtime.{k}={v}".lower().replace("=auto", "=true") for k, v in values.items()]
    return [word for word in words if reasons.get(word)]


def find_lacking_packages() -> dict[str, list[str]]:
    """Returns extra of pyproject.toml -> the packages that it would install and that are not
    installed."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    file = ROOT / "pyproject.toml"
    if not file.is_file():  # a copy of the packages alone
        return {}
    project = tomllib.loads(file.read_text())["project"]
    named = [part.metadata["Name"] for part in distributions()]
    installed = {canonicalize_name(name) for name in named if name}  # a broken one has no name
    lacking = {}
    for extra, lines in project["optional-dependencies"].items():
        names = [Requirement(line).name for line in lines]
        absent = [name for name in names if canonicalize_name(name) not in installed]
        if absent:
            lacking[extra] = absent
    return lacking


def compare_cards(names: Sequence[str]) -> list[list[str]]:
    """Returns the rows of a table, column heads first. A row shows for a technique on which of the
    GPU models `names` it is available, and what it needs. This machine needs no GPU. Raises
    UserError for an unknown name."""
    import torch

    from accel.machine import pretend_gpu
    from common.environment import CARDS
    from scripts.capabilities import list_ways

    for name in names:
        if name not in CARDS:
            raise UserError(f"cards=[{name}] is not known; choose some of {', '.join(CARDS)}.")

    rows = [["technique", *names, "needs"]]
    for word, (kind, value) in list_ways().items():
        row = [word]
        # Collect the notes in a dict, which keeps their order; a set does not.
        notes: dict[str, None] = {}
        for name in names:
            with pretend_gpu(CARDS[name].capability) as needs:
                reason = kind(value, torch.device("cuda")).find_obstacle()
            row.append("no" if reason else "yes")
            notes |= dict.fromkeys([reason.partition(";")[0].rstrip(".")] if reason else needs)
        rows.append([*row, "; ".join(notes)])
    return rows


def try_kernels(words: list[str]) -> list[dict[str, Any]]:
    """Returns a row for each fused kernel: in `words` whether `python train.py <words>` would use
    it on this machine, in `note` why. Trains nothing, and writes nothing
    but the cache of tested kernels."""
    from accel.techniques.fused_kernels import FusedKernel
    from common.environment import pick_device
    from training.assemble import assemble
    from training.weights.first_weights import compose_pretrained

    cfg = compose_pretrained(words).cfg
    stack = assemble(cfg, pick_device(cfg.runtime.device)).stack
    rows = []
    for technique in stack.techniques:
        if isinstance(technique, FusedKernel):
            reason = stack.reasons.get(technique.key, "not requested, or not part of this model")
            why = technique.proof.why if technique.proof else reason
            rows.append({"words": f"{technique.key}={technique.value}".lower(), "note": why})
    return rows


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Describes hardware and drivers, by PyTorch and nvidia-smi."""
    import torch
    from torch.utils import collect_env

    from accel.techniques.compilation import find_cxx_compiler

    known = sorted(torch.cpu.get_capabilities().items())
    vectors = [name for name, has in known if has is True and name[:3] in ("avx", "amx", "sve")]
    facts: dict[str, Any] = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu_threads": torch.get_num_threads(),
        "cpu_instructions": vectors,
        "cxx_compiler": find_cxx_compiler(),
        "torch_built_for": f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU",
        "gpu": None,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return facts | {
            "driver": collect_env.get_nvidia_driver_version(collect_env.run),
            "gpu": properties.name,
            "gpu_count": torch.cuda.device_count(),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
            "cudnn": torch.backends.cudnn.version(),
            "multiprocessors": properties.multi_processor_count,
            "registers_a_multiprocessor": properties.regs_per_multiprocessor,
            "shared_memory_kib_a_block": properties.shared_memory_per_block_optin / 2**10,
            "l2_mib": properties.L2_cache_size / 2**20,
            "sm_clock_peak_mhz": properties.clock_rate / 1000,
            "memory_clock_peak_mhz": properties.memory_clock_rate / 1000,
            **read_clocks(f"GPU-{properties.uuid}"),
        }
    unseen = "CUDA and sees no GPU: no driver, or none is visible"
    why = unseen if torch.version.cuda else "the CPU only"
    return facts | {"gpu_missing_because": f"this PyTorch is built for {why}"}


def read_clocks(gpu: str) -> dict[str, Any]:
    """Reads the clocks and the power limit of a GPU from nvidia-smi; "unknown" if nvidia-smi is
    absent, fails, hangs or gives no number."""
    query = [
        "nvidia-smi",
        f"--id={gpu}",
        f"--query-gpu={','.join(CLOCKS.values())}",
        "--format=csv,noheader,nounits",
    ]
    clocks: dict[str, Any] = dict.fromkeys(CLOCKS, "unknown")
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            query, capture_output=True, text=True, check=True, timeout=NVIDIA_SMI_SECONDS
        )
        for name, cell in zip(CLOCKS, done.stdout.split(","), strict=False):
            with suppress(ValueError):
                clocks[name] = float(cell)
    return clocks


def format_findings(findings: dict[str, Any]) -> str:
    """Formats the findings as a page of text, by doctor.txt.jinja."""
    template = Template(Path(__file__).with_name("doctor.txt.jinja").read_text(), trim_blocks=True)
    return template.render(findings, wrap=wrap, no_gpu=NO_GPU)


def wrap(text: str) -> str:
    return textwrap.fill(text, LINE_WIDTH, subsequent_indent="    ", break_on_hyphens=False)


if __name__ == "__main__":
    with end_command():
        diagnose(*split_words(DoctorConfig, sys.argv[1:], __doc__))
