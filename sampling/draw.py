"""Draws many samples from a trained model, in chunks that are written to disk, and in one or
several processes.

The caller decides what to keep of a sample: `scripts.sample` keeps images, `scripts.evaluate` keeps
features. If a command was killed, the same command continues after the chunks that are on disk.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.config.schema import Device, LedgerLength, Positive, Solver, refuse_values
from common.errors import UserError
from common.files import (
    LOCK_FILE,
    FolderLock,
    hash_file,
    lock_folder,
    make_folder,
    read_object,
    refuse_changes,
    rename,
    sync_path,
    write_json,
)

if TYPE_CHECKING:
    from torch import Tensor

    from common.distributed.ranks import Ranks
    from training.drawing import Conditions, SampleStream

SAMPLER_KEYS = (
    "guidance",
    "guidance_interval",
    "solver",
    "steps",
    "shift",
    "internal_guidance",
    "internal_interval",
)
CHUNK_SAMPLES = 512
"""Number of samples in a chunk, rounded down to a multiple of the batch size; if a batch has more
samples, a chunk is one batch."""


@dataclass(frozen=True)
class ModelConfig:
    """Configuration keys that name the trained model to load."""

    run_dir: str | None = None
    """A run folder or one of its checkpoints, from which the averaged (EMA) weights are loaded."""
    weights: str | None = None
    """Instead of `run_dir`: a weights file of a checkpoint (.safetensors), which may have been
    copied to any folder. The file's header describes the model."""
    checkpoint: str = "last"
    """Checkpoint of `run_dir`: `last`, `best` (of those that the run kept, the one with the lowest
    score of its key `keep_best`), or the number of a step."""
    adapter: str | None = None
    """Path of an adapter to merge into the weights: the folder of a run that trained an adapter, an
    adapter's file, or a folder of the library PEFT."""
    encoder: str | None = None
    """Path of the autoencoder, if the autoencoder's folder was moved since the latents were made;
    null: its path at that time."""
    text_encoder: str | None = None
    """Path of the text encoder, if its folder was moved since the captions were encoded."""

    @property
    def key(self) -> str:
        """Name of the configuration key that says where the model is: "weights" or "run_dir"."""
        return "weights" if self.weights else "run_dir"

    @property
    def path(self) -> str:
        """Value of `key`."""
        return str(self.weights or self.run_dir)

    def find_model(self, say: Callable[[str], object] = print) -> str:
        """Returns the path of the run, checkpoint or weights file to load; calls `say` if the run's
        best checkpoint is better. Raises UserError if there is no such checkpoint."""
        from training.checkpoint.load import choose_checkpoint, read_newest

        path, note = read_newest(self.path, lambda: choose_checkpoint(self.path, self.checkpoint))
        if note:
            say(note)
        return path

    def refuse_no_model(self, action: str) -> None:
        """Raises a UserError unless exactly one of `run_dir` and `weights` is set. `action`, such
        as "sample", is a verb for the message."""
        if bool(self.run_dir) == bool(self.weights):
            fault = "run_dir and weights are both set" if self.weights else "run_dir is not set"
            raise UserError(
                f"{fault}; say what to {action}: run_dir=runs/<name>, or "
                "weights=<file>.safetensors."
            )


