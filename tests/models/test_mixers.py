"""Token mixers: initial values, windows, rotary positions, and the paths of the scans."""

from itertools import pairwise

import pytest
import torch

from models.mixers.attention import Attention, axial_rotations
from models.mixers.bidirectional_ssd import BidirectionalSSD
from models.mixers.selective_scan import SelectiveScan
from models.mixers.zigzag_ssd import PATHS, make_zigzag_path
from tests.harness.denoisers import make_denoiser


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


def test_windows_of_every_other_block_are_shifted():
    blocks = make_denoiser("dit_windows", height=16, width=16).blocks
    spans = [[[2, 2, 2, 2]] * 2, [[1, 2, 2, 2, 1]] * 2]
    assert [block.layers[0].spans for block in blocks] == spans


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
        Attention(64, 32, (4, 4), window=window, shift=shift)


def test_the_first_half_of_a_head_turns_with_the_row():
    """If rows and columns were swapped, weights trained on rectangles would sample nonsense."""
    rotations = axial_rotations((3, 5), 16).view(2, 3, 5, 16)
    assert torch.equal(rotations[..., :8], rotations[:, :, :1, :8].expand(2, 3, 5, 8))
    assert torch.equal(rotations[..., 8:], rotations[:, :1, :, 8:].expand(2, 3, 5, 8))


@pytest.mark.parametrize("grid", [(3, 5), (1, 6), (4, 2)])
@pytest.mark.parametrize("layer", range(PATHS))
def test_a_zigzag_path_visits_every_token_and_steps_to_neighbours(grid, layer):
    path = make_zigzag_path(grid, layer)
    assert sorted(path.tolist()) == list(range(grid[0] * grid[1]))
    rows = path // grid[1]
    columns = path % grid[1]
    assert ((rows.diff().abs() + columns.diff().abs()) == 1).all()


def test_a_selective_scan_alternates_a_path_and_its_reverse_and_has_eight_in_all():
    grid = (3, 5)
    paths = [SelectiveScan(16, 8, grid, layer, state_dim=2).order for layer in range(9)]
    for layer in range(0, 8, 2):
        assert torch.equal(paths[layer], make_zigzag_path(grid, layer // 2))
        assert torch.equal(paths[layer + 1], paths[layer].flip(0))
    assert len({tuple(path.tolist()) for path in paths[:8]}) == 2 * PATHS == 8
    assert torch.equal(paths[8], paths[0])


def test_a_selective_scan_sees_what_came_before_on_its_path_and_nothing_else():
    mixer = make_mixer(SelectiveScan, 16, 8, (2, 4), 0, state_dim=2)
    h = torch.randn(1, 8, 16, requires_grad=True)
    (gradient,) = torch.autograd.grad(mixer(h)[0, 5].sum(), h)
    assert gradient[0].norm(dim=1).ne(0).tolist() == [True] * 6 + [False] * 2


@pytest.mark.parametrize("grid", [(2, 4), (3, 5)])
def test_odd_layers_scan_columns_as_a_plain_layer_scans_the_transposed_grid(grid):
    layer = make_mixer(BidirectionalSSD, 64, 32, grid, columns=True, layer=1)
    plain = make_mixer(BidirectionalSSD, 64, 32, grid[::-1])
    torch.nn.init.normal_(layer.conv_weight)  # it starts as the identity
    plain.load_state_dict(layer.state_dict())
    h = torch.randn(2, *grid, 64)
    torch.testing.assert_close(
        layer(h.flatten(1, 2)[:, layer.order], grid),
        plain(h.transpose(1, 2).flatten(1, 2), grid[::-1]),
    )
