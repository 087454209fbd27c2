"""Reads the folder of a run, finished or not. If a file is missing, its content is empty, and a
sentence in `problems` reports the gap."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from accel.ledger import LedgerRow, format_value
from common.config.compose import read_config
from common.errors import UserError
from common.files import hash_file, read_object
from common.text import is_figure
from common.trees import flatten
from scripts.evaluate import FIGURES
from training.checkpoint.load import list_complete, read_newest, read_state_file
from training.records.metrics import read_metrics
from training.weights.pretrained import read_tensors

FIGURE_COLUMNS = (*FIGURES, "why")
HEADS = ("file", "weights", "features", *FIGURE_COLUMNS)


class Evaluation(NamedTuple):
    """Content of one file that `python -m scripts.evaluate` wrote."""

    rows: list[list[Any]]
    """One row of cells for each feature space; `HEADS` names the columns."""
    protocol: dict[str, Any]


class History:
    """The content of the folder of a run, finished or not. Mappings are flat, with dotted keys.
    Raises UserError if `folder` is no run folder."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "config.yaml").is_file():
            raise UserError(
                f"{folder} is no run folder: it has no config.yaml; name the run_dir of a run."
            )
        self.folder = folder
        self.name = folder.resolve().name
        self.config = flatten(read_config(folder / "config.yaml"))
        self.environment = flatten(self.read("environment.json"))
        self.protocol = flatten(self.read("fd_protocol.json"))
        """Protocol of the distances that training measured: all settings on which they depend, and
        their floors; empty if the run measured none."""
        try:
            self.ledger = [LedgerRow(key, **row) for key, row in self.read("ledger.json").items()]
        except TypeError as error:
            raise UserError(
                f"{folder / 'ledger.json'} holds no ledger; restore it or delete it."
            ) from error
        self.state, self.weights = read_newest(str(folder), self.read_checkpoint)
        self.lines, damaged, _ = read_metrics(folder / "metrics.jsonl")
        steps = {int(f.stem.removeprefix("step-")): f for f in folder.glob("samples/step-*.png")}
        self.grids = sorted(steps.items())

        # Ignore summary.json if the run continued after it had written this file, because the
        # figures in it are then out of date.
        self.summary = self.read("summary.json")
        last = self.lines[-1]["step"] if self.lines else 0
        outrun = bool(self.summary) and last > (self.summary.get("steps") or 0)
        self.latest = {key: y for line in self.lines for key, y in line.items()}
        """Dict: key that was ever logged -> the last value logged for it."""
        if outrun:
            self.summary = {}
        self.figures = {k: y for k, y in (self.summary or self.latest).items() if is_figure(y)}
        """Figures of the summary; for an unfinished run the last logged value of each key."""

        results = [self.read_evaluation(file) for file in sorted(folder.glob("evaluation/*.json"))]
        self.evaluations = [evaluation for evaluation in results if evaluation]
        nans = sum(math.isnan(y) for _, y in self.list_points("loss"))
        problems = {
            "There is no environment.json: what ran where is unknown.": not self.environment,
            "There is no logged step (metrics.jsonl), so nothing is drawn.": not self.lines,
            f"Lines of metrics.jsonl that cannot be read, and are left out: {damaged}.": damaged,
            f"At {nans} of {len(self.lines)} logged steps the loss is no finite number.": nans,
            f"{results.count(None)} files in evaluation/ are no results of scripts.evaluate.": (
                None in results
            ),
            "summary.json is of an earlier end of the run, which went on; it is left out.": outrun,
        }
        self.problems = [sentence for sentence, applies in problems.items() if applies]

    def read(self, name: str) -> dict[str, Any]:
        """Reads the file `name` of the folder as a JSON object; returns {} if there is no such
        file."""
        file = self.folder / name
        return read_object(file) if file.is_file() else {}

    def read_checkpoint(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reads the newest checkpoint. Returns its state as a flat mapping, and a mapping with the
        file, the number of parameters and the hash of the averaged weights; both are empty if there
        is no checkpoint."""
        checkpoints = list_complete(self.folder / "checkpoints")
        if not checkpoints:
            return {}, {}
        file = checkpoints[-1] / "ema.safetensors"
        weights = {
            "file": file.relative_to(self.folder),
            "parameters": sum(tensor.numel() for tensor in read_tensors(file).values()),
            "sha256": hash_file(file),
        }
        return flatten(read_state_file(checkpoints[-1])), weights

    def read_evaluation(self, file: Path) -> Evaluation | None:
        """Reads a file that `scripts.evaluate` wrote; returns None if it is another kind of
        file."""
        content = read_object(file)
        try:
            settings = flatten(content["protocol"])
            weights = f"{settings['weights.kind']} step {format_cell(settings['weights.step'])}"
            rows = [
                [file.name, weights, space, *(figures.get(key, "") for key in FIGURE_COLUMNS)]
                for space, figures in content["features"].items()
            ]
        except (KeyError, AttributeError):
            return None
        return Evaluation(rows, settings)

    def list_points(self, key: str, over: str = "samples") -> list[tuple[float, float]]:
        """Returns (value of `over`, value of `key`) of each line of metrics.jsonl that has both;
        the second is NaN if it was not finite."""
        return [
            (line[over], math.nan if line[key] is None else line[key])
            for line in self.lines
            if key in line and line.get(over) is not None
        ]

    @property
    def distances(self) -> dict[str, list[tuple[float, float]]]:
        """Dict: key of a distance that training measured, such as fd_<features> -> its finite
        points (samples seen, distance)."""
        return {
            key: [point for point in self.list_points(key) if math.isfinite(point[1])]
            for key in self.latest
            if key.startswith(("fd_", "kd_"))
        }

    @property
    def written(self) -> str:
        """Time of the last change of the run's configuration and records, in UTC."""
        files = (self.folder / "config.yaml", *self.folder.glob("*.json*"))
        written = max(file.stat().st_mtime for file in files)
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(written))


def name_autoencoder(encoder: Mapping[str, Any]) -> str:
    """Returns a name by which a user can find the autoencoder that `encoder`, the node of a latent
    set, describes: hub id and revision, folder, or class; "" if the latents are pixels."""
    path = encoder.get("path")
    if path is None:
        target = str(encoder.get("_target_"))
        return "" if target.endswith((".PixelAutoencoder", ".ByteAutoencoder")) else target
    if Path(path).is_absolute():
        return Path(path).name
    return f"{path}, revision {encoder.get('revision')}"


def format_cell(value: Any) -> str:
    """Formats a value for a table cell of the report."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if type(value) is int else format_value(value)


def find_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Returns a row (key, both values) for each key, except run_dir, in which two flat mappings
    differ."""
    return [
        (key, first.get(key), second.get(key))
        for key in {**first, **second}
        if key != "run_dir" and first.get(key) != second.get(key)
    ]
