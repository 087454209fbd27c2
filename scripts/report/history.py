"""Reads a run folder, whole or not: what is missing is empty, and what cannot be read is said."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel.ledger import LedgerRow, shown
from training.checkpoint.find import complete
from training.checkpoint.parts import flat
from training.config.compose import as_yaml, compose, from_yaml

PLACES = ("file", "path", "folder", "run_dir")
"""Last parts of dotted keys that say where something lies: no difference between runs or protocols."""
NUMBERS = {
    "loss": "loss",
    "eval_loss": "held-out loss",
    "steps": "steps",
    "samples": "samples",
    "samples_per_s": "samples/s",
    "mfu": "share of peak FLOP/s",
    "memory_reserved_peak": "GiB of GPU memory reserved at most",
    "skipped_steps": "skipped steps",
    "train_seconds": "seconds of training",
    "seconds": "seconds of the process",
    "warm_up_seconds": "seconds of warm-up",
    "maintenance_seconds": "seconds of evaluating, sampling, saving",
    "save_stall_seconds": "seconds of waiting for saves",
}
"""Key of summary.json -> its name in the report."""


@dataclass(frozen=True)
class Evaluation:
    """One file of `python -m scripts.evaluate`."""

    run: History
    file: str
    features: dict[str, Any]
    """Feature space -> fd, kd, kd_std, precision, recall, floor_fd, why."""
    protocol: dict[str, Any]


@dataclass
class History:
    """The content of a run folder. Files come from anywhere: any value may be of any type."""

    folder: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    ledger: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    protocol: dict[str, Any] = field(default_factory=dict)
    """Of the distances measured during training."""
    described: dict[str, Any] = field(default_factory=dict)
    """state.json of the newest checkpoint."""
    manifest: dict[str, Any] = field(default_factory=dict)
    """Of the newest checkpoint."""
    lines: list[dict[str, Any]] = field(default_factory=list)
    """The logged steps, in order."""
    grids: list[tuple[int, Path]] = field(default_factory=list)
    """(step, PNG), in order."""
    evaluations: list[Evaluation] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What is missing or cannot be read, a sentence each."""

    def json(self, file: Path, missing: str = "") -> dict[str, Any]:
        """The mapping in a JSON file; empty, with the sentence `missing` among the problems, where there is none."""
        try:
            found = json.loads(file.read_text())
            if isinstance(found, dict):
                return found
            self.problems.append(f"{file.name} holds no mapping, and is left out.")
        except FileNotFoundError:
            self.problems.extend([missing] if missing else [])
        except (OSError, ValueError) as error:
            self.problems.append(f"{file.name} cannot be read ({error}), and is left out.")
        return {}

    def series(self, key: str, over: str = "samples") -> list[tuple[float, float]]:
        """(x, y) of the lines that have both; y is NaN where it is no finite number."""
        pairs = [(number(line[over]), number(line[key])) for line in self.lines if key in line and over in line]
        return [(x, y) for x, y in pairs if math.isfinite(x)]

    def numbers(self) -> dict[str, Any]:
        """The summary's figures by the report's names; of an unfinished run the last that were logged."""
        latest: dict[str, Any] = {}
        for line in self.lines:
            latest |= line
        if "step" in latest:
            latest["steps"] = latest["step"]
        found = self.summary or latest
        if found.get("memory_reserved_peak") is not None:
            found = found | {"memory_reserved_peak": number(found["memory_reserved_peak"]) / 2**30}
        return {name: found[key] for key, name in NUMBERS.items() if found.get(key) is not None}

    def facts(self) -> dict[str, Any]:
        """What ran where, with which versions."""
        environment, described = self.environment, self.described
        commit = at(environment, "git", "commit")
        changed = " with uncommitted changes" if at(environment, "git", "uncommitted_changes") else ""
        versions = at(environment, "versions", default={})
        file = next(
            (f for f in (self.folder / "metrics.jsonl", self.folder / "config.yaml") if f.is_file()), self.folder
        )
        return {
            "model": at(environment, "choices", "model"),
            "data": at(environment, "choices", "data"),
            "data fingerprint": at(described, "data", "fingerprint"),
            "runtime": at(environment, "choices", "runtime"),
            "hardware": environment.get("hardware"),
            "processes": described.get("world_size"),
            "versions": ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, dict) else versions,
            "git commit": f"{commit}{changed}" if commit else None,
            "command": command(environment.get("argv")),
            "last written": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(file.stat().st_mtime)),
            "finished": "yes" if self.summary else "no: there is no summary.json, and figures are the last logged ones",
        }

    def ledger_rows(self) -> list[LedgerRow]:
        """The ledger, as far as its rows have the form of one."""
        rows = {key: row for key, row in self.ledger.items() if isinstance(row, dict)}
        return [
            LedgerRow(k, *(row.get(name, "") for name in ("requested", "active", "evidence")))
            for k, row in rows.items()
        ]


