"""Reads a run folder, finished or not: what is missing is empty, and a sentence says so."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from accel.ledger import LedgerRow, shown
from common.errors import UserError
from common.files import file_sha256, read_object
from common.text import is_figure
from training.checkpoint.find import complete, description, read_newest
from training.checkpoint.parts import flat
from training.config.yaml_text import read_config
from training.goodput import told
from training.metrics import read_metrics
from training.weights.pretrained import read_tensors

FIGURES = ("fd", "floor_fd", "kd", "kd_std", "floor_kd", "precision", "recall", "copied", "why")
HEADS = ("run", "file", "weights", "features", *FIGURES)


class Weights(NamedTuple):
    """The averages of a checkpoint."""

    parameters: int
    sha256: str


class Evaluation(NamedTuple):
    """One file of `python -m scripts.evaluate`."""

    run: History
    file: str
    features: dict[str, dict[str, Any]]
    protocol: dict[str, Any]


class History:
    """The content of a run folder, finished or not. Mappings are flat, with dotted keys.

    ValueError, which calls it `key`, where `path` is no run folder.
    """

    def __init__(self, path: str, key: str) -> None:
        self.folder = folder = Path(path).expanduser()
        if not (folder / "config.yaml").is_file():
            raise UserError(
                f"{key}={path} is no run folder: it has no config.yaml; name the run_dir of a run."
            )
        self.name = folder.resolve().name
        self.config = dict(flat(read_config(folder / "config.yaml")))
        self.environment = dict(flat(read(folder / "environment.json")))
        self.ledger = ledger_in(folder / "ledger.json")
        # of the distances measured during training
        self.protocol = dict(flat(read(folder / "fd_protocol.json")))
        self.state, self.weights = read_newest(path, self.read_checkpoint)
        self.summary = read(folder / "summary.json")
        self.time = read(folder / "time.json").get("seconds")
        self.lines, damaged, _ = read_metrics(folder / "metrics.jsonl")
        self.grids = sorted(
            (int(f.stem.removeprefix("step-")), f) for f in (folder / "samples").glob("step-*.png")
        )
        files = {file.name: read(file) for file in sorted((folder / "evaluation").glob("*.json"))}
        self.evaluations = [
            Evaluation(self, k, *parts) for k, v in files.items() if (parts := evaluated(v))
        ]
        strange = len(files) - len(self.evaluations)
        wrong = sum(math.isnan(y) for _, y in self.series("loss"))
        outrun = (
            self.summary
            and self.lines
            and self.lines[-1]["step"] > (self.summary.get("steps") or 0)
        )
        self.summary = {} if outrun else self.summary
        problems = {
            "There is no environment.json: what ran where is unknown.": not self.environment,
            "There is no logged step (metrics.jsonl), so nothing is drawn.": not self.lines,
            f"Lines of metrics.jsonl that cannot be read, and are left out: {damaged}.": damaged,
            f"At {wrong} of {len(self.lines)} logged steps the loss is no finite number.": wrong,
            f"{strange} files in evaluation/ are no results of scripts.evaluate.": strange,
            "summary.json is of an earlier end of the run, which went on; it is left out.": outrun,
        }
        self.problems = [sentence for sentence, true in problems.items() if true]

    def read_checkpoint(self) -> tuple[dict[str, Any], Weights | None]:
        """The newest checkpoint's state, and its averages; empty and None where there is none."""
        found = complete(self.folder / "checkpoints")
        if not found:
            return {}, None
        file = found[-1] / "ema.safetensors"
        parameters = sum(tensor.numel() for tensor in read_tensors(file).values())
        return dict(flat(description(found[-1]))), Weights(parameters, file_sha256(file))

    def series(self, key: str, over: str = "samples") -> list[tuple[float, float]]:
        """(x, y) of the lines that have both; y is NaN where it is no finite number."""
        pairs = [
            (line[over], line[key])
            for line in self.lines
            if key in line and line.get(over) is not None
        ]
        return [(x, math.nan if y is None or math.isinf(y) else y) for x, y in pairs]

    def distances(self) -> list[str]:
        """Keys of the distances measured during training: fd_<features> and kd_<features>."""
        return list(
            dict.fromkeys(
                key for line in self.lines for key in line if key.startswith(("fd_", "kd_"))
            )
        )

    def numbers(self) -> dict[str, Any]:
        """The summary's figures; of an unfinished run the last that were logged."""
        latest = {key: y for line in self.lines for key, y in line.items()}
        found = {key: y for key, y in (self.summary or latest).items() if is_figure(y)}
        peak = found.get("memory_reserved_peak")
        return found | ({"memory_reserved_peak": f"{peak / 2**30:.2f} GiB"} if peak else {})

    def facts(self) -> dict[str, Any]:
        """What ran where, with which versions."""
        versions = {
            k.removeprefix("versions."): v
            for k, v in self.environment.items()
            if k.startswith("versions.")
        }
        commit = self.environment.get("git.commit")
        argv = self.environment.get("argv")
        changed = (
            " with uncommitted changes" if self.environment.get("git.uncommitted_changes") else ""
        )
        written = max(
            f.stat().st_mtime for f in (self.folder / "config.yaml", *self.folder.glob("*.json*"))
        )
        found = {
            **{key: self.environment.get(f"choices.{key}") for key in ("model", "data", "runtime")},
            "data fingerprint": self.state.get("spec.fingerprint"),
            "batch (global)": self.config.get("batch_size"),
            "precision": next((row.active for row in self.ledger if row.key == "precision"), None),
            "hardware": self.environment.get("hardware"),
            "processes": self.state.get("world_size"),
            "versions": ", ".join(f"{name} {version}" for name, version in versions.items())
            or None,
            "git commit": f"{commit}{changed}" if commit else None,
            "command": " ".join(["python", *map(str, argv if isinstance(argv, list) else [])]),
            "time": told(self.time) or None,
            "last written": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(written)),
            "finished": "yes"
            if self.summary
            else "no: there is no summary.json, and figures are the last logged ones",
        }
        return {key: value for key, value in found.items() if value is not None}


