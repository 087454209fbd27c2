"""Denoisers: contract, identity at the start, sizes, FLOPs."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from accel.kernels import bidirectional_ssd
from accel.kernels.qk_rope import rotate
from models.denoiser import Denoiser
from models.layers import sincos_positions
from models.mixers.attention import Attention, axial_rotations
from models.mixers.bidirectional_ssd import BidirectionalSSD
from models.mixers.convolution import Convolution
from models.mixers.selective_scan import SelectiveScan
from models.mixers.zigzag_ssd import PATHS, ZigzagSSD, zigzag_path
from training.config.build import build
from training.config.compose import compose

SPEC = {"channels": 4, "height": 32, "width": 32, "num_classes": 1000}
# Parameters with 4×32×32 latents and 1,000 classes. A change here changes every checkpoint and
# every comparison.
PARAMETERS = {
    "conv_xs": 511_952,
    "conv_s": 32_977_168,
    "conv_b": 130_540_048,
    "conv_l": 458_195_472,
    "conv_xl": 675_250_960,
    "dit_xs": 509_520,
    "dit_s": 32_917_264,
    "dit_b": 130_418_704,
    "dit_l": 457_081_872,
    "dit_xl": 674_824_464,
    "mamba1_xs": 542_416,
    "mamba1_s": 34_814_224,
    "mamba1_b": 135_983_632,
    "mamba1_l": 475_854_864,
    "mamba1_xl": 700_496_656,
    "mamba_xs": 549_704,
    "mamba_s": 35_761_840,
    "mamba_b": 136_490_320,
    "mamba_l": 474_805_776,
    "mamba_xl": 697_553_520,
    "ssd_mlp_xs": 507_822,
    "ssd_mlp_s": 32_462_968,
    "ssd_mlp_b": 126_052_576,
    "ssd_mlp_l": 439_324_560,
    "ssd_mlp_xl": 647_509_736,
    "zigzag_xs": 547_656,
    "zigzag_s": 35_712_688,
    "zigzag_b": 136_404_304,
    "zigzag_l": 474_584_592,
    "zigzag_xl": 697_266_800,
}
SCANS = ("mamba", "ssd_mlp", "zigzag")
MODELS = sorted(PARAMETERS)
FAMILIES = {
    "mamba": dict(mixer=partial(BidirectionalSSD, expand=2, state_dim=16)),
    "ssd_mlp": dict(mixer=partial(BidirectionalSSD, expand=1, state_dim=16), mlp_ratio=8 / 3),
    "dit": dict(mixer=Attention, mlp_ratio=8 / 3),
    "zigzag": dict(mixer=partial(ZigzagSSD, expand=2, state_dim=16)),
    "mamba1": dict(mixer=partial(SelectiveScan, state_dim=8)),
    "conv": dict(mixer=Convolution, mlp_ratio=8 / 3),
    "dit_plain": dict(mixer=partial(Attention, qk_norm=False), mlp_ratio=8 / 3),
    "dit_windows": dict(mixer=partial(Attention, window=2), mlp_ratio=8 / 3),
}


def tiny(family: str, **changes) -> Denoiser:
    """A small denoiser of a family, initialised."""
    torch.manual_seed(0)
    arguments = dict(
        channels=4, height=8, width=8, num_classes=3, dim=64, depth=2, head_dim=32, patch_size=2
    )
    return Denoiser(**arguments | FAMILIES[family] | changes)


def woken(model: Denoiser) -> Denoiser:
    """With modulations and head away from zero, so that every part matters."""
    for layer in (model.modulation, model.head):
        weight = torch.nn.init.normal_(torch.empty_like(layer.weight, dtype=torch.float32), std=0.2)
        with torch.no_grad():  # drawn in fp32, for the same draws whatever dtype holds them
            layer.weight.copy_(weight)
    return model


def inputs(channels=4, height=8, width=8, batch=2):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, channels, height, width, generator=generator)
    return x, torch.rand(batch, generator=generator), torch.arange(batch)


@pytest.mark.parametrize("name", MODELS)
def test_parameter_counts_are_golden(name):
    node = compose([f"model={name}"]).cfg.model
    with torch.device("meta"):
        model = build(node, "model", **SPEC)
    count = sum(p.numel() for p in model.parameters())
    assert count == PARAMETERS[name]
    family = name.rpartition("_")[0]
    attention = PARAMETERS[name.replace(family, "dit")]
    assert abs(count / attention - 1) < 0.09, "the families are compared at equal parameters"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("channels", [1, 4, 16, 32])
@pytest.mark.parametrize(("height", "width"), [(8, 8), (4, 12)])
def test_any_channels_and_any_rectangle(family, channels, height, width):
    model = woken(tiny(family, channels=channels, height=height, width=width))
    x, t, y = inputs(channels, height, width)
    assert model(x, t, y).shape == x.shape


@pytest.mark.parametrize("family", FAMILIES)
def test_every_block_starts_as_the_identity(family):
    model = tiny(family)
    branch = torch.randn(2, 16, 64)
    residual = torch.randn(2, 16, 64)
    gate = torch.rand(2, 64)
    stream = residual + gate[:, None] * branch
    cond = model.modulation(torch.randn(2, 64)).unflatten(1, (-1, 64))[:, : model.modulations]
    for block in model.blocks:
        branch, gate, residual = block(branch, gate, residual, cond)
        assert gate.eq(0).all()
        torch.testing.assert_close(residual + gate[:, None] * branch, stream)
    x, t, y = inputs()
    assert model(x, t, y).eq(0).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_returns_its_increment_not_its_norm(family):
    """With zero gates the stream must not grow, however deep: two published Mamba models get this
    wrong."""
    model = tiny(family, depth=6)
    branch = torch.zeros(1, 16, 64)
    gate = torch.ones(1, 64)
    residual = torch.randn(1, 16, 64)
    size = residual.norm()
    for block in model.blocks:
        branch, gate, residual = block(
            branch, gate, residual, torch.zeros(1, model.modulations, 64)
        )
    torch.testing.assert_close(residual.norm(), size)


@pytest.mark.parametrize("family", FAMILIES)
def test_time_label_and_every_parameter_matter(family):
    model = woken(tiny(family))
    x, t, y = inputs()
    out = model(x, t, y)
    assert not torch.allclose(out, model(x, t + 0.1, y))
    assert not torch.allclose(out, model(x, t, y + 1))
    out.square().sum().backward()
    dead = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]
    assert dead == []


@pytest.mark.parametrize("family", FAMILIES)
def test_the_residual_stays_fp32_under_autocast(family):
    model = woken(tiny(family))
    seen = []
    for block in model.blocks:
        block.register_forward_hook(lambda _m, _i, out: seen.append((out[0].dtype, out[2].dtype)))
    with torch.amp.autocast("cpu", torch.bfloat16):
        model(*inputs())
    assert seen == [(torch.bfloat16, torch.float32)] * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_patches_go_out_as_they_came_in(family):
    model = tiny(family, height=4, width=12)
    x = torch.randn(2, 4, 4, 12)
    assert torch.equal(model.unpatchify(model.patchify(x)), x)


def test_local_mixing_starts_as_the_identity():
    mixer = BidirectionalSSD(64, 32, (2, 2))
    mixer.init_weights()
    kernel = mixer.conv_weight[:, 0]
    assert kernel[:, 1, 1].eq(1).all()
    assert kernel.sum() == len(kernel)


def test_initial_time_steps_and_decays_lie_in_their_ranges():
    mixer = BidirectionalSSD(64, 32, (2, 2))
    mixer.init_weights()
    dt = torch.nn.functional.softplus(mixer.dt_bias)
    assert dt.min() >= 0.99e-3
    assert dt.max() <= 1.01e-1
    assert (mixer.A_log.exp() >= 1).all()
    assert (mixer.A_log.exp() <= 16).all()


def test_drop_path_zeroes_gates_and_keeps_the_mean():
    model = woken(tiny("mamba", drop_path=0.5, depth=2))
    cond = torch.randn(4000, 2, 3, 64)
    uniforms = torch.rand(4000, 2, generator=torch.Generator().manual_seed(0))
    dropped = model.drop_blocks(cond, uniforms)
    assert torch.equal(dropped[:, :, :2], cond[:, :, :2])  # scale and shift stay
    assert torch.equal(dropped[:, 0], cond[:, 0])  # the rate grows from 0
    ratio = dropped[:, 1, 2] / cond[:, 1, 2]
    assert set(ratio.unique().tolist()) <= {0.0, 2.0}
    assert abs(ratio.mean() - 1) < 0.1


def test_weight_decay_leaves_vectors_embeddings_and_the_scan_alone():
    model = tiny("ssd_mlp")
    exempt = model.no_weight_decay()
    decayed = {n for n, _ in model.named_parameters()} - exempt
    kinds = ("proj", "w13", "w2", "patch_embed", "fc1", "fc2", "modulation", "head")
    assert all(n.endswith(tuple(f"{kind}.weight" for kind in kinds)) for n in decayed)
    scan = {f"blocks.0.layers.0.{name}" for name in ("A_log", "dt_bias", "D", "conv_weight")}
    assert {"pos_embed", "label_embed.table.weight", *scan} <= exempt


WINDOWS = {
    # side, moved by half a window or not -> the rows, or columns, at which windows of a grid of 6
    # rows and 10 columns begin
    (4, False): ([0, 4], [0, 4, 8]),
    (4, True): ([0, 2], [0, 2, 6]),
    (3, False): ([0, 3], [0, 3, 6, 9]),
    (3, True): ([0, 2, 5], [0, 2, 5, 8]),
    (8, True): ([0, 4], [0, 4]),
}


@pytest.mark.parametrize(("window", "moved"), WINDOWS)
def test_tokens_attend_within_their_window(window, moved):
    """Against attention over each rectangle of tokens by itself."""
    torch.manual_seed(0)
    mixer = Attention(16, 8, (6, 10), rope_base=None, window=window, layer=int(moved))
    mixer.init_weights()
    h = torch.randn(2, 60, 16)
    grid = h.view(2, 6, 10, 16)
    alone = Attention(16, 8, (1, 1), rope_base=None)
    alone.load_state_dict(mixer.state_dict())
    expected = torch.empty_like(grid)
    edges = [[*begins, side] for begins, side in zip(WINDOWS[window, moved], (6, 10), strict=True)]
    pairs = 0
    for top, bottom in pairwise(edges[0]):
        for left, right in pairwise(edges[1]):
            part = grid[:, top:bottom, left:right]
            tokens = (bottom - top) * (right - left)
            expected[:, top:bottom, left:right] = alone(part.flatten(1, 2)).view_as(part)
            pairs += tokens * tokens
    torch.testing.assert_close(mixer(h), expected.flatten(1, 2))

    products = 2 * 60 * (3 + 1) * 16 * 16
    assert mixer.flops(60) == products + 4 * pairs * 16  # what is masked does not count


def test_windows_of_every_other_block_are_moved():
    even, odd = (block.layers[0] for block in tiny("dit_windows", height=16, width=16).blocks)
    assert even.spans == [[2, 2, 2, 2]] * 2
    assert odd.spans == [[1, 2, 2, 2, 1]] * 2
    mixer = partial(Attention, window=2, shift=0)
    for block in tiny("dit_windows", height=16, width=16, mixer=mixer).blocks:
        assert block.layers[0].spans == even.spans


@pytest.mark.parametrize("window", [0, 1, 4, -2])
def test_windows_that_are_none_are_refused(window):
    with pytest.raises(ValueError, match=f"model.mixer.window={window} must be .*below 4"):
        tiny("dit", mixer=partial(Attention, window=window))


@pytest.mark.parametrize(("window", "shift"), [(3, 3), (3, -1), (None, 0)])
def test_shifts_that_are_none_are_refused(window, shift):
    with pytest.raises(ValueError, match=f"model.mixer.shift={shift} must be .*window={window};"):
        tiny("dit", mixer=partial(Attention, window=window, shift=shift))


def test_rotary_positions_make_scores_depend_on_offsets_only():
    rotations = axial_rotations((4, 4), 16)
    q = torch.randn(16)
    k = torch.randn(16)
    full = rotate(q.expand(1, 1, 16, 16), rotations) @ rotate(k.expand(1, 1, 16, 16), rotations).mT
    scores = full[0, 0].view(4, 4, 4, 4)
    torch.testing.assert_close(scores[0, 0, 1, 2], scores[2, 1, 3, 3])
    assert not torch.allclose(scores[0, 0, 1, 2], scores[0, 0, 2, 1])


def test_the_first_half_of_a_head_turns_with_the_row():
    """Swapped, weights trained on rectangles would sample nonsense."""
    rotations = axial_rotations((3, 5), 16).view(2, 3, 5, 16)
    assert torch.equal(rotations[..., :8], rotations[:, :, :1, :8].expand(2, 3, 5, 8))
    assert torch.equal(rotations[..., 8:], rotations[:, :1, :, 8:].expand(2, 3, 5, 8))


def test_positions_are_all_different():
    table = sincos_positions((4, 6), 30)[0]
    distances = torch.cdist(table, table) + torch.eye(24)
    assert table.shape == (24, 30)
    assert distances.min() > 0.1


@pytest.mark.parametrize(
    ("key", "value"), [("patch_size", 3), ("head_dim", 48), ("drop_path", 1.0)]
)
def test_impossible_sizes_are_refused(key, value):
    with pytest.raises(ValueError, match=f"model.{key}={value}"):
        tiny("mamba", **{key: value})


def attention_flops(query, key, value, *_, **__):
    return 4 * query[0] * query[1] * query[2] * key[2] * query[3]


@pytest.fixture
def whole_sequences(monkeypatch):
    """The definition of the scan takes all tokens at once, as the kernels do and the closed form
    counts."""
    monkeypatch.setattr(bidirectional_ssd, "PIECE", bidirectional_ssd.MAX_QUADRATIC)


@pytest.mark.usefixtures("whole_sequences")
@pytest.mark.parametrize("family", ["mamba", "ssd_mlp", "zigzag", "mamba1", "conv", "dit"])
@pytest.mark.parametrize("size", [8, 16, 32])
def test_flops_agree_with_a_counter(family, size):
    """PyTorch's counter, which counts what runs, against the closed form, which counts what is
    needed."""
    model = tiny(family, height=size, width=size).requires_grad_(False)
    x, t, y = inputs(height=size, width=size, batch=1)
    sdpa = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops}
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=sdpa) as counter:
        model(x, t, y)
    counted = counter.get_total_flops()
    # The reference scan computes scores of both directions for all pairs and then masks: N more
    # products a pair.
    extra = 2 * model.tokens**2 * 16 * model.depth if family in SCANS else 0
    assert counted == model.flops_per_sample() + extra - selective_scans(model)


def selective_scans(model: Denoiser) -> int:
    """FLOPs of its selective scans: elementwise, so that the counter does not see them."""
    mixers = [m for m in model.modules() if isinstance(m, SelectiveScan)]
    return sum(6 * model.tokens * m.A_log.numel() for m in mixers)


@pytest.mark.usefixtures("whole_sequences")
@pytest.mark.parametrize("name", [name for name in MODELS if name.endswith(("_xs", "_b", "_xl"))])
def test_flops_of_real_sizes_agree_with_a_counter(name):
    """On the meta device: nothing is computed, so even the largest takes no time."""
    node = compose([f"model={name}"]).cfg.model
    with torch.device("meta"):
        model = build(node, "model", **SPEC).requires_grad_(False)
        x = torch.empty(1, 4, 32, 32)
        t = torch.empty(1)
        y = torch.zeros(1, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model(x, t, y)
    extra = (
        2 * model.tokens**2 * node["mixer"].get("state_dim", 64) * model.depth
        if name.rpartition("_")[0] in SCANS
        else 0
    )
    expected = model.flops_per_sample() + extra - selective_scans(model)
    assert counter.get_total_flops() == expected


def test_a_training_step_costs_three_forward_passes():
    """The counter sees the backward pass of products; inputs that need no gradient save a little of
    it."""
    model = woken(tiny("dit", depth=6))
    sdpa = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    mapping = {
        sdpa: attention_flops,
        backward: lambda grad, *shapes, **_: 2 * attention_flops(*shapes[:3]),
    }
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        model(*inputs(batch=1)).sum().backward()
    assert abs(counter.get_total_flops() / (3 * model.flops_per_sample()) - 1.0) < 0.02


@pytest.mark.parametrize("grid", [(4, 4), (3, 5), (1, 6), (5, 2)])
@pytest.mark.parametrize("layer", range(PATHS))
def test_a_zigzag_path_visits_every_token_and_steps_to_neighbours(grid, layer):
    path = zigzag_path(grid, layer)
    assert sorted(path.tolist()) == list(range(grid[0] * grid[1]))
    rows = path // grid[1]
    columns = path % grid[1]
    assert ((rows.diff().abs() + columns.diff().abs()) == 1).all()


@pytest.mark.parametrize("grid", [(4, 4), (3, 5), (3, 3), (4, 6), (16, 16)])
def test_the_four_paths_differ_in_both_directions(grid):
    paths = [zigzag_path(grid, layer) for layer in range(PATHS)]
    assert (
        len({tuple(way.tolist()) for path in paths for way in (path, path.flip(0))})
        == 2 * PATHS
        == 8
    )
    assert torch.equal(zigzag_path(grid, PATHS), paths[0])


def test_a_selective_scan_has_a_path_and_its_reverse_in_turn_eight_in_all():
    grid = (4, 6)
    paths = [SelectiveScan(16, 8, grid, layer, state_dim=2).order for layer in range(9)]
    for layer in range(0, 8, 2):
        assert torch.equal(paths[layer], zigzag_path(grid, layer // 2))
        assert torch.equal(paths[layer + 1], paths[layer].flip(0))
    assert len({tuple(path.tolist()) for path in paths[:8]}) == 8
    assert torch.equal(paths[8], paths[0])


def test_a_selective_scan_sees_what_came_before_on_its_path_and_nothing_else():
    mixer = SelectiveScan(16, 8, (2, 4), 0, state_dim=2)
    mixer.init_weights()
    h = torch.randn(1, 8, 16, requires_grad=True)
    (seen,) = torch.autograd.grad(mixer(h)[0, 5].sum(), h)
    assert seen[0].norm(dim=1).ne(0).tolist() == [True] * 6 + [False] * 2


def test_the_first_mamba_starts_with_a_state_of_many_time_scales():
    mixer = SelectiveScan(16, 8, (2, 2), 0, state_dim=3)
    mixer.init_weights()
    torch.testing.assert_close(mixer.A_log.exp(), torch.tensor([1.0, 2.0, 3.0]).expand(32, 3))
    dt = torch.nn.functional.softplus(mixer.dt_bias)
    assert dt.min() >= 0.99e-3
    assert dt.max() <= 1.01e-1
    assert mixer.conv_weight[:, 0, 0].eq(torch.tensor([0.0, 0.0, 0.0, 1.0])).all()
    kept = ("A_log", "dt_bias", "D", "conv_weight", "conv_bias")
    assert {f"blocks.0.layers.0.{name}" for name in kept} <= tiny("mamba1").no_weight_decay()


@pytest.mark.parametrize("family", ["zigzag", "mamba1"])
def test_a_zigzag_model_is_a_plain_one_with_gathers_around_each_mixer(family):
    """The norms apply the orders; here the same is done by gathers around each mixer, with no order
    in the norms."""
    model = woken(tiny(family, depth=5))
    reference = woken(tiny(family, depth=5))
    reference.load_state_dict(model.state_dict())
    for block in reference.blocks:
        mixer = block.layers[0]
        order = mixer.order
        plain = mixer.forward
        mixer.forward = lambda h, order=order, plain=plain: plain(h[:, order])[:, order.argsort()]
        block.rows_0 = block.rows_1 = None
    torch.testing.assert_close(model(*inputs()), reference(*inputs()))


def test_mixers_keep_rows_as_buffers_that_are_not_saved():
    model = tiny("zigzag")
    assert not any("rows" in name for name in model.state_dict())
    assert {name for name, _ in model.named_buffers() if "rows" in name} >= {
        "blocks.0.rows_1",
        "blocks.1.rows_0",
    }