def read_history(path: str, key: str) -> History:
    """Reads the run folder `path`; ValueError, which calls it `key`, if it is none."""
    folder = Path(path).expanduser()
    if not (folder / "config.yaml").is_file():
        raise ValueError(f"{key}={path} is no run folder: it has no config.yaml; name the run_dir of a run.")
    run = History(folder, folder.resolve().name)
    try:
        config = from_yaml((folder / "config.yaml").read_text())
        run.config = config if isinstance(config, dict) else {}
    except Exception as error:  # OmegaConf's own, the yaml parser's, the disk's
        run.problems.append(f"config.yaml cannot be read ({str(error).splitlines()[0]}), and is left out.")
    run.environment = run.json(folder / "environment.json", "There is no environment.json: what ran where is unknown.")
    run.ledger = run.json(folder / "ledger.json", "There is no ledger.json.")
    run.summary = run.json(folder / "summary.json")
    run.protocol = run.json(folder / "fd_protocol.json")
    for newest in complete(folder / "checkpoints")[-1:]:
        run.described, run.manifest = run.json(newest / "state.json"), run.json(newest / "manifest.json")
    read_lines(run)
    if run.lines and number(run.lines[-1].get("step")) > number(run.summary.get("steps")):
        run.problems.append("summary.json is of an earlier end of the run, which went on; it is left out.")
        run.summary = {}
    steps = [(file.stem.removeprefix("step-"), file) for file in (folder / "samples").glob("step-*.png")]
    run.grids = sorted((int(step), file) for step, file in steps if step.isdecimal())
    for file in sorted((folder / "evaluation").glob("*.json")):
        found = run.json(file)
        features, protocol = ({} if not isinstance(n := found.get(k), dict) else n for k in ("features", "protocol"))
        if features:
            run.evaluations.append(Evaluation(run, file.name, features, protocol))
        elif found:
            run.problems.append(f"{file.name} holds no features, and is left out.")
    return run


def read_lines(run: History) -> None:
    """The lines of metrics.jsonl that are whole; the torn one of a killed run is said and left out."""
    file = run.folder / "metrics.jsonl"
    text = file.read_text(errors="replace") if file.is_file() else ""
    for i, line in enumerate(text.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if isinstance(found, dict):
            run.lines.append(found)
        else:
            run.problems.append(f"Line {i + 1} of metrics.jsonl is torn, and is left out.")
    if wrong := sum(not math.isfinite(y) for _, y in run.series("loss")):
        run.problems.append(f"At {wrong} of {len(run.lines)} logged steps the loss is no finite number.")


def at(node: Any, *keys: str, default: Any = None) -> Any:
    """The value below a path of keys; `default` where there is none."""
    for key in keys:
        if not isinstance(node, Mapping) or key not in node:
            return default
        node = node[key]
    return node


def command(argv: Any) -> str | None:
    return f"python {' '.join(map(str, argv))}" if isinstance(argv, list) else None


def number(value: Any) -> float:
    """A finite float, or NaN."""
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return found if math.isfinite(found) else math.nan


def text(value: Any) -> str:
    """A value as the report shows it."""
    if value is None or value == {}:
        return "–"
    if isinstance(value, bool):
        return shown(value)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < 10**15 else f"{value:.4g}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def differing(*trees: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Dotted key -> its value in each tree, for keys in which they differ; places are left out."""
    leaves = [dict(flat(tree)) for tree in trees]
    keys = [key for key in dict.fromkeys(key for tree in leaves for key in tree) if key.split(".")[-1] not in PLACES]
    values = {key: [tree.get(key) for tree in leaves] for key in keys}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def from_defaults(config: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Dotted key -> (default, value), for what differs from this version's defaults."""
    return differing(from_yaml(as_yaml(compose([]).source)), config)


def settings(protocol: Mapping[str, Any]) -> dict[str, Any]:
    """What two protocols must share for their figures to be comparable: all but the weights, floors and places."""
    kept = {k: v for k, v in flat(protocol) if k.split(".")[0] != "weights"}
    return {k: v for k, v in kept.items() if k.split(".")[-1] not in (*PLACES, "floor_fd", "floor_kd")}


def words(differences: Mapping[str, Sequence[Any]]) -> str:
    """Differences in a few words."""
    return ", ".join(f"{key} ({' or '.join(map(text, values))})" for key, values in differences.items())
