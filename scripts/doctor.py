"""What this machine can do, technique by technique, with the reason where it cannot.

    python -m scripts.doctor             a table
    python -m scripts.doctor --json      the same for programs
    python -m scripts.doctor --measure   with measured rates: matrix products by precision, and memory traffic
    python -m scripts.doctor --kernels model=mamba_b data=synthetic batch_size=256 runtime=production
                                         tries the fused kernels as that run would, and says what it would choose

Everything is asked of the machine and of the techniques themselves; nothing is copied from a guide.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--measure", action="store_true", help="measure rates too; takes some seconds")
    parser.add_argument("--kernels", nargs="*", metavar="KEY=VALUE", help="try the kernels of this run; takes a minute")
    options = parser.parse_args(words)
    found = examine(options.measure)
    if options.kernels is not None:
        from training.config.compose import one_sentence

        with one_sentence():
            found["kernels"] = kernels(options.kernels)
    print(json.dumps(found, indent=1) if options.json else as_text(found), flush=True)
    return 0


def examine(measure: bool = False) -> dict[str, Any]:
    """Machine, versions, techniques, what is planned, and rates if asked for."""
    from scripts.capabilities import capabilities
    from training.environment import describe_environment, pick_device

    device = pick_device("auto")
    environment = describe_environment(device)
    found: dict[str, Any] = {
        "machine": machine(device),
        "versions": environment["versions"],
        "techniques": [
            c._asdict() | {"key": c.word.partition("=")[0], "word": c.word, "available": c.reason is None}
            for c in capabilities(device)
        ],
        "planned": planned(device),
    }
    if measure:
        from scripts.timing import rates

        found["rates"] = rates(device)
    return found


def kernels(words: list[str]) -> list[dict[str, Any]]:
    """What `python train.py <words>` would choose of the fused kernels here, and why. Nothing is trained or written."""
    from accel.fused_kernels import FusedKernel
    from training.assemble import build_loader, build_stack, prove_kernels
    from training.config.compose import compose
    from training.environment import pick_device
    from training.pretrained import build_model

    cfg = compose(words).cfg
    device, samples = pick_device(cfg.runtime.device.value), cfg.batch_size // cfg.accumulation_steps
    stack, spec = build_stack(cfg, device), build_loader(cfg.data, cfg.seed, samples, device).spec
    stack.on_process()
    prove_kernels(stack, build_model(cfg.model, spec, device), spec, samples)
    return [
        {
            "key": f"runtime.{t.key}",
            "requested": stack.requested[t.key],
            "on": t.proof is not None and t.proof.on,
            "why": t.proof.why if t.proof else stack.reasons.get(t.key, "not asked for, or no part of this model"),
        }
        for t in stack.techniques
        if isinstance(t, FusedKernel)
    ]


def machine(device: Any) -> dict[str, Any]:
    """Hardware and drivers as PyTorch sees them."""
    import torch

    from accel.compilation import cxx_compiler

    facts: dict[str, Any] = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu_threads": torch.get_num_threads(),
        "cpu_instructions": [
            name
            for name, has in (
                ("AVX2", torch.cpu._is_avx2_supported()),
                ("AVX512", torch.cpu._is_avx512_supported()),
                ("AVX512-BF16", torch.cpu._is_avx512_bf16_supported()),
                ("AMX", torch.cpu._is_amx_tile_supported()),
                ("AMX-FP16", torch.cpu._is_amx_fp16_supported()),
            )
            if has
        ],
        "cxx_compiler": cxx_compiler(),
        "torch_built_for": f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU",
        "gpu": None,
    }
    if device.type == "cuda":
        from torch.utils import collect_env

        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "driver": collect_env.get_nvidia_driver_version(collect_env.run),
            "gpu": properties.name,
            "gpu_count": torch.cuda.device_count(),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "cudnn": torch.backends.cudnn.version(),
        }
    elif torch.version.cuda:
        facts["gpu_missing_because"] = "this PyTorch is built for CUDA and sees no GPU: no driver, or none is visible"
    else:
        facts["gpu_missing_because"] = "this PyTorch is built for the CPU only"
    return facts


def planned(device: Any) -> list[dict[str, Any]]:
    """What this version does not have, and whether the hardware would."""
    import torch

    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return [
        {"name": "FP8 matrix products", "hardware": capability >= (8, 9), "needs": "compute capability 8.9 or newer"},
        {"name": "FlashAttention-3", "hardware": capability[0] == 9, "needs": "compute capability 9.0 (Hopper)"},
    ]


def as_text(found: dict[str, Any]) -> str:
    """The findings as a page of text."""
    lines = ["machine"]
    facts = {k: ", ".join(v) if isinstance(v, list) else v for k, v in found["machine"].items() if v is not None}
    lines += [f"  {key.replace('_', ' '):<22}{value}" for key, value in facts.items()]
    lines += ["", "versions", "  " + ", ".join(f"{k} {v}" for k, v in found["versions"].items()), "", "techniques"]
    for row in found["techniques"]:
        word = row["word"]
        lines.append(f"  {'yes' if row['available'] else 'no ':<5}{word:<38}{row['reason'] or ''}".rstrip())
    lines += ["", "planned, not in this version"]
    for row in found["planned"]:
        lines.append(f"  {row['name']:<22}hardware: {'yes' if row['hardware'] else 'no'} (needs {row['needs']})")
    if "kernels" in found:
        lines += ["", "fused kernels, as that run would choose"]
        lines += [f"  {'on' if row['on'] else 'off':<5}{row['key']:<26}{row['why']}" for row in found["kernels"]]
    if "rates" in found:
        lines += ["", "measured rates (median of 10)"]
        lines += [f"  {name:<22}{value:.1f}" for name, value in found["rates"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
