"""Mistakes of newcomers and the line that each command prints: key, value and fix.

`python -m tests.harness.mistakes` makes all of them in one process.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MISTAKES: dict[str, str] = {
    "train.py --batch_size 32": (
        "--batch_size 32: keys are given as key=value, without dashes; write batch_size=32."
    ),
    "train.py --mixed_precision=fp16": (
        "--mixed_precision=fp16: keys are given as key=value, without dashes; write "
        "runtime.precision=fp16."
    ),
    'train.py "batch_size = 32"': (
        "batch_size = 32 is not of the form key=value; write batch_size=32."
    ),
    "scripts.sample labels=[Apple 11,Tomato Heart 1]": (
        'labels=[Apple …: the list has spaces; quote the whole word for the shell: "labels=[…]".'
    ),
    "scripts.verify_latents latents/photos": (
        "latents/photos is not of the form key=value; `--help` lists the keys."
    ),
    "train.py epochs=80": (
        "epochs=80 is not spelled so here; use total_samples=<epochs times samples in the set>."
    ),
    "scripts.sample cfg_scale=4": "cfg_scale=4 is not spelled so here; use guidance=4.",
    "train.py modle=dit_s": "modle=dit_s: there is no such key; did you mean model?",
    "train.py data.path=latents/photos": (
        "data.path=latents/photos: there is no such key; data=resident has it; add data=resident "
        "or data=webdataset."
    ),
    "train.py ema.halflife_samples=10": (
        "ema.halflife_samples=10: there is no such key; did you mean ema.half_life_samples?"
    ),
    "train.py model=DiT-XL/2": (
        "model=DiT-XL/2: there is no such file in conf/model; choose one of conv_b, conv_l, "
        "conv_s, conv_xl, conv_xs, dit_b, dit_l, dit_s, dit_xl, dit_xs, mamba1_b, mamba1_l, "
        "mamba1_s, mamba1_xl, mamba1_xs, mamba_b, mamba_l, mamba_s, mamba_xl, mamba_xs, "
        "pretrained, ssd_mlp_b, ssd_mlp_l, ssd_mlp_s, ssd_mlp_xl, ssd_mlp_xs, "
        "zigzag_b, zigzag_l, zigzag_s, zigzag_xl, zigzag_xs."
    ),
    "train.py model=dit_s,mamba_s": (
        "model=dit_s,mamba_s: commas stand between the values of a sweep, which needs -m; choose "
        "one."
    ),
    "train.py encoder=sd": (
        "encoder=sd: there is no such key; it is a group of precompute_latents.py."
    ),
    "train.py batch_size=64.0": "batch_size=64.0 must be a whole number, such as 64.",
    "train.py batch_size=-4": "batch_size=-4 must be at least 1.",
    "train.py total_samples=100k": "total_samples=100k must be a whole number, such as 102400.",
    "train.py optim.lr=0,001": (
        "optim.lr=0,001: commas stand between the values of a sweep, which needs -m; write "
        "optim.lr=[…] "
        "for a list, optim.lr=\"'…'\" for text, a point in a number."
    ),
    "train.py runtime.precision=float16": (
        "runtime.precision=float16 must be one of fp32, bf16, fp16, fp8."
    ),
    "train.py batch_size=10 accumulation_steps=4": (
        "batch_size=10 (global) is not a multiple of accumulation_steps=4; change one of them."
    ),
    "train.py sampling.guidance_interval=[1.0]": (
        "sampling.guidance_interval=[1.0] must be two increasing times, such as [0.1,0.9]."
    ),
    "train.py sampling.shift=0": "sampling.shift=0.0 must be above 0.",
    'train.py "run_dir=it\'s"': (
        "run_dir: the word that begins so cannot be read; put the value into two kinds of "
        "quotes: run_dir=\"'…'\"."
    ),
    "train.py +batch_size=32": "+batch_size=32: the key is there already; leave out the +.",
    "train.py runtime.parallel.nccl=4": (
        "runtime.parallel.nccl=4 must be a mapping such as {NAME: value}."
    ),
    "train.py fsdp=true": (
        "fsdp=true is not spelled so here; use runtime.parallel.mode=fsdp (off: none)."
    ),
    "train.py +runtime.parallel.nccl.NCCL_NET_PLUGIN=mine.so": (
        "runtime.parallel.nccl.NCCL_NET_PLUGIN may not be set here, for some variables of NCCL "
        "load code or write files; set it in the environment of the command: "
        "NCCL_NET_PLUGIN=<value>."
    ),
    "train.py extensions=[no_such_package]": (
        "extensions=[no_such_package]: there is no package no_such_package that Python can "
        "import; install it, or put the folder that holds it on PYTHONPATH."
    ),
    "train.py data=resident data.path=/nowhere": (
        "data.path=/nowhere does not exist; name a folder that `python precompute_latents.py "
        "source=<images> out=/nowhere` has finished (the same command continues)."
    ),
    "train.py init_from=/nowhere": (
        "init_from=/nowhere does not exist; name a run that has a checkpoint, a checkpoint, or a "
        ".safetensors file."
    ),
    "train.py run_dir=/dev/null/läufe": (
        "run_dir=/dev/null/läufe cannot be a folder, for /dev/null is a file; choose another."
    ),
    f"train.py run_dir={'a' * 300}": (
        f"run_dir={'a' * 300} cannot be a folder, for a name in it has over 255 bytes; choose a "
        "shorter one."
    ),
    f"train.py run_dir={'b/' * 2100}": f"the path {'b/' * 30}… is too long; use a shorter one.",
    "train.py seed=18446744073709551616": (
        "seed=18446744073709551616 does not fit into 64 bits; give a smaller number."
    ),
    "train.py optim=muon optim.momentum=2": "optim.momentum=2 must be at least 0 and below 1.",
    "train.py run_dir=${oc.env:NOPE}": (
        "run_dir=${oc.env:NOPE}: Environment variable 'NOPE' not found."
    ),
    "train.py batch_size=64,": "batch_size: its value ends with a comma; leave that out.",
    "train.py runtime.nccl.NCCL_DEBUG=INFO": (
        "runtime.nccl.NCCL_DEBUG=INFO: there is no such key; did you mean "
        "runtime.parallel.nccl.NCCL_DEBUG?"
    ),
    "precompute_latents.py out=latents/photos": (
        "source is not set; say which: source=<a folder of images or tars>."
    ),
    "precompute_latents.py source=/nowhere out=latents": (
        "source=/nowhere does not exist; name a folder of images, or tars."
    ),
    "scripts.sample": (
        "run_dir is not set; say what to sample: run_dir=runs/<name>, or "
        "weights=<file>.safetensors."
    ),
    "scripts.import_weights source=x kind=dit out=x.safetensors": (
        "kind=dit: DiT predicts the noise on another schedule, which is no velocity; use a SiT."
    ),
    "train.py adapter=lora": (
        "adapter needs a trained model; set init_from=<weights file, checkpoint or run>."
    ),
    "scripts.import_latents source=/nowhere out=x encoder=sd scale=1": (
        "source=/nowhere does not exist; name a file or folder of latents."
    ),
    "scripts.bench compare a b": (
        "bench compare: there is no such command; choose one of doctor, tests, calibration, "
        "ladder, kernels, techniques, mixers, data, plan, saves, precision, memory, step, "
        "profile, counted, gpu, publish."
    ),
    "scripts.evaluate run_dir=/nowhere count=2": "count=2 must be at least 4.",
    "scripts.report run_dir=/nowhere": (
        "run_dir=/nowhere does not exist; name the run_dir of a run."
    ),
    "scripts.export run_dir=/nowhere out=x": (
        "run_dir=/nowhere does not exist; name a run that has a checkpoint, a checkpoint, or a "
        ".safetensors file."
    ),
}
"""Command -> the sentence after `error: `."""


def make_mistake(line: str) -> tuple[object, str, bool]:
    """Runs a command; returns its exit status, what it printed to stderr, and whether torch was
    imported."""
    sys.argv = shlex.split(line)
    errors = io.StringIO()
    status: object = 0
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            if sys.argv[0].endswith(".py"):
                runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
            else:
                runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as ending:
        status = ending.code
    except Exception as error:
        status = repr(error)
    return status, errors.getvalue(), "torch" in sys.modules


if __name__ == "__main__":
    print(json.dumps([make_mistake(line) for line in MISTAKES]))
