"""The forecast of memory: which keys save how much, and what sharding divides."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from accel.techniques.gradient_checkpointing import CheckpointBlocks
from accel.techniques.offload_activations import OffloadActivations
from accel.techniques.parallel import DataParallel
from common.config.compose import compose
from scripts.plan import memory
from scripts.plan.changes import count_savings, list_savings
from scripts.plan.question import Question
from tests.harness.plans import PLANNED_RUN, forecast_words, pretend_processes
from training.weights.pretrained import build_on_meta


@pytest.mark.filterwarnings("ignore")  # of FSDP2 on the block's views, which nobody writes to
def test_fsdp_reduces_once_a_block_and_once_for_the_rest():
    """FSDP2 gathers as often in each pass, except the root in the backward pass. The plan of many
    GPUs relies on this; here at 1,024 processes."""
    question = forecast_words().question
    model = build_on_meta(question.cfg.model, question.spec).to_empty(device="cpu")
    model.init_buffers()
    with pretend_processes(1024), CommDebugMode() as seen:
        mesh = dist.init_device_mesh("cpu", (1024,))
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh)
        latents = torch.zeros(1, 4, 8, 8)
        model(latents, torch.zeros(1), torch.zeros(1, dtype=torch.long)).sum().backward()
    counts = {str(op): n for op, n in seen.get_comm_counts().items()}
    scatters = sum(n for op, n in counts.items() if "scatter" in op)
    assert scatters == model.depth + 1
    assert sum(counts.values()) - scatters == 2 * model.depth + 1


@pytest.mark.parametrize(
    ("base", "saving", "part"),
    [
        ("", "runtime.residual_in_fp32=false runtime.precision=bf16", "kept"),
        ("", "runtime.fused_add_norm=auto runtime.fused_scan=true", "kept"),
        ("model=conv_xs model.dim=64", "runtime.fused_conv=true", "kept"),
        (
            "model=dit_xs model.dim=64 data.height=32 data.width=32 runtime.attention=math",
            "runtime.attention=auto",
            "kept",
        ),
        ("batch_size=512", "runtime.offload_activations=true", "total"),
    ],
)
def test_what_saves_memory_saves_it(base, saving, part):
    """Keys that the counted steps of test_forecast.py do not have."""
    less = forecast_words(*base.split(), *saving.split()).needs
    assert getattr(less, part) < 0.95 * getattr(forecast_words(*base.split()).needs, part)


def test_sharding_cuts_the_state():
    alone = forecast_words()
    ddp, fsdp, hsdp = (
        forecast_words(f"runtime.parallel.mode={way}", "batch_size=2048", gpus=64)
        for way in ("ddp", "fsdp", "hsdp")
    )
    assert fsdp.needs.total < hsdp.needs.total < ddp.needs.total == alone.needs.total
    assert fsdp.lasting["optimizer"] == pytest.approx(alone.lasting["optimizer"] / 64)
    # the model is built whole before it is sharded
    assert fsdp.phases["start"].weights == alone.needs.weights


def forecast_parallel(*words):
    return forecast_words(*(f"runtime.parallel.{word}" for word in words), gpus=2)


def test_options_of_parallelism_move_the_forecast():
    copied = forecast_parallel("mode=ddp", "gradient_as_bucket_view=false")
    assert copied.buckets == copied.lasting["gradients"] > 0.0
    assert forecast_words(gpus=2).buckets == 0.0
    offloaded = forecast_parallel("mode=fsdp", "cpu_offload=true")
    assert offloaded.lasting["weights"] == 0.0 < offloaded.lasting["on_host"]
    whole = forecast_parallel("mode=fsdp", "reshard_after_forward=false")
    assert whole.gathered > forecast_parallel("mode=fsdp").gathered > 0.0
    # gradients are whole until the last micro-batch
    once, four_times = (
        forecast_words("runtime.parallel.mode=fsdp", f"accumulation_steps={n}", gpus=8)
        .phases["backward"]
        .gradients
        for n in (1, 4)
    )
    assert four_times >= 8 * once > 0.0


def test_one_of_many_processes_counts_as_one_that_is_alone(monkeypatch):
    """A process group, which would wrap the model in DDP, does not change the count."""
    question = Question(compose(PLANNED_RUN).cfg, forecast_words().question.spec, gpus=2, gpu=False)
    monkeypatch.setattr(memory, "COUNT_CACHE", {})
    alone = memory.forecast(question).needs
    monkeypatch.setattr(memory, "COUNT_CACHE", {})
    with pretend_processes(2):
        assert memory.forecast(question).needs == alone


def test_what_saves_memory_is_tried_from_the_cheapest_on():
    """First all kernels together, then micro-batches that leave enough samples, then recomputing,
    then smaller micro-batches; changes that move losses only without `exact`."""
    question = forecast_words("batch_size=32").question
    changes = [saving.values for saving in list_savings(question)]
    assert set(changes[0].values()) == {"auto"}
    steps = [i for i, values in enumerate(changes) if "accumulation_steps" in values]
    assert [changes[i]["accumulation_steps"] for i in steps] == [2, 4, 8, 16, 32]
    recomputing = changes.index({"gradient_checkpointing": True, "checkpoint_policy": "blocks"})
    assert steps[1] < recomputing < steps[2]
    exact = [saving.values for saving in list_savings(question, exact=True)]
    assert {"optim": "adamw_8bit"} in changes
    assert not any("optim" in values or "weights" in values for values in exact)


def test_what_each_change_saves_is_counted_and_the_most_comes_first(monkeypatch):
    """The order is that of this run; keys that are not available are left out."""
    monkeypatch.setattr(
        "scripts.plan.changes.TECHNIQUES", (CheckpointBlocks, DataParallel, OffloadActivations)
    )
    now = forecast_words("batch_size=256")
    rows = count_savings(now)
    sizes = [row["bytes"] for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    names = [row["words"][-1].removeprefix("runtime.") for row in rows]
    blocks, selective = (f"checkpoint_policy={policy}" for policy in ("blocks", "selective"))
    assert names == ["offload_activations=true", blocks, "accumulation_steps=2", selective]
    changed = forecast_words("batch_size=256", *rows[0]["words"])
    assert sizes[0] == pytest.approx(now.needs.total - changed.needs.total)


def test_models_of_other_makes_are_counted_whole_or_refused():
    expected = forecast_words("model.depth=3").needs.total
    own = "extensions=[tests]"
    target = "model._target_=tests.harness.planted_tuning"
    fixed = forecast_words(own, f"{target}.Fixed", "~model.depth")
    assert fixed.depths == [3]
    assert fixed.needs.total == pytest.approx(expected, rel=1e-3)
    with pytest.raises(ValueError, match=f"{target}.Looking: its step cannot be"):
        forecast_words(own, f"{target}.Looking")


def test_heads_after_deep_blocks_are_counted():
    """Blocks are counted with few of them, where the heads stand after the first one."""
    plain = forecast_words("model.depth=9")
    heads = ["model.internal_block=8", "objective.align_weight=1", "objective.align_block=9"]
    plan = forecast_words("model.depth=9", *heads)
    assert plan.network.taps == {"internal": 8, "latent": 9}
    assert plan.network.count_train_flops() > plain.network.count_train_flops()
    assert plain.needs.total < plan.needs.total < 1.3 * plain.needs.total
