"""Optional loggers. The run folder has everything without them; none of them can stop a run."""

from __future__ import annotations

import secrets
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from training.config.secrets import redact_words

FINISH_SECONDS = 60.0
"""W&B has so long to upload the rest at the end of a run."""
finish_timed_out = False
"""Whether W&B did not finish in that time: at exit it would make the process wait for it again."""


class NoLogger:
    """Logs nothing; the loggers below do. Any of their methods may raise: a run calls them through
    `SafeLogger`."""

    def start(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Called once, with the run's configuration and ledger."""

    def log(self, metrics: Mapping[str, Any], samples: int) -> None:
        """Logs one line of metrics after `samples` samples."""

    def image(self, name: str, file: Path, samples: int) -> None:
        """Logs an image file after `samples` samples."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Called at the end of a run, with an empty summary if it was stopped or failed."""


class WandbLogger(NoLogger):
    """Weights & Biases; samples seen are the axis, so a resumed run shows its rewind instead of
    losing points."""

    def __init__(
        self,
        project: str = "fastlatent",
        entity: str | None = None,
        mode: Literal["online", "offline"] = "online",
    ) -> None:
        self.project = project
        self.entity = entity
        self.mode: Literal["online", "offline"] = mode
        self.run: Any = None

    def start(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        remembered = folder / "wandb_id"  # a resumed run goes on in the same W&B run
        if not remembered.is_file():
            remembered.write_text(secrets.token_hex(4))

        def begin(mode: Literal["online", "offline"]) -> Any:
            with scrubbed_argv():
                return wandb.init(
                    project=self.project,
                    entity=self.entity,
                    dir=str(folder),
                    name=folder.name,
                    id=remembered.read_text(),
                    resume="allow",
                    config=dict(config),
                    mode=mode,
                    settings=wandb.Settings(init_timeout=30, console="off"),
                )

        try:
            self.run = begin(self.mode)
        except Exception as error:  # no key, no network, …: an offline run keeps the data
            warnings.warn(
                f"W&B cannot be reached ({first_line(error)}); logging offline into {folder}.",
                stacklevel=2,
            )
            wandb.teardown()  # its service still holds the id
            self.run = begin("offline")
        self.run.define_metric("samples")
        self.run.define_metric("*", step_metric="samples")

    def log(self, metrics: Mapping[str, Any], samples: int) -> None:
        self.run.log(
            {key: value for key, value in metrics.items() if value is not None}
            | {"samples": samples}
        )

    def image(self, name: str, file: Path, samples: int) -> None:
        import wandb

        self.run.log({name: wandb.Image(str(file)), "samples": samples})

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Uploads the rest; TimeoutError if that takes longer than `FINISH_SECONDS`."""
        global finish_timed_out
        if self.run is None:
            return
        kept = {
            key: value
            for key, value in summary.items()
            if value is not None and key != "sample_grid"
        }
        self.run.summary.update(kept)  # "sample_grid" is the last picture there, and here a path
        failures: list[Exception] = []

        def upload() -> None:
            import wandb

            try:
                self.run.finish()
                # its service ends when idle, and a later run of this process would not find it
                wandb.teardown()
            except Exception as error:
                failures.append(error)

        uploading = threading.Thread(target=upload, name="wandb-finish", daemon=True)
        uploading.start()
        uploading.join(FINISH_SECONDS)
        if uploading.is_alive():
            finish_timed_out = True
            raise TimeoutError(
                f"it did not finish in {FINISH_SECONDS:.0f} s; `wandb sync` in the run folder "
                "uploads"
            )
        if failures:
            raise failures[0]


@contextmanager
def scrubbed_argv() -> Iterator[None]:
    """W&B keeps the command line."""
    before = sys.argv
    sys.argv = redact_words(sys.argv)
    try:
        yield
    finally:
        sys.argv = before


class TensorBoardLogger(NoLogger):
    """TensorBoard event files in `<run folder>/tensorboard`."""

    def __init__(self) -> None:
        self.writer: Any = None

    def start(self, folder: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"))
        self.writer.add_text(
            "config", "\n".join(f"    {key}: {value}" for key, value in config.items())
        )

    def log(self, metrics: Mapping[str, Any], samples: int) -> None:
        for name, value in metrics.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(name, value, samples)

    def image(self, name: str, file: Path, samples: int) -> None:
        import numpy as np
        from PIL import Image

        self.writer.add_image(name, np.asarray(Image.open(file)), samples, dataformats="HWC")

    def finish(self, summary: Mapping[str, Any]) -> None:
        if self.writer is not None:
            self.writer.close()


class SafeLogger:
    """A logger that is switched off, with one warning, at its first exception."""

    def __init__(self, logger: NoLogger, silent: bool = False) -> None:
        self.logger = NoLogger() if silent else logger

    def __enter__(self) -> SafeLogger:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """A run that is stopped or fails ends here; one that is complete calls `finish` with its
        summary."""
        if kind is not None:
            self.finish({})

    def guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # a logger may fail in any way and must not cost a run
            name = type(self.logger).__name__
            warnings.warn(
                f"{name} failed ({first_line(error)}) and is off; the run folder has all metrics.",
                stacklevel=3,
            )
            self.logger = NoLogger()

    def start(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.guarded(lambda: self.logger.start(folder, config))

    def log(self, metrics: Mapping[str, Any], samples: int) -> None:
        self.guarded(lambda: self.logger.log(metrics, samples))

    def image(self, name: str, file: Path, samples: int) -> None:
        self.guarded(lambda: self.logger.image(name, file, samples))

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.guarded(lambda: self.logger.finish(summary))


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
