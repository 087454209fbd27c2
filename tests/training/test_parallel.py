"""Runs of several processes do what a run of one does: on gloo, forked, and started by torchrun
where a launcher takes part."""

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file
from torch.testing import assert_close

from common.files import ROOT, read_object
from tests.harness.outcomes import (
    FOUR_STEPS,
    are_equal,
    assert_same_metrics,
    read_columns,
    read_lines,
)
from tests.harness.sets import cover_pairs
from tests.harness.words import slow
from tests.harness.zygote import read_output
from training.checkpoint.snapshots import list_snapshots

EXTRAS = [
    "eval_every=2",
    "sample_every=4",
    "save_every=2",
    "sampling.steps=2",
    "sampling.per_class=3",
    "fd_every=4",
    "fd.count=60",
    "fd.features=[encoder]",
    "ema.snapshots=4",
]
WORKER = [sys.executable, "-m", "tests.harness.parallel_worker", *FOUR_STEPS]


@pytest.fixture(scope="module")
def single(run_ranks, tmp_path_factory):
    """A run of one process, with everything that a run can do along the way."""
    folder = tmp_path_factory.mktemp("single") / "run"
    run_ranks(folder, *EXTRAS, ranks=1)
    return folder


TORCHRUN = """torch.distributed.run --standalone --nproc-per-node=2 --max-restarts=2
    --signals-to-handle=SIGTERM,SIGINT,SIGUSR1"""
"""The options of scripts/slurm/train.sbatch."""
ACCELERATE = """accelerate.commands.launch --multi_gpu --num_processes=2 --num_machines=1
    --main_process_port=0 --mixed_precision=no --dynamo_backend=no"""


def launch(folder, *words, launcher=TORCHRUN, **environment):
    """Starts two processes by a launcher."""
    return subprocess.Popen(
        [sys.executable, "-m", *launcher.split(), *WORKER[1:], *words, f"run_dir={folder}"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )


def read_weights(folder, step, name="ema"):
    return load_file(folder / "checkpoints" / f"step-{step}" / f"{name}.safetensors")


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        (["runtime.parallel.mode=ddp"], 2),
        (["runtime.parallel.mode=fsdp"], 2),
        # A benchmark measures the cost of the path of many processes.
        (["runtime.parallel.mode=fsdp"], 1),
        slow(["runtime.parallel.mode=fsdp"], 3),
        slow(["runtime.parallel.mode=hsdp", "runtime.parallel.shard_degree=2"], 4),
    ],
)
def test_the_same_run_at_any_number_of_processes(words, ranks, run_ranks, single, run_dir):
    """Losses, held-out losses, distances, samples, and the averages in the checkpoint; one process
    prints."""
    output = run_ranks(run_dir, *EXTRAS, *words, ranks=ranks)
    assert output.count("summary") == 1
    assert f"in one step of {ranks} processes" in output
    assert_same_metrics(run_dir, single, "loss", "grad_norm", "lr", "step", "samples")

    # Distances are those of 8-bit images, of which rounding moves a few pixels by one level.
    for name, tolerance in (("eval_loss", 1e-5), ("fd_encoder", 1e-3), ("kd_encoder", 1e-3)):
        values, expected = (
            [line[name] for line in read_lines(run) if name in line] for run in (run_dir, single)
        )
        assert values == pytest.approx(expected, rel=tolerance), name

    assert_close(read_weights(run_dir, 4), read_weights(single, 4), rtol=1e-4, atol=1e-5)
    grid, expected = (
        np.asarray(Image.open(run / "samples" / "step-4.png"), dtype=np.float32)
        for run in (run_dir, single)
    )
    assert np.abs(grid - expected).mean() < 1.0


