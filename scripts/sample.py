"""Draws samples from a trained run.

    python -m scripts.sample run_dir=runs/mine out=samples/mine
    python -m scripts.sample run_dir=runs/mine labels=[apple,3] count=16 guidance=2 grid=16
    python -m scripts.sample weights=copied/ema.safetensors format=png out=samples/copied
    python -m scripts.sample run_dir=runs/mine prompt="a photo of a red apple" count=16 grid=16
    torchrun --nproc-per-node 8 -m scripts.sample run_dir=runs/mine count=50000 batch_size=256

`format=npz` writes <out>.npz with `arr_0` uint8 (N, H, W, 3), which ADM's evaluator reads, and
`labels` (N,); `png` writes <out>/<label>/<number>.png; `latents` writes <out>.npz with `latents`
fp32 (N, C, H, W), as the autoencoder decodes them, and `labels`. <out>.json has the settings of the
draw, and the names of the classes by number. `labels` takes numbers and names; put a name that
looks like a number in quotes: "labels=['3']". A model of captions takes `prompt`, a text as it is
typed, or `prompts`: a file with one on each line, held_out or train; `labels` in the files are then
the numbers of the prompts. Sample i depends on seed and i alone, bit for bit at
equal batch_size. After a stop the same command continues from the pieces in <out>.parts.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from annotated_types import Ge, Le
from PIL import Image

from common.config.paths import refuse_drawing
from common.errors import UserError
from common.files import create_file, hash_content, replace_file, write_json
from sampling.draw import DrawConfig, ResumableChunks, SampleJob
from scripts.commands import run_command

if TYPE_CHECKING:
    import torch


Format = StrEnum("Format", "npz png latents")


@dataclass(frozen=True)
class SampleConfig(DrawConfig):
    """Keys of the command: the samples to draw, and where to write them."""

    format: Format = Format.npz
    """What to write: images in one file, one file for each image, or latents in one file."""
    grid: Annotated[int, Ge(0), Le(1024)] = 0
    """Number of samples, from the first, to write also as one picture <out>.png, sorted by label;
    0: no picture."""
    out: str | None = None
    """Path of the output without its suffix; null: <run_dir>/drawn/step-<N>-<hash of the settings>,
    or samples/drawn-<hash> if `weights` names a file that lies in no run folder."""

    def check(self) -> None:
        """Checks the keys. Raises UserError for values with which no sample can be drawn."""
        super().check()
        if self.grid and self.format is Format.latents:
            raise UserError(
                f"grid={self.grid} is made of images; leave it out with format=latents."
            )


def sample_run(cfg: SampleConfig) -> Path:
    """Draws samples as `cfg` says and returns the file or folder with them. Equal settings give
    equal bytes."""
    refuse_drawing(cfg)
    import torch

    from common.distributed.ranks import Ranks
    from models.images import to_uint8
    from sampling.load import find_run_folder

    ranks = Ranks.from_environment()
    job = SampleJob(cfg, ranks)
    decode = job.trained.autoencoder.decode

    raw = cfg.format is Format.latents
    content = {"kind": "latents" if raw else "images"}
    protocol = job.describe_protocol()
    digest = hash_content([protocol, content])[:8]
    run = find_run_folder(job.trained.file)
    stem = f"{run}/drawn/step-{protocol['weights']['step']}" if run else "samples/drawn"
    out = Path(cfg.out or f"{stem}-{digest}").expanduser()
    parts = Path(f"{out}.parts")
    if cfg.format is Format.png and out.exists() and not parts.exists():
        raise UserError(
            f"out={out} is there already, and its images would mix with new ones; choose another "
            "folder."
        )

    def make_content(labels: torch.Tensor, latents: torch.Tensor) -> dict[str, torch.Tensor]:
        samples = latents if raw else torch.from_numpy(to_uint8(decode(latents)))
        return {"labels": labels, "samples": samples}

    chunks = job.run(parts, content, make_content)

    file = out
    if cfg.format is Format.png:
        write_pngs(out, chunks)
    else:
        file = Path(f"{out}.npz")
        if ranks.first:
            write_npz(file, chunks, cfg.count, "latents" if raw else "arr_0")
    if ranks.first:
        if cfg.grid:
            write_sorted_grid(Path(f"{out}.png"), chunks, min(cfg.grid, cfg.count), job)
        write_json(
            Path(f"{out}.json"), protocol | {"classes": job.stream.conditions.list_names(cfg.count)}
        )
    chunks.remove()
    ranks.say(f"{file}\n{out}.png" if cfg.grid else str(file))
    return file


def write_npz(file: Path, chunks: ResumableChunks, count: int, name: str) -> None:
    """Writes one .npz with the arrays `name` (count, …) and `labels` (count,). Memory holds only
    one chunk at a time."""
    like = chunks.read(0)["samples"].numpy()
    header = {"descr": like.dtype.str, "fortran_order": False, "shape": (count, *like.shape[1:])}
    labels = []

    # Make each ZipInfo from a name, which gives it a fixed date, so that equal samples give equal
    # bytes.
    with replace_file(file) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as stream:
            np.lib.format.write_array_header_1_0(stream, header)
            for chunk in chunks:
                stream.write(chunk["samples"].numpy().tobytes())
                labels.append(chunk["labels"].numpy())
        with archive.open(zipfile.ZipInfo("labels.npy"), "w", force_zip64=True) as stream:
            np.lib.format.write_array(stream, np.concatenate(labels), version=(1, 0))


def write_pngs(folder: Path, chunks: ResumableChunks) -> None:
    """Writes this process's images as <folder>/<label>/<number>.png, with one folder per class."""
    for number in chunks.list_rank_chunks():
        chunk = chunks.read(number)
        for i, label, image in zip(
            chunks.parts[number], chunk["labels"].tolist(), chunk["samples"].numpy(), strict=True
        ):
            file = folder / f"{label:04d}" / f"{i:06d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            with create_file(file) as stream:
                Image.fromarray(image).save(stream, "PNG")


def write_sorted_grid(file: Path, chunks: ResumableChunks, count: int, job: SampleJob) -> None:
    """Writes the first `count` images as one picture, sorted by label.

    Each row is one class with its name, if there are several classes with equally many images each,
    and at most four times as many images in a row as there are rows; otherwise there are about as
    many rows as columns.
    """
    from models.images import write_grid

    first = [chunks.read(number) for number, part in enumerate(chunks.parts) if part.start < count]
    labels = np.concatenate([chunk["labels"] for chunk in first])[:count]
    images = np.concatenate([chunk["samples"] for chunk in first])[:count]
    images = images[np.argsort(labels, kind="stable")]

    classes, sizes = np.unique(labels, return_counts=True)
    if len(sizes) == 1 or sizes.min() < sizes.max() or sizes.max() > 4 * len(sizes):
        return write_grid(file, images, columns=int(np.ceil(np.sqrt(count))))
    conditions = job.stream.conditions
    rows = [conditions.names[label] for label in classes]
    note = conditions.note_rows(len(classes), len(job.trained.spec.names))
    write_grid(file, images, int(sizes[0]), names=rows, note=note)


if __name__ == "__main__":
    run_command(sample_run, SampleConfig, __doc__)
