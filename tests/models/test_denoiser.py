"""Denoisers of every family: contract, identity at the start, sizes, FLOPs."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from accel.kernels.ssd import definition
from common.config.build import build
from common.config.compose import compose, parse_yaml
from common.files import ROOT
from models.layers import Layer
from models.mixers.attention import Attention
from models.mixers.selective_scan import SelectiveScan
from tests.harness.denoisers import (
    FAMILIES,
    LATENTS,
    assert_every_parameter_matters,
    fill_zero_layers,
    make_denoiser,
    make_inputs,
)
from tests.harness.refusals import expect_refusal
from training.heads import ModelWithHeads
from training.objective import LatentHead

PARAMETERS = parse_yaml((ROOT / "tests/assets/parameters.yaml").read_text())
MODEL_SIZES = ("xs", "s", "b", "l", "xl")


@cache
def compose_model(name, *words):
    return compose([f"model={name}", *words]).cfg.model


def make_on_meta(name, *words, **spec):
    """A configured model on the meta device, where even the largest takes no time."""
    with torch.device("meta"):
        return build(compose_model(name, *words), "model", **LATENTS | spec)


@pytest.mark.parametrize("family", PARAMETERS)
@pytest.mark.parametrize("size", MODEL_SIZES)
def test_parameter_counts_are_golden(family, size):
    count = sum(p.numel() for p in make_on_meta(f"{family}_{size}").parameters())
    column = MODEL_SIZES.index(size)
    assert count == PARAMETERS[family][column]
    assert abs(count / PARAMETERS["dit"][column] - 1) < 0.09, "equal parameters in all families"


def test_every_kth_block_of_a_hybrid_has_attention():
    """The scans take rows and columns in turn as if the blocks with attention were not there."""
    model = make_denoiser("hybrid", depth=7, attention_every=3)
    mixers = [block.layers[0] for block in model.blocks]
    assert [isinstance(layer, Attention) for layer in mixers] == [0, 0, 1, 0, 0, 1, 0]
    scans = [layer for layer in mixers if not isinstance(layer, Attention)]
    assert [hasattr(layer, "order") for layer in scans] == [False, True] * 2 + [False]


def test_the_modulations_and_the_head_start_at_zero():
    """Each block therefore starts as the identity, and the velocity is zero."""
    model = make_denoiser("hybrid")
    for layer in (model.modulation, model.head):
        assert not any(parameter.any() for parameter in layer.parameters())


class KeepStream(Layer):
    """Keeps the stream that it reads, and returns patches of zeros."""

    def forward(self, stream, condition):
        self.stream = stream
        return torch.zeros(*stream.shape[:2], 16)


def add_up_stream(model, x, t, y, blocks):
    """The stream after so many blocks in fp32, by the textbook: z ← z + gate·layer(norm(z)·(1 +
    scale) + shift), with the tokens permuted around each layer; and the vectors of later layers."""
    cond = model.modulation(F.silu(model.time_embed(t) + model.label_embed(y)))
    vectors = iter(cond.unflatten(1, (-1, 1, model.dim)).unbind(1))
    z = model.patch_embed(model.patchify(x)) + model.pos_embed
    for block in model.blocks[:blocks]:
        for layer in block.layers:
            h = F.rms_norm(z, (model.dim,), eps=1e-6) * (1 + next(vectors)) + next(vectors)
            order = getattr(layer, "order", torch.arange(model.tokens))
            more = {"grid": model.grid} if hasattr(layer, "conv_weight") else {}
            more = {} if isinstance(layer, SelectiveScan) else more
            z = z + next(vectors) * layer(h[:, order], **more)[:, order.argsort()]
    return z, vectors


def estimate_velocity(model, stream, head, scale, shift):
    h = F.rms_norm(stream, (model.dim,), eps=1e-6)
    return model.unpatchify(head(h * (1 + scale) + shift))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_an_auxiliary_head_reads_the_sum_in_raster_order(family):
    """In training only; velocity, weights files and averages are the same as without it. A block
    returns its increment, not its norm: two published Mamba models get this wrong, and their
    residual stream grows with depth. The internal head reads the same sum; guidance moves the
    velocity away from its estimate."""
    model = fill_zero_layers(make_denoiser(family, depth=3, internal_block=2))
    inputs = make_inputs(model)
    network = ModelWithHeads(model)
    plain = model(*inputs)
    inner = network(*inputs)[1]["internal"]
    heads = {f"after_{block}": KeepStream() for block in (1, 2, 3)}
    for block, name in enumerate(heads, start=1):
        network.tap(name, block, "objective.key")
    network.aux_heads.update(heads)
    velocity, outputs = network(*inputs)
    assert torch.equal(velocity, plain)
    assert outputs.keys() == {"internal", *heads}
    assert all(out.shape == plain.shape for out in outputs.values())
    for blocks, head in enumerate(heads.values(), start=1):
        stream, vectors = add_up_stream(model, *inputs, blocks)
        torch.testing.assert_close(head.stream, stream)
    torch.testing.assert_close(plain, estimate_velocity(model, stream, model.head, *vectors))
    network.eval()
    assert network(*inputs)[1] == {}

    # The internal head has the same form as the last layers.
    _, t, y = inputs
    condition = F.silu(model.time_embed(t) + model.label_embed(y))
    vectors = model.internal.modulation(condition)[:, None].chunk(2, dim=2)
    stream, _ = add_up_stream(model, *inputs, 2)
    torch.testing.assert_close(
        inner, estimate_velocity(model, stream, model.internal.head, *vectors)
    )
    torch.testing.assert_close(model(*inputs, internal_guidance=3.0), inner + 3 * (plain - inner))
    with torch.autocast("cpu", torch.bfloat16):
        network.train()(*inputs)
    assert all(head.stream.dtype == torch.float32 for head in heads.values())


def test_heads_may_predict_the_clean_latent():
    """The flow is x = z + t·v, and internal guidance is linear."""
    plain, clean = (
        fill_zero_layers(make_denoiser("conv", internal_block=1, patch_rank=5, prediction=kind))
        for kind in ("velocity", "clean")
    )
    x, t, y = make_inputs(plain)
    z, v = (model(x, t, y, internal_guidance=2.0) for model in (plain, clean))
    torch.testing.assert_close(z + t.view(-1, 1, 1, 1) * v, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert clean(x, t, y).dtype == torch.float32
    assert clean(x, 0 * t, y).isfinite().all()


def test_patches_are_embedded_through_few_channels():
    full, low = (make_denoiser("dit", patch_size=4, patch_rank=rank) for rank in (0, 6))
    patches = torch.randn(2, 4, 64)
    assert torch.linalg.matrix_rank(low.patch_embed(patches)[0] - low.patch_embed.up.bias) <= 6
    saved = full.patch_embed.weight.numel() - 6 * (64 + 64)
    assert full.flops_per_sample() - low.flops_per_sample() == 2 * low.tokens * saved
    assert low.patch_embed.list_matrices() == {}


@pytest.mark.parametrize("family", PARAMETERS)
def test_a_model_made_on_meta_has_the_same_initial_bits_each_time(family):
    """Memory that is not initialised holds NaN here."""

    def make():
        with torch.device("meta"):
            model = make_denoiser(family, internal_block=1)
        model.to_empty(device="cpu")
        for tensor in (*model.parameters(), *model.buffers()):
            torch.nn.init.constant_(tensor, float("nan") if tensor.is_floating_point() else -1)
        torch.manual_seed(3)
        model.init_weights()
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}

    first = make()
    assert not any(tensor.isnan().any() or (tensor == -1).all() for tensor in first.values())
    torch.testing.assert_close(make(), first, rtol=0.0, atol=0.0)


def test_a_layer_that_nobody_counted_is_an_error():
    model = make_denoiser("dit")
    model.extra = torch.nn.Linear(64, 64)
    with expect_refusal("the model's part extra has no method flops"):
        model.flops_per_sample()
    head = LatentHead(64, 16)
    head.norm = torch.nn.LayerNorm(64)
    with pytest.raises(TypeError, match=r"LatentHead\.flops must count its layers"):
        head.flops(16)


@pytest.mark.parametrize("family", FAMILIES)
def test_latents_of_any_shape_time_label_and_every_parameter_matter(family):
    model = make_denoiser(family, channels=16, height=4, width=12)
    x, t, y = make_inputs(fill_zero_layers(model))
    out = model(x, t, y)
    assert out.shape == x.shape == (2, 16, 4, 12)
    assert torch.equal(model.unpatchify(model.patchify(x)), x)
    for other in ((1 - x, t, y), (x, t + 0.1, y), (x, t, y + 1)):
        assert not torch.allclose(out, model(*other))
    assert_every_parameter_matters(model, out)


def test_drop_path_zeroes_gates_and_keeps_the_mean():
    model = make_denoiser("mamba", drop_path=0.5)
    cond = torch.randn(4000, 2, 3, 64)
    uniforms = torch.rand(4000, 2, generator=torch.Generator().manual_seed(0))
    dropped = model.drop_blocks(cond, uniforms)
    assert torch.equal(dropped[:, :, :2], cond[:, :, :2])  # scale and shift stay
    assert torch.equal(dropped[:, 0], cond[:, 0])  # the rate grows from 0
    ratio = dropped[:, 1, 2] / cond[:, 1, 2]
    assert set(ratio.unique().tolist()) <= {0.0, 2.0}
    assert abs(ratio.mean() - 1) < 0.1


@pytest.mark.parametrize("family", PARAMETERS)
def test_weight_decay_leaves_vectors_embeddings_and_the_scan_alone(family):
    model = make_denoiser(family)
    names = dict(model.named_parameters()).keys()
    kinds = ("proj", "qkv", "w13", "w2", "patch_embed", "fc1", "fc2", "modulation", "head")
    decayed = {name for name in names if name.endswith(tuple(f"{kind}.weight" for kind in kinds))}
    assert names - model.no_weight_decay() == decayed


def test_positions_are_all_different_and_half_of_the_channels_tell_the_row():
    table = make_denoiser("conv", width=12, dim=30).pos_embed[0]
    distances = torch.cdist(table, table) + torch.eye(24)
    assert distances.min() > 0.1
    assert not table.view(4, 6, 30)[..., :16].diff(dim=1).any()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("patch_size", 3),  # of 8 rows
        ("patch_size", 8),  # of 12 columns
        ("head_dim", 48),
        ("drop_path", 1.0),
        ("attention_every", -1),
        ("attention_every", 3),  # of two blocks
        ("internal_block", 3),
        ("patch_rank", 16),  # of 16 values
        ("patch_rank", -1),
    ],
)
def test_impossible_sizes_are_refused(key, value):
    with expect_refusal(f"model.{key}={value}"):
        make_denoiser("mamba", width=12, **{key: value})


@pytest.mark.parametrize(("size", "side"), [("xs", 16), ("b", 32)])
@pytest.mark.parametrize("family", PARAMETERS)
def test_flops_agree_with_a_counter(family, size, side, monkeypatch):
    """PyTorch's counter counts what runs; the closed form counts what is needed."""
    # The definition of the scan takes all tokens at once, as the kernels do and the closed form
    # counts.
    monkeypatch.setattr(definition, "MAX_PIECES", 1)
    model = make_on_meta(f"{family}_{size}", "model.internal_block=1", height=side, width=side)
    model.requires_grad_(False)
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        network = ModelWithHeads(model)
        network.tap("latent", 1, "objective.key")
        network.aux_heads["latent"] = LatentHead(model.dim, model.head.out_features)
        network(torch.empty(1, 4, side, side), torch.empty(1), torch.zeros(1, dtype=torch.long))
    expected = network.count_train_flops() / 3
    for block in model.blocks:
        mixer = block.layers[0]
        if isinstance(mixer, SelectiveScan):
            # elementwise, so that the counter does not see them
            expected -= 6 * model.tokens * mixer.A_log.numel()
        elif hasattr(mixer, "A_log"):
            # The definition computes scores of both directions for all pairs and then masks.
            expected += 2 * model.tokens**2 * mixer.state_dim
    assert counter.get_total_flops() == expected
