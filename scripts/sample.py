"""Draws samples from a trained run.

    python -m scripts.sample run_dir=runs/mine out=samples/mine
    python -m scripts.sample run_dir=runs/mine labels=[apple,3] count=16 guidance=2 grid=16
    python -m scripts.sample weights=copied/ema.safetensors format=png out=samples/copied
    torchrun --nproc-per-node 8 -m scripts.sample run_dir=runs/mine count=50000 batch_size=256

`format=npz` writes <out>.npz with `arr_0` uint8 (N, H, W, 3), which ADM's evaluator reads, and
`labels` (N,); `png` writes <out>/<label>/<number>.png; `latents` writes <out>.npz with `latents`
fp32 (N, C, H, W), as the autoencoder decodes them, and `labels`. <out>.json says how they were
drawn, and the names of the classes by number. `labels` takes numbers and names; a whole number is a
number, a name that looks like one stands in quotes: "labels=['3']". Sample i depends on seed and i
alone, bit for bit at equal batch_size. Stopped anywhere, the same command goes on from the pieces
in <out>.parts.
"""

from __future__ import annotations

import sys
import zipfile
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from annotated_types import Ge, Le
from PIL import Image

from common.errors import UserError
from common.files import rename, write_json
from sampling.draw import DrawConfig, ResumableChunks, SampleJob
from training.config.compose import parse_words, refuse_drawing
from training.distributed.exit import resumable_command

if TYPE_CHECKING:
    import torch


class Format(str, Enum):
    npz = "npz"
    png = "png"
    latents = "latents"


@dataclass(frozen=True)
class SampleConfig(DrawConfig):
    """What to draw, and where it goes."""

    format: Format = Format.npz
    grid: Annotated[int, Ge(0), Le(1024)] = 0
    """The first so many, sorted by label, also as one picture: <out>.png."""
    out: str = "samples/samples"

    def check(self) -> None:
        """ValueError for a value that nothing can be drawn with."""
        super().check()
        if self.grid and self.format is Format.latents:
            raise UserError(
                f"grid={self.grid} is made of images; leave it out with format=latents."
            )


def sample_run(cfg: SampleConfig) -> Path:
    """Draws samples as `cfg` says and returns the file or folder that has them.

    Equal settings give equal bytes.
    """
    refuse_drawing(cfg)
    import torch

    from models.images import to_uint8
    from training.distributed.ranks import Ranks

    ranks = Ranks.from_environment()
    job = SampleJob(cfg, ranks)
    decode = job.trained.autoencoder.decode

    out = Path(cfg.out).expanduser()
    parts = out.with_name(out.name + ".parts")
    if cfg.format is Format.png and out.exists() and not parts.exists():
        raise UserError(
            f"out={out} is there already, and its images would mix with new ones; choose another."
        )

    raw = cfg.format is Format.latents

    def content(labels: torch.Tensor, latents: torch.Tensor) -> dict[str, torch.Tensor]:
        samples = latents if raw else torch.from_numpy(to_uint8(decode(latents)))
        return {"labels": labels, "samples": samples}

    chunks = job.run(parts, {"kind": "latents" if raw else "images"}, content)

    file = out
    if cfg.format is Format.png:
        write_pngs(out, chunks, job.size)
    else:
        file = out.with_name(out.name + ".npz")
        if ranks.first:
            write_npz(file, chunks, cfg.count, "latents" if raw else "arr_0")
    if ranks.first:
        if cfg.grid:
            count = min(cfg.grid, cfg.count)
            write_sorted_grid(out.with_name(out.name + ".png"), chunks, count, job)
        told = job.describe_protocol() | {"classes": job.list_classes()}
        write_json(out.with_name(out.name + ".json"), told)
    chunks.remove()
    ranks.say(str(file))
    return file


def write_npz(file: Path, chunks: ResumableChunks, count: int, name: str) -> None:
    """Writes one .npz with `name` (count, …) and `labels` (count,), a chunk in memory at a time."""
    temporary = file.with_name(file.name + ".tmp")
    like = chunks.read(0)["samples"].numpy()
    header = {"descr": like.dtype.str, "fortran_order": False, "shape": (count, *like.shape[1:])}
    labels = []
    # a ZipInfo made from a name has a fixed date: equal bytes
    with zipfile.ZipFile(temporary, "w") as archive:
        with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as stream:
            np.lib.format.write_array_header_1_0(stream, header)
            for number in range(chunks.count):
                found = chunks.read(number)
                stream.write(found["samples"].numpy().tobytes())
                labels.append(found["labels"].numpy())
        with archive.open(zipfile.ZipInfo("labels.npy"), "w", force_zip64=True) as stream:
            np.lib.format.write_array(stream, np.concatenate(labels), version=(1, 0))
    rename(temporary, file)


def write_pngs(folder: Path, chunks: ResumableChunks, size: int) -> None:
    """Writes this process's images as <folder>/<label>/<number>.png, a folder a class."""
    for number in chunks.list_rank_chunks():
        found = chunks.read(number)
        pairs = zip(found["labels"].tolist(), found["samples"].numpy(), strict=True)
        for i, (label, image) in enumerate(pairs, start=number * size):
            file = folder / f"{label:04d}" / f"{i:06d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(file)


def write_sorted_grid(file: Path, chunks: ResumableChunks, count: int, job: SampleJob) -> None:
    """Writes the first `count` images as one picture, sorted by label.

    A row is a label, with its name, where that fits; else the picture is a square.
    """
    from models.images import write_grid

    first = [chunks.read(number) for number in range(-(-count // job.size))]
    labels = np.concatenate([chunk["labels"] for chunk in first])[:count]
    images = np.concatenate([chunk["samples"] for chunk in first])[:count]
    images = images[np.argsort(labels, kind="stable")]
    drawn, rows = np.unique(labels, return_counts=True)
    if len(rows) == 1 or rows.min() < rows.max() or rows.max() > 4 * len(rows):
        return write_grid(file, images, columns=int(np.ceil(np.sqrt(count))))
    names = job.trained.spec.names
    note = f"{len(drawn)} of {len(names)} classes" if len(names) > len(drawn) else ""
    write_grid(file, images, int(rows[0]), names=[names[label] for label in drawn], note=note)


def main() -> None:
    with resumable_command():
        sample_run(parse_words(SampleConfig, sys.argv[1:], __doc__ or ""))


if __name__ == "__main__":
    main()
