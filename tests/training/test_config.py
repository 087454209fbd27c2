"""The configuration: what composes, and what every mistake says."""

from __future__ import annotations

import enum
import importlib
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from common.files import ROOT
from common.require_python import refuse_python
from scripts.import_latents import ImportConfig
from training.config.build import build, resolve_target
from training.config.compose import (
    CONF_FOLDER,
    compose,
    parse_words,
    read_config,
    refuse_paths,
    report_user_errors,
)
from training.config.schema import PrecomputeConfig, RuntimeConfig, TrainConfig
from training.config.secrets import redact
from training.config.words import FOREIGN_KEYS
from training.distributed.exit import run_app


def command(
    *words: str, program: str = "train.py", **environment: str
) -> subprocess.CompletedProcess:
    """Runs an entry point as a user would, from the checkout."""
    start = ["-m", program] if program.startswith("scripts.") else [program]
    return subprocess.run(
        [sys.executable, *start, *words],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def choices(group: str) -> list[str]:
    return sorted(file.stem for file in (CONF_FOLDER / group).glob("*.yaml"))


GROUPS = ["model", "adapter", "data", "objective", "optim", "runtime", "logger", "experiment"]


@pytest.mark.parametrize("group", GROUPS)
def test_every_file_of_every_group_composes(group):
    for name in choices(group):
        assert compose([f"{group}={name}", "init_from=x"]).choices[group] == name


def test_every_encoder_composes():
    for name in choices("encoder"):
        composed = compose([f"encoder={name}", "source=x", "out=y"], "precompute_latents")
        assert isinstance(composed.cfg, PrecomputeConfig)


def test_every_yaml_says_what_it_is_and_when_to_use_it():
    for file in CONF_FOLDER.rglob("*.yaml"):
        lines = [line for line in file.read_text().splitlines() if "@package" not in line]
        assert lines[0].startswith("# "), file


def test_train_alone_means_fast_on_digits():
    composed = compose()
    assert (composed.choices["runtime"], composed.choices["data"]) == ("fast", "digits")
    assert isinstance(composed.cfg, TrainConfig)


def test_a_default_stands_once():
    """What the dataclasses say is what composes; the primary files and `runtime=eager` hold no
    value of their own."""
    groups = {"runtime", "model", "adapter", "data", "objective", "optim", "logger", "encoder"}
    job = compose(["source=x", "out=y"], "precompute_latents").cfg
    for cfg, default in (
        (compose().cfg, TrainConfig()),
        (job, PrecomputeConfig(source="x", out="y")),
    ):
        assert {k: v for k, v in vars(cfg).items() if k not in groups} == {
            k: v for k, v in vars(default).items() if k not in groups
        }
    assert compose(["runtime=eager"]).cfg.runtime == RuntimeConfig()
    for file in (
        CONF_FOLDER / "train.yaml",
        CONF_FOLDER / "precompute_latents.yaml",
        CONF_FOLDER / "runtime" / "eager.yaml",
    ):
        assert set(OmegaConf.load(file)) <= {"defaults", "hydra"}


def test_an_experiment_overrides_the_runtime_and_the_command_line_overrides_both():
    assert compose(["experiment=fullrun"]).cfg.runtime.on_unavailable.value == "error"
    cfg = compose(
        ["experiment=fullrun", "runtime.on_unavailable=degrade", "batch_size=32", "runtime=eager"]
    ).cfg
    assert cfg.runtime.on_unavailable.value == "degrade"
    assert cfg.batch_size == 32
    assert not cfg.runtime.tf32


def test_the_configuration_cannot_be_changed_after_it_was_composed():
    cfg = compose().cfg
    with pytest.raises(AttributeError):
        cfg.seed = 1
    with pytest.raises(AttributeError):
        cfg.runtime.tf32 = False


def test_help_is_quick_and_lists_groups_with_examples():
    result = command("--help", PYTHONPROFILEIMPORTTIME="1")
    assert result.returncode == 0
    assert "model: conv_b" in result.stdout
    assert "experiment=fastrun" in result.stdout
    assert "| torch" not in result.stderr, "torch was imported"


def test_the_configuration_prints_without_holes():
    result = command("--cfg", "job", "--resolve")
    assert result.returncode == 0
    assert "???" not in result.stdout
    assert "total_samples" in result.stdout


MISTAKES = {
    "batch_size=-4": ("batch_size=-4", "at least 1"),
    "batch_size=10 accumulation_steps=4": ("batch_size=10", "accumulation_steps=4"),
    "total_samples=abc": ("total_samples=abc", "a whole number"),
    "deterministic=perhaps": ("deterministic=perhaps", "true or false"),
    "runtime.precision=bf17": ("runtime.precision=bf17", "fp32, bf16"),
    "model.dpeth=3": ("model.dpeth=3", "did you mean model.depth?"),
    "optmi.lr=3": ("optmi.lr=3", "did you mean optim.lr?"),
    "runtime=fasst": ("runtime=fasst", "eager, fast"),
    "model=mambo": ("model=mambo", "mamba_xs"),
    "experiment=fastrnu": ("experiment=fastrnu", "fastrun"),
    "+junk=1": ("junk=1", "no such key"),
    "+runtime.junk=1": ("runtime.junk=1", "no such key"),
    "+schedule.warmup=1": ("schedule.warmup=1", "did you mean schedule.warmup_samples?"),
    "+model.junk=1": ("model.junk=1", "it takes dim, depth"),
    "+model.mixer.junk=1": ("model.mixer.junk=1", "BidirectionalSSD has no argument"),
    "model.dim=abc": ("model.dim=abc", "a valid integer"),
    "model=null": ("model=null", "mamba_xs"),
    "model.depth=0": ("model.depth=0", "at least 1"),
    "model.patch_size=0": ("model.patch_size=0", "at least 1"),
    "optim.lr=-1": ("optim: Invalid learning rate: -1.0", "AdamW"),
    "model.head_dim=37": ("model.head_dim=37", "divisor"),
    "optim.betas=[0.9]": ("optim.betas=[0.9]", "must be longer"),
    "optim.lr=fast": ("optim.lr=fast", "a valid number"),
    "data=resident": ("data.path=<folder", "precompute_latents.py"),
    "data=resident data.path=/nowhere": ("/nowhere/manifest.json", "precompute_latents.py"),
    "objective.label_dropout=2": ("objective.label_dropout=2", "between 0 and 1"),
    "sampling.guidance_interval=[1,0]": ("sampling.guidance_interval=[1.0, 0.0]", "increasing"),
    "logger=wandb logger.mode=on": ("logger.mode=on", "'online' or 'offline'"),
    "init_from=/nowhere": ("init_from=/nowhere", "neither"),
    "resume=/nowhere": ("/nowhere", "no usable checkpoint"),
    "runtime.device=cuda": ("runtime.device=cuda", "no NVIDIA GPU"),
    "experiment=fullrun runtime.tf32=true runtime.device=cpu": (
        "runtime.tf32=True",
        "on_unavailable=degrade",
    ),
    "model._target_=builtins.open": ("model._target_=builtins.open", "not allowed"),
    "optim._target_=torch.load": ("optim._target_=torch.load", "not allowed"),
    "model._target_=models.denoiser.torch.load": ("models.denoiser.torch.load", "not allowed"),
    "model._target_=models.denoiser.nn.Linear": ("models.denoiser.nn.Linear", "not allowed"),
    "optim._target_=data.digits.DigitLatents": (
        "optim._target_=data.digits.DigitLatents",
        "no Optimizer",
    ),
    "model._target_=models.denoiser.nothing": ("models.denoiser.nothing", "not allowed"),
}
IN_THE_SHELL = [
    "batch_size=-4",
    "model.dpeth=3",
    "+junk=1",
    "+model.junk=1",
    "optim._target_=torch.load",
]


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_gets_one_sentence_with_key_value_and_fix(words, tmp_path, capsys, monkeypatch):
    import torch

    from train import train
    from training.config.compose import report_user_errors

    if words == "runtime.device=cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(sys, "argv", ["train.py", *words.split()])
    folder = tmp_path / "run"
    with pytest.raises(SystemExit) as stopped, report_user_errors():
        train(compose(["total_samples=64", f"run_dir={folder}", *words.split()]))
    said = capsys.readouterr().err
    assert stopped.value.code == 1
    assert said.startswith("error: ")
    assert "Traceback" not in said
    for part in MISTAKES[words]:
        assert part in said
    assert not folder.exists(), "a run that never started left a folder"


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, marks=pytest.mark.slow) if i > 1 else words
        for i, words in enumerate(IN_THE_SHELL)
    ],
)
def test_the_command_says_it_too_and_exits_with_1(words, tmp_path):
    result = command(*words.split(), f"run_dir={tmp_path / 'run'}")
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    assert MISTAKES[words][0] in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("modle:\n  depth: 2\n", "did you mean model?"),
        ("optim:\n  lrr: 2\n", "did you mean optim.lr?"),
        (
            "total_samples: x\n",
            "could not be converted to Integer; it must be a whole number, such as",
        ),
    ],
)
def test_a_typo_inside_an_experiment_file_is_refused(content, said, capsys, monkeypatch):
    from train import train
    from training.config.compose import report_user_errors

    file = CONF_FOLDER / "experiment" / "typo_for_a_test.yaml"
    monkeypatch.setattr(sys, "argv", ["train.py"])
    try:
        file.write_text("# @package _global_\n# A typo.\n" + content)
        with pytest.raises(SystemExit), report_user_errors():
            train(compose(["experiment=typo_for_a_test"]))
    finally:
        file.unlink()
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("key", FOREIGN_KEYS)
def test_foreign_spellings_get_ours(key):
    word = key if "=" in key else f"{key}=1"
    with pytest.raises(ValueError, match=f"{word} is not spelled so here; use"):
        compose([word])