def test_an_extra_term_is_the_same_at_any_number_of_processes(run_ranks, run_dir, tmp_path):
    """A resume at step 2 continues the log window of the first three steps, and the auxiliary head,
    whose term ends after step 3."""
    words = ["model=hybrid_xs", "objective.align_weight=1", "objective.align_until_samples=48"]
    words += ["model.internal_block=1", "log_every=3", "save_every=2", "keep_checkpoints=2"]
    run_ranks(tmp_path / "one", *words, ranks=1)
    for mode in ("ddp", "fsdp"):
        run_ranks(run_dir, *words, f"runtime.parallel.mode={mode}")
        terms = ("loss", "loss_latent", "loss_internal")
        assert_same_metrics(run_dir, tmp_path / "one", "step", *terms, "grad_norm")
        shutil.rmtree(run_dir / "checkpoints" / "step-4")


PAIRS = """
import os, sys, tempfile, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from common.distributed import exit
torch.set_num_threads(1)
def run_rank(file, rank):
    dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=rank, world_size=2)
    # A sharded model keeps its group, too.
    globals()["group"] = init_device_mesh("cpu", (2,)).get_group()
    # The main thread gives the interpreter away only where it waits.
    sys.setswitchinterval(5.0)
    for _ in range(20):
        dist.broadcast_object_list([{"a": "b"}], src=0)
        dist.all_reduce(torch.ones(3))
for _ in range(8):
    file, children = tempfile.mktemp(), []
    for rank in range(2):
        if not (child := os.fork()):
            with exit.exit_cleanly():
                run_rank(file, rank)
        children.append(child)
    print(*(os.waitpid(child, 0)[1] for child in children))
"""


@pytest.mark.fault("threads of a process group at the end of a process", "exit code 0")
def test_a_process_ends_well_while_threads_of_its_group_still_want_the_interpreter():
    """Without `exit_cleanly`, two in five of such pairs have a process that aborts at its end."""
    done = subprocess.run([sys.executable, "-c", PAIRS], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["0"] * 16, done.stderr[-3000:]


MODES = ["ddp", "fsdp", "hsdp"]
OPTIONS = [
    "accumulation_steps=2",
    "runtime.gradient_checkpointing=true",
    "runtime.compile=true",
    "runtime.fused_adamw=true",
]
PAIRWISE = cover_pairs(MODES, *([False, True] for _ in OPTIONS))
ROWS = [
    *PAIRWISE[4::3],
    *(slow(row) for row in itertools.product(MODES, *[[False, True]] * len(OPTIONS))),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_techniques_and_processes_do_not_disturb_each_other(row, run_ranks, single, run_dir):
    """A third of the pairs of choices; the whole matrix is slow."""
    mode, *chosen = row
    words = [word for word, on in zip(OPTIONS, chosen, strict=True) if on]
    run_ranks(run_dir, *words, f"runtime.parallel.mode={mode}", "runtime.on_unavailable=error")
    assert_same_metrics(run_dir, single)


FSDP = "runtime.parallel.mode=fsdp"
RESHARD = "runtime.parallel.reshard_after_forward=false"


@pytest.mark.parametrize(
    "words",
    [
        [FSDP, "runtime.parallel.cpu_offload=true"],
        ["optim=adamw_8bit", "runtime.weights=bf16"],
        *(
            slow(words)
            for words in (
                [
                    "runtime.parallel.gradient_as_bucket_view=false",
                    "runtime.parallel.bucket_cap_mb=1",
                ],
                [FSDP, "runtime.parallel.reduce_dtype=bf16"],
                [FSDP, RESHARD],
            )
        ),
    ],
    ids=lambda words: words[-1].rpartition(".")[2],
)
def test_every_option_trains(words, run_ranks, single, run_dir):
    run_ranks(run_dir, *words)
    assert_same_metrics(run_dir, single, "loss", rtol=1e-2 if "bf16" in str(words) else 2e-5)


def read_copied(folder):
    """MiB of activations that a forward pass copied to the host, as the ledger says."""
    row = read_object(folder / "ledger.json")["offload_activations"]
    assert row["active"] is True, row
    return row["evidence"].rpartition("; ")[2]


@pytest.mark.parametrize(
    "words", [["runtime.gradient_checkpointing=true"], ["runtime.compile=true"], [RESHARD]], ids=str
)
@pytest.mark.slow
def test_fsdp_offloads_activations_and_no_gathered_weights(words, run_ranks, tmp_path):
    """The losses are those of fsdp without it, and ddp copies as much."""
    offload = "runtime.offload_activations=true"
    run_ranks(tmp_path / "plain", FSDP, *words)
    run_ranks(tmp_path / "fsdp", FSDP, *words, offload, OFFLOADS="1")
    losses, plain = (read_columns(tmp_path / run, "loss", "grad_norm") for run in ("fsdp", "plain"))
    assert losses == plain
    words = [word for word in words if "parallel" not in word]
    run_ranks(tmp_path / "ddp", *words, offload, "runtime.parallel.mode=ddp", OFFLOADS="1")
    assert read_copied(tmp_path / "fsdp") == read_copied(tmp_path / "ddp")


@pytest.mark.slow
def test_an_evaluation_leaves_no_trace_where_parameters_stay_gathered(run_ranks, tmp_path):
    for every in ("0", "1"):
        run_ranks(tmp_path / every, FSDP, RESHARD, "save_every=4", f"eval_every={every}")
    assert are_equal(*(read_weights(tmp_path / every, 4, "model") for every in ("0", "1")))


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("runtime.parallel.mode=none", "mode=none with 2 processes"),
        slow("runtime.parallel.reduce_dtype=bf16", "over NCCL only"),
    ],
)
def test_processes_never_train_apart(word, sentence, zygote, run_dir):
    """on_unavailable=degrade does not help here."""
    assert 0 not in zygote(run_dir, *FOUR_STEPS, word, ranks=2)
    assert sentence in read_output(run_dir)
    assert not run_dir.exists()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "words", [["runtime.parallel.mode=ddp"], [FSDP], [FSDP, "runtime.parallel.cpu_offload=true"]]
)
def test_one_process_over_nccl_trains_as_one_without_it(words, tmp_path):
    """NCCL with one process: the same losses as without it. CUDA allows no fork."""
    for name, chosen in (("plain", ["runtime.parallel.mode=none"]), ("many", words)):
        options = [f"run_dir={tmp_path / name}", "runtime.device=cuda", *chosen]
        subprocess.run([*WORKER, *options], cwd=ROOT, check=True)
    assert_same_metrics(tmp_path / "many", tmp_path / "plain")


