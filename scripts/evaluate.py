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
batch size. <out>.json has the figures, the protocol (all settings that they depend on), and the
names of the classes by number. Compare only figures with the same protocol. After a stop the same
command continues from the pieces in <out>.parts and gives the same figures. The features of the
reference are cached below $XDG_CACHE_HOME or ~/.cache; processes on several machines must share
that folder and `out`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
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
    for scale in list_values(cfg.guidance):
        if not isinstance(scale, int | float) or not math.isfinite(scale):
            raise UserError(f"guidance={scale} must be a finite number.")
    refuse_drawing(replace(cfg, guidance=None))
    refuse_missing("reference", cfg.reference, "name a folder of images")
    refuse_missing("inception", cfg.inception, "name the file of its weights")
    from common.distributed.ranks import Ranks
    from scripts.average import AverageConfig, average

    # Make all averages before samples are drawn, on the first rank alone.
    ranks = Ranks.from_environment()
    ranks.wait_for_all()  # connects the processes
    configs = [cfg]
    if cfg.length is not None:
        averages = [AverageConfig(cfg.run_dir, length) for length in list_values(cfg.length)]
        files = ranks.broadcast_result(lambda: [average(wanted) for wanted in averages])
        configs = [
            replace(cfg, run_dir=None, weights=str(f), out=cfg.out and f"{cfg.out}-{f.stem}")
            for f in dict.fromkeys(files)
        ]

    comparison = None
    pieces = []
    results: dict[str, dict[str, Any]] = {}
    for config in configs:
        job = SampleJob(config, ranks)
        place = find_place(config, job.trained.file)
        if comparison is None:
            calls = len(configs) * job.count_calls() * cfg.count
            ranks.say(f"in all, the model runs on {calls:,} samples")
            comparison = Comparison(cfg, job)
        chunks, content = comparison.evaluate(job, place, named=cfg.out is not None)
        pieces.append(chunks)
        results |= content
        del job  # frees the model before the next one is loaded
    if len(results) > 1:
        compare_values(results, cfg.out)
    else:
        for out, result in results.items():
            score = f"{CLIP} {result[CLIP]:.2f}\n" if cfg.clip else ""
            print(f"\n{format_figures(result['features'])}\n{score}{out}.json", flush=True)
    for chunks in pieces:
        chunks.remove()
    return list(results.values())


def find_place(cfg: EvaluateConfig, weights: Path) -> str:
    """Returns `out`, or the beginning of the paths of results in the run's folder. Raises UserError
    if `out` is not set, and these `weights` lie in no run."""
    from sampling.load import find_run_folder

    run = find_run_folder(weights)
    if cfg.out is None and run is None:
        raise UserError(
            f"out is not set, and {weights} is in no run's folder; set out=<file without .json>."
        )
    return os.path.expanduser(cfg.out or f"{run}/evaluation/{weights.parent.name}-")