def test_our_spellings_in_that_table_are_real():
    values = {
        "run_dir": "x",
        "runtime.precision": "bf16",
        "runtime.device": "cpu",
        "runtime.parallel.mode": "ddp",
        "runtime.checkpoint_policy": "selective",
        "runtime.compile_mode": "default",
        "data": "webdataset",
        "data.pin_memory": "true",
        "data.persistent_workers": "true",
        "schedule.kind": "cosine",
        "logger": "wandb",
        "adapter": "lora",
    }
    keys = {ours.partition("=")[0] for ours in FOREIGN_KEYS.values()}
    words = [
        f"{key}={values.get(key, 'true' if key.startswith('runtime.') else '64')}"
        for key in sorted(keys)
    ]
    compose([*words, "init_from=x"])


def test_a_component_may_be_any_class_of_ours_and_no_function():
    assert resolve_target("models.denoiser.Denoiser", "model").__name__ == "Denoiser"
    assert resolve_target("torch.optim.AdamW", "optim").__name__ == "AdamW"
    for target in (
        "training.assemble.build_model",
        "data.synthetic.torch",
        "models.block.F.linear",
        "accel",
        "os.system",
    ):
        with pytest.raises(ValueError, match="not allowed"):
            resolve_target(target, "model")


def test_nested_components_are_built_and_checked():
    node = {
        "_target_": "models.denoiser.Denoiser",
        "dim": 64,
        "depth": 1,
        "head_dim": 32,
        "patch_size": 2,
        "mixer": {
            "_target_": "models.mixers.attention.Attention",
            "_partial_": True,
            "qk_norm": False,
        },
    }
    model = build(node, "model", channels=1, height=8, width=8, num_classes=2)
    assert model.blocks[0].layers[0].q_weight is None
    with pytest.raises(ValueError, match="model lacks depth"):
        build(
            {k: v for k, v in node.items() if k != "depth"},
            "model",
            channels=1,
            height=8,
            width=8,
            num_classes=2,
        )


