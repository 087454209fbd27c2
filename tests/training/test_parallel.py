"""Several processes do what one does: real ones on gloo, forked, and where a launcher has a part,
torchrun's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from common.files import ROOT
from tests.harness.outcomes import FOUR_STEPS, read_columns
from tests.harness.sets import pairwise
from tests.harness.zygote import Zygote, read_output
from training.config.compose import compose
from training.environment import refuse_contradictions

EXTRAS = [
    "eval_every=2",
    "sample_every=4",
    "save_every=2",
    "sampling.steps=2",
    "sampling.per_class=3",
]
EXTRAS += ["fd_every=4", "fd.count=150", "fd.features=[encoder]"]


Finished = Callable[..., str]


@pytest.fixture(scope="module")
def finished(zygote: Zygote) -> Finished:
    """`finished(folder, *words)`: what the processes of a run printed; all must end well."""

    def run(folder: Path, *words: str, ranks: int = 2, **environment: str) -> str:
        codes = zygote(folder, *FOUR_STEPS, *words, ranks=ranks, environment=environment)
        assert codes == [0] * ranks, read_output(folder)
        return read_output(folder)

    return run


def launch(folder: Path, *words: str, **environment: str) -> subprocess.Popen[bytes]:
    """torchrun, with two processes."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    launcher += ["--signals-to-handle=SIGTERM,SIGINT,SIGUSR1"]  # as in scripts/slurm/train.sbatch
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            *launcher,
            "-m",
            "tests.harness.parallel_worker",
            *FOUR_STEPS,
            *words,
            f"run_dir={folder}",
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def close(folder: Path, expected: Path, *names: str) -> None:
    """Same losses, within rounding: a sum over a batch is taken in another order."""
    found, wanted = (
        torch.tensor(read_columns(f, *names), dtype=torch.float64) for f in (folder, expected)
    )
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=0.0)


def weights(folder: Path, step: int, which: str = "ema") -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step-{step}" / f"{which}.safetensors")


@pytest.fixture(scope="module")
def single(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, with everything that a run can do along the way."""
    folder = tmp_path_factory.mktemp("single") / "run"
    finished(folder, *EXTRAS, ranks=1)
    return folder


@pytest.mark.parametrize(
    ("mode", "ranks"),
    [
        ("ddp", 2),
        ("fsdp", 2),
        pytest.param("fsdp", 3, marks=pytest.mark.slow),
        pytest.param("hsdp", 4, marks=pytest.mark.slow),
    ],
)
def test_the_same_run_at_any_number_of_processes(
    mode: str, ranks: int, finished: Finished, single: Path, tmp_path: Path
):
    """Losses, held-out losses, distances, samples, and the averages in the checkpoint; one folder,
    one voice."""
    # two copies of two parts each
    extras = EXTRAS + (["runtime.parallel.shard_degree=2"] if mode == "hsdp" else [])
    printed = finished(tmp_path / "run", *extras, f"runtime.parallel.mode={mode}", ranks=ranks)
    close(tmp_path / "run", single, "loss", "grad_norm", "lr", "step", "samples")
    assert printed.count("summary") == 1
    assert f"in one step of {ranks} processes" in printed
    evaluated = [row for row in read_columns(tmp_path / "run", "eval_loss") if row[0] is not None]
    torch.testing.assert_close(
        torch.tensor(evaluated),
        torch.tensor([r for r in read_columns(single, "eval_loss") if r[0] is not None]),
    )
    # of 8-bit images: rounding moves a few pixels by one level
    for name in ("fd_encoder", "kd_encoder"):
        mine, alone = (
            [row[0] for row in read_columns(f, name) if row[0] is not None]
            for f in (tmp_path / "run", single)
        )
        assert len(mine) == 1
        assert mine == pytest.approx(alone, rel=1e-3), name
    for name, tensor in weights(tmp_path / "run", 4).items():
        torch.testing.assert_close(tensor, weights(single, 4)[name], rtol=1e-4, atol=1e-6, msg=name)
    mine, other = (
        Image.open(folder / "samples" / "step-4.png") for folder in (tmp_path / "run", single)
    )
    assert mine.size == other.size
    assert (
        np.abs(np.asarray(mine, dtype=np.float32) - np.asarray(other, dtype=np.float32)).mean()
        < 1.0
    )


PAIRS = """
import os, sys, tempfile, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from training.distributed import exit
torch.set_num_threads(1)
def one(file, rank):
    dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=rank, world_size=2)
    globals()["kept"] = init_device_mesh("cpu", (2,)).get_group()  # as a sharded model does
    sys.setswitchinterval(5.0)  # the main thread gives the interpreter away only where it waits
    for _ in range(20):
        dist.broadcast_object_list([{"a": "b"}], src=0)
        dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()
