"""runtime=auto: what is slow is not chosen, what is wrong or breaks is refused, the budget and the
memory are kept."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from training.forecast import Forecast

from common.files import ROOT
from scripts.bench.step import Workload, time_steps
from scripts.plan.__main__ import main
from tests.helpers import until_dead
from train import train
from training import contest, tuning
from training.config.compose import compose
from training.distributed.ranks import SINGLE

CPU = torch.device("cpu")
LATENTS = [
    "data=synthetic",
    "data.channels=1",
    "data.height=4",
    "data.width=4",
    "data.count=64",
    "data.num_classes=3",
]
SMALL = [
    *LATENTS,
    "model=conv_xs",
    "model.dim=32",
    "model.head_dim=16",
    "model.depth=2",
    "model.patch_size=2",
]
PLANTED = [
    "extensions=[tests]",
    *SMALL,
    "model._target_=tests.planted_tuning.Planted",
    "batch_size=16",
    "runtime=auto",
]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def stages(*steps: int) -> Any:
    """In the place of what is tried: one stage, of so many micro-batches each."""
    return lambda *_: [lambda best: [best | {"accumulation_steps": n} for n in steps]]


def test_the_fastest_that_is_right_is_chosen_and_remembered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """A whole batch is slow, halves are quick, quarters wrong."""
    monkeypatch.setenv("PLANT", "slow:16,wrong:4")
    monkeypatch.setattr(tuning, "stages_of", stages(2, 4))
    monkeypatch.setattr(contest, "MOST_TURNS", contest.TURNS)
    cfg = compose(PLANTED).cfg
    new, found = tuning.tuned(cfg, CPU, SINGLE)
    assert new.accumulation_steps == 2
    assert not new.runtime.tune
    rows = {row["words"]: row for row in found["tried"]}
    assert rows["as given"]["step_ms"] > 150
    assert "more than 1e-03 apart" in rows["accumulation_steps=4"]["refusal"]
    row = tuning.ledger_row(found)
    assert (row.active, row.missing) == ("accumulation_steps=2", False)
    assert "as given: " in row.evidence

    monkeypatch.setattr(tuning, "Contest", None)  # what is known is not tried again
    monkeypatch.setattr(tuning, "Forecast", None)  # and what fits is not counted again
    assert tuning.tuned(cfg, CPU, SINGLE)[1] == json.loads(json.dumps(found))
    (tmp_path / tuning.FILE).write_text(
        json.dumps({"words": "", "changes": {"accumulation_steps": 8}, "tried": []})
    )
    assert tuning.tuned(cfg, CPU, SINGLE, tmp_path)[0].accumulation_steps == 8
    wrong = ({"no_such_key": True}, {"compile": "x"}, {"accumulation_steps": 3})
    for content in (
        "{",
        "[]",
        *(json.dumps({"changes": some, "words": "", "tried": []}) for some in wrong),
    ):
        (tmp_path / tuning.FILE).write_text(content)
        assert tuning.tuned(cfg, CPU, SINGLE, tmp_path)[0].accumulation_steps == 2


def test_a_choice_is_kept_only_for_a_run_that_it_fits(tmp_path: Path):
    """That of another number of processes is none, nor that for other memory or other code."""
    cfg = compose(PLANTED).cfg
    (tmp_path / tuning.FILE).write_text(
        json.dumps({"words": "", "changes": {"accumulation_steps": 8}, "tried": []})
    )
    assert tuning.read(tmp_path / tuning.FILE, cfg, CPU, 2) is not None
    assert tuning.read(tmp_path / tuning.FILE, cfg, CPU, 4) is None
    facts = tuning.facts_of(cfg, CPU, 1, {}, 0.0)
    assert facts == tuning.facts_of(cfg, CPU, 1, {}, 0.0)
    assert facts != tuning.facts_of(cfg, CPU, 1, {"accumulation_steps": 2}, 0.0)
    assert facts != tuning.facts_of(replace(cfg, extensions=[]), CPU, 1, {}, 0.0)


ACTOR = """
import json, os, signal, sys, time
from pathlib import Path
role = json.loads(Path(sys.argv[1]).read_text())["cfg"]["role"]
answers = os.fdopen(int(sys.argv[2]), "w")
def hang():
    Path(sys.argv[1]).with_suffix(".hangs").touch()
    time.sleep(3600)