def test_secrets_never_reach_what_is_written_down(monkeypatch):
    monkeypatch.setenv("MY_SECRET_VALUE", "hunter2")
    secret = "${oc.env:MY_SECRET_VALUE}"
    composed = compose(["logger=wandb", f"logger.entity={secret}", f"run_dir={secret}"])
    assert composed.cfg.run_dir == "hunter2"
    assert "hunter2" not in str(composed.source)
    assert redact({"api_key": "x", "tokens": 3, "a": [{"password": "y"}]}) == {
        "api_key": "<redacted>",
        "tokens": 3,
        "a": [{"password": "<redacted>"}],
    }


def test_precompute_says_what_it_lacks(tmp_path):
    result = command("out=" + str(tmp_path / "out"), program="precompute_latents.py")
    assert result.returncode == 1
    assert "source is not set" in result.stderr
    assert command("--help", program="precompute_latents.py").returncode == 0


def test_sample_says_what_is_wrong():
    for words, said in (
        (["cuont=3"], "did you mean count?"),
        ([], "run_dir is not set"),
        (["run_dir=/nowhere"], "does not exist"),
    ):
        result = command(*words, program="scripts.sample")
        assert result.returncode == 1
        assert said in result.stderr
    assert "guidance" in command("--help", program="scripts.sample").stdout