@dataclass(frozen=True)
class DrawConfig(ModelConfig):
    """Configuration of a sampling job. If a setting of the sampler is null, the job uses the value
    that the trained run has for it."""

    labels: Any = "balanced"
    """Labels of the samples. `balanced`: all classes, one after the other, again and again; `data`:
    classes as often as in the training set; or a list of class numbers and names, such as
    [3,apple], one after the other, again and again; or one class. Quote a name that YAML reads as
    another type, such as a number: ['3']."""
    prompt: Any = None
    """Text of which all samples are drawn, for a model of captions, or a list [a,b] of texts that
    are drawn one after the other, again and again. A text is taken as it was typed: neither Hydra
    nor YAML reads it."""
    prompts: str = "held_out"
    """For a model of captions, without `prompt`: a text file with a prompt on each line, drawn one
    after the other, again and again; `held_out`: the captions of the held-out samples, likewise;
    `train`: those of the training samples, in the order of `seed`."""
    count: Positive = 64
    """Number of samples to draw."""
    guidance: float | None = None
    """Scale of classifier-free guidance, 1 for none; null: that of the run."""
    guidance_interval: list[float] | None = None
    """Smallest and largest time t at which guidance is on, such as [0.1,0.9]; null: those of the
    run."""
    internal_guidance: float | None = None
    """Scale of internal guidance, for a model with an internal_block, 1 for none; null: that of the
    run."""
    internal_interval: list[float] | None = None
    """Smallest and largest time t at which internal guidance is on; null: those of the run."""
    solver: Solver | None = None
    """Solver of the differential equation: euler, heun, ab2 or sde; null: that of the run."""
    steps: int | None = None
    """Number of steps of the solver; null: that of the run."""
    shift: Any = None
    """Shift of the solver's times: above 1, more steps near the noise; auto: by the size of a
    latent; null: that of the run."""
    seed: int = 0
    """Seed of the noise; also of the order of the training samples for prompts=train and
    labels=data."""
    batch_size: Positive = 64
    """Number of samples that each process draws at a time. With guidance the model's batch is twice
    as large."""
    runtime: dict[str, Any] = field(default_factory=dict)
    """Values that replace those of the run's own runtime keys, such as runtime.precision=fp32 or
    runtime.compile=false."""
    device: Device = Device.auto
    """`auto`: the GPU if there is one, otherwise the CPU."""
    ledger: LedgerLength = LedgerLength.short
    """Which techniques the printed ledger shows: short, or full, with all of them."""

    def check(self) -> None:
        """Raises a UserError if a value of the configuration is invalid."""
        self.refuse_no_model("sample")
        refuse_values(self)


