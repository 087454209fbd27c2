"""Token mixers: initial values, windows, rotary positions, and the paths of the scans."""

from itertools import pairwise

import pytest
import torch

from models.mixers.attention import Attention
from models.mixers.bidirectional_ssd import BidirectionalSSD
from models.mixers.selective_scan import SelectiveScan
from models.mixers.zigzag_ssd import PATHS, make_zigzag_path
from tests.harness.denoisers import fill_zero_layers, make_denoiser, make_inputs


def make_mixer(kind, *arguments, **sizes):
    torch.manual_seed(0)
    mixer = kind(*arguments, **sizes)
    mixer.init_weights()
    return mixer


def test_mixers_start_with_local_mixing_as_the_identity_and_steps_and_decays_in_their_ranges():
    ssd = make_mixer(BidirectionalSSD, 64, 32, (2, 2))
    kernel = ssd.conv_weight[:, 0]
    assert kernel[:, 1, 1].eq(1).all()
    assert kernel.sum() == len(kernel)
    mamba1 = make_mixer(SelectiveScan, 16, 8, (2, 2), 0, state_dim=3)
    assert mamba1.conv_weight[:, 0, 0].eq(torch.tensor([0.0, 0.0, 0.0, 1.0])).all()
    for mixer in (ssd, mamba1):
        dt = torch.nn.functional.softplus(mixer.dt_bias)
        assert 0.99e-3 <= dt.min() <= dt.max() <= 1.01e-1
    decays = ssd.A_log.exp()
    assert 1 <= decays.min() <= decays.max() <= 16
    torch.testing.assert_close(mamba1.A_log.exp(), torch.tensor([1.0, 2.0, 3.0]).expand(32, 3))


WINDOWS = {
    # side, shift and layer -> the rows, and the columns, at which windows of a grid of 6 rows and
    # 10 columns begin
    (4, None, 0): ([0, 4], [0, 4, 8]),
    (4, 0, 1): ([0, 4], [0, 4, 8]),
    (4, None, 1): ([0, 2], [0, 2, 6]),
    (3, None, 1): ([0, 2, 5], [0, 2, 5, 8]),
    (8, None, 1): ([0, 4], [0, 4]),
}


@pytest.mark.parametrize(("window", "shift", "layer"), WINDOWS)
def test_tokens_attend_within_their_window(window, shift, layer):
    """The reference attends over each rectangle of tokens separately."""
    mixer = make_mixer(
        Attention, 16, 8, (6, 10), rope_base=None, window=window, shift=shift, layer=layer
    )
    grid = torch.randn(2, 6, 10, 16)
    alone = Attention(16, 8, (1, 1), rope_base=None)
    alone.load_state_dict(mixer.state_dict())
    expected = torch.empty_like(grid)
    rows, columns = WINDOWS[window, shift, layer]
    pairs = 0
    for top, bottom in pairwise([*rows, 6]):
        for left, right in pairwise([*columns, 10]):
            part = grid[:, top:bottom, left:right]
            expected[:, top:bottom, left:right] = alone(part.flatten(1, 2)).view_as(part)
            pairs += part[0, ..., 0].numel() ** 2
    torch.testing.assert_close(mixer(grid.flatten(1, 2)), expected.flatten(1, 2))

    # masked pairs do not count
    products = 2 * 60 * (3 + 1) * 16 * 16
    assert mixer.flops(60) == products + 4 * pairs * 16


@pytest.mark.parametrize(
    ("window", "shift", "sentence"),
    [
        (1, None, "window=1 must be .*below 4"),
        (4, None, "window=4 must be .*below 4"),
        (3, 3, "shift=3 must be .*window=3;"),
        (None, 0, "shift=0 must be .*window=None;"),
    ],
)
def test_impossible_windows_and_shifts_are_refused(window, shift, sentence):
    with pytest.raises(ValueError, match=f"model.mixer.{sentence}"):
        Attention(64, 32, (4, 3), window=window, shift=shift)


