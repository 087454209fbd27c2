"""Optional loggers, for W&B and TensorBoard. The run folder has all metrics even without a logger,
and an error in a logger does not stop the run."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from common.config.secrets import redact_words
from common.files import write_atomically
from common.text import shorten_error

Values = Mapping[str, Any]
"""Name of a setting or metric -> its value."""
FINISH_SECONDS = 60.0
"""Seconds that W&B may take to upload the remaining data at the end of a run."""


class NoLogger:
    """Logs nothing. This is the interface of loggers; their methods may raise exceptions, because a
    run calls them through `SafeLogger`."""

    def start(self, folder: Path, config: Values, samples: int = 0) -> None:
        """Starts logging a run, which has seen `samples` training samples; `config` holds the run's
        configuration and its ledger of techniques."""

    def log(self, metrics: Values, samples: int) -> None:
        """Logs metrics (name -> value) at `samples`, the number of training samples seen so far."""

    def image(self, name: str, file: Path, samples: int) -> None:
        """Logs an image file at `samples`, the number of training samples seen so far."""

    def finish(self, summary: Values) -> None:
        """Ends logging; `summary` is the run's summary, or only its ledger if the run was stopped
        or failed."""


class WandbLogger(NoLogger):
    """Logs to Weights & Biases. The x axis is the number of samples seen, not W&B's own step: W&B
    drops a point if it already has one at a later step, which happens after a resume. A run that
    crashed logs some points twice; `restart`, the number of starts before, tells them apart. Of
    what W&B prints, only warnings and errors are shown."""

    def __init__(
        self,
        project: str = "fastlatent",
        entity: str | None = None,
        mode: Literal["online", "offline"] = "online",
    ) -> None:
        self.project = project
        self.entity = entity
        self.mode = mode
        self.run: Any = None

    def start(self, folder: Path, config: Values, samples: int = 0) -> None:
        import wandb
        from wandb.errors import UsageError

        # Each start of the process makes a folder in wandb/.
        self.restart = len([*folder.glob("wandb/*run-*")])

        # Keep the id of the W&B run in the run folder, so that a resumed run continues the same W&B
        # run.
        id_file = folder / "wandb_id"
        if not id_file.is_file():
            write_atomically(id_file, secrets.token_hex(4))

        # W&B refuses an empty variable, such as WANDB_SILENT=; take it as one that is not set.
        for name in list(os.environ):
            if name.startswith("WANDB_") and not os.environ[name]:
                del os.environ[name]

        def begin(mode: Any) -> Any:
            wandb.setup(wandb.Settings(show_info=False))
            return wandb.init(
                project=self.project,
                entity=self.entity,
                dir=str(folder),
                name=folder.name,
                id=id_file.read_text(),
                resume="allow",
                config=dict(config),
                mode=mode,
                settings=wandb.Settings(
                    init_timeout=30,
                    console="off",
                    finish_timeout=FINISH_SECONDS,
                    finish_timeout_raises=True,
                ),
            )

        # W&B records `sys.argv`, so hide the secrets in it while W&B starts.
        words = sys.argv
        sys.argv = redact_words(words)
        why = ""
        try:
            self.run = begin(self.mode)
        except Exception as error:
            # If W&B cannot start online (no key, no network, …), log offline, so that no data is
            # lost.
            if isinstance(error, UsageError):
                why = "not logged in (run `wandb login`); "
            else:
                warnings.warn(
                    f"W&B cannot be reached ({type(error).__name__}: {shorten_error(error)}).",
                    stacklevel=2,
                )
            # The failed start left the run's id reserved in W&B's background service: stop the
            # service, so that the offline run can use the id.
            wandb.teardown()
            self.run = begin("offline")
        finally:
            sys.argv = words
        if self.run.offline:
            kept = Path(self.run.dir).parent
            sync = shlex.join(["wandb", "sync", str(kept)])
            self.place = f"offline in {kept}; `{sync}` uploads it"
        else:
            self.place = self.run.url
        print(f"W&B: {why}{self.place}", flush=True)
        self.run.define_metric("samples")
        self.run.define_metric("*", step_metric="samples")

    def log(self, metrics: Values, samples: int) -> None:
        self.run.log(
            {key: value for key, value in metrics.items() if value is not None}
            | {"samples": samples, "restart": self.restart}
        )

    def image(self, name: str, file: Path, samples: int) -> None:
        import wandb

        self.run.log({name: wandb.Image(str(file)), "samples": samples})

    def finish(self, summary: Values) -> None:
        """Uploads the remaining data; raises TimeoutError if that takes longer than
        `FINISH_SECONDS`."""
        import wandb

        if self.run is None:
            return
        # Leave out "sample_grid": W&B already has the last image under this name, and this path
        # replaces the image.
        values = {
            key: value
            for key, value in summary.items()
            if value is not None and key != "sample_grid"
        }
        self.run.summary.update(values)
        self.run.finish()
        # Shut down W&B's background service. It also exits by itself when idle, and a later run in
        # this process fails if it expects the service and finds it gone.
        wandb.teardown()
        print(f"W&B: finished; {self.place}", flush=True)


class TensorBoardLogger(NoLogger):
    """Writes TensorBoard event files to `<run folder>/tensorboard`."""

    def __init__(self) -> None:
        self.writer: Any = None

    def start(self, folder: Path, config: Values, samples: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Hide the points that a killed process logged after its last checkpoint.
        events = folder / "tensorboard"
        self.writer = SummaryWriter(str(events), purge_step=samples + 1)
        print(f"TensorBoard: tensorboard --logdir {shlex.quote(str(events))}", flush=True)
        self.writer.add_text(
            "config", "\n".join(f"    {key}: {value}" for key, value in config.items())
        )

    def log(self, metrics: Values, samples: int) -> None:
        for name, value in metrics.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(name, value, samples)

    def image(self, name: str, file: Path, samples: int) -> None:
        import numpy as np
        from PIL import Image

        self.writer.add_image(name, np.asarray(Image.open(file)), samples, dataformats="HWC")

    def finish(self, summary: Values) -> None:
        if self.writer is not None:
            self.writer.close()
