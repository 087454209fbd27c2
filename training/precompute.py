"""Encoding a list of images into shards, so that the same command can be stopped anywhere and continues.

The content of a shard is a function of (image list, job, shard number). Each finished shard has a sidecar
`<shard>.json` with its description and sums; what has a valid sidecar is not encoded again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from accel.kernels.counter_noise import Purpose, counter_normal
from data.images import RESIZE, DecodedImages, ImageEntry, ImageList
from data.manifest import Manifest, Shard, write_atomically
from data.shards import ShardWriter, file_sha256
from models.autoencoders import Autoencoder
from models.images import psnr
from training.progress import Progress
from training.run import describe_environment
from training.schema import PrecomputeConfig

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class Plan:
    """Which images go into which shard: shuffled by seed, the held-out ones first."""

    shards: list[tuple[str, str, list[tuple[int, ImageEntry]]]]
    """(file name, split, [(index in the shuffled list, image)])"""
    held_out: int

    @property
    def images(self) -> int:
        return sum(len(entries) for _, _, entries in self.shards)


def plan_shards(images: ImageList, cfg: PrecomputeConfig) -> Plan:
    """Cuts the shuffled list into shards of `shard_size`; ValueError if no image is left to train on."""
    order = torch.randperm(len(images.entries), generator=torch.Generator().manual_seed(cfg.seed)).tolist()[: cfg.limit]
    numbered = [(index, images.entries[i]) for index, i in enumerate(order)]
    held_out = round(cfg.held_out * len(numbered))
    shards = []
    for split, part in (("held_out", numbered[:held_out]), ("train", numbered[held_out:])):
        for start in range(0, len(part), cfg.shard_size):
            shards.append((f"{split}-{start // cfg.shard_size:05d}.tar", split, part[start : start + cfg.shard_size]))
    if held_out == len(numbered):
        raise ValueError(f"held_out={cfg.held_out} of {len(numbered)} images leaves none to train on; lower it.")
    return Plan(shards, held_out)


class EncodeStep:
    """What the stack wraps: `forward` is the encoder's forward pass."""

    def __init__(self, encoder: Autoencoder) -> None:
        self.forward: Callable[..., Any] = encoder.encode

    @torch.no_grad()
    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Posterior mean and std (or None) of images in [-1, 1]."""
        return self.forward(images)


def to_input(pixels: list[Tensor], device: torch.device) -> Tensor:
    """8-bit images as a batch in [-1, 1]."""
    return torch.stack(pixels).to(device).float() / 127.5 - 1.0


def first_images(images: ImageList, cfg: PrecomputeConfig, device: torch.device, count: int = 16) -> Tensor:
    """The first decodable images of the list as a batch in [-1, 1]; ValueError if there is none."""
    dataset = DecodedImages(images.entries, cfg.resolution)
    pixels = []
    for i in range(len(dataset)):
        pixel = dataset[i][1]
        if isinstance(pixel, Tensor):
            pixels.append(pixel)
        if len(pixels) == count:
            break
    if not pixels:
        raise ValueError(f"source={cfg.source}: none of the {len(images.entries)} images can be decoded.")
    return to_input(pixels, device)


def measure_psnr(step: EncodeStep, autoencoder: Autoencoder, images: Tensor, floor: float) -> float:
    """dB of reconstructing `images`; ValueError below `floor`: a wrong scale, range or file shows here."""
    mean, _ = step(images)
    quality = psnr(autoencoder.decode(mean), images)
    if not quality >= floor:
        raise ValueError(
            f"the encoder reconstructs the first {len(images)} images at {quality:.1f} dB, below min_psnr={floor}; "
            f"check encoder.path, or lower min_psnr if that is what this encoder does."
        )
    return quality


def job_description(images: ImageList, cfg: PrecomputeConfig, encoder_sha256: str | None) -> dict[str, Any]:
    """All that determines the content of the shards."""
    keys = ("resolution", "flips", "held_out", "limit", "seed", "batch_size", "shard_size", "block_size")
    return {
        **{key: getattr(cfg, key) for key in keys},
        "kind": cfg.kind.value,
        "dtype": cfg.dtype.value,
        "precision": cfg.runtime.precision.value,
        "source_sha256": images.sha256(),
        "encoder_sha256": encoder_sha256,
    }


def claim(out: Path, job: dict[str, Any]) -> None:
    """Makes `out` this job's folder; ValueError if it belongs to another job."""
    file = out / "job.json"
    if file.is_file():
        earlier = json.loads(file.read_text())
        if changed := [f"{k} was {earlier.get(k)}, is {v}" for k, v in job.items() if earlier.get(k) != v]:
            raise ValueError(
                f"out={out} holds latents of another job ({'; '.join(changed)}); choose another folder or delete it."
            )
        return
    if out.exists() and not out.is_dir():
        raise ValueError(f"out={out} is a file; choose a folder.")
    if out.is_dir() and any(found.name != "job.json.tmp" for found in out.iterdir()):  # that one: killed while claiming
        raise ValueError(f"out={out} is not empty and holds no latents of ours; choose another folder.")
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(job, indent=1) + "\n")


