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
from data.images import RESIZE, Decoded, DecodedImages, ImageEntry, ImageList, collate
from data.manifest import Manifest, Shard, write_atomically
from data.shards import ShardWriter, file_sha256
from data.statistics import ChannelSums, channel_statistics
from models.autoencoders import Autoencoder
from models.images import psnr
from training.progress import Progress
from training.run import describe_environment
from training.schema import PrecomputeConfig

PSNR_IMAGES = 16
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


def to_input(pixels: Tensor, device: torch.device) -> Tensor:
    """8-bit images in [-1, 1]."""
    return pixels.to(device).float() / 127.5 - 1.0


def first_images(images: ImageList, cfg: PrecomputeConfig, device: torch.device) -> Tensor:
    """The first decodable images in [-1, 1]: a batch of them, and what PSNR needs; ValueError if there is none."""
    dataset = DecodedImages(images.entries, cfg.resolution)
    pixels = []
    for i in range(len(dataset)):
        pixel = dataset[i][1]
        if isinstance(pixel, Tensor):
            pixels.append(pixel)
        if len(pixels) == max(cfg.batch_size, PSNR_IMAGES):
            break
    if not pixels:
        raise ValueError(f"source={cfg.source}: none of the {len(images.entries)} images can be decoded.")
    return to_input(torch.stack(pixels), device)


def measure_psnr(step: EncodeStep, autoencoder: Autoencoder, images: Tensor, cfg: PrecomputeConfig) -> float:
    """dB of reconstructing `images`; ValueError below `min_psnr`: a wrong scale, range or file shows here.

    ValueError too if the encoder does not divide the resolution.
    """
    decoded = torch.cat([autoencoder.decode(step(part)[0]) for part in images.split(cfg.batch_size)])
    if decoded.shape != images.shape:
        raise ValueError(
            f"resolution={images.shape[-1]}: this encoder gives images of {decoded.shape[-1]} pixels back; "
            f"choose a multiple of its downsampling."
        )
    quality = psnr(decoded, images)
    if not quality >= cfg.min_psnr:
        raise ValueError(
            f"the encoder reconstructs the first {len(images)} images at {quality:.1f} dB, below "
            f"min_psnr={cfg.min_psnr}; check encoder.path, or lower min_psnr if that is what this encoder does."
        )
    return quality


def job_description(
    images: ImageList, cfg: PrecomputeConfig, encoder_sha256: str | None, precision: str
) -> dict[str, Any]:
    """All that determines the content of the shards; `precision` is the one that the ledger shows."""
    keys = ("resolution", "flips", "held_out", "limit", "seed", "batch_size", "shard_size", "block_size")
    return {
        **{key: getattr(cfg, key) for key in keys},
        "kind": cfg.kind.value,
        "dtype": cfg.dtype.value,
        "precision": precision,
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
            sums, skipped, remaining = ChannelSums(), [], len(entries)
            while remaining:
                numbers, decoded = next(batches)
                remaining -= len(numbers)
                progress.advance(len(numbers))
                skipped += decoded.reasons
                if decoded.entries:
                    tensors = self.encode([numbers[i] for i in decoded.places], decoded)
                    sums.add(tensors)
                    writer.add(tensors)
            for line in skipped:
                progress.say(f"skipped {line}")
            sidecar = {"shard": asdict(writer.close()), "skipped": skipped, "sums": sums.as_dict()}
            write_atomically(self.out / f"{name}.json", json.dumps(sidecar) + "\n")
            sidecars[name] = sidecar
        progress.close()
        return [sidecar for sidecar in sidecars.values() if sidecar is not None]

    def decoded(self, todo: list[tuple[str, str, list[tuple[int, ImageEntry]]]]) -> Iterator[tuple[list[int], Decoded]]:
        """Batches (numbers of the images in the shuffled list, what became of them), none across a shard's end."""
        entries = [pair for _, _, part in todo for pair in part]
        chunks, start = [], 0
        for _, _, part in todo:
            end = start + len(part)
            chunks += [
                list(range(i, min(i + self.cfg.batch_size, end))) for i in range(start, end, self.cfg.batch_size)
            ]
            start = end
        dataset = DecodedImages([entry for _, entry in entries], self.cfg.resolution)
        loader = DataLoader(dataset, batch_sampler=chunks, num_workers=self.cfg.num_workers, collate_fn=collate)
        for chunk, decoded in zip(chunks, loader, strict=True):
            yield [entries[i][0] for i in chunk], decoded

    def encode(self, numbers: list[int], decoded: Decoded) -> dict[str, Tensor]:
        """The tensors of one batch, as they are stored."""
        images = to_input(decoded.pixels, self.device)
        tensors = self.latents(images, numbers, decoded.entries, "latents", "std")
        if self.cfg.flips:
            tensors |= self.latents(images.flip(3), numbers, decoded.entries, "mirrored", "mirrored_std")
        return tensors | {"labels": torch.tensor([entry.label for entry in decoded.entries])}

    def latents(
        self, images: Tensor, numbers: list[int], entries: list[ImageEntry], name: str, std_name: str
    ) -> dict[str, Tensor]:
        mean, std = self.step(images)
        if self.cfg.kind.value == "sample" and std is not None:
            position = torch.tensor(numbers, device=mean.device)
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


def write_manifest(
    out: Path,
    sidecars: list[dict[str, Any]],
    images: ImageList,
    cfg: PrecomputeConfig,
    autoencoder: Autoencoder,
    shape: tuple[int, ...],
    psnr_db: float,
    precision: str,
) -> Manifest:
    """Merges the sidecars into `manifest.json`."""
    shards = [Shard(**s["shard"]) for s in sidecars if s["shard"]["count"]]
    counts = {split: sum(s.count for s in shards if s.split == split) for split in ("train", "held_out")}
    if not counts["train"]:
        raise ValueError(f"source={cfg.source}: no training image could be decoded; see the skipped ones above.")
    mean, std = channel_statistics(sidecars)
    local = cfg.encoder.get("path") and os.path.isdir(os.path.expanduser(cfg.encoder["path"]))
    encoder = cfg.encoder | ({"path": str(Path(cfg.encoder["path"]).expanduser().resolve())} if local else {})
    if autoencoder.revision is not None:
        encoder |= {"revision": autoencoder.revision}
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
        precision=precision,
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
