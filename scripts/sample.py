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

from training.config.compose import from_words, one_sentence


@dataclass(frozen=True)
class SampleConfig:
    """What to sample from which run."""

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
    guidance: float = 1.5
    guidance_interval: list[float] | None = None
    solver: str = "heun"
    steps: int = 25
    shift: float = 1.0
    seed: int = 0
    batch_size: int = 64
    device: str = "auto"
    out: str = "samples/samples"


def checked(cfg: SampleConfig) -> SampleConfig:
    if (cfg.run_dir is None) == (cfg.weights is None):
        fault = "run_dir is not set" if cfg.run_dir is None else "run_dir and weights are both set"
        raise ValueError(f"{fault}; say what to sample: run_dir=runs/<name>, or weights=<file>.safetensors.")
    for key in ("count", "steps", "batch_size"):
        if getattr(cfg, key) < 1:
            raise ValueError(f"{key}={getattr(cfg, key)} must be at least 1.")
    return cfg


def sample_run(cfg: SampleConfig) -> tuple[Path, Path]:
    """Samples as `cfg` says and returns the paths of the PNG and the npz. Equal settings give equal samples."""
    import numpy as np
    import torch

    from accel.kernels.counter_noise import Purpose, counter_normal
    from models.images import to_uint8, write_grid
    from models.sampler import guided_velocity, sample
    from training.checkpoint.find import weights_file
    from training.environment import pick_device
    from training.pretrained import build_autoencoder, load_pretrained

    device = pick_device(cfg.device)
    file = weights_file(cfg.weights, "weights") if cfg.weights else weights_file(str(cfg.run_dir), "run_dir")
    model, spec = load_pretrained(file, device)
    chosen = list(range(spec.num_classes)) if cfg.labels is None else cfg.labels
    if wrong := [label for label in chosen if not 0 <= label < spec.num_classes]:
        raise ValueError(f"labels={cfg.labels}: {wrong[0]} is no class of this run; it has 0 … {spec.num_classes - 1}.")
    autoencoder = build_autoencoder(spec, device, cfg.encoder)

    labels = torch.tensor([chosen[i % len(chosen)] for i in range(cfg.count)], device=device)
    labels = labels.sort().values if cfg.count > len(chosen) else labels
    low, high = cfg.guidance_interval or (0.0, 1.0)
    images = []
    for position in torch.arange(cfg.count, device=device).split(cfg.batch_size):
        noise = counter_normal(cfg.seed, Purpose.SAMPLE, position, (spec.channels, spec.height, spec.width))
        velocity = guided_velocity(model, labels[position], spec.num_classes, cfg.guidance, (low, high))
        latents = sample(velocity, noise, cfg.steps, cfg.solver, cfg.shift)  # pyright: ignore[reportArgumentType]
        images.append(to_uint8(autoencoder.decode(spec.denormalise(latents))))
    pixels = np.concatenate(images)

    out = Path(cfg.out).expanduser()
    png, npz = out.with_name(out.name + ".png"), out.with_name(out.name + ".npz")
    write_grid(png, pixels, columns=-(-cfg.count // len(chosen)) if cfg.count > len(chosen) else min(cfg.count, 10))
    np.savez(npz, pixels, labels=labels.cpu().numpy())
    names = [spec.class_names[label] for label in chosen]
    print(f"{cfg.count} samples of {json.dumps(names[:10])}{' …' if len(names) > 10 else ''} from {file}")
    print(f"{png}\n{npz}", flush=True)
    return png, npz


def main() -> None:
    with one_sentence():
        sample_run(checked(from_words(SampleConfig, sys.argv[1:], __doc__ or "")))


if __name__ == "__main__":
    main()