def test_configuration_files_are_found_from_another_folder(tmp_path: Path):
    result = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "--cfg", "job"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_error_that_is_not_the_users_keeps_its_traceback():
    from training.config.compose import report_user_errors

    with pytest.raises(ValueError, match="negative dimension"), report_user_errors():
        np.zeros(-1)
    with pytest.raises(ValueError, match="invalid literal"), report_user_errors():
        enum.IntEnum("Number", {"one": "not a number"})


@pytest.mark.parametrize(
    "words",
    [
        ["runtime.compile_mode=reduce-overhead"],
        [
            "runtime.compile_mode=reduce-overhead",
            "runtime.compile_scope=model",
            "accumulation_steps=2",
        ],
        [
            "runtime.compile_mode=reduce-overhead",
            "runtime.compile_scope=model",
            "runtime.cuda_graph=true",
        ],
    ],
)
def test_inductors_graphs_are_refused_where_they_are_wrong(words):
    with pytest.raises(
        ValueError, match=r"wrong gradients.*runtime\.compile_scope=model.*runtime\.cuda_graph=true"
    ):
        compose(["runtime=production", *words])
    compose(
        [
            "runtime=production",
            "runtime.compile_mode=reduce-overhead",
            "runtime.compile_scope=model",
        ]
    )


def test_timed_kernel_choice_is_refused_where_runs_must_be_equal():
    words = ["runtime=production", "runtime.compile_mode=max-autotune-no-cudagraphs"]
    with pytest.raises(ValueError, match="deterministic=true"):
        compose([*words, "deterministic=true"])
    assert compose(words).cfg.runtime.compile_mode.value == "max-autotune-no-cudagraphs"


def test_presets_build_on_each_other():
    """max ⊃ production ⊃ fast ⊃ eager, and each says in its first line when to use it."""
    on = {}
    for file in sorted((CONF_FOLDER / "runtime").glob("*.yaml")):
        assert file.read_text().startswith("# ")
        runtime = compose([f"runtime={file.stem}"]).cfg.runtime
        on[file.stem] = {name for name, value in vars(runtime).items() if value is True}
    assert on["eager"] < on["fast"] < on["production"] < on["max"]
    assert on["max"] - on["production"] == {"cuda_graph"}
    assert on["lowmem"] - on["fast"] == {"gradient_checkpointing", "empty_cache_at_eval"}


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("", "one word of the command is empty"),
        ("logger=true", "logger=true: a run needs one; choose one of none, tensorboard, wandb"),
        ("+model=3", "model=3: a run needs one"),
        ("+optim.lr=1", "+optim.lr=1: the key is there already; leave out the +"),
        ("seed=" + 101 * "[", "more than 100 brackets"),
        (
            "sampling.guidance_interval.x=1",
            "sampling.guidance_interval.x=1: these words cannot be read",
        ),
    ],
)
def test_words_that_hydra_breaks_on(word: str, sentence: str):
    with pytest.raises(ValueError, match=r"\w") as caught:
        compose([word])
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("dtype==", "dtype: the word that begins so cannot be read"),
        ("source=\t", "source: the word that begins so cannot be read"),
        (
            "scale=" + 400 * "9",
            "scale=" + 40 * "9" + " does not fit into 64 bits; give a smaller number.",
        ),
        ("source=" + 300 * "[", "more than 100 brackets"),
    ],
)
def test_words_that_yaml_breaks_on(word: str, sentence: str):
    with pytest.raises(ValueError, match=r"\w") as caught:
        parse_words(ImportConfig, [word], "")
    assert sentence in str(caught.value)


