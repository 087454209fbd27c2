"""Plans the cases that each command measures, from its keys and the training's overrides."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch

from accel.stack import TECHNIQUES
from accel.technique import Technique
from common.config.compose import CONF_FOLDER, compose
from common.config.schema import refuse_values
from common.errors import UserError
from common.files import ROOT
from scripts.bench import (
    TABLES,
    BenchConfig,
    Case,
    LadderConfig,
    MixersConfig,
    SeedsConfig,
    SpeedrunConfig,
    TechniquesConfig,
    Words,
    data,
    kernels,
    measure,
    speedrun,
    step,
)
from scripts.commands import split_words

SETTINGS = TABLES["settings"]
ATTENTION_FAMILY = "dit"
"""Model family with attention. The command `python -m scripts.bench mixers` compares every other
family with it."""
PRECISIONS = TABLES["precisions"]
TECHNIQUE_EXCEPTIONS = TABLES["techniques"]
PACKAGES = (
    "accel",
    "common",
    "data",
    "encoding",
    "evaluation",
    "models",
    "sampling",
    "scripts",
    "training",
)
"""Packages whose code a result depends on."""


def plan_ladder(cfg: LadderConfig, words: Words) -> Iterator[Case]:
    """Plans a case for each rung of the ladder. The first rungs are variants of the newcomer's
    loop, a plain PyTorch training loop; the other rungs are this framework with one more technique
    per rung. The baseline of every case is the newcomer's loop that reads its samples from
    memory."""
    workers = f"newcomer.num_workers={cfg.num_workers}"
    memory = [*words, workers, "newcomer.storage=memory"]
    newcomers = {
        "0 newcomer, a file per sample": [*words, workers, "newcomer.storage=files"],
        "0 newcomer, items in memory": memory,
        "+ latents on the device": [*words, "newcomer.storage=resident"],
        "+ no loss.item() each step": [*words, "newcomer.storage=resident", "newcomer.item=never"],
    }
    for name, overrides in newcomers.items():
        yield Case(name, measure.compare, overrides, memory)
    for name, added in TABLES["rungs"].items():
        words = [*words, added]
        yield Case(name, measure.compare, words, memory, [added])


def plan_techniques(cfg: TechniquesConfig, words: Words) -> Iterator[Case]:
    """Plans cases that add one technique or feature to runtime=eager, in each precision, and cases
    that remove one technique from runtime=max."""
    if not {*cfg.precisions} <= PRECISIONS.keys():
        precisions = ",".join(cfg.precisions)
        raise UserError(f"precisions=[{precisions}]: choose some of {', '.join(PRECISIONS)}.")
    for kind in TECHNIQUES:
        for over in cfg.precisions:
            if TECHNIQUE_EXCEPTIONS.get(kind.key, {}).get("over", over) == over:
                yield from plan_alone(kind, over, words)
    for over in cfg.precisions:
        yield from plan_features(over, words)
    # runtime=max trains in bf16, so plan the cases that remove a technique from it only if bf16 is
    # among the precisions.
    if "bf16" in cfg.precisions:
        yield from plan_removed(words)


def plan_alone(kind: type[Technique], over: str, words: Words) -> Iterator[Case]:
    """Plans cases that add one technique to runtime=eager in the precision `over`, one case for
    each value of the technique's key. Other techniques that this technique needs are on in the
    baseline too."""
    exceptions = TECHNIQUE_EXCEPTIONS.get(kind.key, {})
    if "family" in exceptions:
        words = measure.replace_family(words, exceptions["family"])
    eager = f"runtime=eager {PRECISIONS[over]} {exceptions.get('baseline', '')}"
    for way in (*kind.list_ways(), *exceptions.get("more_ways", ())):
        overrides = {key: f"runtime.{key}={str(value).lower()}" for key, value in way.items()}
        overrides[kind.key] = kind.make_override(way[kind.key])
        own_keys = (kind.key, *kind.options)
        added = [word for key, word in overrides.items() if key in own_keys]
        others = [word for word in overrides.values() if word not in added]
        base = [*words, *eager.split(), *others]
        name = f"{' '.join(added)} over {over}"
        needs = [PRECISIONS[over], *added]
        labels = {"part": "alone", "key": kind.key, "over": over}
        yield Case(name, measure.compare, [*base, *added], base, needs, labels=labels)


def plan_features(over: str, words: Words) -> Iterator[Case]:
    """Plans cases that add to runtime=eager, in the precision `over`, one feature that guides to
    fast training recommend and that is no technique of this framework: another batch size,
    optimizer or number of loader workers."""
    batch = compose(words).cfg.batch_size
    sizes = {"half": batch // 2, "twice": 2 * batch, "four_times": 4 * batch}
    for name, feature in TABLES["features"].items():
        if feature.get("over", over) == over:
            added = feature.get("base", "").format(**sizes).split()
            family = feature.get("family")
            model_words = measure.replace_family(words, family) if family else words
            base = [*model_words, "runtime=eager", PRECISIONS[over], *added]
            overrides = [*base, *feature["own"].format(**sizes).split()]
            labels = {"part": "feature", "key": name, "over": over}
            needs = [PRECISIONS[over]]
            title = f"{name} over {over}"
            yield Case(title, measure.compare, overrides, base, needs, labels=labels)


def plan_removed(words: Words) -> Iterator[Case]:
    """Plans a case for each technique that runtime=max turns on and runtime=eager does not: the
    case is runtime=max without this technique, the baseline is runtime=max."""
    full = [*words, "runtime=max"]
    eager_values = compose([*words, "runtime=eager"]).cfg.runtime.values()
    max_values = compose(full).cfg.runtime.values()
    for kind in TECHNIQUES:
        if max_values[kind.key] != eager_values[kind.key]:
            word = kind.make_override(eager_values[kind.key])
            needs = [kind.make_override(max_values[kind.key])]
            labels = {"part": "removed", "key": kind.key}
            yield Case(f"max {word}", measure.compare, [*full, word], full, needs, labels=labels)


def plan_mixers(cfg: MixersConfig, words: Words) -> Iterator[Case]:
    """Plans a case for each family of models of the size `cfg.size`. A case compares a training
    step of this family with a step of the family with attention."""
    files = (CONF_FOLDER / "model").glob(f"*_{cfg.size}.yaml")
    families = sorted(file.stem.rpartition("_")[0] for file in files)
    if not families:
        raise UserError(f"size={cfg.size}: there is no such size; choose xs, s, b, l or xl.")
    if not {*cfg.families} <= {*families}:
        unknown = ",".join(cfg.families)
        raise UserError(f"families=[{unknown}]: choose some of {', '.join(families)}.")

    words = [word for word in words if not word.startswith("model")]
    base = [*words, f"model={ATTENTION_FAMILY}_{cfg.size}"]
    others = [name for name in cfg.families or families if name != ATTENTION_FAMILY]
    for family in (ATTENTION_FAMILY, *others):
        yield Case(family, measure.compare, [*words, f"model={family}_{cfg.size}"], base)


def plan_operators(cfg: BenchConfig, words: Words) -> Iterator[Case]:
    """Plans a case for each implementation of each fused operator: the eager definition, the
    compiled definition, and the fused kernel."""
    for operator in kernels.INPUTS:
        for way in kernels.WAYS:
            needs = ["runtime.compile=true"] if way == "compiled" else []
            labels = {"operator": operator, "way": way}
            yield Case(f"{operator} {way}", kernels.time_kernel, needs=needs, labels=labels)


def plan_tests(cfg: BenchConfig, words: Words) -> Iterator[Case]:
    """Plans one case that runs some GPU tests of every kind, then a case for each file of tests. A
    test that crashes its process therefore does not prevent the tests of other files."""
    files = [
        file for file in ROOT.glob("tests/**/test_*.py") if "pytest.mark.gpu" in file.read_text()
    ]
    names = sorted(str(file.relative_to(ROOT)) for file in files)
    yield Case("smoke", measure.run_gpu_tests, [*names, "-k", TABLES["smoke"]])
    for name in names:
        yield Case(name, measure.run_gpu_tests, [name])


def plan_counted(cfg: BenchConfig, words: Words) -> Iterator[Case]:
    """Plans cases that forecast how much memory each technique saves on an H100."""
    for name, texts in TABLES["counted"].items():
        base = [*words, *texts["over"].split()]
        yield Case(name, measure.count_savings, [*base, *texts["words"].split()], base)


Plan = Callable[[Any, Words], Iterator[Case]]


def make_plan(measured: Any, variants: dict[str, str]) -> Plan:
    """Returns a function that plans a case for each of `variants` (name -> overrides to add). The
    function `measured` measures each case. A case runs only on machines that support the overrides
    of its variant."""

    def plan(cfg: BenchConfig, words: Words) -> Iterator[Case]:
        for name, text in variants.items():
            added = text.split()
            yield Case(name, measured, [*words, *added], words, added)

    return plan


COMMANDS: dict[str, tuple[type[BenchConfig], Plan]] = {
    "doctor": (BenchConfig, make_plan(measure.measure_machine, {"machine": ""})),
    "tests": (BenchConfig, plan_tests),
    "ladder": (LadderConfig, plan_ladder),
    "techniques": (TechniquesConfig, plan_techniques),
    "kernels": (BenchConfig, plan_operators),
    "mixers": (MixersConfig, plan_mixers),
    "data": (BenchConfig, make_plan(data.measure_loader, dict.fromkeys(data.LOADERS, ""))),
    "step": (BenchConfig, make_plan(step.measure_phases, {"step": ""})),
    "profile": (BenchConfig, make_plan(step.write_profile, {"profile": ""})),
    "precision": (SeedsConfig, make_plan(measure.measure_seeds, PRECISIONS)),
    "memory": (SeedsConfig, make_plan(measure.measure_seeds, TABLES["memory"])),
    "plan": (BenchConfig, make_plan(measure.measure_planned, TABLES["planned"])),
    "counted": (BenchConfig, plan_counted),
    "speedrun": (SpeedrunConfig, speedrun.plan_rows),
}
"""Name of a bench command -> (class of the command's keys, function that plans the command's
cases)."""


class Job(NamedTuple):
    """A parsed command line of the bench: the command itself, its keys, and the cases to
    measure."""

    command: str
    """The command line that reproduces the results."""
    cfg: BenchConfig
    cases: list[Case]
    seconds: float = 0.0
    """Seconds that a case takes on a GPU before any was measured, as the queue states them."""


def plan_job(command: str, words: Words, help_text: str = "") -> Job:
    """Plans the cases of a command. Keys that are 0 or null get the values of the `setting`. The
    overrides of the setting come before the user's overrides, so the user's overrides win.

    If the user overrides a whole config group (data=digits), all overrides of the setting for that
    group are left out. UserError if a key or an override is wrong.
    """
    schema, plan = COMMANDS[command]
    cfg, user_overrides = split_words(schema, words, help_text)
    setting = cfg.setting or ("s256" if torch.cuda.is_available() else "tiny")
    if setting not in SETTINGS:
        choices = ", ".join(SETTINGS)
        raise UserError(f"setting={setting}: there is no such setting; choose one of {choices}.")
    refuse_values(cfg)

    defaults = SETTINGS[setting]
    steps = cfg.steps or defaults["steps"]
    cfg = replace(
        cfg,
        setting=setting,
        steps=steps,
        repeats=cfg.repeats or defaults["repeats"],
        loss_steps=cfg.loss_steps or steps,
        name=cfg.name or f"{command}_{setting}",
    )

    groups = [word.partition("=")[0] for word in user_overrides if "." not in word]
    replaced = tuple(f"{group}{mark}" for group in groups for mark in "=.")
    kept = [word for word in defaults["words"].split() if not word.startswith(replaced)]
    overrides = [*kept, *user_overrides]
    compose(overrides)

    cases = list(plan(cfg, overrides))
    chosen = [case for case in cases if not cfg.rows or case.name.startswith(tuple(cfg.rows))]
    if not chosen:
        raise UserError(
            f"rows=[{','.join(cfg.rows)}]: choose some of {'; '.join(case.name for case in cases)}."
        )

    # The command line that is stored with the results lacks the keys that do not change them.
    unessential = ("out=", "again=", "rows=")
    essential = [word for word in words if not word.startswith(unessential)]
    line = " ".join(["python -m scripts.bench", command, *essential])
    return Job(line, cfg, chosen)


@cache
def read_code() -> str:
    """Returns the code of all `PACKAGES`, without the lines that are comments."""
    files = [file for name in PACKAGES for file in sorted((ROOT / name).rglob("*.py"))]
    return re.sub(r"(?m)^ *#.*\n", "", "\n".join(file.read_text() for file in files))


@cache
def describe_config(overrides: tuple[str, ...]) -> str:
    """Returns the configuration that is composed from the overrides, as text."""
    return json.dumps(compose([*overrides]).source, sort_keys=True, default=str)


def hash_case(case: Case) -> str:
    """Returns a hash, in 16 hexadecimal digits, of what a case runs: the code, and the
    configuration of its run and of its baseline; for a case of tests, their files."""
    texts = [read_code()]
    for words in (case.overrides, case.baseline):
        overrides = [word for word in words if "=" in word and not word.startswith("newcomer.")]
        texts.append(describe_config(tuple(overrides)))
        texts += [(ROOT / word).read_text() for word in words if word.endswith(".py")]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