class SampleJob:
    """A sampling job: the trained model with its acceleration techniques, and the samples that a
    `DrawConfig` describes, in a stream for each scale of guidance, the unguided one last.

    All ranks must create the job at the same time.
    """

    def __init__(self, cfg: DrawConfig, ranks: Ranks) -> None:
        from common.environment import pick_device
        from models.requested_conditions import list_values
        from sampling.load import load_run
        from training.drawing import SampleStream

        # Connect the processes now: the first call of `wait_for_all` does so.
        ranks.wait_for_all()
        device = ranks.device(pick_device(cfg.device))
        self.cfg = cfg
        self.ranks = ranks
        path = cfg.find_model(ranks.say)
        trained = load_run(
            path, cfg.encoder, device, cfg.key, cfg.runtime, cfg.batch_size, cfg.adapter
        )
        self.trained = replace(trained, text_encoder_path=cfg.text_encoder)
        changes = {name: vars(cfg)[name] for name in SAMPLER_KEYS if vars(cfg)[name] is not None}
        conditions = self.choose_conditions()
        scales = list_values(cfg.guidance) or [trained.sampling.guidance]
        self.streams: dict[str, SampleStream] = {}
        """The streams by the suffix of the names of their tensors."""
        for scale in sorted(dict.fromkeys(scales), key=lambda scale: scale == 1.0):
            sampling = self.trained.change_sampling(**changes | {"guidance": scale})
            self.streams[f"@{scale}" if len(scales) > 1 else ""] = SampleStream(
                trained.forward, trained.spec, sampling, conditions, cfg.seed, cfg.batch_size
            )
        self.stream = next(iter(self.streams.values()))
        guidance = self.stream.sampling.guidance
        self.ledger = self.trained.warm_up(conditions, cfg.batch_size, guidance)

    def choose_conditions(self) -> Conditions:
        """Returns what the samples are drawn of.

        Raises UserError for a label that the model or the data does not have, and for labels or
        prompts that the model does not take.
        """
        from models.requested_conditions import list_values
        from training.drawing import Conditions, list_samples, open_data, read_prompts

        cfg = self.cfg
        trained = self.trained
        spec = trained.spec
        by_text = trained.text_level != "none"
        listed = [] if cfg.labels in ("balanced", "data") else list_values(cfg.labels)
        if cfg.labels == []:
            raise UserError("labels=[] names no class; leave it out, for all of them.")
        if by_text and cfg.labels == "data":
            raise UserError(
                "labels=data: a model of captions takes labels and captions of the data by "
                "prompts=train or held_out; leave labels out."
            )
        if cfg.prompts != type(cfg).prompts and (cfg.prompt is not None or not by_text):
            other = "prompt" if by_text else "a model of classes"
            raise UserError(f"prompts={cfg.prompts} does not go with {other}; leave it out.")

        # Take the labels and prompts that the user has typed.
        prompts = list_values(cfg.prompt)
        if cfg.prompt == [] or not all(isinstance(text, str) for text in prompts):
            raise UserError(
                f"prompt={cfg.prompt} must be a text, or a list of texts; quote one that YAML "
                "reads as another type: ['7']."
            )
        if not prompts and cfg.prompts not in ("held_out", "train"):
            prompts = read_prompts(cfg.prompts)
        if listed or prompts:
            return trained.make_conditions(listed, prompts, self.ranks.say)

        # Without any, take all classes, or labels and captions of the data.
        key = "prompts" if by_text else "labels"
        source = vars(cfg)[key]
        if source == "balanced":
            return Conditions.of_classes(spec, spec.labels, source, trained.device)
        if trained.data is None:
            raise UserError(
                f"{key}={source} needs the run's data, which weights= does not name; use run_dir=."
            )
        loader = open_data(trained.data, spec, cfg.seed, trained.text_level)
        samples = list_samples(loader, source, cfg.count)
        return Conditions.of_samples(source, samples, loader, trained.device)

    def describe_protocol(self, stream: SampleStream | None = None) -> dict[str, Any]:
        """Returns setting -> value for all settings on which a metric of the samples of a stream
        (None: the first), such as a Fréchet distance, depends."""
        chosen = stream or self.stream
        settings = chosen.describe_protocol(self.trained.stack, self.cfg.count)
        return settings | {"weights": self.trained.weights}

    def run(
        self,
        folder: Path,
        job: Mapping[str, Any],
        content: Callable[[Tensor, Tensor], dict[str, Tensor]],
    ) -> ResumableChunks:
        """Draws the samples of all chunks that are not yet in `folder`, writes these chunks, and
        returns a `ResumableChunks`, which reads all chunks.

        First prints the number of samples and the ledger. `content(labels, latents)` returns, for a
        batch, name -> tensor to write to the chunk, where its name gets the suffix of the stream.
        `job` holds the values that determine what `content` returns. Raises UserError if `folder`
        has chunks of another `job`, or if latents are not finite.
        """
        import torch

        from common.output import Progress
        from training.drawing import draw_streams

        cfg = self.cfg
        self.ranks.say(
            f"{cfg.count} samples from {self.trained.file}: the model runs "
            f"{self.count_calls()} times for each\n\n"
            f"ledger ({self.trained.device})\n{self.ledger.format_table(cfg.ledger)}\n"
        )
        whole_job = {
            **self.describe_protocol(),
            # Identify the weights by their hash, so that the job resumes even if their file was
            # moved.
            "weights": self.trained.weights["sha256"],
            **job,
            "batch_size": cfg.batch_size,
            "techniques": {row.key: row.active for row in self.ledger},
        }
        size = cfg.batch_size * max(1, CHUNK_SAMPLES // cfg.batch_size)
        chunks = ResumableChunks(folder, whole_job, cfg.count, size, self.ranks)
        missing = chunks.list_missing_chunks()
        total_chunks = len(chunks.list_rank_chunks())
        finished = total_chunks - len(missing)
        if finished:
            print(f"{finished} of {total_chunks} pieces are already there", flush=True)

        total = sum(len(chunks.parts[number]) for number in missing)
        progress = Progress(total, "samples", silent=not self.ranks.first)
        for number in missing:
            batches = []
            samples = chunks.parts[number]
            for first in samples[:: cfg.batch_size]:
                wanted = min(cfg.batch_size, samples.stop - first)
                tensors = {}
                drawn = draw_streams([*self.streams.values()], first // cfg.batch_size)
                for suffix, (labels, latents) in zip(self.streams, drawn, strict=True):
                    if not latents.isfinite().all():
                        raise UserError(
                            f"{self.trained.file} draws samples that are not finite; use an "
                            "earlier checkpoint of the run, or runtime.precision=fp32."
                        )
                    parts = content(labels[:wanted], latents[:wanted])
                    tensors |= {name + suffix: part for name, part in parts.items()}
                batches.append(tensors)
                progress.advance(wanted)
            chunks.write(
                number,
                {name: torch.cat([batch[name].cpu() for batch in batches]) for name in batches[0]},
            )
        progress.close()
        self.ranks.wait_for_all()
        return chunks

    def count_calls(self) -> int:
        """Returns how often the model runs for a sample of all streams, without running it."""
        import torch

        from training.drawing import draw_streams

        sizes = []

        def count(x: Tensor, *args: Any, **options: Any) -> Tensor:
            sizes.append(len(x))
            return torch.zeros_like(x)

        streams = [replace(s, model=count, batch_size=1) for s in self.streams.values()]
        deque(draw_streams(streams, 0), maxlen=0)
        return sum(sizes)


class ResumableChunks:
    """The `count` samples of one job in one folder, in chunks of `size` samples. Iteration reads
    all chunks, in order. Chunk i belongs to rank i mod the number of ranks, which draws and writes
    it.

    A chunk is one safetensors file named `<number>-<first half of its sha256>.safetensors`. A file
    gets this name only when it is complete and flushed to disk, and the hash in the name reveals
    later damage.

    `job` holds all values on which the chunks' content depends. The folder is locked until `close`
    or the end of the process. If another command has locked the folder, the constructor waits if
    `waits` is set, and otherwise raises UserError. It also raises UserError if the folder has
    chunks of another job.
    """

    def __init__(
        self,
        folder: Path,
        job: Mapping[str, Any],
        count: int,
        size: int,
        ranks: Ranks,
        *,
        waits: bool = False,
    ) -> None:
        self.folder = folder
        samples = range(count)
        self.parts = [samples[start : start + size] for start in samples[::size]]
        """For each chunk the numbers of its samples."""
        self.ranks = ranks
        self.waits = waits
        self.lock: FolderLock | None = None

        # Try to lock in short calls, every half second, so that the other ranks never wait long for
        # the result of the first rank.
        if not ranks.broadcast_result(self.claim):
            ranks.say(f"waiting for another process that works on {folder}")
            while not ranks.broadcast_result(self.claim):
                time.sleep(0.5)
        ranks.broadcast_result(lambda: self.refuse_another(json.loads(json.dumps(job))))

    def claim(self) -> bool:
        """Creates and locks the folder, and returns True. If another process holds the lock,
        returns False if `waits` is set, and otherwise raises UserError."""
        try:
            make_folder(self.folder)
            self.lock = lock_folder(
                self.folder, f"{self.folder}: another process works on it; wait, or stop it."
            )
        except OSError as error:
            raise UserError(
                f"{self.folder} cannot be made or written ({error.strerror}); choose another out, "
                "or set XDG_CACHE_HOME where it is a cache."
            ) from error
        except ValueError:
            if not self.waits or (self.folder / LOCK_FILE).is_symlink():
                raise
        return self.lock is not None

    def refuse_another(self, job: dict[str, Any]) -> None:
        """Writes `job` to job.json if the folder has no such file. Raises UserError if the file
        describes another job."""
        file = self.folder / "job.json"
        if not file.is_file():
            write_json(file, job)
        earlier = read_object(file)
        refuse_changes(str(self.folder), earlier, job, earlier | job)

    def list_rank_chunks(self) -> list[int]:
        """Returns the numbers of the chunks that belong to this rank."""
        return list(range(self.ranks.rank, len(self.parts), self.ranks.world_size))

    def list_missing_chunks(self) -> list[int]:
        """Returns the numbers of this rank's chunks that are absent or damaged."""
        return [number for number in self.list_rank_chunks() if self.find(number) is None]

    def find(self, number: int) -> Path | None:
        """Returns the undamaged file of the chunk `number`, or None if there is none; deletes
        damaged files of this chunk."""
        for file in self.folder.glob(f"{number:06d}-*"):
            if file.name == f"{number:06d}-{hash_file(file)[:32]}.safetensors":
                return file
            file.unlink()
        return None

    def write(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Writes the chunk `number`, from `tensors`, name -> tensor in host memory. Raises
        UserError if the file cannot be written."""
        from training.checkpoint.files import write_tensors

        temporary = self.folder / f"{number:06d}-tmp"
        try:
            sha256 = write_tensors(temporary, tensors, {})["sha256"]
            rename(temporary, self.folder / f"{number:06d}-{sha256[:32]}.safetensors")
            sync_path(self.folder)
        except OSError as error:
            raise UserError(
                f"{self.folder}: piece {number} cannot be written ({error.strerror}); finished "
                "pieces are kept. Mend that and run the same command again."
            ) from error

    def read(self, number: int) -> dict[str, Tensor]:
        """Reads the chunk `number`: name -> tensor. Raises UserError if the chunk is absent or
        damaged."""
        from safetensors.torch import load

        file = self.find(number)
        if file is None:
            raise UserError(
                f"{self.folder}: piece {number} is gone or damaged; run the same command again."
            )
        return load(file.read_bytes())

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return map(self.read, range(len(self.parts)))

    def close(self) -> None:
        """Waits for the other ranks, then unlocks the folder; does not delete the chunks."""
        self.ranks.wait_for_all()
        if self.lock is not None:
            self.lock.close()

    def remove(self) -> None:
        """Deletes the folder with the chunks, after all ranks have called this method."""
        self.close()
        if self.ranks.first:
            shutil.rmtree(self.folder, ignore_errors=True)
