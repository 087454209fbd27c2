"""Samples a second of each loader and of the usual ways to feed latents; and where precompute spends its time.

    python -m scripts.bench data
    python -m scripts.bench data setting=s256 step_ms=100 images=2000

All in one run over the same latents (fp16), in turn. `cold` is the first epoch, from the start of the loader, with the
files out of the page cache (Linux); `warm` what follows. `wait` is the share of the time that a loop which is busy for
`step_ms` a batch spends waiting for the next one. The usual ways: a webdataset pipeline as its documentation has it
(one .npy a sample, shuffle, `.decode()`), and a memory-mapped file read at random.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data.manifest import Manifest
from data.resident import ResidentLatents
from data.shards import ShardWriter
from data.streamed import StreamedLatents
from encoding.job import facts
from encoding.statistics import ChannelSums
from models.autoencoders import PixelAutoencoder
from scripts.bench.report import entries_table, publish
from scripts.bench.settings import BenchConfig, parse
from scripts.bench.timing import Spread, synchronise
from scripts.bench.workload import attempt
from training.environment import pick_device

SIZES = {"tiny": (2048, 64, 8), "s32": (50_000, 32, 32), "s256": (50_000, 256, 32), "b256": (50_000, 256, 32)}
"""Setting -> samples, batch size, side of the latents; 4 channels."""
IMAGES = {"tiny": (24, 32), "s32": (1000, 256), "s256": (1000, 256), "b256": (1000, 256)}
"""Setting -> images to encode, their side."""


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


def write_files(folder: Path, count: int, batch_size: int, side: int, shard_size: int = 2048) -> LatentFiles:
    """Random latents in each form."""
    import numpy as np

    os.environ.setdefault("WDS_SECURE", "1")
    from webdataset.writer import TarWriter

    files = LatentFiles(folder, count, batch_size, (4, side, side))
    files.ours.mkdir(parents=True)
    (folder / "tars").mkdir()
    array = np.lib.format.open_memmap(files.array, mode="w+", dtype=np.float16, shape=(count, *files.shape))
    generator, sums, shards = torch.Generator().manual_seed(0), ChannelSums(), []
    for number, start in enumerate(range(0, count, shard_size)):
        latents = torch.randn(min(shard_size, count - start), *files.shape, generator=generator).half()
        labels = torch.arange(start, start + len(latents)) % 1000
        array[start : start + len(latents)] = latents.numpy()
        writer = ShardWriter(files.ours / f"train-{number:05d}.tar", "train", block_size=256)
        writer.add({"latents": latents, "labels": labels})
        sums.add({"latents": latents})
        shards.append(writer.close())
        with (folder / "tars" / f"{number:05d}.tar").open("wb") as stream, TarWriter(stream, mtime=0) as tar:
            for i in range(len(latents)):
                tar.write({"__key__": f"{start + i:08d}", "npy": latents[i].numpy(), "cls": int(labels[i])})
    array.flush()
    manifest = Manifest(
        **facts(PixelAutoencoder(), {"_target_": "models.autoencoders.PixelAutoencoder"}, shards, [sums.as_dict()]),
        height=side,
        width=side,
        class_names=[str(i) for i in range(1000)],
        kind="sample",
        dtype="float16",
        flips=False,
        resize="none",
        precision="none",
        source="random numbers",
        source_sha256="none",
        seed=0,
    )
    manifest.write(files.ours)
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
    for latents, labels in webdataset.WebLoader(dataset, batch_size=None, num_workers=workers, pin_memory=pinned):
        yield torch.as_tensor(latents).to(device, non_blocking=True).float(), torch.as_tensor(labels).to(device)


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
    sample = 2 * files.shape[0] * files.shape[1] * files.shape[2] + 16
    window = max(256, files.count // 8) * 2 * sample / 2**30
    return {
        "resident": partial(ResidentLatents, **shared, device_memory_gib=1e3),
        "resident, int8": partial(ResidentLatents, **shared, device_memory_gib=1e3, storage="int8"),
        "resident, window of an eighth": partial(ResidentLatents, **shared, device_memory_gib=window),
        "webdataset, in a thread": partial(StreamedLatents, **shared, num_workers=0),
        "webdataset, 1 worker": partial(StreamedLatents, **shared, num_workers=1),
        "webdataset, 2 workers": partial(StreamedLatents, **shared, num_workers=2),
        "mmap at random": partial(random_access, files, device),
        "webdataset's own pipeline, 1 worker": partial(per_sample_pipeline, files, device, 1),
        "webdataset's own pipeline, 2 workers": partial(per_sample_pipeline, files, device, 2),
    }


def measure(name: str, make: Callable[[], Iterator[Any]], files: LatentFiles, cfg: DataConfig) -> dict[str, Any]:
    """Cold and warm samples a second of one way, and its share of waiting."""
    device = pick_device("auto")
    batches = max(1, files.count // files.batch_size)
    files.drop_from_cache()
    began = time.perf_counter()
    loader = make()

    def take(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            next(loader)
        synchronise(device)
        return time.perf_counter() - start

    take(batches)
    cold = files.batch_size * batches / (time.perf_counter() - began)
    warm = Spread.of([files.batch_size * batches / take(batches) for _ in range(cfg.repeats)])
    waited, busy = 0.0, cfg.step_ms / 1e3
    for _ in range(cfg.steps):
        start = time.perf_counter()
        next(loader)
        waited += time.perf_counter() - start
        time.sleep(busy)
    wait = waited / (waited + cfg.steps * busy)
    return {"name": name, "cold_samples_per_s": cold, **warm.as_json("samples_per_s"), "wait": wait}


def random_autoencoder(device: torch.device) -> Any:
    """An autoencoder of Stable Diffusion's shape with random weights, for its time; a tiny one without a GPU."""
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