@pytest.mark.fault(
    "another number of processes: 2, 3, 1", "the same samples; the same losses within rounding"
)
def test_a_checkpoint_fits_any_number_of_processes(run_ranks, single, run_dir):
    """2 -> 3 -> 1, in another mode each time: the losses of the uninterrupted run, and its
    snapshots of averages."""
    for samples, ranks, mode in ((24, 2, "ddp"), (36, 3, "fsdp"), (48, 1, "none")):
        words = [f"total_samples={samples}", "save_every=1", f"runtime.parallel.mode={mode}"]
        run_ranks(run_dir, *words, f"ema.snapshots={samples // 12}", ranks=ranks)
    assert_same_metrics(run_dir, single)
    for snapshot, expected in zip(list_snapshots(run_dir), list_snapshots(single), strict=True):
        assert snapshot.file.name == expected.file.name
        assert_close(load_file(snapshot.file), load_file(expected.file), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", [slow("ddp"), "fsdp"])
@pytest.mark.fault("a NaN in one of two processes", "a step skipped by both; weights bit-identical")
def test_a_bad_gradient_in_one_process_is_a_step_skipped_by_all(mode, run_ranks, run_dir):
    words = ["save_every=1", "keep_checkpoints=9", "runtime.fused_adamw=true"]
    run_ranks(run_dir, *words, f"runtime.parallel.mode={mode}", FAULT="nan:1:3")
    skipped = [count for (count,) in read_columns(run_dir, "skipped")]
    assert sum(skipped) == 1
    bad = skipped.index(1)
    assert are_equal(*(read_weights(run_dir, step, "model") for step in (bad, bad + 1)))


def test_the_command_of_a_killed_process_ends_the_same(zygote, run_ranks, single, run_dir):
    environment = {"FAULT": "die:1:3", "FAULT_MARKER": f"{run_dir}.died"}
    codes = zygote(run_dir, *FOUR_STEPS, "save_every=1", ranks=2, environment=environment)
    assert codes[1] == -9
    run_ranks(run_dir, "save_every=1")
    assert_same_metrics(run_dir, single)


@pytest.mark.slow
@pytest.mark.fault(
    "kill -9 of one process under torchrun --max-restarts", "all start again; the same losses"
)
def test_a_killed_process_is_started_again_and_the_run_ends_the_same(single, tmp_path):
    marker = tmp_path / "died"
    process = launch(tmp_path / "run", "save_every=1", FAULT="die:1:3", FAULT_MARKER=str(marker))
    _, errors = process.communicate()
    assert process.returncode == 0, errors[-3000:]
    assert marker.exists()
    assert_same_metrics(tmp_path / "run", single)


@pytest.mark.fault("a process that hangs", "the run ends within runtime.parallel.timeout_minutes")
def test_a_process_that_hangs_ends_the_run_within_the_timeout(zygote, run_dir):
    words = [*FOUR_STEPS, "runtime.parallel.timeout_minutes=0.1"]
    codes = zygote(run_dir, *words, ranks=2, environment={"FAULT": "hang:1:4"})
    # The harness kills the process that hangs once the other has ended.
    assert codes == [1, -9]
    assert re.search("imed out|imeout", read_output(run_dir))


# tests/faults/test_kills.py signals processes that are forked.
@pytest.mark.slow
@pytest.mark.fault(
    "SIGTERM or SIGUSR1 to torchrun", "saved at the next step; the same command goes on"
)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_to_the_launcher_saves_and_the_same_command_goes_on(name, run_ranks, run_dir):
    process = launch(run_dir, "total_samples=1200000", "save_every=100000", "log_every=5")
    while not (run_dir / "metrics.jsonl").exists():
        assert process.poll() is None, process.communicate()[1][-2000:]
        time.sleep(0.02)
    os.kill(process.pid, getattr(signal, name))
    output, _ = process.communicate()
    assert "asked to stop at step" in output
    (saved,) = (run_dir / "checkpoints").glob("step-*")
    step = int(saved.name.removeprefix("step-"))
    output = run_ranks(run_dir, f"total_samples={12 * (step + 2)}")
    assert f"resumed from {saved} at step {step}" in output


@pytest.mark.parametrize(
    ("words", "environment", "sentence"),
    [
        (["batch_size=10"], {}, "is not a multiple of accumulation_steps=1 × 4 processes"),
        ([], {"RANK": "7"}, "RANK=7 does not fit WORLD_SIZE=4"),
        ([], {"MASTER_ADDR": ""}, "MASTER_PORT is not set, and WORLD_SIZE is 4"),
        (
            ["runtime.parallel.timeout_minutes=0.02"],
            {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"},
            "rank 1 cannot reach the others at 127.0.0.1:9",
        ),
    ],
)
def test_a_wrong_launch_is_one_sentence(words, environment, sentence, zygote, run_dir):
    several = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"} | environment
    assert zygote(run_dir, *FOUR_STEPS, *words, environment=several) == [1]
    output = read_output(run_dir)
    assert sentence in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_accelerate_starts_the_processes_that_torchrun_starts(run_ranks, tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    process = launch(tmp_path / "run", "runtime.device=cpu", launcher=ACCELERATE)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "all-reduce in one step of 2 processes" in output
    run_ranks(tmp_path / "other")
    assert read_columns(tmp_path / "run", "loss") == read_columns(tmp_path / "other", "loss")
