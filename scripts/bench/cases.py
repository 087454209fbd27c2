"""Plans the cases that each command measures: from the rows of cases.yaml, the command's keys and
the training's overrides."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch

from common.config.compose import CONF_FOLDER, compose
from common.config.schema import refuse_values
from common.errors import UserError
from common.files import ROOT
from scripts.bench import (
    TABLES,
    BenchConfig,
    Case,
    Figures,
    LadderConfig,
    MixersConfig,
    SeedsConfig,
    SpeedrunConfig,
    TechniquesConfig,
    Words,
    data,
    kernels,
    measure,
    photos,
    speedrun,
    step,
)
from scripts.commands import split_words

SETTINGS = TABLES["settings"]
ROWS = TABLES["cases"]
"""Name of a command -> its rows: title of a case -> its words, or its fields."""
FIELDS = ("name", "over", "base", "adds", "own", "more", "needs", "family")
"""Fields of a row that the comment of cases.yaml explains; the others are facts of the result."""
ATTENTION_FAMILY = "dit"
"""Model family with attention. The command `python -m scripts.bench mixers` compares every other
family with it."""


def refuse_unknown(key: str, names: Collection[str], known: Collection[str]) -> None:
    """Raises a UserError if a name in the list of `key` is not known."""
    if not {*names} <= {*known}:
        raise UserError(f"{key}=[{','.join(names)}]: choose some of {', '.join(known)}.")


def plan_rows(command: Command, cfg: Any, words: Words, rows: Any) -> Iterator[Case]:
    """Plans a case for each row, in each of the command's `precisions` if it has this key. The
    words of a row follow `words`."""
    refuse_unknown("precisions", getattr(cfg, "precisions", ()), ROWS["precision"])
    batch = compose(words).cfg.batch_size
    values = vars(cfg) | {"half": batch // 2, "twice": 2 * batch, "four_times": 4 * batch}
    rungs: Words = []
    for over in values.get("precisions", [""]):
        values |= {"over": over, "precision": f"runtime.precision={over}"}
        for title, row in rows.items():
            texts = {"name": title, "over": over} | ({"adds": row} if isinstance(row, str) else row)
            if texts["over"] != over:
                continue

            # Put the values into the texts.
            texts = {
                key: text.format(title=title, **values) if isinstance(text, str) else text
                for key, text in texts.items()
            }
            base, adds, own, more = (texts.get(key, "").split() for key in FIELDS[2:6])
            needs = texts["needs"].split() if "needs" in texts else [*adds, *more]
            labels = {key: text for key, text in texts.items() if key not in FIELDS}

            # Join the words of the row to those of the command.
            start = words
            if "family" in texts:
                start = [re.sub(r"^model=\w+_", f"model={texts['family']}_", w) for w in words]
            rungs += more
            overrides = [*start, *(own or rungs)] if own or more else [*start, *base, *adds]
            yield Case(texts["name"], command.measure, overrides, [*start, *base], needs, labels)


def plan_mixers(command: Command, cfg: MixersConfig, words: Words, rows: Any) -> Iterator[Case]:
    """Plans a case for each family of models of the size `cfg.size`. A case compares a training
    step of this family with a step of the family with attention."""
    files = (CONF_FOLDER / "model").glob(f"*_{cfg.size}.yaml")
    families = sorted(file.stem.rpartition("_")[0] for file in files)
    if not families:
        raise UserError(f"size={cfg.size}: there is no such size; choose xs, s, b, l or xl.")
    refuse_unknown("families", cfg.families, families)
    row = {"base": f"model={ATTENTION_FAMILY}_{cfg.size}", "own": f"model={{title}}_{cfg.size}"}
    words = [word for word in words if not word.startswith("model")]
    compared = dict.fromkeys([ATTENTION_FAMILY, *(cfg.families or families)], row)
    return plan_rows(command, cfg, words, compared)


def plan_operators(command: Command, cfg: BenchConfig, words: Words, rows: Any) -> Iterator[Case]:
    """Plans a case for each implementation of each fused operator: the eager definition, the
    compiled definition, and the fused kernel."""
    for operator in kernels.INPUTS:
        for way in kernels.WAYS:
            needs = ["runtime.compile=true"] if way == "compiled" else []
            yield Case(
                f"{operator} {way}",
                command.measure,
                needs=needs,
                labels={"operator": operator, "way": way},
            )


def plan_tests(command: Command, cfg: BenchConfig, words: Words, rows: Any) -> Iterator[Case]:
    """Plans one case that runs some GPU tests of every kind, then a case for each file of tests. A
    test that crashes its process therefore does not prevent the tests of other files."""
    files = sorted(
        str(file.relative_to(ROOT))
        for file in ROOT.glob("tests/**/test_*.py")
        if "pytest.mark.gpu" in file.read_text()
    )
    yield Case("smoke", command.measure, [*files, "-k", TABLES["smoke"]])
    for file in files:
        yield Case(file, command.measure, [file])


class Command(NamedTuple):
    """A command that measures cases."""

    measure: Callable[[Case, Any], Figures]
    """Function that measures a case."""
    keys: type[BenchConfig] = BenchConfig
    plan: Callable[[Command, Any, Words, Any], Iterator[Case]] = plan_rows
    """Function that plans the command's cases from its keys, the overrides and its `ROWS`."""