def ledger_in(file: Path) -> list[LedgerRow]:
    try:
        return [LedgerRow(name, **row) for name, row in read(file).items()]
    except TypeError as error:
        raise UserError(f"{file} holds no ledger; restore it or delete it.") from error


def evaluated(content: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Figures by feature space and the flat protocol, from a file of `scripts.evaluate`; None of
    another file."""
    features = content.get("features")
    protocol = content.get("protocol")
    if not isinstance(features, dict) or not isinstance(protocol, dict):
        return None
    told = dict(flat(protocol))
    rows = features.values()
    whole = {"weights.kind", "weights.step"} <= told.keys() and all(
        isinstance(row, dict) for row in rows
    )
    return (features, told) if whole else None


def read(file: Path) -> dict[str, Any]:
    return read_object(file) if file.is_file() else {}


def text(value: Any) -> str:
    """A value as the report shows it."""
    if value is None or isinstance(value, float):
        return "–" if value is None else f"{value:.4g}"
    return f"{value:,}" if type(value) is int else shown(value)


def differing(*trees: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """(key, its value in each flat mapping…) for the keys in which they differ."""
    rows = [
        (key, *(tree.get(key) for tree in trees))
        for key in dict.fromkeys(key for tree in trees for key in tree)
    ]
    return [row for row in rows if any(value != row[1] for value in row[2:])]


def by_protocol(members: Sequence[Any]) -> list[tuple[list[Any], dict[str, Any], str]]:
    """Groups of evaluations or runs: members, the protocol that they share, and why they stand
    apart from the first.

    Weights, floors and the folder of the reference may differ. A member without a protocol stands
    alone.
    """
    groups: list[tuple[list[Any], dict[str, Any], str]] = []
    for member in members:
        kept = {
            key: value for key, value in member.protocol.items() if key.split(".")[0] != "weights"
        }
        kept = {
            k: v for k, v in kept.items() if k != "reference.name" and not k.startswith("floors.")
        }
        if same := [group for group in groups if kept and group[1] == kept]:
            same[0][0].append(member)
            continue
        differences = differing(groups[0][1], kept) if groups else []
        told = ", ".join(
            f"{key} ({text(first)} or {text(here)})" for key, first, here in differences
        )
        apart = (
            f"Another protocol, not to be compared with the first: {told or 'neither is recorded'}."
        )
        groups.append(([member], kept, apart if groups else ""))
    return groups


def evaluation_rows(evaluations: Sequence[Evaluation]) -> list[list[Any]]:
    """A row under HEADS for each feature space of each evaluation."""
    rows = []
    for run, file, features, protocol in evaluations:
        weights = f"{protocol['weights.kind']} step {text(protocol['weights.step'])}"
        for space, found in features.items():
            rows.append([run.name, file, weights, space, *(found.get(key, "") for key in FIGURES)])
    return rows
