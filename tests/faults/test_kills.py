"""SIGKILL at any moment, and the same command again: the bits of an undisturbed run."""

import random
from itertools import count

import pytest

from common.files import read_object
from tests.harness.captions import save_captioned_set
from tests.harness.outcomes import assert_newest_loads, assert_tidy, list_checkpoints, read_outcome
from tests.harness.sets import save_random_set
from tests.harness.words import slow
from tests.harness.zygote import read_output
from training.run import RUNNING_FILE

# Each of the many runs has a limit of its own.
pytestmark = pytest.mark.timeout(0)
MODES = {
    1: [],
    2: [
        "runtime.parallel.mode=fsdp",
        "runtime.fused_adamw=true",
        "runtime.parallel.timeout_minutes=10",
    ],
}
THIRTY_STEPS = ["total_samples=240"]
CAPTIONED = [
    "data=webdataset",
    "data.streams=4",
    "data.window=6",
    "data.num_workers=1",
    "model.conditioning=text",
]


def kill_until_done(start, parent, words, ranks, plan, kills):
    """Starts runs by the plan, one entry a start, until `kills` of them were killed; a run that
    ends all the same makes room for the next one. Yields the folders of the runs that ended."""
    folder = parent / "0"
    killed = marked = 0
    entries = iter(plan)
    entry = next(entries)
    for _ in range(4 * kills + 4):
        codes = start(folder, *words, ranks=ranks, **entry)
        assert set(codes) <= {0, -9, 1}, read_output(folder)
        assert -9 in codes or set(codes) == {0}, read_output(folder)
        assert_newest_loads(folder)
        if set(codes) == {0}:
            yield folder
            folder = parent / str(int(folder.name) + 1)
        killed += -9 in codes
        marked |= (folder / RUNNING_FILE).exists()
        if killed == kills:
            break
        # A change that the short rest of a run does not reach, a whole run does.
        if -9 in codes or "at_event" not in entry:
            entry = next(entries)
    assert killed == kills
    assert marked or ranks > 1
    assert start(folder, *words, ranks=ranks) == [0] * ranks, read_output(folder)
    yield folder


@pytest.mark.fault("kill -9 at each change of a file during saves", "the same bits as without it")
@pytest.mark.parametrize(
    ("ranks", "rank", "step"), [(1, 0, 19), slow(2, 1, 9), slow(1, 0, 1), slow(2, 0, 1)]
)
def test_kills_within_a_save(ranks, rank, step, zygote, run_whole, tmp_path, record_property):
    """Within 55 changes the first start of a run makes two saves and begins to remove checkpoints;
    later starts also remove what the kill has left."""
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
        (1, 2, CAPTIONED),
        *(
            slow(*case)
            for case in (
                (1, 50, []),
                (2, 50, []),
                (1, 30, CAPTIONED),
                (2, 20, CAPTIONED),
                (1, 20, ["async_checkpoints=false"]),
                (1, 20, ["runtime.precision=bf16"]),
                (2, 20, ["runtime.parallel.mode=ddp"]),
                (1, 15, ["data=resident", f"data.device_memory_gib={30 * 240 / 2**30}"]),
            )
        ),
    ],
)
def test_kills_at_random(ranks, kills, words, zygote, run_whole, tmp_path, record_property):
    """A kill strikes at any time between the first step and the end of an undisturbed run."""
    record_property("struck", kills)
    words = [*MODES[ranks], *words, *THIRTY_STEPS]
    if "data=" in str(words):
        save = save_captioned_set if "model.conditioning=text" in words else save_random_set
        words.append(f"data.path={save(tmp_path / 'set', 45, held_out=4)}")
    undisturbed = run_whole(*words, ranks=ranks)
    expected = read_outcome(undisturbed)
    summary = read_object(undisturbed / "summary.json")
    longest = summary["train_seconds"] + summary["maintenance_seconds"]
    draw = random.Random(kills)
    plan = ({"after_seconds": draw.uniform(0.0, longest), "kill_rank": i % ranks} for i in count())
    for folder in kill_until_done(zygote, tmp_path, words, ranks, plan, kills):
        assert read_outcome(folder) == expected
        assert_tidy(folder)


@pytest.mark.fault(
    "SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1",
    "at most one step lost; exit code 75; goes on to the same bits",
)
@pytest.mark.parametrize(
    "signal", ["SIGHUP", *(slow(s) for s in ("SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1"))]
)
def test_a_signal_saves_first(signal, zygote, run_whole, run_dir):
    words = ["save_every=1000", "eval_every=0"]
    codes = zygote(run_dir, *words, "total_samples=80000", after_lines=2, signal=signal)
    assert codes == [75], read_output(run_dir)
    (saved,) = list_checkpoints(run_dir)
    step = int(saved.removeprefix("step-"))
    assert f"asked to stop at step {step}; saved" in read_output(run_dir)
    words.append(f"total_samples={8 * (step + 4)}")
    assert zygote(run_dir, *words) == [0]
    assert read_outcome(run_dir).state == read_outcome(run_whole(*words)).state


@pytest.mark.fault("SIGTERM to one of two processes", "both save the same step and leave with 75")
def test_a_signal_to_one_stops_all(zygote, run_dir):
    words = [*MODES[2], "save_every=1000", "eval_every=0", "total_samples=80000"]
    codes = zygote(run_dir, *words, ranks=2, after_lines=2, kill_rank=1, signal="SIGTERM")
    assert codes == [75, 75], read_output(run_dir)
    (saved,) = list_checkpoints(run_dir)
    assert f"asked to stop at step {saved.removeprefix('step-')}" in read_output(run_dir)
