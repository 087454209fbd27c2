"""Loggers are optional: none of them stops a run."""

import hashlib
import re
import sys
import time
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from tests.harness.outcomes import read_columns
from training.assemble import Training
from training.records.loggers import NoLogger

TWENTY_STEPS = ["total_samples=160", "runtime=eager", "log_every=1"]


def test_a_logger_is_told_the_machine_and_if_a_run_is_stopped_its_evidence(run, monkeypatch):
    facts = {}
    monkeypatch.setattr(
        NoLogger, "start", lambda self, folder, config, samples: facts.update(config)
    )
    monkeypatch.setattr(NoLogger, "finish", lambda self, summary: facts.update(summary))
    monkeypatch.setattr(Training, "take_step", lambda self: sys.exit(75))
    with pytest.raises(SystemExit):
        run()
    assert facts["hardware"]
    assert facts["ledger"]["fused_adamw"]["evidence"]


class Wandb:
    """W&B as far as fastlatent uses it, down from one of four moments on."""

    Settings = dict
    setup = define_metric = teardown = Mock()
    url = dir = ""

    def __init__(self, down):
        self.down = down
        self.lines = []
        self.summary = {}

    def init(self, mode, settings, **_):
        self.settings = settings
        self.offline = mode == "offline"
        if self.down == "start" and not self.offline:
            raise ConnectionError("no route to host")
        return self

    def log(self, metrics):
        if self.down == "middle" and metrics["samples"] > 80:
            raise ConnectionError("broken pipe")
        self.lines.append(metrics)

    def finish(self):
        if self.down == "end":
            raise ConnectionError("broken pipe")
        if self.down == "hangs at the end":
            time.sleep(min(600.0, self.settings["finish_timeout"]))
            if self.settings["finish_timeout_raises"]:
                raise TimeoutError("Timed out finishing run.")


@pytest.mark.fault(
    "W&B down at the start, in the middle, at the end, or hanging",
    "one warning; the run and metrics.jsonl are complete",
)
@pytest.mark.parametrize(
    ("down", "warning", "lines"),
    [
        ("start", "cannot be reached", 20),
        ("middle", "broken pipe", 10),
        ("end", "broken pipe", 20),
        ("hangs at the end", "Timed out", 20),
    ],
)
def test_wandb_down(down, warning, lines, run, run_dir, monkeypatch):
    fake = Wandb(down)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setitem(sys.modules, "wandb.errors", Mock(UsageError=KeyError))
    monkeypatch.setattr("training.records.loggers.FINISH_SECONDS", 0.5)
    with pytest.warns(UserWarning, match=warning):
        run(*TWENTY_STEPS, "logger=wandb")
    assert read_columns(run_dir, "step") == [[step] for step in range(1, 21)]
    assert len(fake.lines) == lines


@pytest.mark.slow
@pytest.mark.fault(
    "W&B itself at a port where nobody listens", "one warning, logged offline; the run is complete"
)
def test_wandb_at_a_dead_port(run, run_dir, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with pytest.warns(UserWarning, match="W&B cannot be reached"):
        run(*TWENTY_STEPS, "logger=wandb")
    assert len(read_columns(run_dir, "step")) == 20
    assert list(run_dir.glob("wandb/offline-run-*"))


def test_wandb_receives_the_sample_grid_and_no_null(run, run_dir):
    """The picture is read back from the offline files, and so is the record that names it. A path
    under `sample_grid` would replace the picture in the summary of W&B."""
    run("logger=wandb", "logger.mode=offline", "sample_every=2", "sampling.steps=2")
    (folder,) = (run_dir / "wandb").glob("offline-run-*")
    (picture,) = (folder / "files" / "media" / "images").glob("sample_grid_*.png")
    (grid,) = (run_dir / "samples").glob("step-*.png")
    assert np.array_equal(np.asarray(Image.open(picture)), np.asarray(Image.open(grid)))
    record = next(folder.glob("*.wandb")).read_bytes()
    digest = hashlib.sha256(picture.read_bytes()).hexdigest().encode()
    assert re.search(rb'sample_grid.{1,300}"image-file".{1,400}' + digest, record, re.DOTALL)
    assert b"samples_per_s" in record
    assert grid.name.encode() not in record
    assert b"mfu" not in record


def test_a_missing_logger_package_costs_one_warning(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.warns(UserWarning, match="TensorBoardLogger failed"):
        assert run("logger=tensorboard")["steps"] == 2