def say(**content): print(json.dumps(content), file=answers, flush=True)
if role == "hangs": hang()
if role == "crashes": os.kill(os.getpid(), signal.SIGSEGV)
say(losses=[1.0], norms=[2.2 if role == "other norms" else 2.0], tolerance=1e-3, refusal=None)
for line in sys.stdin:
    if role == "hangs later": hang()
    if role == "memory": say(refusal="memory ran out")
    else: say(seconds=[{"slow": 4.0, "slower": 8.0, "quick": 2.0}.get(role, 1.0)] * int(line))
"""


BUDGET = 3600.0
"""Seconds."""


@dataclass
class Role:
    """In the place of a configuration."""

    role: str


def contest_of(first: str, *stages: list[str]) -> tuple[str, dict[str, contest.Candidate]]:
    """What actors come to, each a process that says what its role would."""
    make: Any = Role
    held = contest.Contest(lambda changes: make(**changes), {}, contest.time.monotonic() + BUDGET)
    chosen = held.run(
        {"role": first}, [lambda _, own=own: [{"role": role} for role in own] for own in stages]
    )
    return chosen["role"], {candidate.changes["role"]: candidate for candidate in held.tried}


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "PROGRAM", ["-c", ACTOR])


@pytest.mark.usefixtures("actors")
def test_the_slower_half_is_out_after_each_round(monkeypatch: pytest.MonkeyPatch):
    """And whoever crashes, exhausts the memory or computes something else is refused with the
    reason."""
    monkeypatch.setattr(contest, "TURNS", 1)
    monkeypatch.setattr(contest, "MOST_TURNS", 2)
    chosen, tried = contest_of(
        "slow", ["slower", "quick"], ["crashes", "quicker", "memory", "other norms"]
    )
    assert chosen == "quicker"
    assert len(tried["quicker"].seconds) > len(tried["slower"].seconds) == contest.STEPS
    assert "its process ended" in str(tried["crashes"].refusal)
    assert tried["memory"].refusal == "memory ran out"
    assert "its norms are 2.2 instead of 2, more than 1e-03 apart" in str(
        tried["other norms"].refusal
    )


@pytest.mark.usefixtures("actors")
@pytest.mark.parametrize(
    ("role", "refusal", "taken"),
    [
        (
            "hangs",
            f"it was not warm after {contest.PATIENCE * BUDGET:.0f} s",
            contest.PATIENCE * BUDGET,
        ),
        ("hangs later", contest.LATE, BUDGET),
    ],
)
def test_the_budget_is_kept_whatever_hangs(
    role: str, refusal: str, taken: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """One that never gets warm leaves a quarter of the time; one that hangs in a step ends with the
    budget.

    The clock stands still but while the contest waits for one that hangs: it then shows when the
    contest gives up.
    """
    now = [0.0]
    waited = select.select

    def given_up(
        read: list[int], write: list[int], other: list[int], left: float
    ) -> tuple[list[int], ...]:
        while not (found := waited(read, write, other, 0.01))[0]:
            for mark in tmp_path.glob("*/*.hangs"):
                mark.unlink()
                now[0] += left
                return found
        return found

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(contest, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(contest, "select", SimpleNamespace(select=given_up))
    chosen, tried = contest_of("quick", [role])
    assert now == [taken]
    assert chosen == "quick"
    assert tried["quick"].seconds
    assert tried[role].refusal == refusal


STARTS = (
    "import subprocess, sys, time; from pathlib import Path;"
    "told = Path(sys.argv[1]).with_suffix('.told');"
    "told.write_text(str(subprocess.Popen(['sleep', '99999']).pid));"
)
"""A candidate that starts a process; what a process starts may hold the GPU."""


def test_a_candidate_ends_with_all_that_it_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(contest, "PROGRAM", ["-c", STARTS + "time.sleep(99999)"])
    one = contest.Contestant(contest.Candidate({}), {"cfg": {}}, tmp_path, time.monotonic() + 99)
    child = int(told_in(tmp_path))
    one.end()
    until_dead(child)


def test_a_candidate_ends_with_its_parent(tmp_path: Path):
    """Also where the parent has no time to say so."""
    own = STARTS + (
        "from training.tuning_candidate import end_with; end_with(int(sys.argv[2])); "
        "time.sleep(99999)"
    )
    parent = (
        "import os, subprocess, sys; one = os.path.join(sys.argv[1], "
        f"'one');subprocess.Popen([sys.executable, '-c', {own!r}, one, str(os.getpid())], "
        "start_new_session=True);sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent, tmp_path], stdin=subprocess.PIPE, cwd=ROOT
    ) as process:
        child = int(told_in(tmp_path))
        process.kill()
    until_dead(child)


def told_in(folder: Path) -> str:
    """What the candidate wrote, as soon as it has."""
    while not (found := [text for file in folder.glob("*.told") if (text := file.read_text())]):
        time.sleep(0.05)
    return found[0]


@pytest.mark.slow
def test_one_that_exhausts_the_memory_is_tried_alone_and_then_refused(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("PLANT", "memory:8")
    monkeypatch.setattr(tuning, "stages_of", stages(2))
    new, found = tuning.tuned(compose(PLANTED).cfg, CPU, SINGLE)
    assert new.accumulation_steps == 1
    assert found["tried"][0]["steps"] > 0
    assert found["tried"][1]["refusal"] == "memory ran out"


def test_memory_demands_micro_batches_before_checkpoints(monkeypatch: pytest.MonkeyPatch):
    """The first that fits by its forecast; a limit that nothing meets is an error, before anything
    is tried."""
    cfg = compose(
        [
            *SMALL,
            "model.depth=6",
            "batch_size=16",
            "runtime=auto",
            "data.height=16",
            "data.width=16",
        ]
    ).cfg
    spec, resident = tuning.latents_of(cfg.data, 0, 1e9)
    assert resident == 2.2 * 64 * 256

    def needs(**changes: Any) -> float:
        return Forecast(
            tuning.changed(cfg, changes), spec, gpu=False, resident=resident
        ).needs.total

    recomputed = {"gradient_checkpointing": True, "checkpoint_policy": "blocks"}
    halves = {"accumulation_steps": 2}
    for limit, wanted in (
        (needs(), {}),
        (needs(**halves), halves),
        (needs(**recomputed, **halves), recomputed | halves),
    ):
        monkeypatch.setattr(
            tuning, "memory_of", lambda _, limit=limit: 1.001 * limit / tuning.USABLE
        )
        assert tuning.fitting(cfg, CPU, 1, spec, resident)[0] == wanted
    monkeypatch.setattr(tuning, "memory_of", lambda _: 1e5)
    with pytest.raises(
        ValueError, match=r"a step needs .* GiB at least, of 9.31e-05; use a smaller model"
    ):
        tuning.fitting(replace(cfg, batch_size=1), CPU, 1, spec, resident)


def test_candidates_go_with_the_rest_of_the_configuration():
    """Whatever cannot be had here, or contradicts another key, is none; techniques that are on
    already are none."""

    def words(*given: str, processes: int = 1) -> set[str]:
        cfg = compose([*SMALL, "runtime=auto", *given]).cfg
        ways = tuning.stages_of(cfg, CPU, processes)
        return {tuning.words_of(changes) for way in ways for changes in way({})}

    assert not any(
        "cuda_graph" in some or "attention" in some or "fused" in some for some in words()
    )
    assert "accumulation_steps=2" in words()
    assert "accumulation_steps=2" not in words("batch_size=6", processes=2)
    assert {"accumulation_steps=2", "accumulation_steps=8"} <= words("accumulation_steps=4")


def test_what_cannot_be_chosen_by_time_is_refused():
    with pytest.raises(
        ValueError, match=r"runtime.tune=true chooses techniques by their time, so runs differ"
    ):
        compose([*SMALL, "runtime=auto", "deterministic=true"])
    with pytest.raises(ValueError, match=r"runtime.tune_seconds=0.0 must be above 0"):
        compose([*SMALL, "runtime.tune_seconds=0"])
    with pytest.raises(
        ValueError,
        match=r"runtime.tune=true does not go with runtime.parallel.mode=fsdp: it measures",
    ):
        compose([*SMALL, "runtime=auto", "runtime.parallel.mode=fsdp"])
    with pytest.raises(
        ValueError,
        match=r"runtime.tune_seconds=1800.0 must be below the 30.0? minutes of runtime.par",
    ):
        compose(
            [
                *SMALL,
                "runtime=auto",
                "runtime.tune_seconds=1800",
                "runtime.parallel.timeout_minutes=30",
            ]
        )


def test_a_drift_of_the_machine_or_a_lucky_turn_chooses_nothing():
    champion = contest.Candidate({}, seconds=[9.0] * 8, turns=[1.0, 2.0, 3.0, 4.0])
    assert contest.Candidate({}, turns=[0.9, 1.8, 2.7, 3.6]).beats(champion)
    assert not contest.Candidate({}, turns=[0.995, 1.99, 2.985, 3.98]).beats(champion)
    assert not contest.Candidate({}, turns=[0.9, 1.8, 3.3, 4.4]).beats(champion)
    assert not contest.Candidate({}).beats(champion)


def test_a_run_says_what_was_chosen_and_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tuning, "stages_of", stages(2))
    run = [
        *SMALL,
        "runtime=auto",
        "batch_size=8",
        "total_samples=32",
        f"run_dir={tmp_path / 'run'}",
        "save_every=2",
    ]
    monkeypatch.setenv("PLANT", "")
    (tmp_path / "run").mkdir()
    chosen = {"words": "accumulation_steps=2", "changes": {"accumulation_steps": 2}, "tried": []}
    (tmp_path / "run" / tuning.FILE).write_text(json.dumps(chosen))
    quiet = ["eval_every=0", "sample_every=0", "log_every=2"]
    summary = train(compose([*run, *quiet]))
    assert summary["ledger"]["tune"]["active"] == "accumulation_steps=2"
    assert json.loads((tmp_path / "run" / tuning.FILE).read_text()) == chosen
    longer = train(compose([*run, *quiet, "total_samples=48"]))
    assert longer["ledger"]["tune"] == summary["ledger"]["tune"]


def test_tune_writes_a_runtime_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    chosen = {"compile": True, "compile_scope": "model", "accumulation_steps": 2}
    row = {"words": tuning.words_of(chosen), "step_ms": 5.0, "steps": 8, "refusal": None}
    found = {"words": tuning.words_of(chosen), "changes": chosen, "tried": [row]}
    monkeypatch.setattr("training.tuning.choice_of", lambda *_: found)
    out = tmp_path / "tuned.yaml"
    main(["tune", *SMALL, f"out={out}"])
    assert f"written to {out}" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"out=.*there is no folder"):
        main(["tune", *SMALL, f"out={tmp_path / 'no' / 'tuned.yaml'}"])
    with pytest.raises(ValueError, match=r"runtime=fast would be based on itself"):
        main(["tune", *SMALL, "runtime=fast", f"out={tmp_path / 'fast.yaml'}"])
    monkeypatch.setitem(row, "step_ms", None)
    with pytest.raises(
        ValueError, match=r"seconds=120.0: nothing was measured .* give more seconds"
    ):
        main(["tune", *SMALL, f"out={out}"])
    text = out.read_text()
    assert "# It goes with accumulation_steps=2." in text
    assert text.endswith("defaults:\n- fast\n- _self_\ncompile: true\ncompile_scope: model\n")


@pytest.mark.slow
def test_auto_is_as_fast_as_the_better_preset():
    """At most 8% slower than the better of fast and production, in turn, each in the quietest of 8
    rounds.

    On a shared CPU two processes of one candidate differ by up to 7%. Under the load of other
    guests eager steps take up to a fifth longer and compiled ones do not, so a median would say
    what the load was.
    """
    size = ["model=mamba_xs", "data=digits", "batch_size=64"]
    cfg = compose([*size, "runtime=auto"]).cfg
    found = tuning.tuned(cfg, CPU, SINGLE)[1]
    changes = [] if found["words"] == "as given" else found["words"].split()
    ways = {
        "auto": [*size, *changes],
        "fast": [*size, "runtime=fast"],
        "production": [*size, "runtime=production"],
    }
    times = time_steps({name: Workload(words) for name, words in ways.items()}, 10, 8)
    quietest = {name: min(some) for name, some in times.items()}
    assert quietest["auto"] <= 1.08 * min(quietest.values()), (times, found)
