"""Samples a second of each loader and of the usual ways to feed latents; and where precompute
spends its time.

    python -m scripts.bench data
    python -m scripts.bench data setting=s256 step_ms=100 images=2000

One after the other over the same latents (fp16); `×usual` divides medians. `cold` is the first
epoch, from the start of the loader, with the files out of the page cache (Linux); the others are
warm. `wait` is the share of the time that a loop which is busy for `step_ms` a batch spends waiting
for the next one. The usual ways: a webdataset pipeline as its documentation has it (one .npy a
sample, shuffle, `.decode()`), and a memory-mapped file read at random.
"""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from common.errors import UserError
from data.resident import ResidentLatents
from data.streamed import StreamedLatents
from scripts.bench.report import entries_table
from scripts.bench.rows import Benchmark, Row
from scripts.bench.settings import BenchConfig, scratch
from scripts.bench.workload import Kept
from scripts.timing import Spread, seconds
from training.environment import pick_device

SIZES = {
    "tiny": (2048, 64, 8),
    "s32": (50_000, 32, 32),
    "s256": (50_000, 256, 32),
    "b256": (50_000, 256, 32),
}
"""Setting -> samples, batch size, side of the latents; 4 channels."""
IMAGES = {"tiny": (24, 32), "s32": (1000, 256), "s256": (1000, 256), "b256": (1000, 256)}
"""Setting -> images to encode, their side."""
USUAL = "webdataset's own pipeline, 2 workers"
PRECOMPUTE = "precompute"


@dataclass(frozen=True)
class DataConfig(BenchConfig):
    """Keys of the comparison."""

    count: int | None = None
    """Samples of the set; null: the setting's."""
    step_ms: float = 100.0
    """How long the loop is busy with a batch, for the share of waiting."""
    images: int | None = None
    """Images to encode; 0 for none, null: the setting's."""


@dataclass(frozen=True)
class LatentFiles:
    """The same latents three times: our shards, one .npy a sample in tars, one array."""

    folder: Path
    count: int
    batch_size: int
    shape: tuple[int, int, int]

    @property
    def ours(self) -> Path:
        return self.folder / "ours"

    @property
    def tars(self) -> list[str]:
        return sorted(str(file) for file in (self.folder / "tars").glob("*.tar"))

    @property
    def array(self) -> Path:
        return self.folder / "latents.npy"

    def drop_from_cache(self) -> None:
        """Out of the page cache, where the system offers that."""
        if hasattr(os, "posix_fadvise"):
            for file in self.folder.rglob("*"):
                if file.is_file():
                    descriptor = os.open(file, os.O_RDONLY)
                    os.fsync(descriptor)
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(descriptor)


def write_files(folder: Path, count: int, batch_size: int, side: int) -> LatentFiles:
    """Random latents in each form; ours are imported from the array."""
    import numpy as np

    os.environ.setdefault("WDS_SECURE", "1")
    from webdataset.writer import TarWriter

    from encoding.foreign import open_foreign
    from encoding.foreign_samples import Asked
    from models.autoencoders import PixelAutoencoder
    from scripts.import_latents import ImportConfig, write

    files = LatentFiles(folder, count, batch_size, (4, side, side))
    labels = folder / "labels.npy"
    files.ours.mkdir(parents=True)
    (folder / "tars").mkdir()
    draw = np.random.default_rng(0)
    array = np.lib.format.open_memmap(
        files.array, mode="w+", dtype=np.float16, shape=(count, *files.shape)
    )
    np.save(labels, np.arange(count) % 1000)
    for start in range(0, count, 2048):
        with (
            (folder / "tars" / f"{start:08d}.tar").open("wb") as stream,
            TarWriter(stream, mtime=0) as tar,
        ):
            for i in range(start, min(start + 2048, count)):
                array[i] = draw.standard_normal(files.shape, dtype=np.float32)
                tar.write({"__key__": f"{i:08d}", "npy": array[i], "cls": i % 1000})
    array.flush()
    cfg = ImportConfig(str(files.array), labels=str(labels), scale=1.0, held_out=0.0)
    foreign = open_foreign(str(files.array), Asked(labels=str(labels)))
    encoder = {"_target_": "models.autoencoders.PixelAutoencoder"}
    write(cfg, foreign, PixelAutoencoder(), encoder, files.ours).write(files.ours)
    return files


