"""What each command measures: its cases, planned from its keys and the training's overrides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from accel.stack import TECHNIQUES
from accel.technique import Technique
from common.errors import UserError
from common.files import ROOT
from scripts.bench import (
    TABLES,
    BenchConfig,
    Case,
    DataConfig,
    LadderConfig,
    MixersConfig,
    SeedsConfig,
    TechniquesConfig,
    TestsConfig,
    Words,
    data,
    forecasts,
    kernels,
    measure,
    step,
)
from scripts.commands import split_words
from training.config.compose import CONF_FOLDER, compose
from training.config.schema import refuse_values

SETTINGS = TABLES["settings"]
ATTENTION = "dit"
PRECISIONS = TABLES["precisions"]
EXCEPTIONS = TABLES["techniques"]
CALIBRATED = {"mamba": "", "ssd_mlp": "", ATTENTION: ""}


def plan_ladder(cfg: LadderConfig, words: Words) -> Iterator[Case]:
    """Plans rungs, each timed in turn with the newcomer's loop over items in memory."""
    workers = f"newcomer.num_workers={cfg.num_workers}"
    memory = [*words, workers, "newcomer.storage=memory"]
    newcomers = {
        "0 newcomer, a file per sample": [*words, workers, "newcomer.storage=files"],
        "0 newcomer, items in memory": memory,
        "+ latents on the device": [*words, "newcomer.storage=resident"],
        "+ no loss.item() each step": [*words, "newcomer.storage=resident", "newcomer.item=never"],
    }
    for name, own in newcomers.items():
        yield Case(name, measure.compare, own, memory, seconds=10.0)
    for name, added in TABLES["rungs"].items():
        words = [*words, added]
        yield Case(name, measure.compare, words, memory, [added], 10.0)


def plan_techniques(cfg: TechniquesConfig, words: Words) -> Iterator[Case]:
    """Plans each technique alone over eager in each precision, features likewise, and each
    technique removed from max."""
    if not {*cfg.precisions} <= PRECISIONS.keys():
        chosen = ",".join(cfg.precisions)
        raise UserError(f"precisions=[{chosen}]: choose some of {', '.join(PRECISIONS)}.")
    for kind in TECHNIQUES:
        for over in cfg.precisions:
            if EXCEPTIONS.get(kind.key, {}).get("over", over) == over:
                yield from plan_alone(kind, over, words)
    for over in cfg.precisions:
        yield from plan_features(over, words)
    if "bf16" in cfg.precisions:  # as in max
        yield from plan_removed(words)


def plan_alone(kind: type[Technique], over: str, words: Words) -> Iterator[Case]:
    """Plans a technique in each of its ways; what it needs is in its baseline too."""
    exceptions = EXCEPTIONS.get(kind.key, {})
    if "family" in exceptions:
        words = measure.replace_family(words, exceptions["family"])
    eager = f"runtime=eager {PRECISIONS[over]} {exceptions.get('baseline', '')}"
    for way in (*kind.list_ways(), *exceptions.get("more_ways", ())):
        given = {key: f"runtime.{key}={str(value).lower()}" for key, value in way.items()}
        given[kind.key] = kind.make_override(way[kind.key])
        own = [word for key, word in given.items() if key in (kind.key, *kind.options)]
        base = [*words, *eager.split(), *(word for word in given.values() if word not in own)]
        name = f"{' '.join(own)} over {over}"
        needs = [PRECISIONS[over], *own]
        labels = {"part": "alone", "key": kind.key, "over": over}
        yield Case(name, measure.compare, [*base, *own], base, needs, labels=labels)


