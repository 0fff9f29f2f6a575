"""Parts that don't belong together, or are not there, are refused before anything is drawn with them."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import T5Config, T5EncoderModel

from ssd_pipelines import AutoregressiveVerifier, SpatialSpeculativePipeline
from ssd_pipelines.testing import tiny_family, tiny_image_tokenizer, tiny_pipeline


FAMILIES = ("janus", "emu3", "lumina", "llamagen")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folders = {}
    for family in FAMILIES:
        folders[family] = tmp_path_factory.mktemp(family) / "pipeline"
        tiny_family(family).save_pretrained(folders[family])
    return folders


def without(folder, part, name, tmp_path):
    """A copy of a folder whose safetensors of a part lack the tensors of a name."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    (file,) = (copy / part).glob("*.safetensors")
    tensors = load_file(file)
    kept = {key: tensor for key, tensor in tensors.items() if name not in key}
    assert len(kept) < len(tensors)
    save_file(kept, file, metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize(
    ("family", "part", "name"),
    [
        ("janus", "backbone", "model.generation_head."),
        ("emu3", "backbone", "lm_head."),
        ("lumina", "backbone", "layers.1.self_attn.q_norm."),
        ("lumina", "image_tokenizer", "decoder.conv_in."),
        ("llamagen", "backbone", "output."),
        ("llamagen", "text_encoder", "encoder.block.0.layer.0.SelfAttention.q."),
    ],
)
def test_a_saved_pipeline_that_lacks_tensors_is_refused(saved, tmp_path, family, part, name):
    """The libraries would fill them with random numbers."""
    broken = without(saved[family], part, name, tmp_path)
    with pytest.raises(ValueError, match=rf"weights in .*{part} lack .*random numbers"):
        SpatialSpeculativePipeline.from_pretrained(broken)


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_ones_load(saved, family):
    SpatialSpeculativePipeline.from_pretrained(saved[family])


@pytest.mark.parametrize(
    ("name", "needed"),
    [("model.generation_head.", True), ("model.vision_model.", False), ("model.aligner.", False)],
)
def test_a_backbone_may_lack_only_what_drawing_does_not_need(tmp_path, name, needed):
    tiny_pipeline(side=4).backbone.save_pretrained(tmp_path / "whole" / "backbone")
    tiny_pipeline(side=4).tokenizer.save_pretrained(tmp_path / "whole" / "backbone")
    folder = without(tmp_path / "whole", "backbone", name, tmp_path) / "backbone"
    if needed:
        with pytest.raises(ValueError, match=r"lack model.generation_head\..* and \d+ more, which would be random"):
            SpatialSpeculativePipeline.from_pretrained(folder)
    else:
        SpatialSpeculativePipeline.from_pretrained(folder)


def test_a_backbone_s_folder_takes_components_in_memory(tmp_path):
    pipe = tiny_pipeline(side=4)
    pipe.backbone.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds no tokenizer that loads .*pass `tokenizer=`"):
        SpatialSpeculativePipeline.from_pretrained(tmp_path)
    loaded = SpatialSpeculativePipeline.from_pretrained(tmp_path, tokenizer=pipe.tokenizer)
    assert loaded.tokenizer is pipe.tokenizer
    again = SpatialSpeculativePipeline.from_pretrained(tmp_path, tokenizer=pipe.tokenizer, backbone=pipe.backbone)
    assert again.backbone is pipe.backbone
    call = {"generator": torch.Generator().manual_seed(0), "output_type": "latent"}
    codes = loaded("a red circle", **call).codes
    call["generator"].manual_seed(0)
    plain = SpatialSpeculativePipeline.from_pipe(pipe, heads=None, verifier=AutoregressiveVerifier())
    assert torch.equal(plain("a red circle", **call).codes, codes)


def test_a_picture_decoder_of_other_codes_is_refused():
    pipe = tiny_family("llamagen")
    with pytest.raises(ValueError, match=r"`image_tokenizer` knows 32 codes, .* draws 64"):
        SpatialSpeculativePipeline.from_pipe(pipe, image_tokenizer=tiny_image_tokenizer(32))


def test_a_text_encoder_of_another_width_is_refused():
    pipe = tiny_family("llamagen")
    wider = T5EncoderModel(T5Config(vocab_size=64, d_model=48, d_kv=8, d_ff=32, num_layers=1, num_heads=2))
    with pytest.raises(ValueError, match=r"states of width 48, .* reads captions of width \d+: pass the one"):
        SpatialSpeculativePipeline.from_pipe(pipe, text_encoder=wider)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_needs_a_tokenizer(family):
    pipe = SpatialSpeculativePipeline.from_pipe(tiny_family(family), tokenizer=None)
    with pytest.raises(ValueError, match="pass `tokenizer=`"):
        pipe("a red circle")


def test_an_encoded_prompt_names_the_size_of_its_picture():
    """In Emu3's format it does; another one would be drawn to a prompt that lies."""
    pipe = tiny_family("emu3")
    encoded = pipe.encode_prompt("a red circle", do_classifier_free_guidance=True)
    pipe(prompt_embeds=encoded, output_type="latent")
    grid = pipe.adapter().grid()
    patch = pipe.adapter().patch_size
    size = {"height": grid.rows * patch // 2, "width": grid.columns * patch * 2}
    with pytest.raises(ValueError, match="was encoded for pictures of 4 x 4 codes, this call draws 2 x 8"):
        pipe(prompt_embeds=encoded, **size, output_type="latent")


@pytest.mark.parametrize("scale", [[5], (3.0,), 5 + 0j, True, "5"])
def test_guidance_is_a_real_number(scale):
    with pytest.raises(ValueError, match="`guidance_scale` must be"):
        tiny_pipeline(side=4)("a red circle", guidance_scale=scale)


@pytest.mark.parametrize("size", [(8, 43200), (8, 96000), (43200, 8)])
def test_emu3_refuses_shapes_that_no_ratio_of_its_area_has(size):
    backbone = tiny_family("emu3").adapter()
    backbone.model.config.image_area = 720 * 720
    patch = backbone.patch_size
    with pytest.raises(ValueError, match="up to 8:1"):
        backbone.grid(size[0] // 8 * patch, size[1] // 8 * patch)


@pytest.mark.parametrize("family", ["janus", "emu3", "lumina"])
def test_the_tokenizer_of_another_model_is_refused(family):
    """It would draw in silence, to a prompt of other words."""
    other = tiny_family("emu3" if family != "emu3" else "janus").tokenizer
    pipe = SpatialSpeculativePipeline.from_pipe(tiny_family(family), tokenizer=other)
    with pytest.raises(ValueError, match="belongs to another model"):
        pipe("a red circle", output_type="latent")
