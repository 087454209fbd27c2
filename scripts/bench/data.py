"""Measures the samples per second of each loader and of the usual ways to feed latents.

All loaders read the same latents in fp16, one loader after the other. `first_samples_per_s` is the
speed of the first epoch, including the time to open the loader; `samples_per_s` is the speed of
later epochs. The usual ways are webdataset's pipeline as its documentation shows it (one .npy per
sample, shuffle, `.decode()`), and random reads of a memory-mapped file.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.environment import pick_device
from data.resident import GIB, ResidentLatents
from data.streamed import StreamedLatents
from scripts.bench import BenchConfig, Case, Figures
from scripts.timing import measure_seconds, summarise

SETTING_SIZES = {"tiny": (2048, 64, 8), "s32": (8192, 32, 32)}
"""Name of a setting -> (number of samples, batch size, height and width of the latents); the
latents have 4 channels."""
USUAL_SIZES = (50_000, 256, 32)
"""(number of samples, batch size, height and width of the latents) in all settings that
`SETTING_SIZES` does not have."""


@cache
def write_latent_files(count: int, side: int) -> Path:
    """Writes the same random latents in three forms, once per process: one array, tars with one
    .npy per sample, and shards of this framework. Returns the folder."""
    os.environ.setdefault("WDS_SECURE", "1")
    from webdataset.writer import TarWriter

    from encoding.foreign import ForeignOptions, open_foreign
    from models.autoencoders import PixelAutoencoder
    from scripts.import_latents import ImportConfig, write_set

    folder = Path(tempfile.mkdtemp())
    shape = (count, 4, side, side)
    latents = np.random.default_rng(0).standard_normal(shape, dtype=np.float32).astype(np.float16)
    for start in range(0, count, 2048):
        with (folder / f"{start:08d}.tar").open("wb") as stream, TarWriter(stream, mtime=0) as tar:
            for i in range(start, min(start + 2048, count)):
                tar.write({"__key__": f"{i:08d}", "npy": latents[i], "cls": i % 1000})

    file = str(folder / "latents.npy")
    labels = str(folder / "labels.npy")
    ours = folder / "ours"
    ours.mkdir()
    np.save(file, latents)
    np.save(labels, np.arange(count) % 1000)
    write_set(
        ImportConfig(file, labels=labels, scale=1.0, held_out=0.0),
        open_foreign(file, ForeignOptions(labels=labels)),
        PixelAutoencoder(),
        {"_target_": "models.autoencoders.PixelAutoencoder"},
        ours,
    )
    return folder


def feed_per_sample(
    folder: Path, size: int, device: torch.device, num_workers: int
) -> Iterator[Any]:
    """Yields batches (latents, labels) on the device, endlessly, by the pipeline that webdataset's
    documentation shows."""
    webdataset: Any = import_module("webdataset")
    tars = sorted(str(file) for file in folder.glob("*.tar"))
    dataset = webdataset.WebDataset(tars, shardshuffle=100, empty_check=False)
    samples = dataset.shuffle(1000).decode().to_tuple("npy", "cls")
    batches = samples.batched(size, partial=False).repeat()
    loader = webdataset.WebLoader(
        batches, batch_size=None, num_workers=num_workers, pin_memory=device.type == "cuda"
    )
    for latents, labels in loader:
        on_device = torch.as_tensor(latents).to(device, non_blocking=True).float()
        yield on_device, torch.as_tensor(labels).to(device)


def feed_at_random(folder: Path, size: int, device: torch.device) -> Iterator[Any]:
    """Yields batches of latents on the device, endlessly: random rows of a memory-mapped array, as
    nanoGPT reads its data."""
    array = np.load(folder / "latents.npy", mmap_mode="r")
    draw = np.random.default_rng(0)
    while True:
        latents = torch.from_numpy(array[np.sort(draw.integers(0, len(array), size))])
        if device.type == "cuda":
            latents = latents.pin_memory()
        yield latents.to(device, non_blocking=True).float()


def open_ours(
    kind: Any, folder: Path, size: int, device: torch.device, **more: Any
) -> Iterator[Any]:
    """Opens this framework's loader of class `kind` on the shards that `write_latent_files`
    wrote."""
    return kind(path=str(folder / "ours"), batch_size=size, seed=0, device=device, **more)


def open_in_chunks(folder: Path, size: int, device: torch.device) -> Iterator[Any]:
    """Opens the resident loader with device memory for only half of the set, so that it loads the
    set in chunks. A thread copies the next quarter of the set to the device (on a GPU in a side
    stream) while batches come from the quarter before."""
    room = (folder / "latents.npy").stat().st_size / 2
    return open_ours(ResidentLatents, folder, size, device, device_memory_gib=room / GIB)


LOADERS: dict[str, Callable[..., Iterator[Any]]] = {
    "resident": partial(open_ours, ResidentLatents),
    "chunks": open_in_chunks,
    "webdataset": partial(open_ours, StreamedLatents),
    "mmap": feed_at_random,
    "pipeline": feed_per_sample,
}
"""Name of a loader in cases.yaml -> function that opens it as an endless stream of batches on the
device."""


def measure_loader(case: Case, cfg: BenchConfig) -> Figures:
    """Measures the samples per second of a loader in its first epoch and in later epochs."""
    count, size, side = SETTING_SIZES.get(str(cfg.setting), USUAL_SIZES)
    folder = write_latent_files(count, side)
    device = pick_device("auto")
    number = max(1, count // size)

    # Start the clock before the loader opens, so that the first epoch includes the time to open it.
    began = time.perf_counter()
    options = {name: value for name, value in case.labels.items() if name != "loader"}
    batches = LOADERS[case.labels["loader"]](folder, size, device, **options)

    def read_epoch() -> None:
        for _ in range(number):
            next(batches)

    measure_seconds(read_epoch, device)
    first = number * size / (time.perf_counter() - began)
    warm = [number * size / measure_seconds(read_epoch, device) for _ in range(cfg.repeats)]
    return {**summarise("samples_per_s", warm), "first_samples_per_s": first}