def precompute_by_parts(folder: Path, count: int, side: int, device: torch.device) -> dict[str, Any]:
    """Images a second of encoding random JPEGs with an autoencoder of Stable Diffusion's shape (random weights)."""
    import numpy as np
    from PIL import Image

    from accel.precision import Precision
    from encoding.encoder import EncodeStep, ShardEncoder
    from encoding.images import list_images
    from encoding.job import plan_shards
    from models.autoencoders import DiffusersAutoencoder
    from training.config.schema import PrecomputeConfig

    draw = np.random.default_rng(0)
    (folder / "images" / "one").mkdir(parents=True)
    for i in range(count):
        pixels = np.kron(
            draw.integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8), np.ones((10, 10, 1), np.uint8)
        )
        Image.fromarray(pixels).save(folder / "images" / "one" / f"{i:06d}.jpg")
    random_autoencoder(device).save_pretrained(folder / "vae")
    out = folder / "encoded"
    out.mkdir()
    cfg = PrecomputeConfig(source=str(folder / "images"), out=str(out), resolution=side, num_workers=2)
    autoencoder = DiffusersAutoencoder(str(folder / "vae")).to(device)
    step = EncodeStep(autoencoder)
    if device.type == "cuda":
        step = Precision("bf16", device).on_step(step)
    encoder = ShardEncoder(step, cfg, out, device)
    began = time.perf_counter()
    encoder.run(plan_shards(list_images(folder / "images"), cfg))
    seconds = time.perf_counter() - began
    shares = {part: spent / seconds for part, spent in encoder.seconds.items()}
    return {"images": count, "side": side, "images_per_s": count / seconds, "shares": shares}


def main(words: list[str]) -> None:
    cfg, _ = parse(DataConfig, "data", words, __doc__ or "")
    assert cfg.setting is not None
    if cfg.step_ms < 0 or (cfg.count is not None and cfg.count < 1):
        raise ValueError(f"step_ms={cfg.step_ms} must be at least 0, and count={cfg.count} at least 1.")
    count, batch_size, side = SIZES[cfg.setting]
    images, image_side = IMAGES[cfg.setting]
    device = pick_device("auto")
    with tempfile.TemporaryDirectory() as temporary:
        files = write_files(Path(temporary) / "latents", cfg.count or count, batch_size, side)
        entries: list[dict[str, Any]] = []
        for name, make in ways(files, device).items():
            made = attempt(lambda n=name, m=make: measure(n, m, files, cfg))
            entries.append({"name": name, "error": made} if isinstance(made, str) else made)
        wanted = images if cfg.images is None else cfg.images
        encoding = precompute_by_parts(Path(temporary), wanted, image_side, device) if wanted else None
    usual = next(e for e in entries if e["name"] == "webdataset's own pipeline, 2 workers")
    for e in entries:
        if "error" not in e:
            e["times_usual"] = e["samples_per_s"] / usual["samples_per_s"] if "error" not in usual else None
    columns = {
        "samples/s": "{samples_per_s:.0f}",
        "range": "{samples_per_s_min:.0f}–{samples_per_s_max:.0f}",
        "cold": "{cold_samples_per_s:.0f}",
        "×usual": "{times_usual:.1f}",
        f"wait at {cfg.step_ms:.0f} ms": "{wait:.1%}",
    }
    texts = [entries_table(columns, entries)]
    if encoding is not None:
        spent = ", ".join(f"{part} {share:.0%}" for part, share in encoding["shares"].items())
        texts.append(
            f"precompute: {encoding['images_per_s']:.1f} images/s of {image_side} pixels ({spent} of the time)"
        )
    found = {"count": files.count, "batch_size": files.batch_size, "ways": entries, "shape": files.shape}
    publish(cfg, [], device, found | {"precompute": encoding}, *texts)
