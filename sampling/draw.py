"""Draws many samples of a trained run, piece by piece and in several processes; what becomes of
them is the caller's.

`scripts.sample` keeps the images, `scripts.evaluate` their features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from models.solver import Solver
from training.config.schema import at_least

if TYPE_CHECKING:
    from torch import Tensor

    from accel.ledger import Ledger
    from sampling.load import Labels
    from sampling.resumable_chunks import Pieces
    from training.distributed.ranks import Ranks

SAMPLER = ("guidance", "guidance_interval", "solver", "steps", "shift")
PIECE = 512
"""Samples in a piece, or a batch where that is larger."""


@dataclass(frozen=True)
class DrawConfig:
    """What to draw from which run. Null, in the settings of the sampler: as the run itself
    sampled."""

    run_dir: str | None = None
    """A run folder, or one of its checkpoints; its averaged weights are used."""
    weights: str | None = None
    """Instead of a run: a .safetensors file of a checkpoint, wherever it lies; its header says what
    the model is."""
    adapter: str | None = None
    """Merged into the weights: a run with an adapter, one of its files, or a folder in PEFT's
    format."""
    encoder: str | None = None
    """Where the autoencoder lies now, if its folder was moved since the latents were made."""
    labels: Any = "balanced"
    """`balanced`: all classes in turn; `data`: as often as the training set has them; or a list,
    dealt in turn, of numbers and names: [3,apple]. A name that YAML reads as something else stands
    in quotes: ['3']."""
    count: int = 64
    guidance: float | None = None
    guidance_interval: list[float] | None = None
    solver: Solver | None = None
    steps: int | None = None
    shift: float | None = None
    seed: int = 0
    batch_size: int = 64
    """Of each process. Guidance doubles it."""
    runtime: dict[str, Any] = field(default_factory=dict)
    """Changes to the run's own runtime keys, such as runtime.precision=fp32 or
    runtime.compile=false."""
    device: str = "auto"

    def check(self) -> None:
        """ValueError for a value that nothing can be drawn with."""
        if (self.run_dir is None) == (self.weights is None):
            fault = (
                "run_dir is not set" if self.run_dir is None else "run_dir and weights are both set"
            )
            raise UserError(
                f"{fault}; say what to sample: run_dir=runs/<name>, or weights=<file>.safetensors."
            )
        at_least(1, self, "count", "batch_size")


class Drawing:
    """The samples of a `DrawConfig`, opened: the model under its techniques, and the endless stream
    of its samples."""

    def __init__(self, cfg: DrawConfig, ranks: Ranks) -> None:
        from sampling.load import SampleStream, load_run
        from training.environment import pick_device

        cfg.check()
        key = "weights" if cfg.weights else "run_dir"
        device = ranks.device(pick_device(cfg.device))
        self.cfg = cfg
        self.ranks = ranks
        self.trained = load_run(
            str(getattr(cfg, key)),
            cfg.encoder,
            device,
            key,
            cfg.runtime,
            cfg.batch_size,
            cfg.adapter,
        )
        given = {name: getattr(cfg, name) for name in SAMPLER}
        sampling = self.trained.settings(
            **{name: value for name, value in given.items() if value is not None}
        )
        self.labels, dealt = self.chosen_labels()
        """`balanced`, `data`, or numbers of classes."""
        self.stream = SampleStream(
            self.trained.forward,
            self.trained.spec,
            sampling,
            dealt,
            cfg.seed,
            cfg.batch_size,
            device,
        )
        self.ledger: Ledger = self.trained.warm_up(cfg.batch_size, sampling.guidance)
        self.size = cfg.batch_size * max(1, PIECE // cfg.batch_size)

    def chosen_labels(self) -> tuple[Any, Labels]:
        """The labels that the configuration asks for, and how they are dealt; ValueError where they
        cannot be had."""
        from sampling.load import labels_in_turn, labels_of_data, numbers_of

        cfg = self.cfg
        trained = self.trained
        if cfg.labels == "balanced":
            return cfg.labels, labels_in_turn(trained.spec.labels, trained.device)
        if cfg.labels == "data":
            if trained.data is None:
                raise UserError(
                    "labels=data needs the run's data, which weights= does not name; use run_dir=."
                )
            return cfg.labels, labels_of_data(
                trained.data, cfg.seed, cfg.batch_size, trained.device
            )
        if not isinstance(cfg.labels, list) or not cfg.labels:
            raise UserError(
                f"labels={cfg.labels} must be balanced, data or a list of classes by number or "
                "name, such as [3,apple]."
            )
        numbers = numbers_of(cfg.labels, trained.spec)
        return numbers, labels_in_turn(numbers, trained.device)

    def classes(self) -> dict[str, str]:
        """Number -> name of each class that is drawn."""
        spec = self.trained.spec
        drawn = sorted(set(self.labels)) if isinstance(self.labels, list) else spec.labels
        return {str(number): spec.names[number] for number in drawn} if spec.num_classes else {}

    def protocol(self) -> dict[str, Any]:
        """All that a figure of these samples depends on: settings, weights, and how the model
        computes."""
        from sampling.load import protocol_of

        told = protocol_of(self.trained.stack, self.stream, self.cfg.count, self.labels)
        return told | {"weights": self.trained.weights}

    def run(
        self,
        folder: Path,
        job: Mapping[str, Any],
        content: Callable[[Tensor, Tensor], dict[str, Tensor]],
    ) -> Pieces:
        """Draws all samples into pieces in `folder`, of which some may be there, and returns them.

        `content(labels, latents)` makes the tensors to keep of a batch; `job` says what else they
        depend on. ValueError for latents that are not finite.
        """
        import torch

        from common.progress import Progress
        from sampling.resumable_chunks import Pieces

        cfg = self.cfg
        size = self.size
        told = self.protocol()
        told["weights"] = told["weights"]["sha256"]  # the same file by another path is the same job
        job = {
            **told,
            **job,
            "batch_size": cfg.batch_size,
            "techniques": {row.key: row.active for row in self.ledger},
        }
        pieces = Pieces(folder, job, -(-cfg.count // size), self.ranks)
        missing = pieces.missing()
        if done := len(pieces.mine()) - len(missing):
            print(f"{done} of {len(pieces.mine())} pieces are already there", flush=True)
        total = sum(min(size, cfg.count - number * size) for number in missing)
        progress = Progress(total, "samples", silent=not self.ranks.first)
        for number in missing:
            first = number * size
            last = min((number + 1) * size, cfg.count)
            found: list[dict[str, Tensor]] = []
            for start in range(first, last, cfg.batch_size):
                labels, latents = self.stream.batch(start // cfg.batch_size)
                if not bool(latents.isfinite().all()):
                    raise UserError(
                        f"{self.trained.file} draws samples that are not finite; use an earlier "
                        "checkpoint of the run, or runtime.precision=fp32."
                    )
                kept = content(labels[: last - start], latents[: last - start])
                found.append({name: tensor.cpu() for name, tensor in kept.items()})
                progress.advance(min(cfg.batch_size, last - start))
            pieces.write(
                number, {name: torch.cat([kept[name] for kept in found]) for name in found[0]}
            )
        progress.close()
        self.ranks.wait_for_all()
        return pieces
