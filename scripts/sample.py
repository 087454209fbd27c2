"""Samples from a trained run: a PNG grid and an array file.

    python -m scripts.sample run_dir=runs/mine out=samples/mine
    python -m scripts.sample run_dir=runs/mine labels=[0,3] count=16 guidance=2 steps=50 seed=1 out=samples/two_classes
    python -m scripts.sample weights=copied/ema.safetensors

Writes <out>.png (a grid) and <out>.npz: `arr_0` uint8 (N, H, W, 3) and `labels` (N,), as ADM's evaluator reads it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from models.solver import Solver
from training.config.compose import from_words, one_sentence


@dataclass(frozen=True)
class SampleConfig:
    """What to sample from which run. Null, in the settings of the sampler: as the run itself sampled."""

    run_dir: str | None = None
    """A run folder, or one of its checkpoints; its averaged weights are used."""
    weights: str | None = None
    """Instead of a run: a .safetensors file of a checkpoint, wherever it lies; its header says what the model is."""
    encoder: str | None = None
    """Where the autoencoder lies now, if its folder was moved since the latents were made."""
    labels: list[int] | None = None
    """Classes to sample; null: all of them."""
    count: int = 64
    """Samples in all, dealt to the labels in turn."""
    guidance: float | None = None
    guidance_interval: list[float] | None = None
    solver: Solver | None = None
    steps: int | None = None
    shift: float | None = None
    seed: int = 0
    batch_size: int = 64
    device: str = "auto"
    out: str = "samples/samples"


SAMPLER = ("guidance", "guidance_interval", "solver", "steps", "shift")


def checked(cfg: SampleConfig) -> SampleConfig:
    if (cfg.run_dir is None) == (cfg.weights is None):
        fault = "run_dir is not set" if cfg.run_dir is None else "run_dir and weights are both set"
        raise ValueError(f"{fault}; say what to sample: run_dir=runs/<name>, or weights=<file>.safetensors.")
    for key in ("count", "batch_size"):
        if getattr(cfg, key) < 1:
            raise ValueError(f"{key}={getattr(cfg, key)} must be at least 1.")
    return cfg


def sample_run(cfg: SampleConfig) -> tuple[Path, Path]:
    """Samples as `cfg` says and returns the paths of the PNG and the npz. Equal settings give equal samples."""
    import numpy as np

    from models.images import write_grid
    from training.sampling import load_run

    key = "weights" if cfg.weights else "run_dir"
    trained = load_run(str(getattr(cfg, key)), cfg.encoder, cfg.device, key)
    chosen = list(range(trained.spec.num_classes)) if cfg.labels is None else cfg.labels
    labels = [chosen[i % len(chosen)] for i in range(cfg.count)]
    labels = sorted(labels) if cfg.count > len(chosen) else labels
    settings = {name: getattr(cfg, name) for name in SAMPLER if getattr(cfg, name) is not None}
    pixels = trained.sample(labels, cfg.seed, cfg.batch_size, **settings)

    out = Path(cfg.out).expanduser()
    png, npz = out.with_name(out.name + ".png"), out.with_name(out.name + ".npz")
    write_grid(png, pixels, columns=-(-cfg.count // len(chosen)) if cfg.count > len(chosen) else min(cfg.count, 10))
    np.savez(npz, pixels, labels=np.array(labels))
    names = [trained.spec.class_names[label] for label in chosen]
    print(f"{cfg.count} samples of {json.dumps(names[:10])}{' …' if len(names) > 10 else ''} from {trained.file}")
    print(f"{png}\n{npz}", flush=True)
    return png, npz


def main() -> None:
    with one_sentence():
        sample_run(checked(from_words(SampleConfig, sys.argv[1:], __doc__ or "")))


if __name__ == "__main__":
    main()