def finished(out: Path, name: str) -> dict[str, Any] | None:
    """The sidecar of a shard that is complete and undamaged."""
    sidecar, file = out / f"{name}.json", out / name
    if not (sidecar.is_file() and file.is_file()):
        return None
    described = json.loads(sidecar.read_text())
    return described if described["shard"]["sha256"] == file_sha256(file) else None


class Encoder:
    """Encodes the shards of a plan that are not finished yet."""

    def __init__(self, step: EncodeStep, cfg: PrecomputeConfig, out: Path, device: torch.device) -> None:
        self.step, self.cfg, self.out, self.device = step, cfg, out, device
        self.dtype = DTYPES[cfg.dtype.value]

    def run(self, plan: Plan) -> list[dict[str, Any]]:
        """Sidecars of all shards, in order. Decoding runs in worker processes, ahead of the encoder."""
        sidecars = {name: finished(self.out, name) for name, _, _ in plan.shards}
        todo = [(name, split, entries) for name, split, entries in plan.shards if sidecars[name] is None]
        done = plan.images - sum(len(entries) for _, _, entries in todo)
        if done:
            print(f"{done} of {plan.images} images are already encoded", flush=True)
        progress = Progress(plan.images, "images", initial=done, every=10.0)
        batches = self.decoded(todo)
        for name, split, entries in todo:
            writer = ShardWriter(self.out / name, split, self.cfg.block_size)
            sums, skipped, remaining = Sums(), [], len(entries)
            while remaining:
                decoded = next(batches)
                remaining -= len(decoded)
                progress.advance(len(decoded))
                skipped += [f"{entry.key}: {pixels}" for _, (entry, pixels) in decoded if isinstance(pixels, str)]
                good = [(index, entry, pixels) for index, (entry, pixels) in decoded if isinstance(pixels, Tensor)]
                if good:
                    writer.add(sums.added(self.encode(*zip(*good, strict=True))))
            for line in skipped:
                progress.say(f"skipped {line}")
            sidecar = {"shard": asdict(writer.close()), "skipped": skipped, "sums": sums.as_dict()}
            write_atomically(self.out / f"{name}.json", json.dumps(sidecar) + "\n")
            sidecars[name] = sidecar
        progress.close()
        return [sidecar for sidecar in sidecars.values() if sidecar is not None]

    def decoded(self, todo: list[tuple[str, str, list[tuple[int, ImageEntry]]]]) -> Iterator[list[tuple[int, Any]]]:
        """Batches [(index, (image, pixels or reason))], none across the end of a shard."""
        entries = [pair for _, _, part in todo for pair in part]
        chunks, start = [], 0
        for _, _, part in todo:
            ends = range(start, start + len(part), self.cfg.batch_size)
            chunks += [list(range(i, min(i + self.cfg.batch_size, start + len(part)))) for i in ends]
            start += len(part)
        dataset = DecodedImages([entry for _, entry in entries], self.cfg.resolution)
        loader = DataLoader(dataset, batch_sampler=chunks, num_workers=self.cfg.num_workers, collate_fn=list)
        for chunk, items in zip(chunks, loader, strict=True):
            yield [(entries[i][0], item) for i, item in zip(chunk, items, strict=True)]

    def encode(
        self, indices: tuple[int, ...], entries: tuple[ImageEntry, ...], pixels: tuple[Tensor, ...]
    ) -> dict[str, Tensor]:
        """The tensors of one batch, as they are stored."""
        images = to_input(list(pixels), self.device)
        tensors = self.latents(images, indices, entries, "latents", "std")
        if self.cfg.flips:
            tensors |= self.latents(images.flip(3), indices, entries, "mirrored", "mirrored_std")
        return tensors | {"labels": torch.tensor([entry.label for entry in entries])}

    def latents(
        self, images: Tensor, indices: tuple[int, ...], entries: tuple[ImageEntry, ...], name: str, std_name: str
    ) -> dict[str, Tensor]:
        mean, std = self.step(images)
        if self.cfg.kind.value == "sample" and std is not None:
            position = torch.tensor(indices, device=mean.device)
            mean, std = mean + std * counter_normal(self.cfg.seed, Purpose.POSTERIOR, position, mean.shape[1:]), None
        tensors = {name: mean} if std is None else {name: mean, std_name: std}
        tensors = {key: tensor.to(self.dtype).cpu() for key, tensor in tensors.items()}
        for tensor in tensors.values():
            bad = ~tensor.isfinite().flatten(1).all(1)
            if bad.any():
                raise ValueError(
                    f"{entries[int(bad.nonzero()[0])].key}: its latents are not finite in "
                    f"dtype={self.cfg.dtype.value}; use dtype=bfloat16 or float32, and another out."
                )
        return tensors