for _ in range(8):
    file, children = tempfile.mktemp(), []
    for rank in range(2):
        if not (child := os.fork()):
            exit.group_joined = True  # as Ranks.connect says it
            with exit.exiting():
                one(file, rank)
        children.append(child)
    print(*(os.waitpid(child, 0)[1] for child in children))
"""


@pytest.mark.fault("threads of a process group at the end of a process", "exit code 0")
def test_a_process_ends_well_while_threads_of_its_group_still_want_the_interpreter():
    """Of such pairs, two in five had a process aborted at its end before there was `exiting`."""
    done = subprocess.run([sys.executable, "-c", PAIRS], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["0"] * 16, done.stderr[-3000:]


TECHNIQUES = {
    "accumulation": [[], ["accumulation_steps=2"]],
    "checkpointing": [[], ["runtime.gradient_checkpointing=true"]],
    "compile": [[], ["runtime.compile=true"]],
    "optimizer": [[], ["runtime.fused_adamw=true"]],
}
ROWS = pairwise(["ddp", "fsdp", "hsdp"], *([0, 1] for _ in TECHNIQUES))


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=pytest.mark.slow) if i % 3 != 1 else row
        for i, row in enumerate(ROWS)
    ],
    ids=str,
)
def test_techniques_and_processes_do_not_disturb_each_other(
    row: tuple, finished: Finished, single: Path, tmp_path: Path
):
    mode, *chosen = row
    words = [w for options, i in zip(TECHNIQUES.values(), chosen, strict=True) for w in options[i]]
    finished(
        tmp_path / "run", *words, f"runtime.parallel.mode={mode}", "runtime.on_unavailable=error"
    )
    close(tmp_path / "run", single, "loss", "grad_norm")


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            ["runtime.parallel.gradient_as_bucket_view=false", "runtime.parallel.bucket_cap_mb=1"],
            marks=pytest.mark.slow,
        ),
        ["runtime.parallel.mode=fsdp", "runtime.parallel.cpu_offload=true"],
        ["optim=adamw_8bit", "runtime.weights=bf16"],
        pytest.param(
            ["runtime.parallel.mode=fsdp", "runtime.parallel.reduce_dtype=bf16"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["runtime.parallel.mode=fsdp", "runtime.parallel.reshard_after_forward=false"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda words: words[-1].rpartition(".")[2],
)
def test_every_option_trains(words: list[str], finished: Finished, single: Path, tmp_path: Path):
    finished(tmp_path / "run", *words)
    found, wanted = (torch.tensor(read_columns(f, "loss")) for f in (tmp_path / "run", single))
    torch.testing.assert_close(found, wanted, rtol=1e-2 if "bf16" in str(words) else 2e-5, atol=0.0)


def copied(folder: Path) -> str:
    """How many MiB of activations a forward pass copied to the host, as the ledger says."""
    row = json.loads((folder / "ledger.json").read_text())["offload_activations"]
    assert row["active"] is True, row
    return row["evidence"].rpartition("; ")[2]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param([], marks=pytest.mark.slow),
        ["runtime.gradient_checkpointing=true"],
        pytest.param(["runtime.compile=true"], marks=pytest.mark.slow),
        pytest.param(["runtime.parallel.reshard_after_forward=false"], marks=pytest.mark.slow),
        pytest.param(["runtime.parallel.cpu_offload=true"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_fsdp_offloads_activations_and_no_gathered_weights(
    more: list[str], finished: Finished, tmp_path: Path
):
    """The losses are those of fsdp without it, and what is copied is what ddp copies."""
    fsdp = ["runtime.parallel.mode=fsdp", *more]
    offload = "runtime.offload_activations=true"
    finished(tmp_path / "plain", *fsdp)
    finished(tmp_path / "away", *fsdp, offload, OFFLOADS="1")
    assert read_columns(tmp_path / "away", "loss", "grad_norm") == read_columns(
        tmp_path / "plain", "loss", "grad_norm"
    )
    words = [word for word in more if "parallel" not in word]
    finished(tmp_path / "ddp", *words, offload, "runtime.parallel.mode=ddp", OFFLOADS="1")
    assert copied(tmp_path / "away") == copied(tmp_path / "ddp")


@pytest.mark.slow
def test_an_evaluation_leaves_no_trace_where_parameters_stay_gathered(
    finished: Finished, tmp_path: Path
):
    words = [
        "runtime.parallel.mode=fsdp",
        "runtime.parallel.reshard_after_forward=false",
        "save_every=4",
    ]
    for every in (0, 1):
        finished(tmp_path / str(every), *words, f"eval_every={every}")
    one, other = (weights(tmp_path / str(every), 4, "model") for every in (0, 1))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["runtime.parallel.mode=none"],
            "mode=none with 2 processes: Each would train a model of its own",
        ),
        pytest.param(
            ["runtime.parallel.reduce_dtype=bf16"],
            "over NCCL only, which needs NVIDIA GPUs; use reduce_dtype=fp32",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_processes_never_train_apart(
    words: list[str], sentence: str, zygote: Zygote, tmp_path: Path
):
    """Even where what cannot be had is left out otherwise."""
    assert 0 not in zygote(tmp_path / "run", *FOUR_STEPS, *words, ranks=2)
    assert sentence in read_output(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("mode", "more"), [("ddp", []), ("fsdp", []), ("fsdp", ["runtime.parallel.cpu_offload=true"])]
)
def test_one_gpu_on_the_path_of_many(mode: str, more: list[str], tmp_path: Path):
    """NCCL with one process: the same losses as without it."""
    # not forked, for CUDA's sake
    for name, chosen in (("plain", ["none"]), ("many", [mode, *more])):
        words = [
            *FOUR_STEPS,
            f"run_dir={tmp_path / name}",
            "runtime.device=cuda",
            f"runtime.parallel.mode={chosen[0]}",
        ]
        words += chosen[1:]
        subprocess.run(
            [sys.executable, "-m", "tests.harness.parallel_worker", *words], cwd=ROOT, check=True
        )
    close(tmp_path / "many", tmp_path / "plain", "loss", "grad_norm")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("mode", ["ddp", "fsdp", "hsdp"])
@pytest.mark.parametrize("bits", range(16))
def test_the_whole_matrix(
    mode: str, ranks: int, bits: int, finished: Finished, single: Path, tmp_path: Path
):
    words = [w for i, options in enumerate(TECHNIQUES.values()) for w in options[bits >> i & 1]]
    finished(tmp_path / "run", *words, f"runtime.parallel.mode={mode}", ranks=ranks)
    close(tmp_path / "run", single, "loss", "grad_norm")


@pytest.mark.fault(
    "another number of processes: 2, 3, 1", "the same samples; the same losses within rounding"
)
def test_a_checkpoint_fits_any_number_of_processes(
    finished: Finished, single: Path, tmp_path: Path
):
    """2 -> 3 -> 1, in another mode each time: the losses of the uninterrupted run."""
    folder = tmp_path / "run"
    stages = [(24, 2, "fsdp"), (36, 3, "ddp"), (48, 1, "none")]
    for samples, ranks, mode in stages:
        words = [f"total_samples={samples}", "save_every=1", f"runtime.parallel.mode={mode}"]
        finished(folder, *words, ranks=ranks)
    close(folder, single, "loss", "grad_norm")


@pytest.mark.parametrize("mode", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
@pytest.mark.fault("a NaN in one of two processes", "a step skipped by both; weights bit-identical")
def test_a_bad_gradient_in_one_process_is_a_step_skipped_by_all(
    mode: str, finished: Finished, tmp_path: Path
):
    words = [
        "save_every=1",
        "keep_checkpoints=9",
        f"runtime.parallel.mode={mode}",
        "runtime.fused_adamw=true",
    ]
    finished(tmp_path / "run", *words, FAULT="nan:1:4")
    skipped = [row[0] for row in read_columns(tmp_path / "run", "skipped")]
    assert sum(skipped) == 1
    bad = skipped.index(1)
    if bad:
        before, after = (weights(tmp_path / "run", step, "model") for step in (bad, bad + 1))
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.fault(
    "kill -9 of one process under torchrun --max-restarts", "all start again; the same losses"
)
def test_a_killed_process_is_started_again_and_the_run_ends_the_same(single: Path, tmp_path: Path):
    process = launch(
        tmp_path / "run", "save_every=1", FAULT="die:1:3", FAULT_MARKER=str(tmp_path / "died")
    )
    _, errors = process.communicate()
    assert process.returncode == 0, errors.decode()[-3000:]
    assert (tmp_path / "died").exists()
    close(tmp_path / "run", single, "loss", "grad_norm")


@pytest.mark.fault("a process that hangs", "the run ends within runtime.parallel.timeout_minutes")
def test_a_process_that_hangs_ends_the_run_within_the_timeout(zygote: Zygote, tmp_path: Path):
    words = [*FOUR_STEPS, "runtime.parallel.timeout_minutes=0.1"]
    # it never ends
    assert zygote(tmp_path / "run", *words, ranks=2, environment={"FAULT": "hang:1:4"}) == [1, -9]
    assert "imed out" in read_output(tmp_path / "run") or "imeout" in read_output(tmp_path / "run")


@pytest.mark.fault(
    "SIGTERM or SIGUSR1 to torchrun", "saved at the next step; the same command goes on"
)
@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGUSR1", marks=pytest.mark.slow)])
def test_a_signal_to_the_launcher_saves_and_the_same_command_goes_on(
    name: str, finished: Finished, tmp_path: Path
):
    words = ["total_samples=1200000", "save_every=100000", "log_every=5"]
    process = launch(tmp_path / "run", *words)
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert process.poll() is None, process.communicate()[1].decode()[-2000:]
        time.sleep(0.02)
    os.kill(process.pid, getattr(signal, name))
    output, _ = process.communicate()
    assert "asked to stop at step" in output.decode()
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    step = int(saved.name.removeprefix("step-"))
    printed = finished(tmp_path / "run", f"total_samples={12 * (step + 2)}", "save_every=100000")
    assert f"resumed from {saved} at step {step}" in printed


@pytest.mark.parametrize(
    ("words", "environment", "sentence"),
    [
        (
            ["batch_size=10"],
            {},
            "batch_size=10 (global) is not a multiple of accumulation_steps=1 × 4 processes",
        ),
        ([], {"RANK": "7"}, "RANK=7 does not fit WORLD_SIZE=4"),
        ([], {"MASTER_ADDR": ""}, "MASTER_PORT is not set, and WORLD_SIZE is 4"),
        (
            ["runtime.parallel.timeout_minutes=0.02"],
            {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"},
            "rank 1 cannot reach the others at 127.0.0.1:9",
        ),
    ],
)
def test_a_wrong_launch_is_one_sentence(
    words: list[str], environment: dict, sentence: str, zygote: Zygote, tmp_path: Path
):
    several = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"} | environment
    assert zygote(tmp_path / "run", *FOUR_STEPS, *words, environment=several) == [1]
    assert sentence in read_output(tmp_path / "run")
    assert "Traceback" not in read_output(tmp_path / "run")


def contradiction(monkeypatch: pytest.MonkeyPatch, *words: str, **environment: str) -> str:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"\w") as caught:
        refuse_contradictions(compose([*words]).cfg)
    for name in environment:
        monkeypatch.delenv(name)
    return str(caught.value)


def test_accelerate_starts_the_processes_that_torchrun_starts(finished: Finished, tmp_path: Path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    launcher = "accelerate.commands.launch --multi_gpu --num_processes=2 --num_machines=1"
    launcher += " --main_process_port=0 --mixed_precision=no --dynamo_backend=no"
    words = [*FOUR_STEPS, "runtime.device=cpu", f"run_dir={tmp_path / 'run'}"]
    done = subprocess.run(
        [sys.executable, "-m", *launcher.split(), "-m", "tests.harness.parallel_worker", *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "all-reduce in one step of 2 processes" in done.stdout
    finished(tmp_path / "other")
    assert read_columns(tmp_path / "run", "loss") == read_columns(tmp_path / "other", "loss")


def test_what_accelerate_says_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch):
    said = contradiction(monkeypatch, "runtime.precision=fp32", ACCELERATE_MIXED_PRECISION="bf16")
    assert "ACCELERATE_MIXED_PRECISION=bf16, but runtime.precision=fp32" in said
    assert "--mixed_precision no" in said
    said = contradiction(monkeypatch, "runtime.precision=fp8", ACCELERATE_MIXED_PRECISION="bf16")
    assert "--mixed_precision fp8" in said
    assert "use runtime.parallel.mode" in contradiction(monkeypatch, ACCELERATE_USE_FSDP="true")
    assert "runtime.compile=false" in contradiction(
        monkeypatch, ACCELERATE_DYNAMO_BACKEND="INDUCTOR"
    )
    for theirs, ours in (("no", "fp32"), ("fp8", "fp8")):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", theirs)
        refuse_contradictions(compose([f"runtime.precision={ours}"]).cfg)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["runtime.parallel.shard_degree=2"], "is for mode=hsdp"),
        (["runtime.parallel.cpu_offload=true"], "is for fsdp and hsdp"),
        (
            ["runtime.parallel.bucket_cap_mb=0"],
            "runtime.parallel.bucket_cap_mb=0 must be at least 1",
        ),
        (["runtime.parallel.timeout_minutes=0"], "must be above 0"),
        *(
            ([f"runtime.checkpoint_policy={policy}"], "or every_<n> with n from 2 on")
            for policy in ("every_1", "every_0", "every_x", "every_02", "4")
        ),
        (["+runtime.parallel.nccl.DEBUG=INFO"], "set it in the environment of the command"),
        (
            ["runtime.parallel.mode=fsdp", "runtime.compile=true", "runtime.compile_scope=model"],
            "block by block",
        ),
        (["runtime.parallel.mode=ddp", "runtime.cuda_graph=true"], "never tried"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(words: list[str], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        compose(words)


def test_one_process_may_take_the_path_of_many(finished: Finished, single: Path, tmp_path: Path):
    """For measuring what it costs."""
    printed = finished(tmp_path / "run", "runtime.parallel.mode=fsdp", ranks=1)
    assert "in one step of 1 processes" in printed
    close(tmp_path / "run", single, "loss", "grad_norm")
