"""Objective, schedule, averages, accumulation, evaluation, loggers, and whole runs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from accel.kernels.counter_noise import Purpose, counter_normal
from data.digits import DigitLatents
from data.loader import Batch
from models.autoencoders import PixelAutoencoder
from models.images import LINE
from models.sampler import make_guided_velocity, sample, shift_times
from sampling.load import draw_latents, load_run
from tests.harness.denoisers import fill_zero_layers, make_denoiser
from tests.harness.sets import random_samples, save_latent_set
from tests.harness.steps import assemble, tiny_training
from train import train
from training.assemble import Training, restore
from training.checkpoint.files import make_header
from training.checkpoint.save import Checkpoints
from training.config.compose import compose
from training.config.schema import SamplingConfig
from training.distributed.ranks import Ranks
from training.environment import find_peak_flops
from training.evaluate import draw_sample_grid, evaluate
from training.loggers import NoLogger, WandbLogger
from training.metrics import Meter, SafeLogger
from training.objective import FlowMatching
from training.optimizers import Schedule
from training.state import TrainState
from training.step import EMA, StepOutput

CPU = torch.device("cpu")


def batch_of(size=64, channels=1):
    position = torch.arange(size)
    latents = counter_normal(9, Purpose.SYNTHETIC, position, (channels, 4, 4))
    return Batch(latents, position % 3, position, position)


def test_a_perfect_model_has_no_loss():
    """v = ε - z exactly: recovered here from x and t alone, because z = 0."""
    batch = batch_of()
    batch = batch._replace(latents=torch.zeros_like(batch.latents))
    losses, t = FlowMatching().losses(
        lambda x, t, y: x / t.view(-1, 1, 1, 1), batch, seed=0, null_label=3
    )
    assert losses.max() < 1e-10
    assert ((t > 0) & (t < 1)).all()


def test_time_is_logit_normal_and_shifted():
    batch = batch_of(4000)
    _, t = FlowMatching(logit_mean=0.5, logit_std=0.7).losses(
        lambda x, *_: x, batch, seed=0, null_label=3
    )
    logit = torch.logit(t)
    assert abs(logit.mean() - 0.5) < 0.05
    assert abs(logit.std() - 0.7) < 0.05
    _, moved = FlowMatching(logit_mean=0.5, logit_std=0.7, timestep_shift=3.0).losses(
        lambda x, *_: x, batch, seed=0, null_label=3
    )
    torch.testing.assert_close(moved, shift_times(t, 3.0))
    assert (moved > t).all()


def test_labels_are_dropped_at_their_rate_in_training_only():
    seen = []

    def model(x, t, y):
        seen.append(y)
        return x

    batch = batch_of(4000)
    FlowMatching(label_dropout=0.3).losses(model, batch, seed=0, null_label=3)
    FlowMatching(label_dropout=0.3).losses(model, batch, seed=0, null_label=3, held_out=True)
    assert abs((seen[0] == 3).float().mean() - 0.3) < 0.03
    assert torch.equal(seen[1], batch.labels)


def test_a_dropped_label_becomes_the_one_that_no_class_has():
    """Digits have the classes 0 … 9."""
    training = tiny_training("mamba", "objective.label_dropout=1.0")
    seen = []
    training.step.forward = lambda x, t, y: seen.append(y) or x
    training.step.losses(next(training.loader))
    assert seen[0].unique().tolist() == [10]


def test_draws_follow_the_position_not_the_batch():
    batch = batch_of(8)
    model = fill_zero_layers(make_denoiser("mamba", channels=1, height=4, width=4))
    whole, _ = FlowMatching().losses(model, batch, seed=0, null_label=3)
    part, _ = FlowMatching().losses(model, Batch(*(t[3:5] for t in batch)), seed=0, null_label=3)
    torch.testing.assert_close(part, whole[3:5])


def test_warm_up_and_cosine_in_samples():
    schedule = Schedule("cosine", total_samples=1000, warmup_samples=100, final=0.1)
    assert schedule(50) == 0.5
    assert schedule(100) == 1.0
    assert math.isclose(schedule(550), 0.55)
    assert math.isclose(schedule(1000), 0.1)
    assert Schedule("constant", 1000, 100)(999) == 1.0


def test_the_last_step_of_a_cosine_to_zero_learns():
    schedule = Schedule("cosine", total_samples=1000)
    assert schedule(990, 10) == schedule(990)  # the others have the rate of their end
    assert schedule(1000, 10) == schedule(995) > 0.0
    assert schedule(1008, 16) == schedule(992)  # also where it goes beyond the horizon


def test_the_average_has_its_half_life_and_ramp():
    model = torch.nn.Linear(1, 1, bias=False)
    ema = EMA(model, half_life_samples=100.0, ramp=0.05)
    model.weight.data.fill_(0.0)
    ema.averages[0].fill_(1.0)
    for _ in range(10):
        ema.update(torch.tensor(ema.compute_weight(10**6, 10)))
    assert math.isclose(ema.averages[0].item(), 0.5, rel_tol=1e-5)
    assert math.isclose(ema.compute_weight(200, 10), 0.5)  # half-life 0.05 · 200 = 10 samples


def test_a_step_has_the_rates_of_the_samples_it_ends_at():
    step = tiny_training("mamba", "schedule.warmup_samples=160").step  # 8 samples a step
    step.schedule(72)
    assert step.lr == pytest.approx(0.5e-3)  # half of the warm-up
    step.schedule(152)
    assert step.lr == pytest.approx(1e-3)
    # the half-life is 0.05 · 160 samples: one step
    assert step.ema_weight.item() == pytest.approx(0.5)


def test_an_update_in_parts_has_the_same_bits(monkeypatch):
    model = fill_zero_layers(make_denoiser("dit"))
    whole = EMA(model, 100.0)
    weight = torch.tensor(0.3)
    monkeypatch.setattr("accel.composite_optimizer.PART_ELEMENTS", 1000)
    parts = EMA(model, 100.0)
    assert len(whole.parts) == 1 < len(parts.parts)
    for p in model.parameters():
        p.data.mul_(1.1)
    for ema in (whole, parts):
        ema.update(weight)
    assert all(torch.equal(a, b) for a, b in zip(whole.averages, parts.averages, strict=True))


def test_averages_do_not_depend_on_the_batch_size():
    ema = EMA(torch.nn.Linear(1, 1), half_life_samples=100.0)
    small = (1 - ema.compute_weight(10**6, 10)) ** 4
    assert math.isclose(small, 1 - ema.compute_weight(10**6, 40))


def test_the_averages_are_applied_and_taken_back_bit_for_bit():
    model = fill_zero_layers(make_denoiser("dit"))
    ema = EMA(model, 100.0)
    for average in ema.averages:
        average.add_(1.0)
    before = [p.detach().clone() for p in model.parameters()]
    averages = [a.clone() for a in ema.averages]
    with ema.swap_in():
        assert all(torch.equal(p, a) for p, a in zip(model.parameters(), averages, strict=True))
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(ema.averages, averages, strict=True))


@pytest.mark.parametrize("parts", [2, 4])
def test_accumulation_equals_one_large_batch(parts):
    _, step, _, loader = assemble(fused_adamw=True)
    whole = step([next(loader)])
    _, accumulated, _, _ = assemble(fused_adamw=True)
    pieces = DigitLatents(batch_size=8 // parts, seed=0, device=CPU)
    output = accumulated([next(pieces) for _ in range(parts)])
    torch.testing.assert_close(output.loss, whole.loss, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(output.grad_norm, whole.grad_norm, rtol=1e-5, atol=0.0)
    moments = (optimizer.state.values() for optimizer in (step.optimizer, accumulated.optimizer))
    # after one step the first moment is the gradient, times 0.1
    for a, b in zip(*moments, strict=True):
        torch.testing.assert_close(a["exp_avg"], b["exp_avg"], rtol=1e-4, atol=1e-7)


def fingerprint(state: TrainState) -> str:
    """sha256 over all parameters, averages and optimizer tensors: equal states have equal
    fingerprints."""
    digest = hashlib.sha256()
    content = state.state_dict()
    tensors = list(content["model"].values()) + list(content["ema"].values())
    tensors += list(content["optimizer"].values())
    for tensor in tensors:
        digest.update(
            tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()


def test_warm_up_leaves_no_trace():
    training = tiny_training(fused_adamw=True)
    state = training.state
    loader = training.loader
    training.take_step()
    before = fingerprint(state)
    seen = loader.state_dict()
    rng = torch.get_rng_state()
    samples = state.samples
    with state.preserve():
        training.stack.warm_up(lambda: (torch.rand(3), training.take_step()), training.model.blocks)
        assert fingerprint(state) != before
    assert fingerprint(state) == before
    assert (loader.state_dict(), state.samples) == (seen, samples)
    assert torch.equal(torch.get_rng_state(), rng)


def test_evaluation_is_fixed_and_uses_the_averages():
    training = tiny_training()
    first = evaluate(training)
    assert evaluate(training) == first
    batch = next(training.loader.held_out(1000))
    with training.state.use_averages(), torch.no_grad():
        loss, t = training.step.losses(batch, held_out=True)
    for i, name in enumerate(("t0.00_0.25", "t0.25_0.50", "t0.50_0.75", "t0.75_1.00")):
        inside = loss[(t >= i / 4) & (t < (i + 1) / 4)]
        assert len(inside) > 5
        assert first[f"eval_loss_{name}"] == pytest.approx(inside.mean().item(), rel=1e-5)
    # each quarter has a loss of its own
    assert len({round(value, 6) for value in first.values()}) == 5
    with training.state.use_averages():
        assert not training.model.training
    assert training.model.training
    training.step.ema.averages[0].add_(0.1)
    assert evaluate(training) != first


def test_a_grid_has_a_row_for_each_class(tmp_path, monkeypatch):
    def shade_of_its_class(model, spec, labels, *_):
        return (labels / 4.5 - 1).view(-1, 1, 1, 1).expand(-1, 1, 8, 8)

    monkeypatch.setattr("training.evaluate.draw_latents", shade_of_its_class)
    training = tiny_training("mamba", "sampling.per_class=3")
    file = draw_sample_grid(training, PixelAutoencoder(), tmp_path / "grid.png")
    with Image.open(file) as grid:
        pixels = np.asarray(grid)[:, -120:, 0]  # without the names
    shades = pixels[20::40, 20::40]  # 8 pixels and a frame, four times as large
    assert shades.tolist() == [[round(255 * label / 9)] * 3 for label in range(10)]

    names = [f"kind {i}" for i in range(9)] + ["an apple of a very long name", *"αβ"]
    spec = dataclasses.replace(training.loader.spec, class_names=names, num_classes=12)
    monkeypatch.setattr(training.loader, "spec", spec)
    with Image.open(draw_sample_grid(training, PixelAutoencoder(), tmp_path / "named.png")) as named:
        assert named.height == 400 + LINE  # which says that these are 10 of 12
        beside = np.asarray(named)[:, :-120, 0]
    assert 80 < beside.shape[1] < 200
    for row in range(10):
        assert (beside[40 * row : 40 * row + 40] < 128).any(), f"row {row} has no name"
    assert (np.asarray(named)[400:] < 128).any()


def test_the_first_rate_after_a_resume_is_of_new_steps_only():
    meter = Meter(batch_size=8, tokens=1, flops_per_sample=1, peak_flops=None)
    meter.load_state_dict(
        {"loss": 3.0, "skipped": 0.0, "backed_off": 0.0, "in_row": 0.0, "steps": 3}
    )
    zero = torch.zeros(())
    meter.update(StepOutput(torch.tensor(5.0), zero, zero, zero))
    assert meter.report(lr=0.1)["loss"] == 2.0  # of all four
    assert meter.trained_samples == 8


def test_the_shift_moves_the_times_at_which_a_sampler_calls_the_model():
    times: list[float] = []
    sample(lambda x, t: times.append(t) or x, torch.ones(1, 1, 1, 1), 4, "euler", shift=3.0)
    assert times == pytest.approx([1.0, 0.9, 0.75, 0.5])  # 3t / (1 + 2t) at 1, 3/4, 1/2, 1/4


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("shift", 3.0),
        ("steps", 3),
        ("solver", "euler"),
        ("guidance", 3.0),
        ("guidance_interval", [0.1, 0.9]),
    ],
)
def test_every_setting_of_the_sampler_reaches_the_samples(key, value):
    training = tiny_training()
    spec = training.loader.spec
    labels = torch.arange(4)

    def latents(**settings):
        return draw_latents(
            training.model, spec, labels, labels, 0, SamplingConfig(**{"steps": 4} | settings)
        )

    assert torch.equal(latents(), latents())
    assert not torch.allclose(latents(), latents(**{key: value}))


@pytest.mark.parametrize("solver", ["euler", "heun"])
def test_a_straight_path_is_exact_in_one_step(solver):
    z = torch.randn(2, 1, 4, 4)
    noise = torch.randn(2, 1, 4, 4)
    torch.testing.assert_close(
        sample(lambda x, t: noise - z, noise, 1, solver, shift=3.0), z, rtol=1e-4, atol=1e-5
    )


def test_guidance_extrapolates_inside_its_interval_only():
    calls = []

    def model(x, t, y):
        calls.append(len(x))
        return y.view(-1, 1, 1, 1).float().expand_as(x)

    velocity = make_guided_velocity(
        model, torch.tensor([1, 2]), null_label=5, guidance=3.0, guidance_interval=(0.2, 0.8)
    )
    x = torch.zeros(2, 1, 1, 1)
    assert velocity(x, 0.5).flatten().tolist() == [5 + 3 * (1 - 5), 5 + 3 * (2 - 5)]
    assert velocity(x, 0.9).flatten().tolist() == [1, 2]
    assert calls == [4, 2]


def test_sampling_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="steps=0"):
        sample(lambda x, t: x, torch.zeros(1, 1, 1, 1), 0, "heun")
    with pytest.raises(ValueError, match="solver=dpm"):
        sample(lambda x, t: x, torch.zeros(1, 1, 1, 1), 4, "dpm")


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_all_that_it_promises(run, tmp_path):
    summary = run(
        "sample_every=2", "save_every=1", "eval_every=1", "sampling.per_class=2", "sampling.steps=2"
    )
    folder = tmp_path / "run"
    assert summary == json.loads((folder / "summary.json").read_text())
    keys = {
        "loss",
        "eval_loss",
        "steps",
        "samples",
        "samples_per_s",
        "mfu",
        "memory_reserved_peak",
        "skipped_steps",
    }
    assert keys | {"seconds", "ledger", "checkpoint", "sample_grid"} <= summary.keys()
    assert (summary["steps"], summary["samples"]) == (2, 16)
    assert [line["step"] for line in lines(folder)] == [1, 2]
    assert all("loss" in line and "eval_loss" in line for line in lines(folder))
    assert Path(summary["sample_grid"]).stat().st_size > 0
    assert (Path(summary["checkpoint"]) / "ema.safetensors").is_file()
    assert {"config.yaml", "environment.json", "ledger.json"} <= {
        file.name for file in folder.iterdir()
    }
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert "total_samples=16" in environment["overrides"]


def test_the_loss_falls(run):
    long = run(
        "total_samples=1600",
        "batch_size=32",
        "log_every=10",
        "optim.lr=3e-3",
        "schedule.warmup_samples=160",
    )
    assert long["loss"] < 1.3  # 2 at the start: variance of noise plus variance of data


def test_weights_of_another_run_start_a_new_one(run, tmp_path):
    run("save_every=2")
    folder = tmp_path / "run"
    ema = load_file(folder / "checkpoints/step-2/ema.safetensors")
    summary = run(f"init_from={folder}", "optim.lr=0", "save_every=2", folder="second")
    again = load_file(Path(summary["checkpoint"]) / "model.safetensors")
    assert all(torch.equal(again[name], value) for name, value in ema.items())
    bad = tmp_path / "bad.safetensors"
    save_file({"x": torch.zeros(1)}, bad)
    with pytest.raises(ValueError, match="does not fit this model"):
        run(f"init_from={bad}", folder="third")


def weights_file(training: Training, file: Path, described: bool = True) -> Path:
    """The model of a run, as its checkpoint would hold it; or without a description, as another
    tool would."""
    told = {"model": training.cfg.model, "spec": training.loader.spec.as_dict(), "step": 1}
    save_file(training.model.state_dict(), file, make_header(told, "model") if described else None)
    return file


def started_from(file: Path, training: Training) -> str:
    cfg = dataclasses.replace(training.cfg, init_from=str(file))
    return restore(cfg, training.state, Checkpoints(file.parent / "none"), {})


CLASSES = ["apple", "pear", "plum"]


@pytest.mark.parametrize(
    ("then", "now", "rows", "said"),
    [
        (
            CLASSES,
            ["kiwi", "plum"],
            [None, 2, 3],
            "kept 1 of 3 rows of the label table by the names .*plum.* rows: 1",
        ),
        (CLASSES, ["pear", "plum", "apple"], [1, 2, 0, 3], "kept 3 of 3 .* new rows: 0"),
        (
            CLASSES,
            ["a", "b", "c"],
            [None, None, None, 3],
            "kept 0 of 3 .* classes, and the null row; new rows: 3",
        ),
        ([], CLASSES, [None, None, None, 0], "kept 0 of 0 .* new rows: 3"),
        (CLASSES, [], [3], "kept 0 of 3 .* new rows: 0"),
        (CLASSES, CLASSES, [0, 1, 2, 3], "safetensors$"),
    ],
)
def test_fine_tuning_keeps_the_label_rows_of_equal_names(then, now, rows, said, tmp_path):
    """By name, not by place; and everything else of the model, for its averages too."""
    old = tiny_training("dit", *set_with(tmp_path / "then", then), "sampling.guidance=1")
    new = tiny_training("dit", *set_with(tmp_path / "now", now), "sampling.guidance=1")
    with torch.no_grad():
        for parameter in old.model.parameters():
            parameter.add_(1.0)
    fresh = new.model.label_embed.table.weight.detach().clone()
    sentence = started_from(weights_file(old, tmp_path / "old.safetensors"), new)
    assert re.search(said, sentence), sentence
    for state in (new.model.state_dict(), new.state.ema.state_dict()):
        table = state.pop("label_embed.table.weight")
        trained = old.model.label_embed.table.weight
        expected = [fresh[i] if row is None else trained[row] for i, row in enumerate(rows)]
        assert torch.equal(table, torch.stack(expected))
        assert all(
            torch.equal(value, old.model.state_dict()[name]) for name, value in state.items()
        )


def test_weights_that_do_not_fit_are_named_by_the_first_tensor(tmp_path):
    words = set_with(tmp_path / "set", CLASSES), "sampling.guidance=1"
    new = tiny_training("dit", *words[0], words[1])
    deeper, wider = (
        tiny_training("dit", *words[0], words[1], f"model.{key}") for key in ("depth=3", "dim=96")
    )
    other = tiny_training("dit", *set_with(tmp_path / "other", ["a", "b"]), words[1])
    file = tmp_path / "old.safetensors"
    for old, described, said in (
        (
            deeper,
            True,
            r"modulation.weight has shape \(1280, 64\) in the file and has shape \(896, 64\) in "
            r"the model\.$",
        ),
        (
            wider,
            True,
            r"pos_embed has shape \(1, 4, 96\) in the file and has shape \(1, 4, 64\) in the "
            r"model\.$",
        ),
        (
            other,
            False,
            r"label_embed.table.weight has shape \(3, 64\) .* and the file names no classes\.$",
        ),
    ):
        with pytest.raises(ValueError, match=rf"init_from=.*does not fit this model: {said}"):
            started_from(weights_file(old, file, described), new)
    like = tiny_training("dit", *words[0], words[1])
    assert started_from(weights_file(like, file, described=False), new).endswith("old.safetensors")


def test_a_logger_cannot_stop_a_run(capsys):
    class Broken(NoLogger):
        def log(self, metrics, samples):
            raise ConnectionError("gone")

    logger = SafeLogger(Broken())
    with pytest.warns(UserWarning, match="gone"):
        logger.log({}, 0)
    logger.log({}, 1)
    logger.finish({})


def test_a_logger_is_told_the_machine_and_if_a_run_is_stopped_its_evidence(
    run, monkeypatch, capsys
):
    told: dict = {}
    monkeypatch.setattr(NoLogger, "start", lambda self, folder, config: told.update(config))
    monkeypatch.setattr(NoLogger, "finish", lambda self, summary: told.update(summary))
    monkeypatch.setattr(TrainState, "advance", lambda self, samples: sys.exit(75))
    with pytest.raises(SystemExit):
        run()
    assert told["hardware"]
    assert {"versions", "git"} <= told.keys()
    assert told["ledger"]["fused_adamw"]["evidence"]
    assert capsys.readouterr().out.count("\nAcceleration: compile=false fused_adamw=") == 1


def test_wandb_offline_and_unreachable(run, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    run("logger=wandb", "logger.mode=offline")
    assert list((tmp_path / "run").glob("wandb/offline-run-*"))

    import wandb

    monkeypatch.setattr(
        wandb, "init", lambda **_: (_ for _ in ()).throw(wandb.errors.CommError("no network"))
    )
    with pytest.warns(UserWarning, match="no network"):
        summary = run("logger=wandb", folder="second")
    assert summary["steps"] == 2
    assert WandbLogger().mode == "online"


def test_wandb_keeps_the_picture_and_no_null(monkeypatch):
    """A path under `draw_sample_grid` took the picture's place in the summary, and `mfu` was null on a
    CPU."""
    logged: list[dict[str, object]] = []
    logger = WandbLogger()
    logger.run = SimpleNamespace(
        log=logged.append, summary={"sample_grid": "a picture"}, finish=lambda: None
    )
    monkeypatch.setattr("wandb.teardown", lambda: None)
    logger.log({"loss": 1.0, "mfu": None}, 8)
    logger.finish({"steps": 2, "mfu": None, "sample_grid": "runs/a/samples/step-2.png"})
    assert logged == [{"loss": 1.0, "samples": 8}]
    assert logger.run.summary == {"sample_grid": "a picture", "steps": 2}


def test_tensorboard(run, tmp_path):
    pytest.importorskip("tensorboard", reason="the tensorboard extra is not installed")
    run("logger=tensorboard")
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))


def test_a_missing_logger_package_costs_one_warning(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.warns(UserWarning, match="TensorBoardLogger failed"):
        assert run("logger=tensorboard")["steps"] == 2


def test_a_fullrun_shows_its_fastrun_or_warns(tmp_path, capsys):
    tiny_words = [
        "model.dim=32",
        "model.depth=1",
        "model.head_dim=32",
        "total_samples=8",
        "batch_size=8",
        "sample_every=0",
    ]
    words = [
        *tiny_words,
        "save_every=0",
        "eval_every=0",
        "runtime=eager",
        "schedule.warmup_samples=0",
    ]
    train(compose(["experiment=fullrun", *words, f"run_dir={tmp_path / 'one'}"]))
    assert "warning: no fastrun" in capsys.readouterr().out
    train(compose(["experiment=fastrun", *words, f"run_dir={tmp_path / 'two'}"]))
    train(compose(["experiment=fullrun", *words, f"run_dir={tmp_path / 'three'}"]))
    said = capsys.readouterr().out
    assert f"latest fastrun of this model and runtime: {tmp_path / 'two'}" in said
    assert "samples/s" in said
    train(compose(["experiment=fullrun", *words, "model=dit_xs", f"run_dir={tmp_path / 'four'}"]))
    assert "warning: no fastrun of model=dit_xs" in capsys.readouterr().out


def test_a_step_that_is_not_finite_is_counted(run, monkeypatch):
    original = DigitLatents.__next__
    calls = []

    def poisoned(self):
        calls.append(1)
        batch = original(self)
        return batch._replace(latents=batch.latents * float("nan")) if len(calls) == 4 else batch

    monkeypatch.setattr(DigitLatents, "__next__", poisoned)
    assert run("total_samples=32")["skipped_steps"] == 1


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 80GB HBM3", "fp16", 989e12),
        ("NVIDIA H100 NVL", "bf16", None),  # lower than its name says: not in the table
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100-SXM4-80GB", "fp32", None),  # a share of the 16-bit peak would mean nothing
        ("NVIDIA H100 80GB HBM3", "fp8", None),  # some products are in 8 bits, and the rest is not
        ("NVIDIA A40", "bf16", 149.7e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("Some other GPU", "bf16", None),
    ],
)
def test_utilisation_is_of_a_known_peak_or_none(name, precision, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert find_peak_flops(torch.device("cuda"), precision) == peak
    assert find_peak_flops(torch.device("cpu"), precision) is None


# Data without classes


def set_with(folder: Path, names: list[str], side: int = 4) -> list[str]:
    """Words of a run on random latents of classes with these names."""
    samples = [random_samples(count, seed, (1, side, side)) for seed, count in enumerate((20, 4))]
    for split in samples:
        split["labels"] %= max(1, len(names))
    encoder = {"_target_": "models.autoencoders.PixelAutoencoder"}
    parts = list(zip(("train", "held_out"), samples, strict=True))
    save_latent_set(folder, parts, class_names=names, encoder=encoder, encoder_sha256=None)
    return ["data=resident", f"data.path={folder}", "model.patch_size=2"]


@pytest.fixture
def unconditional(tmp_path) -> list[str]:
    return set_with(tmp_path / "set", [])


def test_data_without_classes_is_trained_on_and_sampled(unconditional, run, tmp_path):
    """The one label, 0, is the null label: dropping it changes nothing, and grids have one row."""
    small = [
        "sampling.guidance=1",
        "sampling.steps=2",
        "sampling.per_class=3",
        "sample_every=1",
        "eval_every=1",
    ]
    summary = run(*unconditional, *small, "save_every=1", "objective.label_dropout=0.5")
    assert math.isfinite(summary["eval_loss"])
    with Image.open(summary["sample_grid"]) as grid:
        assert grid.width == 3 * grid.height  # one row
    trained = load_run(tmp_path / "run", device="cpu")
    assert trained.model.label_embed.table.weight.shape[0] == 1
    assert trained.sample([0, 0], steps=2).shape == (2, 4, 4, 3)
    with pytest.raises(ValueError, match=r"labels: 1 is no class of this run, whose data has none"):
        trained.sample([1])
    with pytest.raises(
        ValueError, match=r"guidance=1.5: the data has no classes to guide to; set guidance=1\."
    ):
        trained.sample([0], guidance=1.5)


def test_data_without_classes_is_not_guided(unconditional, run):
    with pytest.raises(
        ValueError, match=r"sampling.guidance=1.5: the data has no classes .* sampling.guidance=1\."
    ):
        run(*unconditional)


def test_what_any_process_skipped_is_known_to_all():
    """Two processes read other blocks; the first writes the metrics and the checkpoint."""

    class Two(Ranks):
        def all_reduce(self, values, how="mean"):
            return torch.ones_like(values)

        def gather_objects(self, item):
            return [item, {"b.tar (samples 0–3 of train)": 4}]

    training = tiny_training()
    training.ranks = Two(0, 2)
    training.loader.skipped = {"a.tar (samples 0–7 of train)": 8}
    assert training.note_skipped_data() == {"skipped_data": 12}
    assert (
        training.state.state_dict()["counters"]["skipped_data"].keys()
        == training.state.skipped_data.keys()
    )
    assert len(training.state.skipped_data) == 2
