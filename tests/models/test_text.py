"""Denoisers conditioned on text: where captions enter, what masks them, what refuses them."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from accel.kernels.attention.attend import attend, attend_by_products, attend_in_groups, make_mask
from common.condition import Condition, EncodedText
from models.mixers.attention import Attention
from tests.harness.denoisers import (
    FAMILIES,
    assert_every_parameter_matters,
    fill_zero_layers,
    make_denoiser,
    make_inputs,
)
from tests.harness.refusals import expect_refusal

TOKENS = 5
SPEC = {"width": 8, "max_tokens": TOKENS, "mean": [0.1] * 8}
SPEC |= {"empty_pooled": [0.5] * 8, "empty_tokens": [[1.0, -1.0] * 4, [0.5, 2.0] * 4]}
READERS = ("dit", "hybrid", "dit_plain", "dit_windows")


def make_text_model(family, conditioning="text", tokens=False, **changes):
    options = {"conditioning": conditioning, "text_tokens": tokens, "text": SPEC}
    return fill_zero_layers(make_denoiser(family, **options | changes))


def draw_text():
    generator = torch.Generator().manual_seed(3)
    pooled = torch.randn(2, 8, generator=generator).half()
    tokens = torch.randn(2, TOKENS, 8, generator=generator).half()
    return EncodedText(pooled, tokens, torch.tensor([2, 4]), torch.arange(2))


def answer(model, text, labels=(0, 1)):
    """The velocity for these texts and labels."""
    x, t, _ = make_inputs(model)
    return model(x, t, Condition(torch.tensor(labels), text).y)


@pytest.mark.parametrize("conditioning", ["text", "class_and_text"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_caption_and_every_parameter_matter(family, conditioning):
    model = make_text_model(family, conditioning, family in READERS)
    text = draw_text()
    out = answer(model, text)
    assert not torch.allclose(out, answer(model, text._replace(pooled=-text.pooled)))
    assert torch.equal(answer(model, text, (1, 2)), out) == (conditioning == "text")
    assert_every_parameter_matters(model, out)


def test_the_null_label_drops_the_caption():
    """The empty caption stands where training drops captions, and where guidance compares."""
    model = make_text_model("dit", tokens=True)
    null = 2 * [model.num_classes]
    dropped = answer(model, draw_text(), null)
    empty = torch.tensor([SPEC["empty_tokens"]])
    padded = torch.nn.functional.pad(empty, (0, 0, 0, TOKENS - 2)).expand(2, -1, -1)
    stored = EncodedText(torch.full((2, 8), 0.5), padded, torch.tensor([2, 2]), torch.arange(2))
    for same in (answer(model, None, null), answer(model, None), answer(model, stored)):
        torch.testing.assert_close(same, dropped)
    assert not torch.allclose(answer(model, draw_text()), dropped)


@pytest.mark.parametrize("family", READERS)
def test_padding_is_ignored_and_tokens_are_not(family):
    model = make_text_model(family, tokens=True)
    text = draw_text()
    out = answer(model, text)
    changed = text.tokens.clone()
    changed[0, 2:] += 3.0
    changed[1, 4:] += 3.0
    torch.testing.assert_close(answer(model, text._replace(tokens=changed)), out)
    changed[1, 3] += 3.0
    new = answer(model, text._replace(tokens=changed))
    assert torch.allclose(new[0], out[0])
    assert not torch.allclose(new[1], out[1])


def test_the_scale_of_tokens_and_the_mean_of_captions_change_nothing():
    """int8 tokens are stored without their scale, and all vectors of an encoder share a part."""
    model = make_text_model("dit", tokens=True)
    text = draw_text()
    expected = answer(model, text)
    changed = text._replace(tokens=text.tokens * 8.0, pooled=text.pooled.float() + 2.0)
    model.text_embed.mean += 2.0
    torch.testing.assert_close(answer(model, changed), expected, atol=1e-4, rtol=1e-3)
    assert not torch.allclose(answer(model, text), expected, atol=1e-2)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [4, 16])
def test_every_way_of_attention_heeds_the_mask(window):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 3, 16, 8, generator=generator)
    k, v = torch.randn(2, 2, 3, 16 + TOKENS, 8, generator=generator)
    prefix = torch.arange(TOKENS) < torch.tensor([[2], [4]])
    groups = torch.arange(16, dtype=torch.int32) // window
    near = (groups[:, None] == groups).expand(2, 16, 16)
    seen = torch.cat((prefix[:, None].expand(2, 16, TOKENS), near), dim=2).unsqueeze(1)
    groups = None if window == 16 else groups
    scores = (q @ k.transpose(2, 3) / 8**0.5).masked_fill(~seen, -torch.inf)
    expected = scores.softmax(-1) @ v
    for ours in (
        attend(q, k, v, "auto", groups, prefix),
        attend(q, k, v, "math", groups, prefix),
        attend_by_products(q, k, v, make_mask(groups, prefix, 16)),
        attend_in_groups(q, k, v, groups, prefix),
    ):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        ("mamba", {"tokens": True}, "choose model=dit_<size> or hybrid_<size>, or set model.text"),
        ("conv", {"tokens": True}, "needs layers whose forward takes `text`, such as attention"),
        ("dit", {"tokens": True, "text": SPEC | {"max_tokens": 0}}, "stores no tokens of its"),
        ("dit", {"tokens": True, "conditioning": "class"}, "needs model.conditioning=text"),
        ("dit", {"text": None}, "needs a latent set with captions, and this one has none"),
    ],
)
def test_refusals(family, changes, sentence):
    with expect_refusal(sentence):
        make_text_model(family, **changes)


def test_flops_count_the_text():
    model = make_text_model("dit", tokens=True)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        answer(model, draw_text())
    assert counter.get_total_flops() == 2 * model.flops_per_sample()


def test_muon_takes_keys_and_values_of_text_apart():
    layer = Attention(64, 32, (4, 4), text_tokens=TOKENS)
    assert layer.list_matrices()[layer.text.kv.weight] == ((0, 64), (64, 128))


def test_16_bits_do_not_round_the_mean():
    """Neither where weights are made with 16 bits, as diffusers does, nor where they are
    converted."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = make_text_model("dit", tokens=True).bfloat16()
    finally:
        torch.set_default_dtype(torch.float32)
    assert model.text_embed.pooled.weight.dtype == torch.bfloat16
    assert torch.equal(model.text_embed.mean, torch.full((8,), 0.1))
    assert torch.equal(model.text_embed.empty_tokens[:2], torch.tensor(SPEC["empty_tokens"]))


def test_a_meta_model_knows_the_empty_caption():
    with torch.device("meta"):
        model = make_denoiser("dit", conditioning="text", text_tokens=True, text=SPEC)
    model.to_empty(device="cpu").init_weights()
    assert model.text_embed.empty_pooled.tolist() == [0.5] * 8
    assert int(model.text_embed.empty_length) == 2
    assert "text_embed.empty_pooled" not in model.state_dict()