class Comparison:
    """The images that samples are compared with; all values of a sweep share them."""

    def __init__(self, cfg: EvaluateConfig, job: SampleJob) -> None:
        from evaluation.clip import ClipScore
        from evaluation.distances import explain_too_few
        from evaluation.evaluator import Evaluator

        trained = job.trained
        decode = trained.autoencoder.decode
        self.clip = ClipScore(cfg.clip, job.stream.conditions, decode) if cfg.clip else None
        self.evaluator = Evaluator(
            cfg, trained.spec, trained.data, trained.autoencoder, trained.device, job.ranks
        )
        self.originals = self.evaluator.collect_originals(trained.spec, trained.data, job.ranks)
        for name, space in self.evaluator.spaces.items():
            too_few = explain_too_few(cfg.count, space.dim)
            if too_few:
                job.ranks.say(f"note: {name}: {too_few}")

        # Version 2: held-out images give the threshold of `copied`; before, when protocols had no
        # version, the reference's own images did.
        self.protocol = self.evaluator.describe_protocol() | {"version": 2}
        self.protocol |= {"clip": self.clip.sha256} if self.clip else {}

    def measure(self, labels: Tensor, latents: Tensor) -> dict[str, Tensor]:
        """Returns what a chunk keeps of samples: their features, and their CLIP scores."""
        scores = {} if self.clip is None else {CLIP: self.clip(labels, latents)}
        return self.evaluator.compute_latent_features(latents) | scores

    def evaluate(
        self, job: SampleJob, place: str, named: bool
    ) -> tuple[ResumableChunks, dict[str, dict[str, Any]]]:
        """Draws the samples of a job, and writes a file of figures for each of its streams, whose
        path begins with `place`; `named` says that `out` is set. Returns the chunks of the samples,
        and on rank 0 a dict: path of a file, without .json -> its content."""
        from common.environment import describe_environment
        from common.files import hash_content, write_json

        # Put a hash of the protocol into the name of a file in the run's folder, so that different
        # settings write different files.
        protocols = {}
        for suffix, stream in job.streams.items():
            protocol = job.describe_protocol(stream) | self.protocol
            digest = hash_content(protocol, sort_keys=True)[:8]
            protocols[place + (suffix if named else digest)] = protocol
        parts = next(iter(protocols)) + "".join(job.streams)
        chunks = job.run(Path(f"{parts}.parts"), self.protocol, self.measure)

        results: dict[str, dict[str, Any]] = {}
        if job.ranks.first:
            figures = self.summarise(chunks, list(job.streams))
            for (out, protocol), values in zip(protocols.items(), figures, strict=True):
                results[out] = values | {
                    "protocol": protocol,
                    "environment": describe_environment(job.trained.device),
                    "classes": job.stream.conditions.list_names(job.cfg.count),
                }
                write_json(Path(f"{out}.json"), results[out])
        return chunks, results

    def summarise(self, chunks: ResumableChunks, suffixes: list[str]) -> list[dict[str, Any]]:
        """Computes the figures of the samples of each stream, given by the suffix of its tensors;
        holds the features of one chunk at a time."""
        import torch

        from evaluation.distances import collect_stats, compute_figures

        scores: dict[str, list[Tensor]] = {suffix: [] for suffix in suffixes}

        def read_features() -> Iterator[dict[str, Tensor]]:
            for chunk in chunks:
                for suffix in suffixes if self.clip else ():
                    scores[suffix].append(chunk.pop(CLIP + suffix))
                yield chunk

        stats = collect_stats(read_features())
        results = []
        for suffix in suffixes:
            fake = {name: stats[name + suffix] for name in self.evaluator.spaces}
            figures = compute_figures(fake, self.evaluator.reference, *self.originals)
            score = {CLIP: float(torch.cat(scores[suffix]).mean())} if self.clip else {}
            results.append({"features": figures, **score})
        return results


def compare_values(results: Mapping[str, dict[str, Any]], out: str | None) -> None:
    """Prints a table of the figures of a sweep, and for each distance the value with the lowest one
    beside the best one without guidance. Draws the distances in <out>.svg, or beside the files of
    the figures. `results` maps the path of each, without .json, to its content."""
    rows = {}
    distances: dict[str, dict[tuple[str, float], float]] = {}
    for result in sorted(results.values(), key=lambda result: result["protocol"]["guidance"]):
        guidance = result["protocol"]["guidance"]
        weights = Path(result["protocol"]["weights"]["file"]).stem
        score = f", {CLIP} {result[CLIP]:.2f}" if CLIP in result else ""
        for space, figures in result["features"].items():
            rows[f"{space}, {weights}, guidance={guidance:g}{score}"] = figures
            kind = "kd" if figures["fd"] is None else "fd"
            distances.setdefault(f"{kind}_{space}", {})[weights, guidance] = figures[kind]

    table = sorted(rows.items(), key=lambda item: item[0].partition("guidance=")[0])
    print(f"\n{format_figures(dict(table))}")
    for name, points in distances.items():
        ranked = sorted(points, key=points.__getitem__)
        chosen = ranked[:1] + [point for point in ranked if point[1] == 1.0][:1]
        facts = [f"{points[w, g]:.4g} with {w}, guidance={g:g}" for w, g in chosen]
        print(f"{name}: lowest {'; without guidance '.join(facts)}")
    if find_spec("matplotlib") is None:
        print("no plot: pip install 'fastlatent[report]'")
        return
    file = Path(f"{os.path.expanduser(out) if out else next(iter(results)) + '-sweep'}.svg")
    draw_distances(file, distances)
    print(file, flush=True)


def draw_distances(file: Path, distances: Mapping[str, dict[tuple[str, float], float]]) -> None:
    """Draws each distance, given by weights and guidance, over guidance with a curve for each file
    of weights; or if there is one scale alone, over the weights."""
    from matplotlib.figure import Figure

    from common.files import create_file

    over = int(len({guidance for points in distances.values() for _, guidance in points}) > 1)
    figure = Figure(figsize=(5.0 * len(distances), 4.0), layout="constrained")
    panels = figure.subplots(1, len(distances), squeeze=False)[0]
    for axes, (name, points) in zip(panels, distances.items(), strict=True):
        axes.set(title=name, xlabel=("weights", "guidance")[over])
        for curve in dict.fromkeys(point[1 - over] for point in points):
            line = {point[over]: d for point, d in points.items() if point[1 - over] == curve}
            axes.plot([*line], [*line.values()], marker="o", label=curve)
        if over:
            axes.axvline(1.0, linestyle=":", label="without guidance")
        axes.legend()
    with create_file(file) as stream:
        figure.savefig(stream, format="svg")


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