def test_the_first_half_of_a_head_turns_with_the_row():
    """If rows and columns were swapped, weights trained on rectangles would sample nonsense."""
    rotations = make_mixer(Attention, 16, 16, (3, 5)).rotations.view(2, 3, 5, 16)
    assert not rotations[..., :8].diff(dim=2).any()
    assert not rotations[..., 8:].diff(dim=1).any()


@pytest.mark.parametrize("grid", [(3, 5), (1, 6), (4, 2)])
@pytest.mark.parametrize("layer", range(PATHS))
def test_a_zigzag_path_visits_every_token_and_steps_to_neighbours(grid, layer):
    path = make_zigzag_path(grid, layer)
    assert sorted(path.tolist()) == list(range(grid[0] * grid[1]))
    rows = path // grid[1]
    columns = path % grid[1]
    assert ((rows.diff().abs() + columns.diff().abs()) == 1).all()
    # the ends of the first row and of the first column
    begins = (0, 0, grid[1] - 1, len(path) - grid[1])
    assert path[0] == begins[layer]


def test_a_selective_scan_alternates_a_path_and_its_reverse_and_has_eight_in_all():
    grid = (3, 5)
    paths = [SelectiveScan(16, 8, grid, layer, state_dim=2).order for layer in range(9)]
    for layer in range(0, 8, 2):
        assert torch.equal(paths[layer], make_zigzag_path(grid, layer // 2))
        assert torch.equal(paths[layer + 1], paths[layer].flip(0))
    assert len({tuple(path.tolist()) for path in paths[:8]}) == 2 * PATHS == 8
    assert torch.equal(paths[8], paths[0])


SEEN = {
    # family and block -> the patches, of 3 rows and 4 columns, that the one in row 1 and column 1
    # sees
    ("conv", 0): "xxx. xxx. xxx.",
    ("mamba", 1): "xxx. xxx. xxx.",
    ("zigzag", 0): "...x xxxx xx..",  # three before it on the path and three after it
    ("zigzag", 1): ".xx. xxx. xx..",
    ("mamba1", 0): "xxxx .xxx ....",  # all before it
    ("dit_windows", 0): "xx.. xx.. ....",
    ("dit_windows", 1): ".... .xx. .xx.",
}


@pytest.mark.parametrize(("family", "block"), SEEN)
def test_a_patch_sees_its_neighbours_in_the_latent_or_on_the_path(family, block):
    """By one of two mixers, without its scan if that sees everything."""
    model = fill_zero_layers(make_denoiser(family, height=6))
    mixer, other = (model.blocks[number].layers[0] for number in (block, 1 - block))
    torch.nn.init.zeros_(other.out_proj.weight)
    if not isinstance(mixer, Attention):
        torch.nn.init.normal_(mixer.conv_weight)  # it starts as the identity
    if isinstance(mixer, BidirectionalSSD):
        torch.nn.init.constant_(mixer.dt_bias, -1e9)
    x, t, y = make_inputs(model)
    velocity = model(x.requires_grad_(), t, y)
    (gradient,) = torch.autograd.grad(velocity[0, :, 2:4, 2:4].sum(), x)
    patches = gradient[0].abs().sum(0).view(3, 2, 4, 2).sum((1, 3))
    seen = ["".join(".x"[value > 0] for value in row) for row in patches]
    assert " ".join(seen) == SEEN[family, block]


def test_odd_layers_scan_columns_as_a_plain_layer_scans_the_transposed_grid():
    grid = (3, 5)
    layer = make_mixer(BidirectionalSSD, 64, 32, grid, columns=True, layer=1)
    plain = make_mixer(BidirectionalSSD, 64, 32, grid[::-1])
    torch.nn.init.normal_(layer.conv_weight)  # it starts as the identity
    plain.load_state_dict(layer.state_dict())
    h = torch.randn(2, *grid, 64)
    torch.testing.assert_close(
        layer(h.flatten(1, 2)[:, layer.order], grid),
        plain(h.transpose(1, 2).flatten(1, 2), grid[::-1]),
    )