def plan_features(over: str, words: Words) -> Iterator[Case]:
    """Plans what guides propose beside the techniques: batches, optimizers, workers of a loader."""
    batch = compose(words).cfg.batch_size
    sizes = {"half": batch // 2, "twice": 2 * batch, "four_times": 4 * batch}
    for name, feature in TABLES["features"].items():
        if feature.get("over", over) == over:
            added = feature.get("base", "").format(**sizes).split()
            family = feature.get("family")
            given = measure.replace_family(words, family) if family else words
            base = [*given, "runtime=eager", PRECISIONS[over], *added]
            own = [*base, *feature["own"].format(**sizes).split()]
            labels = {"part": "feature", "key": name, "over": over}
            needs = [PRECISIONS[over]]
            yield Case(f"{name} over {over}", measure.compare, own, base, needs, labels=labels)


def plan_removed(words: Words) -> Iterator[Case]:
    """Plans max without each technique that it has and eager has not."""
    full = [*words, "runtime=max"]
    eager = compose([*words, "runtime=eager"]).cfg.runtime.values()
    most = compose(full).cfg.runtime.values()
    for kind in TECHNIQUES:
        if most[kind.key] != eager[kind.key]:
            word = kind.make_override(eager[kind.key])
            needs = [kind.make_override(most[kind.key])]
            labels = {"part": "removed", "key": kind.key}
            own = [*full, word]
            yield Case(f"max {word}", measure.compare, own, full, needs, labels=labels)


def plan_mixers(cfg: MixersConfig, words: Words) -> Iterator[Case]:
    """Plans a training step of each family of models, with attention as the baseline of all."""
    files = (CONF_FOLDER / "model").glob(f"*_{cfg.size}.yaml")
    families = sorted(file.stem.rpartition("_")[0] for file in files)
    if not families:
        raise UserError(f"size={cfg.size}: there is no such size; choose xs, s, b, l or xl.")
    if not {*cfg.families} <= {*families}:
        given = ",".join(cfg.families)
        raise UserError(f"families=[{given}]: choose some of {', '.join(families)}.")
    words = [word for word in words if not word.startswith("model")]
    base = [*words, f"model={ATTENTION}_{cfg.size}"]
    others = [name for name in cfg.families or families if name != ATTENTION]
    for family in (ATTENTION, *others):
        own = [*words, f"model={family}_{cfg.size}"]
        yield Case(family, measure.compare, own, base)


def plan_operators(cfg: BenchConfig, words: Words) -> Iterator[Case]:
    for operator in kernels.INPUTS:
        for way in (*kernels.OURS, *kernels.PEERS.get(operator, ())):
            compiled = ["runtime.compile=true"] if way == "compiled" else []
            labels = {"operator": operator, "way": way}
            yield Case(
                f"{operator} {way}", kernels.time_kernel, compiled, seconds=4.0, labels=labels
            )


def plan_tests(cfg: TestsConfig, words: Words) -> Iterator[Case]:
    """Plans some of every kind in one case, then a case a file, for a crash ends a process."""
    if cfg.select not in ("all", "smoke", "rest"):
        raise UserError(f"select={cfg.select}: choose all, smoke or rest.")
    files = [file for file in ROOT.glob("tests/**/test_*.py") if "mark.gpu" in file.read_text()]
    names = sorted(str(file.relative_to(ROOT)) for file in files)
    if cfg.select != "rest":
        yield Case("smoke", measure.run_gpu_tests, [*names, "-k", TABLES["smoke"]], seconds=90.0)
    if cfg.select != "smoke":
        for name in names:
            yield Case(name, measure.run_gpu_tests, [name], seconds=120.0)


def plan_counted(cfg: BenchConfig, words: Words) -> Iterator[Case]:
    """Plans what each technique saves of an H100's memory, and how large a model each way fits."""
    for name, texts in TABLES["counted"].items():
        base = [*words, *texts["over"].split()]
        yield Case(name, forecasts.count_savings, [*base, *texts["words"].split()], base)
    for name, text in TABLES["largest"].items():
        yield Case(
            name, forecasts.count_largest, [*words, *text.split()], [*words, "runtime=eager"]
        )


Plan = Callable[[Any, Words], Iterator[Case]]


def make_plan(measured: Any, variants: dict[str, str], seconds: float = 30.0) -> Plan:
    """Plans a case for each variant of the overrides, which the machine must be able to have."""

    def plan(cfg: BenchConfig, words: Words) -> Iterator[Case]:
        for name, text in variants.items():
            added = text.split()
            yield Case(name, measured, [*words, *added], words, added, seconds)

    return plan


COMMANDS: dict[str, tuple[type[BenchConfig], Plan]] = {
    "doctor": (BenchConfig, make_plan(measure.measure_machine, {"machine": ""}, 15.0)),
    "calibration": (BenchConfig, make_plan(measure.calibrate, CALIBRATED, 12.0)),
    "tests": (TestsConfig, plan_tests),
    "ladder": (LadderConfig, plan_ladder),
    "techniques": (TechniquesConfig, plan_techniques),
    "kernels": (BenchConfig, plan_operators),
    "mixers": (MixersConfig, plan_mixers),
    "data": (DataConfig, make_plan(data.measure_loader, dict.fromkeys(data.LOADERS, ""))),
    "step": (BenchConfig, make_plan(step.measure_phases, {"step": ""})),
    "profile": (BenchConfig, make_plan(step.write_profile, {"profile": ""})),
    "saves": (BenchConfig, make_plan(measure.measure_saves, {"background": "", "foreground": ""})),
    "precision": (SeedsConfig, make_plan(measure.measure_seeds, PRECISIONS, 60.0)),
    "memory": (SeedsConfig, make_plan(measure.measure_seeds, TABLES["memory"], 60.0)),
    "plan": (BenchConfig, make_plan(measure.measure_planned, TABLES["planned"])),
    "counted": (BenchConfig, plan_counted),
}
"""Command -> its keys, and what plans its cases."""


class Job(NamedTuple):
    """The cases of one command with its words."""

    command: str
    """The line that does it again."""
    cfg: BenchConfig
    cases: list[Case]


def plan_job(command: str, words: Words, help_text: str = "") -> Job:
    """Plans a command: its own keys, completed from the setting, and the training's overrides.

    A group that the words choose (data=digits) replaces what the setting says of it. ValueError
    for a mistake, before anything is measured.
    """
    schema, plan = COMMANDS[command]
    cfg, theirs = split_words(schema, words, help_text)
    setting = cfg.setting or ("s256" if torch.cuda.is_available() else "tiny")
    if setting not in SETTINGS:
        choices = ", ".join(SETTINGS)
        raise UserError(f"setting={setting}: there is no such setting; choose one of {choices}.")
    refuse_values(cfg)
    given = SETTINGS[setting]
    steps = cfg.steps or given["steps"]
    cfg = replace(
        cfg,
        setting=setting,
        steps=steps,
        repeats=cfg.repeats or given["repeats"],
        loss_steps=cfg.loss_steps or steps,
        name=cfg.name or f"{command}_{setting}",
    )
    groups = [word.partition("=")[0] for word in theirs if "." not in word]
    replaced = tuple(f"{group}{mark}" for group in groups for mark in "=.")
    kept = [word for word in given["words"].split() if not word.startswith(replaced)]
    overrides = [*kept, *theirs]
    compose(overrides)
    told = [word for word in words if not word.startswith(("out=", "again="))]
    line = " ".join(["python -m scripts.bench", command, *told])
    return Job(line, cfg, list(plan(cfg, overrides)))
