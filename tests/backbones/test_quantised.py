"""Backbones whose linear layers are stored in eight bits, by transformers' own loading, on a CPU.

torchao is the quantiser that runs without a GPU on every supported transformers and can be saved. Where it is
installed, transformers imports it in every process, slowly and with warnings: so it has an extra of its own, which
.ci/run installs for these tests alone.
"""

import pytest
import torch
from diffusers import PipelineQuantizationConfig
from transformers import TorchAoConfig

from ssd_pipelines import SpatialDraftVerifier, SpatialSpeculativePipeline
from ssd_pipelines.testing import tiny_family


quantization = pytest.importorskip("torchao.quantization", reason="torchao comes with the extra `quantized`")

FAMILIES = ("janus", "emu3", "lumina", "llamagen")
PROMPT = "a photo of a red circle"


def eight_bits(**kwargs) -> TorchAoConfig:
    return TorchAoConfig(quantization.Int8WeightOnlyConfig(), **kwargs)


def draw(pipe, **kwargs):
    pipe.set_progress_bar_config(disable=True)
    return pipe(PROMPT, generator=torch.Generator().manual_seed(0), output_type="np", **kwargs)


def quantised_layers(model: torch.nn.Module) -> int:
    return sum("Int8" in type(module.weight).__name__ for module in model.modules() if type(module) is torch.nn.Linear)


def load(folder, plain, **kwargs):
    """The backbone in eight bits, beside it what its family keeps outside of it."""
    parts = {name: plain.components[name] for name in ("image_tokenizer", "text_encoder")}
    return SpatialSpeculativePipeline.from_pretrained(
        folder, **{"quantization_config": eight_bits(), **parts, **kwargs}
    )


@pytest.fixture(scope="module", params=FAMILIES)
def source(request, tmp_path_factory):
    """A folder of the backbone alone, and the pipeline that it is of."""
    folder = tmp_path_factory.mktemp(request.param)
    pipe = tiny_family(request.param)
    pipe.backbone.save_pretrained(folder)
    pipe.tokenizer.save_pretrained(folder)
    pipe.heads.save_pretrained(folder / "heads")
    pipe.save_pretrained(folder / "pipeline")
    return folder, pipe


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_quantised_backbone_drafts_and_draws_nearly_the_same_picture(source, dtype):
    folder, plain = source
    pipe = load(folder, plain, heads=folder / "heads", dtype=dtype)
    assert quantised_layers(pipe.backbone) > 10 and quantised_layers(plain.backbone) == 0
    assert pipe.heads.dtype == dtype, "heads keep their own dtype"
    codes = draw(plain).codes
    hidden, _ = plain.adapter().read(
        codes, plain.adapter().encode_prompt([PROMPT], None, False), plain.adapter().grid()
    )
    with torch.no_grad():
        ours, _ = pipe.adapter().read(codes, pipe.adapter().encode_prompt([PROMPT], None, False), pipe.adapter().grid())
    difference = (pipe.adapter().logits(ours) - plain.adapter().logits(hidden)).abs().mean()
    spread = plain.adapter().logits(hidden).std()
    assert 0 < difference < 0.1 * spread
    output = draw(pipe)
    assert output.stats.nfe < plain.adapter().grid().length, "it drafts"
    assert torch.from_numpy(output.images).isfinite().all() and output.images.std() > 0.01
    # The picture decoder runs in float32 whatever the dtype, quantised attention in it included.
    again, reference = pipe.decode_latents(codes, "pt"), plain.decode_latents(codes, "pt")
    torch.testing.assert_close(again, reference, rtol=0, atol=0.05)


def test_lossless_decoding_draws_the_quantised_backbone_s_own_picture(source):
    folder, plain = source
    pipe = load(folder, plain)
    alone = draw(pipe).codes
    pipe.load_ssd_heads(plain.heads)
    pipe.verifier = SpatialDraftVerifier(lossless=True)
    assert torch.equal(draw(pipe).codes, alone)


def test_a_quantised_backbone_in_memory_and_one_saved_quantised_draw_the_same(source, tmp_path):
    folder, plain = source
    expected = draw(load(folder, plain)).codes
    model = type(plain.backbone).from_pretrained(folder, quantization_config=eight_bits()).eval()
    pipe = SpatialSpeculativePipeline(**{**plain.components, "backbone": model, "heads": None, "verifier": None})
    assert torch.equal(draw(pipe).codes, expected)
    pipe.save_pretrained(tmp_path / "quantised")
    again = SpatialSpeculativePipeline.from_pretrained(tmp_path / "quantised")
    assert quantised_layers(again.backbone) == quantised_layers(model)
    assert torch.equal(draw(again).codes, expected)
    saved = SpatialSpeculativePipeline.from_pretrained(folder / "pipeline", backbone=model, heads=None)
    assert torch.equal(draw(saved).codes, expected)


@pytest.mark.parametrize("kind", ["backbone", "pipeline"])
@pytest.mark.parametrize("of", ["pipeline", "model"])
def test_a_config_of_diffusers_or_of_transformers_quantises_either_kind_of_folder(source, kind, of):
    folder, plain = source
    given = eight_bits()
    if of == "pipeline":
        given = PipelineQuantizationConfig(quant_mapping={"backbone": given})
    if kind == "pipeline":
        pipe = SpatialSpeculativePipeline.from_pretrained(folder / "pipeline", quantization_config=given)
    else:
        pipe = load(folder, plain, quantization_config=given)
    assert quantised_layers(pipe.backbone) > 10
    assert (draw(pipe).codes >= 0).all()