class Sums:
    """Per channel, in fp64: count, sum and sum of squares of what training will see (posterior variance included)."""

    def __init__(self) -> None:
        self.count = 0
        self.total: Tensor | float = 0.0
        self.squares: Tensor | float = 0.0

    def added(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, std_name in (("latents", "std"), ("mirrored", "mirrored_std")):
            if name in tensors:
                values = tensors[name].double()
                self.count += values.numel() // values.shape[1]
                self.total = self.total + values.sum((0, 2, 3))
                self.squares = self.squares + values.square().sum((0, 2, 3))
                if std_name in tensors:
                    self.squares = self.squares + tensors[std_name].double().square().sum((0, 2, 3))
        return tensors

    def as_dict(self) -> dict[str, Any]:
        total, squares = (v.tolist() if isinstance(v, Tensor) else [] for v in (self.total, self.squares))
        return {"count": self.count, "total": total, "squares": squares}


def channel_statistics(sidecars: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Mean and std per channel over the training shards."""
    train = [s["sums"] for s in sidecars if s["shard"]["split"] == "train" and s["sums"]["count"]]
    count = sum(s["count"] for s in train)
    mean = torch.tensor([s["total"] for s in train], dtype=torch.float64).sum(0) / count
    square = torch.tensor([s["squares"] for s in train], dtype=torch.float64).sum(0) / count
    return mean.tolist(), (square - mean.square()).clamp(min=1e-12).sqrt().tolist()


def write_manifest(
    out: Path,
    sidecars: list[dict[str, Any]],
    images: ImageList,
    cfg: PrecomputeConfig,
    autoencoder: Autoencoder,
    shape: tuple[int, ...],
    psnr_db: float,
) -> Manifest:
    """Merges the sidecars into `manifest.json`."""
    shards = [Shard(**s["shard"]) for s in sidecars if s["shard"]["count"]]
    counts = {split: sum(s.count for s in shards if s.split == split) for split in ("train", "held_out")}
    if not counts["train"]:
        raise ValueError(f"source={cfg.source}: no training image could be decoded; see the skipped ones above.")
    mean, std = channel_statistics(sidecars)
    local = cfg.encoder.get("path") and os.path.isdir(os.path.expanduser(cfg.encoder["path"]))
    encoder = cfg.encoder | ({"path": str(Path(cfg.encoder["path"]).expanduser().resolve())} if local else {})
    manifest = Manifest(
        channels=shape[0],
        height=shape[1],
        width=shape[2],
        class_names=images.class_names,
        kind=cfg.kind.value,
        dtype=cfg.dtype.value,
        flips=cfg.flips,
        mean=mean,
        std=std,
        encoder=encoder,
        encoder_class=autoencoder.kind,
        encoder_sha256=autoencoder.weights_sha256,
        scaling_factor=autoencoder.scaling_factor,
        shift_factor=autoencoder.shift_factor,
        input_range=[-1.0, 1.0],
        resize=RESIZE,
        resolution=cfg.resolution,
        psnr_db=psnr_db,
        count=counts["train"],
        held_out=counts["held_out"],
        skipped=[line for s in sidecars for line in s["skipped"]],
        source=str(cfg.source),
        source_sha256=images.sha256(),
        seed=cfg.seed,
        versions=describe_environment(torch.device("cpu"))["versions"],
        shards=shards,
    )
    manifest.write(out)
    return manifest
