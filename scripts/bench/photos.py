"""Judges what minutes of training buy on photos: packs pictures and an autoencoder into one file
that travels, and trains on them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from PIL import Image
from torch import Tensor

from common.config.compose import parse_words
from common.config.paths import refuse_missing
from common.errors import UserError
from common.files import hash_content, read_object, replace_file
from encoding.decoding import DecodedImages
from encoding.sources import list_images
from scripts.bench import HELP, TABLES, BenchConfig, Case, Figures, Words
from scripts.evaluate import EvaluateConfig, evaluate_run
from scripts.report.__main__ import ReportConfig, report
from scripts.sample import SampleConfig, sample_run

PACKED = Path("photos.zip")


@dataclass(frozen=True)
class PackConfig:
    """Keys of the command `pack`."""

    source: str = "photos"
    """Images with classes, as for precompute_latents.py."""
    encoder: str = "models/taef2"
    """Folder of an autoencoder in the format of diffusers, which is packed too."""


def pack_photos(words: Words) -> None:
    """Runs the command `pack`: writes `PACKED`, a zip file with pictures/<class>/<number>.jpg,
    squares of 128 pixels, and encoder/. UserError if an image cannot be decoded."""
    cfg = parse_words(PackConfig, words, HELP)
    refuse_missing("encoder", cfg.encoder, "name the folder of an autoencoder")
    images = list_images(cfg.source)
    decoded = DecodedImages(images.entries, 128)
    with replace_file(PACKED) as temporary, ZipFile(temporary, "w", ZIP_DEFLATED) as archive:
        for i, entry in enumerate(images.entries):
            _, pixels = decoded[i]
            if not isinstance(pixels, Tensor):
                raise UserError(f"source={cfg.source}: {pixels}; remove or mend it.")
            with archive.open(
                f"pictures/{images.class_names[entry.label]}/{i:06}.jpg", "w"
            ) as stream:
                Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(
                    stream, "JPEG", quality=70, optimize=True, progressive=True
                )

        for file in Path(cfg.encoder).iterdir():
            archive.write(file, f"encoder/{file.name}")
    print(f"{PACKED} has {len(decoded)} pictures")


def measure_photos(case: Case, cfg: BenchConfig) -> Figures:
    """Trains a model on the packed photos, compares its samples at several scales of guidance, and
    writes 64 samples and the run's report beside the result. It goes on from what an earlier call
    left: latents, the run's latest checkpoint, pieces of the comparison that was stopped."""
    if not PACKED.is_file():
        return {"reason": f"{PACKED} is not here; write it by `bench pack`, then add again=all"}
    lines = TABLES["photos"]
    run = f"runs/photos/{case.name}-{hash_content(case.overrides)[:8]}"
    for line in lines["before"]:
        words = line.format(words=" ".join(case.overrides), run=run)
        subprocess.run([sys.executable, *words.split()], check=True)

    rows = {
        result["protocol"]["guidance"]: result["features"]["picture"]
        for result in evaluate_run(EvaluateConfig(run_dir=run, **lines["evaluate"]))
    }
    best = min(rows, key=lambda guidance: rows[guidance]["fd"])

    out = f"{cfg.out}/{cfg.name}/{case.name}/drawn"
    sample_run(SampleConfig(run_dir=run, guidance=best, out=out, **lines["sample"]))
    report(ReportConfig(run, out))
    figures = rows[best] | {"guidance": best, "unguided_fd": rows[1.0]["fd"]}
    return read_object(Path(run, "summary.json")) | figures