def per_sample_pipeline(files: LatentFiles, device: torch.device, workers: int) -> Iterator[Any]:
    """webdataset as its documentation has it; endless, and on the device, as ours are."""
    webdataset: Any = importlib.import_module("webdataset")
    dataset = (
        webdataset.WebDataset(files.tars, shardshuffle=100, empty_check=False)
        .shuffle(1000)
        .decode()
        .to_tuple("npy", "cls")
        .batched(files.batch_size, partial=False)
        .repeat()
    )
    pinned = device.type == "cuda"
    for latents, labels in webdataset.WebLoader(
        dataset, batch_size=None, num_workers=workers, pin_memory=pinned
    ):
        yield (
            torch.as_tensor(latents).to(device, non_blocking=True).float(),
            torch.as_tensor(labels).to(device),
        )


def random_access(files: LatentFiles, device: torch.device) -> Iterator[Any]:
    """A memory-mapped array, rows at random, as nanoGPT has it."""
    import numpy as np

    array = np.load(files.array, mmap_mode="r")
    draw = np.random.default_rng(0)
    while True:
        rows = np.sort(draw.integers(0, files.count, files.batch_size))
        latents = torch.from_numpy(array[rows])
        latents = latents.pin_memory() if device.type == "cuda" else latents
        yield latents.to(device, non_blocking=True).float()


