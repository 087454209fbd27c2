"""Measures how close samples of a trained run are to images: Fréchet and kernel distance,
precision, recall, copies.

    python -m scripts.evaluate run_dir=runs/mine count=10000
    python -m scripts.evaluate run_dir=runs/mine count=50000 reference=photos guidance=1 solver=ab2
    steps=100 torchrun --nproc-per-node 8 -m scripts.evaluate run_dir=runs/mine count=50000
    batch_size=256 \
        features=[inception,dinov2] inception=weights-inception-2015-12-05-6726825d.pth
        dinov2=facebook/dinov2-large

Features: `encoder` (the latent set's autoencoder) and `random` (a fixed random network) download
nothing; `inception` and `dinov2` need `pip install 'fastlatent[evaluation]'` and weights;
`<package>.<module>.<Class>` is one of your own (extensions=[package]). The reference is a folder of
images, or the decoded training latents ("reconstructions"). `labels=[apple,3]` draws those classes
only, by name or number. <out>.json has the figures, the protocol (all that they depend on), and the
names of the classes by number. Compare figures of one protocol only. Stopped anywhere, the same
command goes on from the pieces in <out>.parts and comes to the same figures. Features of the
reference are kept below $XDG_CACHE_HOME or ~/.cache; processes on several machines must share that
folder and `out`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import UserError
from sampling.draw import DrawConfig, Drawing
from training.config.compose import from_words
from training.config.paths import refuse_drawing, refuse_missing
from training.config.schema import at_least
from training.distributed.exit import resumable_command

os.environ.setdefault("KINETO_LOG_LEVEL", "99")


@dataclass(frozen=True)
class EvaluateConfig(DrawConfig):
    """What to draw, and what to compare it with."""

    count: int = 10_000
    batch_size: int = 128
    features: list[str] = field(default_factory=lambda: ["encoder", "random"])
    reference: str | None = None
    """A folder of images, tars or `datasets`; null: the run's training latents, decoded."""
    reference_count: int = 50_000
    """At most so many of the reference."""
    inception: str | None = None
    """File of torch-fidelity's Inception weights."""
    dinov2: str | None = None
    """Folder or hub id of DINOv2."""
    out: str | None = None
    """Null: <run_dir>/evaluation/step-<N>-<hash of the protocol>; needed with weights outside of a
    run."""

    def check(self) -> None:
        """ValueError for a value that nothing can be evaluated with."""
        super().check()
        at_least(4, self, "count")
        at_least(8, self, "reference_count")


def evaluate_run(cfg: EvaluateConfig) -> dict[str, Any]:
    """Draws, compares and writes <out>.json; returns its content, in the first process."""
    refuse_drawing(cfg)
    refuse_missing("reference", cfg.reference, "name a folder of images")
    refuse_missing("inception", cfg.inception, "name the file of its weights")
    from common.files import write_atomically
    from evaluation.judge import Judge, JudgeConfig
    from evaluation.sides import figures
    from training.distributed.ranks import Ranks
    from training.environment import describe_environment

    ranks = Ranks.from_environment()
    ranks.wait_for_all()  # connects them
    drawing = Drawing(cfg, ranks)
    trained = drawing.trained
    if cfg.out is None and trained.file.parent.parent.name != "checkpoints":
        raise UserError(
            f"out is not set, and {trained.file} lies in no run; say where: out=<file without "
            ".json>."
        )
    files = {"inception": cfg.inception, "dinov2": cfg.dinov2}
    how = JudgeConfig(tuple(cfg.features), cfg.reference, cfg.reference_count, files)
    judge = Judge(how, trained.spec, trained.data, trained.autoencoder, trained.device, ranks)
    protocol = drawing.protocol() | judge.protocol()
    out = out_of(cfg, trained.file, protocol)
    ranks.say(
        f"{cfg.count} samples from {trained.file}\n\nledger "
        f"({trained.device})\n{drawing.ledger.table()}\n"
    )

    job = judge.protocol()
    job["reference"] = {key: value for key, value in job["reference"].items() if key != "name"}
    pieces = drawing.run(
        out.with_name(out.name + ".parts"), job, lambda labels, latents: judge.of_latents(latents)
    )
    result: dict[str, Any] = {}
    if ranks.first:
        sides = judge.sides()
        for number in range(pieces.count):
            for name, features in pieces.read(number).items():
                sides[name].add(features)
        result = {
            "features": figures(sides, judge.reference),
            "protocol": protocol,
            "environment": describe_environment(trained.device),
            "classes": drawing.classes(),
        }
        file = out.with_name(out.name + ".json")
        write_atomically(file, json.dumps(result, indent=1) + "\n")
        print(f"\n{table(result['features'])}\n{file}", flush=True)
    pieces.remove()
    return result


def out_of(cfg: EvaluateConfig, weights: Path, protocol: Mapping[str, Any]) -> Path:
    """Where the result goes; its folder exists."""
    name = hashlib.sha256(json.dumps(protocol, sort_keys=True).encode()).hexdigest()[:8]
    default = weights.parents[2] / "evaluation" / f"{weights.parent.name}-{name}"
    out = default if cfg.out is None else Path(cfg.out).expanduser()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"out={out} cannot be written ({error.strerror}); choose another."
        ) from error
    return out


def table(features: Mapping[str, Mapping[str, Any]]) -> str:
    """The figures as aligned lines, with a sentence where one is refused."""
    columns = ("fd", "floor_fd", "kd", "kd_std", "floor_kd", "precision", "recall", "copied")
    rows = [["features", *columns]]
    for name, found in features.items():
        rows.append([name, *("–" if found[c] is None else f"{found[c]:.4g}" for c in columns)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join(
        lines + [f"{name}: {found['why']}" for name, found in features.items() if "why" in found]
    )


def main(words: list[str]) -> None:
    with resumable_command():
        evaluate_run(from_words(EvaluateConfig, words, __doc__ or ""))


if __name__ == "__main__":
    main(sys.argv[1:])
