"""Runs one trial of a sweep: one of the runs that `train.py -m` starts.

This file must not import torch: each trial trains in a fork of this process, and the fork of a
process that has used CUDA cannot use CUDA.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from common.config.compose import (
    Composed,
    compose_from_hydra,
    describe_failure,
    list_hydra_words,
    parse_yaml,
    read_config,
    report_user_errors,
    to_yaml,
)
from common.config.schema import TrainConfig, find_direction
from common.config.secrets import redact_text, redact_words
from common.distributed.exit import RESUMABLE_EXIT_CODE, StopRequest
from common.errors import UserError
from common.files import read_object
from common.text import escape_unprintable

ENDED: list[tuple[int, list[str], str, float]] = []
"""Trials of this sweep that ended: number, overrides, name and value of the metric."""
POLL_SECONDS = 0.2
"""Seconds between two looks at whether a signal has arrived."""


def run_trial(train: Callable[[Composed, float], Any], source: DictConfig) -> float | None:
    """Trains with the configuration that Hydra composed for a trial, in a folder of its own.
    Returns the metric that the key `sweep_metric` names, None if the key is null.

    If the trial fails, the function prints why and raises an Exception, after which Hydra starts
    the next trial. If a signal asks it to stop, or the sweep cannot compare its trials, the
    function says so and raises SystemExit, which ends the sweep.
    """
    hydra = HydraConfig.get()
    words = redact_words(list_hydra_words())
    trial = f"trial {hydra.job.num} ({' '.join(words)})"
    source["run_dir"] = os.path.join(hydra.sweep.dir, str(hydra.sweep.subdir))
    try:
        composed = compose_from_hydra(source)
        cfg = composed.cfg
        with report_user_errors():
            refuse_sweep(cfg, hydra.runtime.choices["hydra/sweeper"], hydra.sweeper)
        stopped = train_apart(train, composed)
        if stopped:
            again = f"the same command with run_dir={hydra.sweep.dir} continues the sweep"
            print(f"{trial} {stopped}; {again}", flush=True)
            raise SystemExit(RESUMABLE_EXIT_CODE)
        summary = read_object(Path(cfg.run_dir) / "summary.json")
        name = cfg.sweep_metric or ("loss" if summary.get("eval_loss") is None else "eval_loss")
        value = summary[name]
        if value is None:
            raise UserError(f"{name} is not finite at the end of run_dir={cfg.run_dir}.")
    except Exception as error:
        message = redact_text(describe_failure(error) or repr(error))
        print(f"{trial} failed: {escape_unprintable(message)}", file=sys.stderr)
        raise

    print(f"\n{trial} ended; {name}: {value}", flush=True)
    if not ENDED:
        atexit.register(print_table)  # also if a trial fails, which ends Hydra
    ENDED.append((hydra.job.num, words, name, value))
    return value if cfg.sweep_metric else None


def print_table() -> None:
    """Prints the trials that ended: what differs between them, their metric, and the best."""
    shared = set.intersection(*(set(words) for _, words, *_ in ENDED))
    values = [value for *_, value in ENDED]
    best = max(values) if find_direction(ENDED[0][2]) == "maximize" else min(values)
    for number, words, name, value in ENDED:
        differs = " ".join(word for word in words if word not in shared)
        mark = "  best" if value == best else ""
        print(f"trial {number}  {name} {value:.6g}  {differs}{mark}")


def refuse_sweep(cfg: TrainConfig, sweeper: str, node: Mapping[str, Any]) -> None:
    """Raises UserError if `sweeper`, Hydra's choice of hydra/sweeper, needs a metric and none is
    set, if the `direction` in its `node` of the configuration is not that of the metric, or if
    torchrun started several processes."""
    if sweeper != "basic" and cfg.sweep_metric is None:
        raise UserError(
            f"hydra/sweeper={sweeper} compares trials, but sweep_metric=null; choose "
            f"{', '.join(cfg.list_metrics())}."
        )
    direction = find_direction(cfg.sweep_metric)
    given = node.get("direction", direction)
    given = getattr(given, "name", given)
    key = "hydra.sweeper.direction"
    if given != direction:
        raise UserError(
            f"{key}={given} looks for the worst {cfg.sweep_metric}; set {key}={direction}."
        )
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks != "1":
        raise UserError(
            f"WORLD_SIZE={ranks}, but a sweep (-m) trains in one process; give torchrun one run."
        )


def refuse_other_run(composed: Composed) -> None:
    """Raises UserError if the trial's folder holds a run with other settings."""
    file = Path(composed.cfg.run_dir) / "config.yaml"
    if not file.exists():
        return
    from training.weights.first_weights import insert_pretrained  # imports torch

    # The file names the model that replaced model=pretrained.
    settings = parse_yaml(to_yaml(insert_pretrained(composed).source))
    if read_config(file) | {"run_dir": settings["run_dir"]} != settings:
        raise UserError(
            f"run_dir={file.parent} holds a run with other settings; choose another run_dir."
        )


def train_apart(train: Callable[[Composed, float], Any], composed: Composed) -> str:
    """Trains in a process of its own, so that no state, such as random generators, flags of PyTorch
    or a broken CUDA context, passes to the next trial. If a signal asks to stop, waits until the
    trial has stopped, and returns how it ended, such as "stopped"; otherwise returns "".

    Raises UserError if `refuse_other_run` refuses the folder or training fails.
    """
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        began = time.perf_counter()
        try:
            refuse_other_run(composed)
            train(composed, began)
        except Exception as error:
            message = describe_failure(error)
            if message is None:
                raise
            sender.send(message)
            sys.exit(1)

    process = context.Process(target=work)
    with StopRequest() as stop:
        process.start()
        while process.is_alive():
            # Repeat the signal: until training catches signals, the fork takes them by the handler
            # of this `with` block, which only notes them.
            if stop.name:
                process.terminate()
            process.join(POLL_SECONDS)
    code = process.exitcode or 0
    said = f"run_dir={composed.cfg.run_dir}: its process ended with code {code}."
    message = receiver.recv() if receiver.poll() else said
    if stop.name or code == RESUMABLE_EXIT_CODE:
        return {0: "ended", RESUMABLE_EXIT_CODE: "stopped"}.get(code, f"failed: {message}")
    if code:
        raise UserError(message)
    return ""