def test_a_message_is_one_line(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit), report_user_errors():
        compose(["seed=a\nb\x1b[31m"])
    assert capsys.readouterr().err.count("\n") == 1


def test_a_whole_number_above_all_floats_is_refused():
    node = compose([]).cfg.model | {"drop_path": 10**400}
    with pytest.raises(ValueError, match=r"model.drop_path=10+ must be a finite number"):
        build(node, "model", channels=1, height=8, width=8, num_classes=2)


@pytest.mark.parametrize(
    "word",
    [
        "sampling.guidance=nan",
        "ema.ramp=inf",
        "objective.logit_std=nan",
        "sampling.guidance_interval=[0,nan]",
    ],
)
def test_numbers_that_are_not_finite_are_refused(word: str):
    with pytest.raises(
        ValueError, match=rf"{word.partition('=')[0]}[.\d]*=(nan|inf) is no finite number"
    ):
        compose([word])


@pytest.mark.parametrize(
    "words",
    [
        ("model=dit_xs", "model.mlp_ratio=-1"),
        ("model=mamba_xs", "model.mixer.expand=-1"),
        ("model=zigzag_xs", "model.mixer.state_dim=0"),
        ("model=mamba1_xs", "model.mixer.state_dim=0"),
        ("model=conv_xs", "model.mixer.expand=0"),
    ],
)
def test_sizes_below_their_least_are_refused(words: tuple[str, str]):
    with pytest.raises(ValueError, match=rf"{words[1]}(\.0)? must be"):
        build(compose([*words]).cfg.model, "model", channels=1, height=8, width=8, num_classes=2)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("run_dir=läufe/ä", "läufe/ä"),
        ("run_dir=漢 字/🙂", "漢 字/🙂"),
        ("run_dir=runs/naïve-${seed}", "runs/naïve-0"),
        ("run_dir='läufe/ä'", "läufe/ä"),
        ("run_dir=runs (1)/a=b", "runs (1)/a=b"),
        ("run_dir=~/runs", "~/runs"),
        ("run_dir=my runs", "my runs"),
        ("run_dir=runs/${seed}", "runs/0"),
        ("run_dir=null", None),
        ("fd.features=[encoder, größe,random]", ["encoder", "größe", "random"]),
        ("+runtime.parallel.nccl={NCCL_DEBUG: größe}", {"NCCL_DEBUG": "größe"}),
        ("runtime.parallel.nccl={NCCL_DEBUG: INFO}", {"NCCL_DEBUG": "INFO"}),
    ],
)
def test_a_value_may_have_any_letter(word: str, value: object):
    found: Any = compose([word]).cfg
    for name in word.lstrip("+").partition("=")[0].split("."):
        found = getattr(found, name)
    assert found == value


def test_a_run_may_lie_in_a_folder_of_any_name(run, monkeypatch: pytest.MonkeyPatch):
    """In a command too, where Hydra reads the words."""
    summary = run(folder="läufe 漢/(1) ä")
    assert Path(summary["run_dir"]).is_dir()
    found = []
    monkeypatch.setattr("train.train", lambda composed: found.append(composed.cfg.run_dir))
    monkeypatch.setattr(sys, "argv", ["train.py", f"run_dir={summary['run_dir']}", "seed=1"])
    monkeypatch.setenv("HYDRA_MAIN_MODULE", "__main__")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    run_app(importlib.import_module("train").main)
    assert found == [summary["run_dir"]]
    assert parse_words(ImportConfig, [f"out={summary['run_dir']}"], "").out == summary["run_dir"]


