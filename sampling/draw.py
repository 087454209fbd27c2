"""Draws many samples of a trained run, chunk by chunk and in several processes.

What becomes of them is the caller's: `scripts.sample` keeps the images, `scripts.evaluate` their
features.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from training.config.schema import Positive, Solver, refuse_values

if TYPE_CHECKING:
    from torch import Tensor

    from sampling.load import Labels
    from sampling.resumable_chunks import ResumableChunks
    from training.distributed.ranks import Ranks

SAMPLER = ("guidance", "guidance_interval", "solver", "steps", "shift")
CHUNK = 512
"""Samples in a chunk, or a batch where that is larger."""

# the profiled warm-up is ours; its messages help no user
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


@dataclass(frozen=True)
class DrawConfig:
    """What to draw from which run. A setting of the sampler that is null is the run's own."""

    run_dir: str | None = None
    """A run folder, or one of its checkpoints; its averaged weights are used."""
    weights: str | None = None
    """Instead of a run: a .safetensors file of a checkpoint, wherever it lies; its header says what
    the model is."""
    adapter: str | None = None
    """Merged into the weights: a run with an adapter, a file of one, or a folder of PEFT's."""
    encoder: str | None = None
    """Where the autoencoder lies now, if its folder was moved since the latents were made."""
    labels: Any = "balanced"
    """`balanced`: all classes in turn; `data`: as often as the training set has them; or a list,
    dealt in turn, of numbers and names: [3,apple]. A name that YAML reads as something else stands
    in quotes: ['3']."""
    count: Positive = 64
    guidance: float | None = None
    guidance_interval: list[float] | None = None
    solver: Solver | None = None
    steps: int | None = None
    shift: float | None = None
    seed: int = 0
    batch_size: Positive = 64
    """Of each process. Guidance doubles it."""
    runtime: dict[str, Any] = field(default_factory=dict)
    """Changes to the run's own runtime keys, such as runtime.precision=fp32 or
    runtime.compile=false."""
    device: str = "auto"

    def check(self) -> None:
        """ValueError for a value that nothing can be drawn with."""
        if (self.run_dir is None) == (self.weights is None):
            unset = self.run_dir is None
            fault = "run_dir is not set" if unset else "run_dir and weights are both set"
            raise UserError(
                f"{fault}; say what to sample: run_dir=runs/<name>, or weights=<file>.safetensors."
            )
        refuse_values(self)


class SampleJob:
    """The samples of a `DrawConfig`: the model under its techniques, and the stream of its samples.

    All processes build it together.
    """

    def __init__(self, cfg: DrawConfig, ranks: Ranks) -> None:
        from sampling.load import SampleStream, load_run
        from training.environment import pick_device

        cfg.check()
        ranks.wait_for_all()  # connects them
        device = ranks.device(pick_device(cfg.device))
        key = "weights" if cfg.weights else "run_dir"
        self.cfg = cfg
        self.ranks = ranks
        self.trained = load_run(
            cfg.weights or str(cfg.run_dir),
            cfg.encoder,
            device,
            key,
            cfg.runtime,
            cfg.batch_size,
            cfg.adapter,
        )
        given = {name: getattr(cfg, name) for name in SAMPLER if getattr(cfg, name) is not None}
        sampling = self.trained.settings(**given)
        self.labels, dealt = self.chosen_labels()
        """`balanced`, `data`, or numbers of classes."""
        forward = self.trained.forward
        spec = self.trained.spec
        self.stream = SampleStream(forward, spec, sampling, dealt, cfg.seed, cfg.batch_size, device)
        self.ledger = self.trained.warm_up(cfg.batch_size, sampling.guidance)
        self.size = cfg.batch_size * max(1, CHUNK // cfg.batch_size)
        """Samples in a chunk."""

    def announce(self) -> None:
        """Prints what is drawn, and the ledger."""
        self.ranks.say(
            f"{self.cfg.count} samples from {self.trained.file}\n\n"
            f"ledger ({self.trained.device})\n{self.ledger.table()}\n"
        )

    def chosen_labels(self) -> tuple[Any, Labels]:
        """Returns the labels that the configuration asks for, and how they are dealt.

        ValueError where they cannot be had.
        """
        from sampling.load import labels_in_turn, labels_of_data, numbers_of

        cfg = self.cfg
        trained = self.trained
        if cfg.labels == "data":
            if trained.data is None:
                raise UserError(
                    "labels=data needs the run's data, which weights= does not name; use run_dir=."
                )
            dealt = labels_of_data(trained.data, cfg.seed, cfg.batch_size, trained.device)
            return cfg.labels, dealt
        if cfg.labels == "balanced":
            return cfg.labels, labels_in_turn(trained.spec.labels, trained.device)
        if not isinstance(cfg.labels, list) or not cfg.labels:
            raise UserError(
                f"labels={cfg.labels} must be balanced, data or a list of classes by number or "
                "name, such as [3,apple]."
            )
        numbers = numbers_of(cfg.labels, trained.spec)
        return numbers, labels_in_turn(numbers, trained.device)

    def classes(self) -> dict[str, str]:
        """Returns number -> name of each class that is drawn."""
        spec = self.trained.spec
        drawn = sorted(set(self.labels)) if isinstance(self.labels, list) else spec.labels
        return {str(number): spec.names[number] for number in drawn} if spec.num_classes else {}

    def protocol(self) -> dict[str, Any]:
        """Returns all that a figure of these samples depends on."""
        from sampling.load import protocol_of

        settings = protocol_of(self.trained.stack, self.stream, self.cfg.count, self.labels)
        return settings | {"weights": self.trained.weights}

    def run(
        self,
        folder: Path,
        job: Mapping[str, Any],
        content: Callable[[Tensor, Tensor], dict[str, Tensor]],
    ) -> ResumableChunks:
        """Draws all samples into chunks in `folder`, of which some may be there, and returns them.

        `content(labels, latents)` makes the tensors to keep of a batch; `job` says what else they
        depend on. ValueError for latents that are not finite.
        """
        import torch

        from common.progress import Progress
        from sampling.resumable_chunks import ResumableChunks

        cfg = self.cfg
        whole_job = {
            **self.protocol(),
            # the same file by another path is the same job
            "weights": self.trained.weights["sha256"],
            **job,
            "batch_size": cfg.batch_size,
            "techniques": {row.key: row.active for row in self.ledger},
        }
        chunks = ResumableChunks(folder, whole_job, -(-cfg.count // self.size), self.ranks)
        missing = chunks.missing()
        mine = len(chunks.mine())
        if len(missing) < mine:
            print(f"{mine - len(missing)} of {mine} pieces are already there", flush=True)

        total = sum(min(self.size, cfg.count - number * self.size) for number in missing)
        progress = Progress(total, "samples", silent=not self.ranks.first)
        for number in missing:
            found = []
            last = min((number + 1) * self.size, cfg.count)
            for first in range(number * self.size, last, cfg.batch_size):
                labels, latents = self.stream.batch(first // cfg.batch_size)
                if not bool(latents.isfinite().all()):
                    raise UserError(
                        f"{self.trained.file} draws samples that are not finite; use an earlier "
                        "checkpoint of the run, or runtime.precision=fp32."
                    )
                wanted = min(cfg.batch_size, last - first)
                found.append(content(labels[:wanted], latents[:wanted]))
                progress.advance(wanted)
            chunks.write(
                number, {name: torch.cat([kept[name].cpu() for kept in found]) for name in found[0]}
            )
        progress.close()
        self.ranks.wait_for_all()
        return chunks
