"""Manages a run: its device, its folder, and the files in it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch

from accel.ledger import Ledger
from accel.stack import AccelerationStack
from accel.trial.contest import make_ledger_row
from accel.trial.kernels import KERNELS_FILE
from common.clock import CLOCK, MAINTENANCE_KINDS, TIME_FILE, explain_bound
from common.config.compose import Composed, parse_yaml, read_config, to_yaml
from common.config.schema import TrainConfig
from common.distributed.exit import RESUMABLE_EXIT_CODE
from common.distributed.ranks import Ranks
from common.environment import choose_folder, describe_environment
from common.errors import READ_ERRORS, UserError
from common.files import (
    FolderLock,
    go_on_without,
    lock_folder,
    make_folder,
    read_object,
    write_atomically,
    write_json,
)
from common.text import replace_non_finite
from training.assemble import Training
from training.checkpoint.load import (
    FORMAT_VERSION,
    describe_difference,
    describe_other_part,
    find_branch,
    list_complete,
    read_finished_summary,
    select_identity,
)
from training.checkpoint.save import Checkpoints
from training.preflight.length import LENGTH_FILE, describe_length, measure_seconds, settle_length
from training.preflight.tune import TUNING_FILE, tune_config
from training.records.log_lines import format_summary
from training.records.metrics import METRICS_FILE, MetricsFile, SafeLogger, read_metrics
from training.state import TrainState

RUNNING_FILE = "running"
"""Name of a file in a run folder that is there while a process trains."""
EARLIER_RUN_FILES = ("checkpoints/step-*", "averages/samples-*", "summary.json")
"""Patterns of files in a run folder; if one matches, the folder already holds a run."""


@dataclass
class RunFolder:
    """A run and its folder.

    The folder holds config.yaml (the composed configuration, with interpolations unresolved and
    secrets hidden), environment.json, ledger.json, kernels.json, tuning.json and length.json (if
    kernels, techniques or the length were chosen by measuring), metrics.jsonl, time.json, samples/,
    checkpoints/, averages/ (if `ema.snapshots` is set) and summary.json; while a process trains,
    also an empty file, `RUNNING_FILE`. Only the first rank writes files other than checkpoints.
    """

    composed: Composed
    ranks: Ranks
    device: torch.device
    folder: Path
    finished: dict[str, Any] | None = None
    """Summary of the run in this folder if that run has already seen all its samples; otherwise
    None."""
    lock: FolderLock | None = None
    """Lock of the folder; None on all ranks but the first."""
    choices: list[dict[str, Any]] = field(default_factory=list)
    """Rows that the run adds to the ledger of techniques, such as a row about tuning."""
    reported_bounds: set[str] = field(default_factory=set)
    """Limits of the step's speed, such as "data-bound", that the run has already printed."""

    def __post_init__(self) -> None:
        self.started = time.perf_counter()
        self.cfg: TrainConfig = self.composed.cfg
        self.metrics = MetricsFile(self.folder / METRICS_FILE)
        self.environment = describe_environment(self.device) | {
            "choices": self.composed.choices,
            "overrides": self.composed.overrides,
        }

    @classmethod
    def open(cls, composed: Composed, ranks: Ranks, device: torch.device) -> RunFolder:
        """Chooses the folder of a run, reads whether the run in it is finished, and locks the
        folder if it is not. All ranks must call this function.

        If the folder does not exist, the first `write_file` creates and locks it, so that a failed
        set-up leaves no empty folder. UserError if `resume` does not fit what the folder holds, if
        the length of the run cannot be computed, or if another run holds the lock.
        """
        folder = ranks.broadcast_result(
            lambda: Path(composed.cfg.run_dir or choose_folder(composed.choices)).expanduser()
        )
        run = cls(composed, ranks, device, folder)
        run.settle_length()
        run.finished = ranks.broadcast_result(run.enter)
        return run

    def enter(self) -> dict[str, Any] | None:
        """Returns the summary of the run in this folder if that run is finished; otherwise returns
        None, locks the folder if it exists, and prints a line if the process that ran there last
        was killed. Only the first rank calls this method.

        UserError if `resume` does not fit what the folder holds, or another run holds the lock.
        """
        earlier = [file for name in EARLIER_RUN_FILES for file in self.folder.glob(name)]
        if self.cfg.resume == "never" and earlier:
            raise UserError(
                f"resume=never, but run_dir={self.folder} holds a run; choose another run_dir or "
                "resume=auto."
            )
        # Refuse an unfit checkpoint now; training loads the checkpoint only after it has built the
        # model.
        find_branch(self.cfg.resume, self.folder / "checkpoints")

        finished = read_finished_summary(self.cfg, self.folder)
        if finished is None and self.folder.exists():
            self.claim_folder()
            # Say if the process that ran here last was killed: no other process runs here now, for
            # this one has the lock.
            if (self.folder / RUNNING_FILE).exists():
                steps = [line["step"] for line in read_metrics(self.metrics.file)[0]]
                print(
                    f"the last start in {self.folder} ended without a word after step "
                    f"{max(steps, default=0)}; Linux's out-of-memory killer does that",
                    flush=True,
                )
        return finished

    def claim_folder(self) -> None:
        """Creates the run folder if it does not exist, and locks it if this process has not locked
        it yet. Raises UserError if another run holds the lock."""
        if self.lock is not None:
            return
        key = f"run_dir={self.folder}"
        try:
            make_folder(self.folder)
            self.lock = lock_folder(
                self.folder,
                f"{key}: another run writes to it; wait for it, or choose another folder.",
            )
        except OSError as error:
            raise UserError(
                f"{key} cannot be written to ({error.strerror}); choose another folder."
            ) from error

    def settle_length(self) -> None:
        """Sets `cfg`, and that of `composed`, to the configuration with the run's length."""
        self.cfg = self.ranks.broadcast_result(
            lambda: settle_length(self.cfg, self.folder, self.device)
        )
        self.composed = self.composed._replace(cfg=self.cfg)

    def write_file(self, name: str, content: Any) -> None:
        """Writes `content` as the JSON file `name` in the run folder; first creates the folder if
        it does not exist. All ranks must call it. Raises OSError if the file cannot be written."""
        self.ranks.broadcast_result(self.claim_folder)
        if self.ranks.first:
            write_json(self.folder / name, replace_non_finite(content))

    def write_record(self, name: str, content: Any) -> None:
        """Does what `write_file` does, for a file that training does not need: if it cannot be
        written, the run continues, with a warning."""
        with go_on_without(self.folder / name):
            self.write_file(name, content)

    @CLOCK.count_as("warm_up")
    def apply_measurements(self) -> TrainConfig:
        """Returns the configuration with what a run measures before it trains: with `runtime.tune`
        the techniques that are fastest on this machine, and with `budget_minutes` the length."""
        if self.cfg.runtime.tune:
            self.cfg, choice = tune_config(self.cfg, self.device, self.ranks, self.folder)
            self.write_file(TUNING_FILE, choice)
            self.choices.append(choice)
        if self.cfg.budget_minutes is not None and not (self.folder / LENGTH_FILE).exists():
            measured = self.ranks.broadcast_result(
                lambda: measure_seconds(self.cfg, self.device, self.ranks.world_size)
            )
            self.write_file(LENGTH_FILE, measured)
            self.settle_length()
        return self.cfg

    def open_checkpoints(self) -> Checkpoints:
        """Returns the object that saves, lists and deletes the checkpoints in the run folder."""
        cfg = self.cfg
        return Checkpoints(
            self.folder / "checkpoints",
            cfg.keep_checkpoints,
            self.ranks,
            keep_every=cfg.keep_every,
            best_by=cfg.keep_best,
            in_background=cfg.async_checkpoints,
            patience=timedelta(minutes=cfg.runtime.parallel.timeout_minutes),
        )

    def close(self) -> None:
        """Releases the folder lock."""
        if self.lock is not None:
            self.lock.close()

    def write_kernels(self, training: Training) -> None:
        """Writes the choice of fused kernels to the run folder before training, so that a resumed
        run computes with the same kernels."""
        if training.kernels:
            self.write_file(KERNELS_FILE, training.kernels)
            self.choices.append(training.kernels)

    def announce_start(
        self, training: Training, ledger: Ledger, logger: SafeLogger, origin: str
    ) -> None:
        """Writes environment, ledger and configuration to the run folder, prints the ledger, and
        starts the logger. `origin` is a sentence that says from which checkpoint or weights the run
        starts."""
        ledger += [make_ledger_row(self.choices)] if self.choices else []
        rows = ledger.as_dict()
        self.write_record("environment.json", self.environment)
        self.write_record("ledger.json", rows)
        if not self.ranks.first:
            return

        # Show the ledger, and pass it to the logger with the configuration.
        config = self.composed.source
        file = self.folder / "config.yaml"
        with go_on_without(file):
            write_atomically(file, to_yaml(config))
        table = ledger.format_table(self.cfg.ledger)
        print(
            f"\nledger ({self.device}: {self.environment['hardware']})\n{table}\n\n"
            f"{ledger.format_line()}\n\n{origin}\n{describe_length(self.cfg, training.loader)}",
            flush=True,
        )
        facts = {f"ledger.{k}": f"{row['requested']} -> {row['active']}" for k, row in rows.items()}
        facts |= {"config": config}
        facts |= {
            name: self.environment[name] for name in ("choices", "versions", "hardware", "git")
        }
        logger.start(self.folder, facts, training.state.samples)
        logger.known = {"ledger": rows}

    def continue_records(self, state: TrainState) -> None:
        """Continues time.json and metrics.jsonl at the step of `state`; removes the metrics of
        later steps, which the run will log again."""
        CLOCK.resume(self.folder / TIME_FILE, state.step)
        lines = self.metrics.drop_after(state.step) if self.ranks.first else []
        if lines:
            state.meter.earlier_seconds = float(lines[-1].get("train_seconds") or 0.0)

    def append_metrics(self, metrics: dict[str, Any], stack: AccelerationStack) -> None:
        """Appends a line to metrics.jsonl. Adds the best score to `metrics` if they have a score.
        If waiting for data or launching kernels limits the speed of a step, prints a line that says
        so, with configuration keys to try; prints each of the two possible lines at most once in a
        run. `stack` holds the run's techniques."""
        if not self.ranks.first:
            return
        self.metrics.append(metrics)
        if self.cfg.keep_best in metrics:
            metrics |= self.find_best()

        # Find out whether waiting for data or launching kernels limits the speed of a step.
        step_ms = 1e3 * self.cfg.batch_size / metrics["samples_per_s"]
        data_ms = metrics["data_wait"] * step_ms
        explanation = explain_bound(
            step_ms, data_ms, stack.busy_ms, stack.list_launch_savers(), self.cfg.data
        )
        if explanation is None:
            return
        bound, reason, keys = explanation
        if bound not in self.reported_bounds:
            self.reported_bounds.add(bound)
            print(f"{bound}: {reason}; try {', '.join(keys)}", flush=True)

    def find_best(self) -> dict[str, Any]:
        """Returns the lowest value that the run has logged of the score that decides which
        checkpoint is the best, and its step, as the metrics `best_<score>` and `best_step`; empty
        if there is none."""
        name = self.cfg.keep_best
        lines = read_metrics(self.metrics.file)[0]
        scored = [(line[name], line["step"]) for line in lines if line.get(name) is not None]
        if not scored:
            return {}
        best, step = min(scored)
        return {f"best_{name}": best, "best_step": step}

    def write_time(self, state: TrainState, *, saved: bool = False, now: bool = False) -> None:
        """Writes the run's seconds by kind to time.json: at once if a checkpoint of this step was
        `saved` or `now` is set, otherwise at most every few seconds."""
        if self.ranks.first:
            state.meter.sum_waits()
            CLOCK.write(self.folder / TIME_FILE, state.step if saved else None, now=saved or now)

    def show_finished(self) -> dict[str, Any]:
        """Prints and returns the summary of the finished run in this folder; changes no file.
        Raises UserError if that run has another model, data, objective, optimizer or adapter than
        this configuration."""
        assert self.finished is not None
        state = f"run_dir={self.folder} holds a finished run"
        if self.finished.get("format") != FORMAT_VERSION:
            raise UserError(
                f"{state}, made by an earlier checkout; use a new run_dir, or "
                f"init_from={self.folder} to start from its weights."
            )
        try:
            old = read_config(self.folder / "config.yaml")
            new = parse_yaml(to_yaml(self.composed.source))
        except (OSError, ValueError):
            old = {}
            new = {}
        other = describe_other_part(select_identity(old), select_identity(new))
        if other:
            raise UserError(f"{state} of {other}; use a new run_dir.")

        changed = describe_difference(old, new)
        note = f" Changed settings have no effect: {changed}." if changed else ""
        self.ranks.say(
            f"{state}, of {self.finished['samples']} samples; there is nothing to do. A larger "
            f"total_samples continues it.{note}\n\nsummary\n{format_summary(self.finished)}"
        )
        return self.finished

    def stop(self, state: TrainState) -> NoReturn:
        """Ends the process with `RESUMABLE_EXIT_CODE`, which means that the same command resumes
        the run."""
        self.write_time(state, now=True)
        saved = "saved" if state.step else "nothing is saved"
        if not self.cfg.save_every:
            saved = "nothing is saved, for save_every=0"
        self.ranks.say(
            f"\nasked to stop at step {state.step}; {saved}. The same command again resumes."
        )
        self.close()
        raise SystemExit(RESUMABLE_EXIT_CODE)

    def summarise(self, state: TrainState, ledger: Ledger) -> dict[str, Any]:
        """Writes summary.json and returns its content: the latest value of the main metrics, the
        paths of the newest checkpoint and sample grid, and times in seconds."""
        self.write_time(state, now=True)
        latest: dict[str, Any] = {}
        for line in read_metrics(self.metrics.file)[0]:
            latest |= line

        # If this process took no step, because the run was complete, use the last training rate in
        # metrics.jsonl.
        meter = state.meter
        rate = latest.get("samples_per_s")
        if meter.train_seconds:
            rate = meter.trained_samples / meter.train_seconds

        # `CLOCK.seconds` has the seconds of this process, `CLOCK.account` those of all processes of
        # the run.
        process_seconds = CLOCK.seconds
        account = CLOCK.account
        checkpoints = list_complete(self.folder / "checkpoints")
        grid = max((self.folder / "samples").glob("step-*.png"), default=None, key=os.path.getmtime)
        summary = {
            "loss": latest.get("loss"),
            "eval_loss": latest.get("eval_loss"),
            **self.find_best(),
            **{name: latest[name] for name in self.cfg.fd.list_scores() if name in latest},
            "steps": state.step,
            "samples": state.samples,
            "samples_per_s": rate,
            **{name: latest.get(name) for name in ("mfu", "gpu_busy", "memory_reserved_peak")},
            "skipped_steps": state.skipped_steps,
            "skipped_data": state.skipped_data,
            "seconds": time.perf_counter() - self.started,
            "train_seconds": meter.train_seconds,
            "warm_up_seconds": process_seconds["warm_up"],
            "maintenance_seconds": sum(process_seconds[kind] for kind in MAINTENANCE_KINDS),
            "save_stall_seconds": process_seconds["saving"],
            "goodput": account["steps"] / max(1e-9, sum(account.values())),
            "time": account,
            "ledger": ledger.as_dict(),
            "checkpoint": str(checkpoints[-1]) if checkpoints else None,
            "sample_grid": grid and str(grid),
            "run_dir": str(self.folder),
            "format": FORMAT_VERSION,
        }
        self.write_record("summary.json", summary)
        return summary

    def show_rehearsal(self) -> None:
        """Prints the ledger and the speed of the latest run of the experiment that the key
        `rehearsal` names, with the same model, runtime and versions; warns if there is none."""
        experiment = self.cfg.rehearsal
        if experiment is None or not self.ranks.first:
            return

        chosen = {"experiment": experiment}
        chosen |= {key: self.composed.choices.get(key) for key in ("model", "runtime")}
        files = {
            file.resolve()
            for folder in (self.folder.parent, Path("runs"))
            for file in folder.glob("*/summary.json")
        }
        for file in sorted(files, key=os.path.getmtime, reverse=True):
            try:
                summary = read_object(file)
                environment = read_object(file.with_name("environment.json"))
                same = chosen.items() <= environment["choices"].items()
                same = same and environment["versions"] == self.environment["versions"]
                rows = [
                    f"    {k}: {row['requested']} -> {row['active']}"
                    for k, row in summary["ledger"].items()
                ]
                rate = f"{summary['samples_per_s'] or 0.0:.1f} samples/s"
            except READ_ERRORS:
                continue  # skip a file that is no summary of a run
            if same:
                print(f"latest {experiment} of this model and runtime: {file.parent}, {rate}")
                print("\n".join(rows), flush=True)
                return

        print(
            f"warning: {self.folder.parent} holds no {experiment} of model={chosen['model']} "
            f"runtime={chosen['runtime']} with these versions; a few minutes of "
            f"`experiment={experiment}` can save hours.",
            flush=True,
        )
