"""The two patches of the HunyuanVideo-1.5 transformer. Oracle: upstream's own module in the same process, bit for bit."""

import inspect
import zlib

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from conftest import assert_same
from diffusers.models.transformers import transformer_hunyuan_video15 as hunyuan15


@pytest.fixture(scope="module")
def hunyuan15_pair(upstream):
    """Ours, and upstream's with its weights."""
    theirs = upstream("diffusers.models.transformers.transformer_hunyuan_video15").HunyuanVideo15Transformer3DModel
    cls = hunyuan15.HunyuanVideo15Transformer3DModel
    names = list(inspect.signature(cls.forward).parameters)
    assert names == [*inspect.signature(theirs.forward).parameters, "is_t2v"]  # positions stay
    sizes = {"in_channels": 5, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}
    sizes |= {"text_embed_dim": 12, "text_embed_2_dim": 10, "image_embed_dim": 8, "num_refiner_layers": 1}
    ours, theirs = (made(**sizes, rope_axes_dim=(4, 6, 6)).eval() for made in (cls, theirs))
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def random_mask(generator, kind: str, batch: int, length: int) -> torch.Tensor:
    if kind == "valid":
        return torch.ones(batch, length, dtype=torch.long)
    if kind == "padding":
        return torch.zeros(batch, length, dtype=torch.long)
    if kind == "right-padded":
        lengths = torch.randint(0, length + 1, (batch, 1), generator=generator)
        return (torch.arange(length) < lengths).long()
    return torch.randint(0, 2, (batch, length), generator=generator)


def hunyuan15_inputs(text_mask: str, byt5_mask: str, image: str, batch: int = 3) -> dict:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{text_mask} {byt5_mask} {image}".encode()))
    embeds = torch.randn(batch, 5, 8, generator=generator)
    return {
        "hidden_states": torch.randn(batch, 5, 2, 4, 3, generator=generator),
        "timestep": torch.tensor([7.0] * batch),
        "encoder_hidden_states": torch.randn(batch, 11, 12, generator=generator),
        "encoder_attention_mask": random_mask(generator, text_mask, batch, 11),
        "encoder_hidden_states_2": torch.randn(batch, 7, 10, generator=generator),
        "encoder_attention_mask_2": random_mask(generator, byt5_mask, batch, 7),
        "image_embeds": embeds if image == "image" else torch.zeros_like(embeds),
        "return_dict": False,
    }


def run_hunyuan15(model, inputs: dict, **more) -> list[torch.Tensor]:
    """The output, and what the first block got: hidden states of video and text, modulation, mask."""
    seen = []
    hook = model.transformer_blocks[0].register_forward_pre_hook(lambda _, args: seen.extend(args[:4]))
    with torch.no_grad():
        output = model(**inputs, **more)[0]
    hook.remove()
    return [output, *seen]


MASKS = ["valid", "padding", "right-padded", "scattered"]


@pytest.mark.parametrize("image", ["image", "no image"])
@pytest.mark.parametrize("text_mask, byt5_mask", [*zip(MASKS, MASKS), *zip(MASKS, MASKS[1:] + MASKS[:1])])
def test_hunyuan15_equals_upstream(hunyuan15_pair, text_mask, byt5_mask, image):
    ours, theirs = hunyuan15_pair
    inputs = hunyuan15_inputs(text_mask, byt5_mask, image)
    expected = run_hunyuan15(theirs, inputs)
    assert expected[2].shape[1] == 5 + 7 + 11 and expected[4].dtype == torch.bool
    assert_same(run_hunyuan15(ours, inputs), expected)
    assert_same(run_hunyuan15(ours, inputs, is_t2v=image == "no image"), expected)


def test_hunyuan15_is_t2v_overrules_the_values(hunyuan15_pair):
    ours, theirs = hunyuan15_pair
    inputs = hunyuan15_inputs("scattered", "right-padded", "image")
    without = inputs | {"image_embeds": torch.zeros_like(inputs["image_embeds"])}
    assert_same(run_hunyuan15(ours, inputs, is_t2v=True), run_hunyuan15(theirs, without))
    kept = run_hunyuan15(ours, without, is_t2v=False)
    assert kept[4].sum() == run_hunyuan15(theirs, inputs)[4].sum() == run_hunyuan15(theirs, without)[4].sum() + 3 * 5


def test_hunyuan15_padding_that_is_not_a_number_is_zeroed(hunyuan15_pair):
    inputs = hunyuan15_inputs("valid", "right-padded", "image")
    inputs["encoder_attention_mask_2"][0, -2:] = 0
    inputs["encoder_hidden_states_2"][0, -1] = float("nan")
    ours, expected = (run_hunyuan15(model, inputs) for model in hunyuan15_pair)
    assert expected[2].isfinite().all()
    assert_same(ours, expected)


def test_hunyuan15_runs_without_values(hunyuan15_pair):
    """With is_t2v given nothing asks for a value: neither a branch nor a shape."""
    inputs = hunyuan15_inputs("scattered", "scattered", "no image")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        assert hunyuan15_pair[0](**fake, is_t2v=True)[0].shape == (3, 4, 2, 4, 3)
        with pytest.raises(DataDependentOutputException):
            hunyuan15_pair[0](**fake)