def ways(files: LatentFiles, device: torch.device) -> dict[str, Callable[[], Iterator[Any]]]:
    shared: dict[str, Any] = {
        "path": str(files.ours),
        "batch_size": files.batch_size,
        "seed": 0,
        "device": device,
    }
    window = max(256, files.count // 8) * 2 * (2 * prod(files.shape) + 16) / 2**30
    return {
        "resident": partial(ResidentLatents, **shared, device_memory_gib=1e3),
        "resident, int8": partial(ResidentLatents, **shared, device_memory_gib=1e3, storage="int8"),
        "resident, window of an eighth": partial(
            ResidentLatents, **shared, device_memory_gib=window
        ),
        "webdataset, in a thread": partial(StreamedLatents, **shared, num_workers=0),
        "webdataset, 1 worker": partial(StreamedLatents, **shared, num_workers=1),
        "webdataset, 2 workers": partial(StreamedLatents, **shared, num_workers=2),
        "mmap at random": partial(random_access, files, device),
        "webdataset's own pipeline, 1 worker": partial(per_sample_pipeline, files, device, 1),
        USUAL: partial(per_sample_pipeline, files, device, 2),
    }


def measure(name: str, files: LatentFiles, cfg: DataConfig) -> dict[str, Any]:
    """Cold and warm samples a second of one way, and its share of waiting."""
    device = pick_device("auto")
    make = ways(files, device)[name]
    batches = max(1, files.count // files.batch_size)
    files.drop_from_cache()
    began = time.perf_counter()
    loader = make()

    def epoch() -> None:
        for _ in range(batches):
            next(loader)

    seconds(epoch, device)
    cold = files.batch_size * batches / (time.perf_counter() - began)
    warm = Spread.of(
        [files.batch_size * batches / seconds(epoch, device) for _ in range(cfg.repeats)]
    )
    waited = 0.0
    busy = cfg.step_ms / 1e3
    for _ in range(cfg.steps):
        start = time.perf_counter()
        next(loader)
        waited += time.perf_counter() - start
        time.sleep(busy)
    wait = waited / (waited + cfg.steps * busy)
    return {
        "cold_samples_per_s": cold,
        **warm.as_json("samples_per_s"),
        "wait": wait,
        "batch_size": files.batch_size,
    }


def random_autoencoder(device: torch.device) -> Any:
    """An autoencoder of Stable Diffusion's shape with random weights, for its time; a tiny one
    without a GPU."""
    from diffusers import AutoencoderKL

    make: Any = AutoencoderKL
    widths = (128, 256, 512, 512) if device.type == "cuda" else (8, 8)
    encoder = make(
        block_out_channels=widths,
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        layers_per_block=2,
        norm_num_groups=min(32, widths[0]),
    )
    return encoder.to(device).eval()


def precompute_by_parts(
    folder: Path, count: int, side: int, device: torch.device
) -> dict[str, Any]:
    """Images a second of encoding random JPEGs with an autoencoder of Stable Diffusion's shape
    (random weights)."""
    import numpy as np
    from PIL import Image

    from accel.techniques.precision import Precision
    from encoding.encoder import EncodeStep, ShardEncoder
    from encoding.job import plan_shards
    from encoding.sources import list_images
    from models.autoencoders import DiffusersAutoencoder
    from training.config.precompute import PrecomputeConfig

    draw = np.random.default_rng(0)
    (folder / "images" / "one").mkdir(parents=True)
    for i in range(count):
        pixels = np.kron(
            draw.integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8),
            np.ones((10, 10, 1), np.uint8),
        )
        Image.fromarray(pixels).save(folder / "images" / "one" / f"{i:06d}.jpg")
    random_autoencoder(device).save_pretrained(folder / "vae")
    out = folder / "encoded"
    out.mkdir()
    cfg = PrecomputeConfig(
        source=str(folder / "images"), out=str(out), resolution=side, num_workers=2
    )
    autoencoder = DiffusersAutoencoder(str(folder / "vae")).to(device)
    step = EncodeStep(autoencoder)
    if device.type == "cuda":
        step = Precision("bf16", device).on_step(step)
    encoder = ShardEncoder(step, cfg, out, device)
    began = time.perf_counter()
    encoder.run(plan_shards(list_images(folder / "images"), cfg))
    taken = time.perf_counter() - began
    shares = {part: spent / taken for part, spent in encoder.seconds.items()}
    return {"images": count, "side": side, "images_per_s": count / taken, "shares": shares}


def plan(cfg: DataConfig, overrides: list[str], device: torch.device) -> Iterator[Row]:
    assert cfg.setting is not None
    if cfg.step_ms < 0 or (cfg.count is not None and cfg.count < 1):
        raise UserError(
            f"step_ms={cfg.step_ms} must be at least 0, and count={cfg.count} at least 1."
        )
    count, batch_size, side = SIZES[cfg.setting]
    images, image_side = IMAGES[cfg.setting]
    temporary = scratch(cfg)
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    kept: Kept[LatentFiles] = Kept()

    def of_way(name: str) -> dict[str, Any]:
        files = kept.get(
            "files",
            lambda: write_files(temporary / "latents", cfg.count or count, batch_size, side),
        )
        return measure(name, files, cfg) | {"samples": files.count, "step_ms": cfg.step_ms}

    for name in ways(LatentFiles(temporary, count, batch_size, (4, side, side)), device):
        yield Row(name, partial(of_way, name), 30)
    wanted = images if cfg.images is None else cfg.images
    if wanted:
        yield Row(
            PRECOMPUTE, partial(precompute_by_parts, temporary, wanted, image_side, device), 60
        )


def texts(entries: Sequence[dict[str, Any]]) -> list[str]:
    loaders = [e for e in entries if e["name"] != PRECOMPUTE]
    usual = next(
        (e["samples_per_s"] for e in loaders if e["name"] == USUAL and "samples_per_s" in e), None
    )
    if usual:
        loaders = [
            e | {"times_usual": e["samples_per_s"] / usual} if "samples_per_s" in e else e
            for e in loaders
        ]
    columns = {
        "samples/s": "{samples_per_s:.0f}",
        "quartiles": "{samples_per_s_q1:.0f}–{samples_per_s_q3:.0f}",
        "cold": "{cold_samples_per_s:.0f}",
        **({"×usual": "{times_usual:.1f}"} if usual else {}),
        "wait": "{wait:.1%}",
        "at ms": "{step_ms:.0f}",
    }
    encoded = [e for e in entries if e["name"] == PRECOMPUTE]
    shares = {part: f"{{shares[{part}]:.0%}}" for e in encoded for part in e.get("shares", ())}
    images = {"images/s": "{images_per_s:.1f}", "images": "{images}", "pixels": "{side}", **shares}
    return [entries_table(columns, loaders), *([entries_table(images, encoded)] if encoded else [])]


BENCHMARKS = {"data": Benchmark(DataConfig, plan, texts, __doc__ or "")}