COMMANDS = {
    "doctor": Command(measure.measure_machine),
    "tests": Command(measure.run_gpu_tests, plan=plan_tests),
    "ladder": Command(measure.compare, LadderConfig),
    "techniques": Command(measure.compare, TechniquesConfig),
    "kernels": Command(kernels.time_kernel, plan=plan_operators),
    "mixers": Command(measure.compare, MixersConfig, plan_mixers),
    "data": Command(data.measure_loader),
    "step": Command(step.measure_phases),
    "profile": Command(step.write_profile),
    "compiling": Command(measure.measure_compiling),
    "precision": Command(measure.measure_seeds, SeedsConfig),
    "memory": Command(measure.measure_seeds, SeedsConfig),
    "plan": Command(measure.measure_planned),
    "counted": Command(measure.count_savings),
    "photos": Command(photos.measure_photos),
    "speedrun": Command(speedrun.measure_speedup, SpeedrunConfig, speedrun.plan_rows),
}


class Job(NamedTuple):
    """A parsed command line of the bench: the command itself, its keys, and the cases to
    measure."""

    command: str
    """The command line that reproduces the results."""
    cfg: BenchConfig
    cases: list[Case]
    seconds: float = 0.0
    """Seconds that a case takes on a GPU before any was measured, as the queue states them."""


def plan_job(name: str, words: Words, help_text: str = "") -> Job:
    """Plans the cases of a command. Keys that are 0 or null get the values of the `setting`. The
    overrides of the setting come before the user's overrides, so the user's overrides win.

    If the user overrides a whole config group (data=digits), all overrides of the setting for that
    group are left out. UserError if a key or an override is wrong.
    """
    command = COMMANDS[name]
    cfg, user_overrides = split_words(command.keys, words, help_text)
    setting = (
        cfg.setting
        or TABLES["usual"].get(name)
        or ("s256" if torch.cuda.is_available() else "tiny")
    )
    if setting not in SETTINGS:
        raise UserError(
            f"setting={setting}: there is no such setting; choose one of {', '.join(SETTINGS)}."
        )
    refuse_values(cfg)

    defaults = SETTINGS[setting]
    steps = cfg.steps or defaults["steps"]
    cfg = replace(
        cfg,
        setting=setting,
        steps=steps,
        repeats=cfg.repeats or defaults["repeats"],
        loss_steps=cfg.loss_steps or steps,
        name=cfg.name or f"{name}_{setting}",
    )

    groups = [word.partition("=")[0] for word in user_overrides if "." not in word]
    replaced = tuple(f"{group}{mark}" for group in groups for mark in "=.")
    kept = [word for word in defaults["words"].split() if not word.startswith(replaced)]
    overrides = [*kept, *user_overrides]
    compose(overrides)

    cases = list(command.plan(command, cfg, overrides, ROWS.get(name)))
    chosen = [case for case in cases if not cfg.rows or case.name.startswith(tuple(cfg.rows))]
    if not chosen:
        raise UserError(
            f"rows=[{','.join(cfg.rows)}]: choose some of {'; '.join(case.name for case in cases)}."
        )

    # The command line that is stored with the results lacks the keys that do not change them.
    essential = [word for word in words if not word.startswith(("out=", "again=", "rows="))]
    return Job(" ".join(["python -m scripts.bench", name, *essential]), cfg, chosen)


@cache
def read_code() -> str:
    """Returns the code and the configuration on which a result depends, without the lines that are
    comments, and without what `scripts.plan tune` wrote."""
    files = [file for pattern in TABLES["code"] for file in sorted(ROOT.glob(pattern))]
    text = "\n".join(file.read_text() for file in files if file.name != "tuned.yaml")
    return re.sub(r"(?m)^ *#.*\n", "", text)


def hash_code(words: Words) -> str:
    """Returns a hash, in 16 hexadecimal digits, of the code that a case with the overrides `words`
    runs; for a case of tests also of their files, if they are there."""
    tests = [ROOT / word for word in words if word.endswith(".py")]
    texts = [read_code(), *(file.read_text() for file in tests if file.is_file())]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
