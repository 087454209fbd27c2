"""Measures how close samples of a run are to images: distances, precision, recall, copies.

    python -m scripts.evaluate run_dir=runs/mine count=10000
    python -m scripts.evaluate run_dir=runs/mine reference=photos guidance=1 solver=ab2 steps=100
    python -m scripts.evaluate run_dir=runs/mine guidance=[1,1.25,1.5] length=[0.05,0.1]
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
model>` measures how well samples fit them. Several values of `guidance`, and of `length` for a run
with snapshots, are compared on the same noise and reference, in a table and a plot; each has the
figures that a command of its own gives, bit for bit unless a compiler makes other code for another
batch size. <out>.json has the figures, the protocol (all settings
that they depend on), and the names of the classes by number. Compare only figures with the same
protocol. After a stop the same command continues from the pieces in <out>.parts and gives the same
figures. The features of the reference are cached below $XDG_CACHE_HOME or ~/.cache; processes on
several machines must share that folder and `out`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from common.config.paths import refuse_drawing, refuse_missing
from common.config.schema import EnoughSamples, FdConfig, Positive
from common.errors import UserError
from common.text import format_table
from models.requested_conditions import list_values
from sampling.draw import DrawConfig, SampleJob
from scripts.commands import run_command

if TYPE_CHECKING:
    from torch import Tensor

    from common.distributed.ranks import Ranks
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
    guidance: Any = None
    """Scale of classifier-free guidance, 1 for none, or scales to compare, such as [1,1.25,1.5];
    null: that of the run."""
    length: Any = None
    """Instead of a checkpoint's weights: the length of an average of the run's weights, or lengths
    to compare, such as [0.05,0.1] (see scripts.average)."""
    prompts: str = "train"
    clip: str | None = None
    """For a model of captions: folder or hub id of a CLIP model, by which `clip_score` is measured:
    100 times the mean cosine between a sample and its caption."""
    out: str | None = None
    """Path of the result without .json; null: <run_dir>/evaluation/step-<N>-<hash of the protocol>.
    Required if `weights` names a file that lies in no run folder. Results of several values are
    <out>@<scale>.json, or <out>-<average>.json."""


def evaluate_run(cfg: EvaluateConfig) -> list[dict[str, Any]]:
    """Draws samples with each value of `guidance` and `length`, compares their features with those
    of the reference, and writes a file of figures for each value. Returns the content of the files
    on rank 0, and an empty list on all other ranks."""
    if [] in (cfg.guidance, cfg.length):
        raise UserError("guidance=[] or length=[] has no value; name some, or leave it out.")
    for scale in list_values(cfg.guidance) or [None]:
        refuse_drawing(replace(cfg, guidance=scale))
    refuse_missing("reference", cfg.reference, "name a folder of images")
    refuse_missing("inception", cfg.inception, "name the file of its weights")
    from common.distributed.ranks import Ranks
    from scripts.average import AverageConfig, average

    # Make all averages before samples are drawn.
    ranks = Ranks.from_environment()
    configs = [cfg]
    if cfg.length is not None:
        averages = [AverageConfig(cfg.run_dir, length) for length in list_values(cfg.length)]
        files = ranks.broadcast_result(lambda: [average(wanted) for wanted in averages])
        configs = [
            replace(cfg, run_dir=None, weights=str(f), out=cfg.out and f"{cfg.out}-{f.stem}")
            for f in dict.fromkeys(files)
        ]

    pieces = []
    results: dict[str, dict[str, Any]] = {}
    for config in configs:
        chunks, content = evaluate_weights(config, ranks)
        pieces.append(chunks)
        results |= content
    if len(results) > 1:
        compare_values(results)
    else:
        for out, result in results.items():
            score = f"{CLIP} {result[CLIP]:.2f}\n" if cfg.clip else ""
            print(f"\n{format_figures(result['features'])}\n{score}{out}.json", flush=True)
    for chunks in pieces:
        chunks.remove()
    return list(results.values())


def evaluate_weights(
    cfg: EvaluateConfig, ranks: Ranks
) -> tuple[ResumableChunks, dict[str, dict[str, Any]]]:
    """Draws samples of one file of weights with each scale of guidance, and writes their figures.
    Returns the chunks of the samples, and on rank 0 a dict: path of a file of figures, without
    .json -> its content."""
    from common.environment import describe_environment
    from common.files import hash_content, write_json
    from evaluation.clip import ClipScore
    from evaluation.evaluator import Evaluator
    from sampling.load import find_run_folder

    job = SampleJob(cfg, ranks)
    trained = job.trained
    run = find_run_folder(trained.file)
    if cfg.out is None and run is None:
        raise UserError(
            f"out is not set, and {trained.file} is in no run's folder; set out=<file without "
            ".json>."
        )
    conditions = job.stream.conditions
    clip = ClipScore(cfg.clip, conditions, trained.autoencoder.decode) if cfg.clip else None
    evaluator = Evaluator(
        cfg, trained.spec, trained.data, trained.autoencoder, trained.device, ranks
    )
    originals = evaluator.collect_originals(trained.spec, trained.data, ranks)
    note_few_samples(cfg, evaluator, ranks)

    # Put a hash of the protocol into the name of a result's file, so that different settings write
    # different files.
    # Version 2: held-out images give the threshold of `copied`; before, when protocols had no
    # version, the reference's own images did.
    reference_protocol = evaluator.describe_protocol() | {"version": 2}
    reference_protocol |= {"clip": clip.sha256} if clip else {}
    protocols = {}
    for suffix, stream in job.streams.items():
        protocol = job.describe_protocol(stream) | reference_protocol
        digest = hash_content(protocol, sort_keys=True)[:8]
        out = f"{run}/evaluation/{trained.file.parent.name}-{digest}"
        protocols[os.path.expanduser(f"{cfg.out}{suffix}" if cfg.out else out)] = protocol

    def measure(labels: Tensor, latents: Tensor) -> dict[str, Tensor]:
        scores = {} if clip is None else {CLIP: clip(labels, latents)}
        return evaluator.compute_latent_features(latents) | scores

    parts = next(iter(protocols)) + "".join(job.streams)
    chunks = job.run(Path(f"{parts}.parts"), reference_protocol, measure)
    results = {}
    for suffix, (out, protocol) in zip(job.streams, protocols.items(), strict=True):
        if ranks.first:
            results[out] = summarise(chunks, suffix, evaluator, originals) | {
                "protocol": protocol,
                "environment": describe_environment(trained.device),
                "classes": conditions.list_names(cfg.count),
            }
            write_json(Path(f"{out}.json"), results[out])
    return chunks, results


def note_few_samples(cfg: EvaluateConfig, evaluator: Evaluator, ranks: Ranks) -> None:
    """Says for which feature spaces there will be too few samples."""
    from evaluation.distances import explain_too_few

    for name, space in evaluator.spaces.items():
        too_few = explain_too_few(cfg.count, space.dim)
        if too_few:
            ranks.say(f"note: {name}: {too_few}")


def summarise(
    chunks: ResumableChunks, suffix: str, evaluator: Evaluator, originals: list[StatsBySpace]
) -> dict[str, Any]:
    """Computes the figures of the samples whose tensors have this `suffix`; holds the features of
    one chunk at a time."""
    import torch

    from evaluation.distances import collect_stats, compute_figures

    stats = collect_stats({n: chunk[n + suffix] for n in evaluator.spaces} for chunk in chunks)
    result: dict[str, Any] = {"features": compute_figures(stats, evaluator.reference, *originals)}
    if CLIP in chunks.read(0):
        scores = [chunk[CLIP + suffix] for chunk in chunks]
        result[CLIP] = float(torch.cat(scores).mean())
    return result


def compare_values(results: Mapping[str, dict[str, Any]]) -> None:
    """Prints a table of the figures of a sweep, and for each feature space and file of weights the
    lowest distance beside that without guidance. Draws the distances in an SVG beside the files of
    the figures. `results` maps the path of each, without .json, to its content."""
    rows = {}
    curves: dict[str, dict[float, float]] = {}
    for result in sorted(results.values(), key=lambda result: result["protocol"]["guidance"]):
        guidance = result["protocol"]["guidance"]
        weights = Path(result["protocol"]["weights"]["file"]).stem
        score = f", {CLIP} {result[CLIP]:.2f}" if CLIP in result else ""
        for space, figures in result["features"].items():
            rows[f"{space}, {weights}, guidance={guidance:g}{score}"] = figures
            kind = "kd" if figures["fd"] is None else "fd"
            curves.setdefault(f"{kind}_{space}, {weights}", {})[guidance] = figures[kind]

    table = sorted(rows.items(), key=lambda item: item[0].partition("guidance=")[0])
    print(f"\n{format_figures(dict(table))}")
    for name, distances in curves.items():
        best, *_ = sorted(distances, key=distances.__getitem__)
        unguided = f", without it {distances[1.0]:.4g}" if 1.0 in distances else ""
        print(f"{name}: lowest {distances[best]:.4g} at guidance={best:g}{unguided}")
    if find_spec("matplotlib") is None:
        print("no plot: pip install 'fastlatent[report]'")
        return
    from matplotlib.figure import Figure

    from common.files import create_file

    figure = Figure(layout="constrained")
    axes = figure.add_subplot(xlabel="guidance", ylabel="distance")
    for name, distances in curves.items():
        axes.plot([*distances], [*distances.values()], marker="o", label=name)
    axes.axvline(1.0, linestyle=":", label="without guidance")
    axes.legend()
    file = Path(f"{next(iter(results))}-sweep.svg")
    with create_file(file) as stream:
        figure.savefig(stream, format="svg")
    print(file, flush=True)


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
