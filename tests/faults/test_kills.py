"""SIGKILL at any moment, and the same command again: bit for bit the run that nothing befell."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.harness.outcomes import assert_newest_loads, assert_tidy, read_outcome
from tests.harness.sets import random_samples, save_latent_set
from tests.harness.zygote import HANG, Start, read_output
from training.checkpoint.load import list_complete

pytestmark = pytest.mark.timeout(0)  # many runs, each with a limit of its own

MODES = {
    1: [],
    2: [
        "runtime.parallel.mode=fsdp",
        "runtime.fused_adamw=true",
        "runtime.parallel.timeout_minutes=10",
    ],
}
LONGER = ["total_samples=240"]
"""Thirty steps."""


def seconds_of(folder: Path) -> float:
    """What a run took from its first step on, with all that came between steps."""
    summary = json.loads((folder / "summary.json").read_text())
    return summary["train_seconds"] + summary["maintenance_seconds"]


def kill_until_done(
    start: Start, parent: Path, words: list[str], ranks: int, plan: Iterable[dict], kills: int
) -> Iterator[Path]:
    """Carries out the plan, one stroke a start, until so many have killed; a run that ends in spite
    of one makes room for the next. Yields the runs that have ended."""
    folder = parent / "0"
    landed = 0
    strokes = iter(plan)
    stroke = next(strokes)
    for _ in range(4 * kills + 4):
        codes = start(folder, *words, ranks=ranks, **stroke)
        assert set(codes) <= {0, -9, 1}, read_output(folder)
        assert -9 in codes or set(codes) == {0}, read_output(folder)
        assert_newest_loads(folder)
        if set(codes) == {0}:
            yield folder
            folder = parent / str(int(folder.name) + 1)
        if (landed := landed + (-9 in codes)) == kills:
            break
        # a change that a short rest does not reach, a whole run does
        if -9 in codes or "at_event" not in stroke:
            stroke = next(strokes)
    assert landed == kills
    assert start(folder, *words, ranks=ranks) == [0] * ranks, read_output(folder)
    yield folder


@pytest.mark.fault("kill -9 at each change of a file during saves", "the same bits as without it")
@pytest.mark.parametrize(
    ("ranks", "rank", "step"),
    [
        pytest.param(1, 0, 19, id="one process"),
        pytest.param(2, 1, 9, id="the second of two", marks=pytest.mark.slow),
        pytest.param(1, 0, 1, id="one process, every change", marks=pytest.mark.slow),
        pytest.param(2, 0, 1, id="the first of two, every change", marks=pytest.mark.slow),
    ],
)
def test_kills_within_a_save(
    ranks: int,
    rank: int,
    step: int,
    zygote: Start,
    run_whole: Callable[..., Path],
    tmp_path: Path,
    record_property,
):
    """The first start of a run makes two saves and begins to remove checkpoints in so many changes;
    later ones remove what the kill has left as well."""
    words = MODES[ranks]
    last = 55 if rank == 0 else 2
    plan = [{"at_event": k, "kill_rank": rank} for k in range(1, last + 1, step)]
    record_property("struck", len(plan))
    expected = read_outcome(run_whole(*words, ranks=ranks))
    for folder in kill_until_done(zygote, tmp_path, words, ranks, plan, len(plan)):
        assert read_outcome(folder) == expected
        assert_tidy(folder)


@pytest.mark.fault("kill -9 at random moments", "the same bits as without it")
@pytest.mark.parametrize(
    ("ranks", "kills", "words"),
    [
        pytest.param(1, 3, [], id="one process"),
        pytest.param(1, 50, [], id="one process, 50 times", marks=pytest.mark.slow),
        pytest.param(2, 50, [], id="two processes, 50 times", marks=pytest.mark.slow),
        pytest.param(
            1,
            20,
            ["async_checkpoints=false"],
            id="saving in the foreground",
            marks=pytest.mark.slow,
        ),
        pytest.param(1, 20, ["runtime.precision=bf16"], id="bf16", marks=pytest.mark.slow),
        pytest.param(2, 20, ["runtime.parallel.mode=ddp"], id="ddp", marks=pytest.mark.slow),
    ],
)
def test_kills_at_random(
    ranks: int,
    kills: int,
    words: list[str],
    zygote: Start,
    run_whole: Callable[..., Path],
    tmp_path: Path,
    record_property,
):
    record_property("struck", kills)
    words = [*MODES[ranks], *words, *LONGER]
    undisturbed = run_whole(*words, ranks=ranks)
    expected = read_outcome(undisturbed)
    longest = seconds_of(undisturbed)
    draw = random.Random(kills)
    plan = ({"after_seconds": draw.uniform(0.0, longest), "kill_rank": i % ranks} for i in count())
    for folder in kill_until_done(zygote, tmp_path, words, ranks, plan, kills):
        assert read_outcome(folder) == expected
        assert_tidy(folder)


@pytest.mark.slow
@pytest.mark.fault("kill -9 at random moments", "the same bits as without it")
@pytest.mark.parametrize(
    "words",
    [
        ["data=webdataset", "data.streams=4", "data.window=6", "data.num_workers=1"],
        ["data=resident", f"data.device_memory_gib={30 * 240 / 2**30}"],  # in chunks
    ],
    ids=["streamed", "in chunks"],
)
def test_kills_with_other_loaders(
    words: list[str], zygote: Start, run_whole: Callable[..., Path], tmp_path: Path, record_property
):
    save_latent_set(
        tmp_path / "set", [("train", random_samples(45, 0)), ("held_out", random_samples(4, 1))]
    )
    words = [*words, f"data.path={tmp_path / 'set'}", *LONGER]
    record_property("struck", 15)
    undisturbed = run_whole(*words)
    expected = read_outcome(undisturbed)
    longest = seconds_of(undisturbed)
    draw = random.Random(0)
    plan = ({"after_seconds": draw.uniform(0.0, longest)} for _ in count())
    for folder in kill_until_done(zygote, tmp_path, words, 1, plan, 15):
        assert read_outcome(folder) == expected


@pytest.mark.fault(
    "SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1",
    "at most one step lost; exit code 75; goes on to the same bits",
)
@pytest.mark.parametrize(
    "signal",
    [
        "SIGHUP",
        *(
            pytest.param(s, marks=pytest.mark.slow)
            for s in ("SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1")
        ),
    ],
)
def test_a_signal_saves_first(
    signal: str, zygote: Start, run_whole: Callable[..., Path], tmp_path: Path
):
    folder = tmp_path / "run"
    words = ["save_every=1000"]
    assert zygote(folder, *words, "total_samples=80000", after_lines=2, signal=signal) == [75], (
        read_output(folder)
    )
    (saved,) = list_complete(folder / "checkpoints")
    step = int(saved.name.removeprefix("step-"))
    assert f"asked to stop at step {step}; saved" in read_output(folder)
    assert zygote(folder, *words, f"total_samples={8 * (step + 4)}") == [0]
    expected = run_whole(*words, f"total_samples={8 * (step + 4)}")
    assert read_outcome(folder).state == read_outcome(expected).state


@pytest.mark.fault("SIGTERM to one of two processes", "both save the same step and leave with 75")
def test_a_signal_to_one_stops_all(zygote: Start, tmp_path: Path):
    folder = tmp_path / "run"
    words = [*MODES[2], "save_every=1000", "total_samples=80000"]
    assert zygote(folder, *words, ranks=2, after_lines=2, kill_rank=1, signal="SIGTERM") == [
        75,
        75,
    ], read_output(folder)
    (saved,) = list_complete(folder / "checkpoints")
    assert f"asked to stop at step {saved.name.removeprefix('step-')}" in read_output(folder)


@pytest.mark.timeout(HANG)
def test_a_run_that_is_given_up_does_not_answer_for_the_next(zygote: Start, tmp_path: Path):
    assert zygote(tmp_path / "first", "total_samples=8") == [0]
    signal.setitimer(signal.ITIMER_REAL, 3)  # the alarm of pytest-timeout, sooner
    with pytest.raises(pytest.fail.Exception, match="Timeout"):
        zygote(tmp_path / "run", *MODES[2], ranks=2, environment={"FAULT": "hang:1:4"})
    # nobody holds the folder any more
    assert zygote(tmp_path / "run") == [0], read_output(tmp_path / "run")