@pytest.mark.parametrize(
    ("folder", "entry"),
    [
        ("step-4", "state.json"),
        ("run", "checkpoints"),
        ("checkpoints", "step-4"),
        ("run", None),
        (None, None),
    ],
)
def test_a_run_resumes_from_a_checkpoint_or_a_run_that_is_there(folder, entry, tmp_path: Path):
    """Even where run_dir holds checkpoints, which would be taken instead."""
    (tmp_path / "mine" / "checkpoints" / "step-8").mkdir(parents=True)
    if entry:
        (tmp_path / folder / entry).mkdir(parents=True)
    cfg = compose(
        [f"run_dir={tmp_path / 'mine'}", f"resume={tmp_path / (folder or 'nowhere')}"]
    ).cfg
    with (
        nullcontext()
        if entry
        else pytest.raises(ValueError, match=r"resume=.*; name a run, a checkpoint such as")
    ):
        refuse_paths(cfg)


def test_a_python_that_is_too_old_or_too_new_is_named():
    for version in ((3, 6, 15), (3, 10, 13), (3, 14, 0)):
        with pytest.raises(SystemExit) as stopped:
            refuse_python(version, "/usr/bin/python")
        this = ".".join(map(str, version))
        said = (
            f"error: fastlatent needs Python 3.11 to 3.13; this is {this} (/usr/bin/python); "
            "`make setup PYTHON="
        )
        assert str(stopped.value).startswith(said)
    for version in ((3, 11, 0), (3, 12, 1), (3, 13, 9)):
        refuse_python(version)


@pytest.mark.parametrize(
    ("word", "exported", "anew"),
    [(sys.executable, "", False), ("/no/python", "", True), (None, "/no/python", False)],
)
def test_a_venv_is_made_anew_for_another_python_on_the_command_line_alone(
    word, exported, anew, tmp_path: Path
):
    """Whatever made it: this one has no pyvenv.cfg."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    words = ["make", "-n", "setup", f"VENV={tmp_path}", *([f"PYTHON={word}"] if word else [])]
    env = os.environ | {"MAKEFLAGS": ""} | ({"PYTHON": exported} if exported else {})
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert (f"rm -rf {tmp_path}" in done.stdout) is anew


@pytest.mark.parametrize(
    "start",
    [
        ["train.py"],
        ["precompute_latents.py"],
        ["-m", "scripts.sample"],
        ["-m", "scripts.bench"],
        ["make"],
    ],
)
def test_an_older_python_is_told_before_anything_fails_on_it(start: list[str], tmp_path: Path):
    places = [
        shutil.which("python3.10"),
        *map(str, Path.home().glob(".pyenv/versions/3.10*/bin/python")),
    ]
    working = (
        place
        for place in places
        if place and not subprocess.run([place, "-c", ""], check=False).returncode
    )
    if (older := next(working, None)) is None:
        pytest.skip("no Python 3.10 at hand")
    words = (
        ["make", "setup", f"PYTHON={older}", f"VENV={tmp_path / 'venv'}"]
        if start == ["make"]
        else [older, *start]
    )
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode
    assert done.stderr.startswith("error: fastlatent needs Python 3.11 to 3.13; this is 3.10.")
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    ("earlier", "now"), [("training.process.loggers.NoLogger", "training.loggers.NoLogger")]
)
def test_names_of_earlier_versions_are_understood(earlier: str, now: str, tmp_path: Path):
    """On a command line, and in the configuration that a run of an earlier version left."""
    found = resolve_target(earlier, "logger")
    assert f"{found.__module__}.{found.__qualname__}" == now
    file = tmp_path / "config.yaml"
    file.write_text(f"logger:\n  _target_: {earlier}\n")
    assert read_config(file) == {"logger": {"_target_": now}}
