"""`python -m scripts.plan tune`: measures which techniques make a run's step fastest on this
machine, and writes them.

    python -m scripts.plan tune model=ssd_mlp_s data=synthetic batch_size=256 seconds=300
    python train.py runtime=tuned model=ssd_mlp_s data=synthetic batch_size=256

It is what `runtime=auto` does before training; the file can be read, changed and kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from scripts.tables import table
from training.config.words import CONF
from training.config.yaml_text import as_yaml
from training.distributed.ranks import SINGLE
from training.environment import describe_environment, pick_device
from training.tuning import tuned
from training.weights.adapter_base import settled


@dataclass(frozen=True)
class TuneConfig:
    """Where the choice goes; any other word is an override of the training configuration."""

    out: str | None = None
    """Null: conf/runtime/tuned.yaml, so that runtime=tuned asks for it."""
    seconds: float = 120.0


def tune(cfg: TuneConfig, words: list[str]) -> str:
    """Tries techniques, writes the fastest as a runtime file, and returns the table of all.

    ValueError if nothing was measured, or the file cannot be where it was asked for.
    """
    composed = settled([*words, f"runtime.tune_seconds={cfg.seconds}"])
    train = composed.cfg
    file = Path(cfg.out).expanduser() if cfg.out else CONF / "runtime" / "tuned.yaml"
    if not file.parent.is_dir():
        raise UserError(
            f"out={file}: there is no folder {file.parent}; make it, or choose another file."
        )
    base = {"auto": "fast"}.get(composed.choices["runtime"], composed.choices["runtime"])
    if base == file.stem:
        raise UserError(
            f"runtime={base} would be based on itself in {file}; start from another one, as "
            "runtime=fast."
        )
    device = pick_device(train.runtime.device.value)
    _, found = tuned(train, device, SINGLE)
    if not any(row["step_ms"] for row in found["tried"]):
        told = "; ".join(f"{row['words']}: {row['refusal']}" for row in found["tried"])
        raise UserError(f"seconds={cfg.seconds}: nothing was measured ({told}); give more seconds.")
    rows: list[tuple[object, ...]] = [("candidate", "ms/step", "steps", "")]
    rows += [
        (row["words"], row["step_ms"], row["steps"] or None, row["refusal"] or "")
        for row in found["tried"]
    ]
    runtime = {key: value for key, value in found["changes"].items() if key != "accumulation_steps"}
    hardware = describe_environment(device)["hardware"]
    told = f"# The fastest of {len(found['tried'])} on {hardware}, for: {' '.join(words)}\n"
    steps = found["changes"].get("accumulation_steps")
    told += f"# It goes with accumulation_steps={steps}.\n" if steps else ""
    file.write_text(told + as_yaml({"defaults": [base, "_self_"]} | runtime))
    return f"{table(rows)}\n\n{found['words']}: written to {file}"
