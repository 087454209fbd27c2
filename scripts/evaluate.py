"""Measures how close samples of a run are to images: distances, precision, recall, copies.

    python -m scripts.evaluate run_dir=runs/mine count=10000
    python -m scripts.evaluate run_dir=runs/mine reference=photos guidance=1 solver=ab2 steps=100
    torchrun --nproc-per-node 8 -m scripts.evaluate run_dir=runs/mine count=50000 batch_size=256 \
        features=[inception,dinov2] inception=weights-inception-2015-12-05-6726825d.pth \
        dinov2=facebook/dinov2-large

Features: `encoder` (the latent set's autoencoder) and `random` (a fixed random network) download
nothing; with `picture_encoder=<folder>`, one autoencoder for runs on different latent spaces,
`picture` takes the place of `encoder`; `inception` and `dinov2` need `pip install
'fastlatent[evaluation]'` and weights; `<package>.<module>.<Class>` is your own
(extensions=[package]). The reference is a folder of images, or the decoded training latents
("reconstructions"). `labels=[apple,3]` draws only those classes, by name or number; a model of
captions draws those of the training samples, in order (`prompts`), and `clip=<folder of a CLIP
model>` measures how well samples fit them. <out>.json has the figures, the protocol (all settings
that they depend on), and the names of the classes by number. Compare only figures with the same
protocol. After a stop the same command continues from the pieces in <out>.parts and gives the same
figures. The features of the reference are cached below $XDG_CACHE_HOME or ~/.cache; processes on
several machines must share that folder and `out`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from common.config.paths import refuse_drawing, refuse_missing
from common.config.schema import EnoughSamples, FdConfig, Positive
from common.errors import UserError
from common.text import format_table
from sampling.draw import DrawConfig, SampleJob
from scripts.commands import run_command

if TYPE_CHECKING:
    from torch import Tensor

    from evaluation.distances import StatsBySpace
    from evaluation.evaluator import Evaluator
    from sampling.draw import ResumableChunks

CLIP = "clip_score"
FIGURES = ("fd", "floor_fd", "kd", "kd_std", "floor_kd", "precision", "recall", "copied")
"""Names of the figures of a feature space."""


@dataclass(frozen=True)
class EvaluateConfig(FdConfig, DrawConfig):
    """Keys of the command: the samples to draw, and the images to compare them with."""

    count: Annotated[int, Ge(4)] = 10_000
    """Number of samples to draw; fd needs more than twice as many as the features have
    dimensions."""
    batch_size: Positive = 128
    reference_count: EnoughSamples = 50_000
    prompts: str = "train"
    clip: str | None = None
    """For a model of captions: folder or hub id of a CLIP model, by which `clip_score` is measured:
    100 times the mean cosine between a sample and its caption."""
    out: str | None = None
    """Path of the result without .json; null: <run_dir>/evaluation/step-<N>-<hash of the protocol>.
    Required if `weights` names a file that lies in no run folder."""


def evaluate_run(cfg: EvaluateConfig) -> dict[str, Any]:
    """Draws samples, compares their features with those of the reference, and writes <out>.json.
    Returns the content of that file on rank 0, and an empty dict on all other ranks."""
    refuse_drawing(cfg)
    refuse_missing("reference", cfg.reference, "name a folder of images")
    refuse_missing("inception", cfg.inception, "name the file of its weights")
    from common.distributed.ranks import Ranks
    from common.environment import describe_environment
    from common.files import hash_content, write_json
    from evaluation.clip import ClipScore
    from evaluation.distances import explain_too_few
    from evaluation.evaluator import Evaluator
    from sampling.load import find_run_folder

    ranks = Ranks.from_environment()
    job = SampleJob(cfg, ranks)
    trained = job.trained
    run = find_run_folder(trained.file)
    if cfg.out is None and run is None:
        raise UserError(
            f"out is not set, and {trained.file} is in no run's folder; set out=<file without "
            ".json>."
        )
    decode = trained.autoencoder.decode
    clip = ClipScore(cfg.clip, job.stream.conditions, decode) if cfg.clip else None
    evaluator = Evaluator(
        cfg, trained.spec, trained.data, trained.autoencoder, trained.device, ranks
    )
    originals = evaluator.collect_originals(trained.spec, trained.data, ranks)
    for name, space in evaluator.spaces.items():
        too_few = explain_too_few(cfg.count, space.dim)
        if too_few:
            ranks.say(f"note: {name}: {too_few}")

    # Put a hash of the protocol into the name of the result's file, so that different settings
    # write different files.
    # Version 2: held-out images give the threshold of `copied`; before, when protocols had no
    # version, the reference's own images did.
    reference_protocol = evaluator.describe_protocol() | {"version": 2}
    reference_protocol |= {"clip": clip.sha256} if clip else {}
    protocol = job.describe_protocol() | reference_protocol
    digest = hash_content(protocol, sort_keys=True)[:8]
    out = Path(cfg.out or f"{run}/evaluation/{trained.file.parent.name}-{digest}").expanduser()

    def measure(labels: Tensor, latents: Tensor) -> dict[str, Tensor]:
        scores = {} if clip is None else {CLIP: clip(labels, latents)}
        return evaluator.compute_latent_features(latents) | scores

    chunks = job.run(Path(f"{out}.parts"), reference_protocol, measure)
    result: dict[str, Any] = {}
    if ranks.first:
        result = summarise(chunks, evaluator, originals) | {
            "protocol": protocol,
            "environment": describe_environment(trained.device),
            "classes": job.stream.conditions.list_names(cfg.count),
        }
        write_json(Path(f"{out}.json"), result)
        score = f"{CLIP} {result[CLIP]:.2f}\n" if clip else ""
        print(f"\n{format_figures(result['features'])}\n{score}{out}.json", flush=True)
    chunks.remove()
    return result


def summarise(
    chunks: ResumableChunks, evaluator: Evaluator, originals: list[StatsBySpace]
) -> dict[str, Any]:
    """Computes the figures of all samples; holds the features of one chunk at a time."""
    import torch

    from evaluation.distances import collect_stats, compute_figures

    stats = collect_stats({name: chunk[name] for name in evaluator.spaces} for chunk in chunks)
    result: dict[str, Any] = {"features": compute_figures(stats, evaluator.reference, *originals)}
    if CLIP in chunks.read(0):
        result[CLIP] = float(torch.cat([chunk[CLIP] for chunk in chunks]).mean())
    return result


def format_figures(features: Mapping[str, Mapping[str, Any]]) -> str:
    """Formats the figures as a table, with a sentence for each figure that could not be
    computed."""
    rows: list[tuple[str, ...]] = [("features", *FIGURES)]
    for name, row in features.items():
        rows.append((name, *("–" if row[c] is None else f"{row[c]:.4g}" for c in FIGURES)))
    reasons = [f"{name}: {row['why']}" for name, row in features.items() if "why" in row]
    return "\n".join([format_table(rows), *reasons])


if __name__ == "__main__":
    run_command(evaluate_run, EvaluateConfig, __doc__)
