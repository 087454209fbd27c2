"""Encodes images to latents and writes these to shards (tar files); precompute_latents.py runs
this. Letters: B or n images, S T height and width of an image in pixels, C channels, H height and W
width of the latents."""

from __future__ import annotations

import math
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel.device_memory import WORKER_BYTES, refuse_large_batch
from accel.kernels.counter_noise.draws import Purpose, counter_normal
from common.config.contradictions import list_sides
from common.config.schema import PrecomputeConfig
from common.errors import UserError
from common.output import Progress
from common.text import format_bytes
from encoding.caption_job import CaptionJob
from encoding.decoding import BATCHES_AHEAD, Decoded, DecodedImages, make_decoding_loader
from encoding.images import ImageEntry, ImageList, has_other_profile, read_with_retries
from encoding.job import NumberedImage, Plan
from encoding.reuse import EarlierSet
from encoding.shapes import describe_shapes, read_aspect
from encoding.shards import (
    WHOLE,
    ChannelSums,
    ShardWriter,
    cast_tensors,
    explain_full_disk,
    read_finished,
    write_sidecar,
)
from models.images import Autoencoder, psnr

PSNR_IMAGES = 16
"""Number of images that the job encodes and decodes to measure the PSNR, before it encodes the
set."""


class EncodeStep:
    """Calls the encoder through the attribute `forward`, which the acceleration stack may replace
    by a faster function."""

    def __init__(self, encoder: Autoencoder) -> None:
        self.forward: Callable[..., Any] = encoder.encode

    @torch.no_grad()
    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Encodes images (B, 3, S, T) in [-1, 1]; returns the mean and the std of the posterior,
        both (B, C, H, W). If the encoder has no posterior, returns the latents and None."""
        return self.forward(images)


def to_input(pixels: Tensor, device: torch.device) -> Tensor:
    """Moves 8-bit images to the device and converts their values from 0…255 to fp32 in [-1, 1]."""
    return pixels.to(device).float() / 127.5 - 1.0


def make_decoded_images(entries: list[ImageEntry], cfg: PrecomputeConfig) -> DecodedImages:
    """Makes a data set that decodes the images of `entries`; `cfg` sets their resolution, the
    background of transparent pixels, the limit in megapixels, and what becomes of colour
    profiles."""
    return DecodedImages(
        entries,
        cfg.resolution,
        background=cfg.background,
        max_megapixels=cfg.max_megapixels,
        convert_profile=cfg.convert_profile,
    )


def read_first_images(images: ImageList, cfg: PrecomputeConfig, device: torch.device) -> Tensor:
    """Returns the first images that can be decoded, (n, 3, S, T) in [-1, 1]; n is at most
    `batch_size` or `PSNR_IMAGES`, whichever is larger. Raises UserError if no image can be
    decoded."""
    decodable = (
        item for _, item in make_decoded_images(images.entries, cfg) if isinstance(item, Tensor)
    )
    pixels = list(islice(decodable, max(cfg.batch_size, PSNR_IMAGES)))
    if not pixels:
        raise UserError(
            f"source={cfg.source}: none of the {len(images.entries)} images can be decoded."
        )
    return to_input(torch.stack(pixels), device)


def refuse_large_encoding(step: EncodeStep, cfg: PrecomputeConfig, device: torch.device) -> None:
    """Raises a UserError if a batch of images surely needs more memory than is there."""
    shape = (3, *list_sides(cfg.resolution))
    decoded = BATCHES_AHEAD * cfg.batch_size * math.prod(shape)
    refuse_large_batch(
        cfg.batch_size,
        device,
        lambda samples: step(torch.zeros(samples, *shape, device=device)),
        cfg.num_workers * (WORKER_BYTES + decoded),
    )


def measure_psnr(
    step: EncodeStep, autoencoder: Autoencoder, images: Tensor, cfg: PrecomputeConfig
) -> float:
    """Encodes and decodes `images`, and returns the PSNR of the result in dB.

    Raises UserError if the PSNR is below `min_psnr` (a wrong scale, range or weights file causes
    that), or if a side of the images is no multiple of the encoder's downsampling.
    """
    decoded = torch.cat(
        [autoencoder.decode(step(part)[0]) for part in images.split(cfg.batch_size)]
    )
    if decoded.shape != images.shape:
        height, width = decoded.shape[2:]
        raise UserError(
            f"resolution={cfg.resolution}: this encoder gives images of {height}×{width} pixels "
            "back; choose multiples of its downsampling."
        )
    quality = psnr(decoded, images)
    if not quality >= cfg.min_psnr:
        raise UserError(
            f"the encoder reconstructs the first {len(images)} images at {quality:.1f} dB, below "
            f"min_psnr={cfg.min_psnr}; check encoder.path, or lower min_psnr if that is what this "
            "encoder does."
        )
    return quality


@dataclass
class ShardEncoder:
    """Encodes the unfinished shards of a plan's part."""

    step: EncodeStep
    cfg: PrecomputeConfig
    out: Path
    device: torch.device
    captions: CaptionJob | None = None
    earlier: EarlierSet | None = None
    """A set from which latents of the same images are copied."""
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Part of the job (decode, encode, write) -> seconds spent on it. "decode" counts only the
    seconds in which the encoder waits for decoded images."""

    def run(self, plan: Plan) -> None:
        """Writes each unfinished shard of the plan's part, and its sidecar, a JSON file that
        describes the shard. Worker processes decode images ahead of the encoder."""
        shards = plan.part.select(plan.shards)
        if any((self.out / f"{name}.json").is_file() for name, _, _ in shards):
            print("checking the hashes of the finished shards", flush=True)
        todo = [shard for shard in shards if read_finished(self.out, shard[0]) is None]
        images = sum(len(entries) for _, _, entries in shards)
        done = images - sum(len(entries) for _, _, entries in todo)
        if done:
            print(f"{done} of {images} images are already encoded", flush=True)

        # Decode batches of numbered images in the order of the shards; no batch spans two shards.
        size = self.cfg.batch_size
        batches = [shard[i : i + size] for _, _, shard in todo for i in range(0, len(shard), size)]
        dataset = make_decoded_images([entry for batch in batches for _, entry in batch], self.cfg)
        if self.earlier is not None:
            dataset.known = self.earlier.images
        sizes = [len(batch) for batch in batches]
        loader = make_decoding_loader(dataset, sizes, self.cfg.num_workers)
        decoded_batches = zip(batches, loader, strict=True)

        progress = Progress(images, plan.part.name_unit("images"), initial=done)
        for name, split, entries in todo:
            with explain_full_disk(self.out, name):
                self.encode_shard(name, split, len(entries), decoded_batches, progress)
        progress.close()

    def encode_shard(
        self,
        name: str,
        split: str,
        remaining: int,
        batches: Iterator[tuple[list[NumberedImage], Decoded]],
        progress: Progress,
    ) -> None:
        """Takes the next `remaining` images from `batches`, encodes them into the shard `name`, and
        writes the shard's sidecar. Skips images that cannot be decoded; raises UserError if the
        file of an image cannot be read."""
        sums = ChannelSums()
        skipped = []
        digests = []
        with ShardWriter(self.out / name, split, self.cfg.block_size) as writer:
            while remaining:
                with self.time_part("decode"):
                    batch, decoded = next(batches)
                if decoded.unread:
                    raise UserError(
                        f"source={self.cfg.source}: {decoded.unread}. Finished shards are kept: "
                        "make the image readable and run the same command again."
                    )

                remaining -= len(batch)
                progress.advance(len(batch))
                skipped += decoded.reasons
                digests += decoded.digests.values()
                if decoded.digests:
                    with self.time_part("encode"):
                        tensors = self.encode(batch, decoded)
                    with self.time_part("write"):
                        sums.add(tensors)
                        writer.add(tensors)

            for line in skipped:
                progress.say(f"skipped {line}")
            with self.time_part("write"):
                facts = {"skipped": skipped, "sums": sums.as_dict(), "images": digests}
                write_sidecar(self.out, writer.close(), facts)

    @contextmanager
    def time_part(self, part: str) -> Iterator[None]:
        """Adds the seconds that the `with` block takes to `seconds[part]`."""
        began = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - began

    def encode(self, batch: list[NumberedImage], decoded: Decoded) -> dict[str, Tensor]:
        """Encodes the decoded images of a batch. Returns a dict from name to tensor with the names
        that a stored shard uses, such as `latents`, `std` and `labels`."""
        tensors: dict[str, Tensor] = {}
        if decoded.places:
            images = to_input(decoded.pixels, self.device)
            numbers, new = zip(*(batch[i] for i in decoded.places), strict=True)
            tensors = self.encode_latents(images, numbers, "latents", "std")
            if self.cfg.flips:
                tensors |= self.encode_latents(images.flip(3), numbers, "mirrored", "mirrored_std")
            tensors = cast_tensors(tensors, self.cfg.dtype, [entry.key for entry in new])
        if self.earlier is not None:
            tensors = self.earlier.add_latents(tensors, decoded)

        entries = [batch[i][1] for i in decoded.digests]
        tensors["labels"] = torch.tensor([entry.label for entry in entries])
        if self.captions is not None:
            tensors["captions"] = self.captions.number_captions([e.captions for e in entries])
        return tensors

    def encode_latents(
        self, images: Tensor, numbers: Sequence[int], name: str, std_name: str
    ) -> dict[str, Tensor]:
        """Encodes images in [-1, 1]. With kind=mean_std it returns the posterior's mean under the
        key `name` and the std under `std_name`. Otherwise it returns one sample of the posterior
        under `name`, whose noise depends only on the seed and on the image's index in the shuffled
        list. If the encoder has no posterior, it returns the latents under `name`."""
        mean, std = self.step(images)
        if std is None:
            return {name: mean}
        if self.cfg.kind == "mean_std":
            return {name: mean, std_name: std}
        position = torch.tensor(numbers, device=mean.device)
        noise = counter_normal(self.cfg.seed, Purpose.POSTERIOR, position, mean.shape[1:])
        return {name: mean + std * noise}


def estimate(encoder: ShardEncoder, images: ImageList, plan: Plan) -> str:
    """Returns the text that dry_run=true prints: the number of images of the job, the GiB that it
    will take, and the minutes that this part of it will take, estimated by encoding the first three
    batches of training images; which resolution and patches fit those, and how many of them have
    another colour profile than sRGB."""
    cfg = encoder.cfg
    first = plan.images[plan.held_out :][: 3 * cfg.batch_size]
    with encoder.time_part("decode"):
        dataset = make_decoded_images([entry for _, entry in first], cfg)
        batches = list(make_decoding_loader(dataset, cfg.batch_size, 0))
    used: list[ImageEntry] = []
    size = 0
    grid: Sequence[int] = ()
    with encoder.time_part("encode"):
        for number, decoded in enumerate(batches):
            if decoded.places:
                batch = first[number * cfg.batch_size :]
                used += [batch[place][1] for place in decoded.places]
                tensors = encoder.encode(batch, decoded)
                size += sum(tensor.nbytes for tensor in tensors.values())
                grid = tensors["latents"].shape[2:]
    count = len(used)
    if not used:
        return f"none of the first {len(first)} images can be decoded"

    processes = max(1, cfg.num_workers)
    reading = encoder.seconds["decode"] / len(first) / processes
    encoding = encoder.seconds["encode"] / count
    minutes = len(plan.images) / plan.part.count * max(encoding, reading) / 60
    each = f" for each of {plan.part.count} parts" if plan.part != WHOLE else ""
    out = encoder.out.absolute()
    folder = next(parent for parent in (out, *out.parents) if parent.exists())
    others = 0
    aspects = []
    for entry in used:
        with suppress(OSError):
            content = read_with_retries(entry)
            others += has_other_profile(content, entry.key)
            aspects.append(read_aspect(content, entry.key))
    shapes = describe_shapes([*filter(None, aspects)], cfg.resolution, grid)
    profiles = (
        f"\n  {others} of the first {count} images have another colour profile than sRGB: "
        f"they are {'converted' if cfg.convert_profile else 'read as sRGB'}"
    )
    return (
        f"dry run, nothing is written: {len(plan.images)} of {len(images.entries)} images, "
        f"{plan.held_out} of them held out, in {len(plan.shards)} shards\n"
        f"  about {format_bytes(len(plan.images) * size / count)} in {encoder.out}; "
        f"{format_bytes(shutil.disk_usage(folder).free)} are free there\n"
        f"  about {minutes:.1f} minutes{each}: "
        f"decoding {1e3 * reading * processes:.1f} ms an image in each of {processes} processes, "
        f"encoding {1e3 * encoding:.1f} ms "
        f"({'decoding' if reading > encoding else 'encoding'} is slower; from {count} images)\n"
        f"{shapes}{profiles * bool(others)}"
    )
