"""What users get wrong, or fear, with such models, for every family: loading, sizes, guidance, devices.

Wrong input gets one sentence that says what was given and what to do; odd but sensible input works.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ssd_pipelines import AutoregressiveVerifier, SpatialDraftVerifier, SpatialSpeculativePipeline
from ssd_pipelines.backbones import adapter_class
from ssd_pipelines.testing import tiny_family, tiny_lumina


FAMILIES = ("janus", "emu3", "lumina", "llamagen")
PROMPT, SHORT = "a photo of a red circle left of a green square", "blue"


@pytest.fixture(scope="module")
def families():
    return {family: tiny_family(family) for family in FAMILIES}


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture
def pipe(families, family):
    families[family].verifier = SpatialDraftVerifier()
    return families[family]


def draw(pipe, prompt=PROMPT, **kwargs):
    return pipe(prompt, **{"generator": torch.Generator().manual_seed(0), "output_type": "latent", **kwargs}).codes


def refusal(call, *args, **kwargs) -> str:
    """The sentence that a call is refused with."""
    with pytest.raises(ValueError) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400, message
    return message


# --- loading ----------------------------------------------------------------------------------------------------------

XLLMX = {"architectures": ["ChameleonXLLMXForConditionalGeneration"], "mask_image_logits": False}
LUMINA_TOKENS = dict.fromkeys(["<racm3:break>", "<reserved08706>", "<reserved08799>", "<reserved08801>"], 1)
META = {"model_type": "chameleon", "vocabulary_map": LUMINA_TOKENS}
OTHER_RELEASES = [
    ("deepseek-ai/Janus-Pro-7B", {"model_type": "multi_modality"}, "use deepseek-community/Janus-Pro-7B, the same"),
    ("deepseek-ai/Janus-Pro-1B", {"model_type": "multi_modality"}, "use deepseek-community/Janus-Pro-1B, the same"),
    ("deepseek-ai/Janus-1.3B", {"model_type": "multi_modality"}, "Pro-1B or deepseek-community/Janus-Pro-7B"),
    ("deepseek-ai/JanusFlow-1.3B", {"model_type": "multi_modality"}, "is JanusFlow, which draws by rectified flow"),
    ("folder", {"model_type": "multi_modality", "vision_gen_dec_config": {}}, "is JanusFlow, .* use deepseek-com"),
    ("BAAI/Emu3-Gen", {"model_type": "Emu3"}, "use BAAI/Emu3-Gen-hf, the same model"),
    ("BAAI/Emu3-Stage1", {"model_type": "Emu3"}, "middle of Emu3's training; use BAAI/Emu3-Gen-hf"),
    ("BAAI/Emu3-Chat", {"model_type": "Emu3"}, "reads pictures but draws none; use BAAI/Emu3-Gen-hf"),
    ("BAAI/Emu3-Chat-hf", {"model_type": "emu3"}, "reads pictures but draws none; use BAAI/Emu3-Gen-hf"),
    ("BAAI/Emu3.5-Image", {"model_type": "Emu3"}, "is Emu3.5, .*; use BAAI/Emu3-Gen-hf"),
    ("Alpha-VLLM/Lumina-mGPT-7B-768", {**META, **XLLMX}, "convert it once with `ssd-pipelines convert lumina-mgpt`"),
    ("Alpha-VLLM/Lumina-mGPT-2.0", {"model_type": "chameleon"}, "is Lumina-mGPT 2.0, .* convert Alpha"),
    ("facebook/chameleon-7b", META, "Meta's own draws nothing. Convert Alpha-VLLM/Lumina-mGPT-7B-768"),
    ("leloy/Anole-7b-v0.1-hf", META, "`register_backbone`, as examples/backbones.md does for Anole"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "settings", "hint"), OTHER_RELEASES, ids=[f"{n} {len(s)}" for n, s, _ in OTHER_RELEASES]
)
def test_a_release_that_cannot_be_loaded_is_refused_with_what_to_use(name, settings, hint, tmp_path):
    with pytest.raises(ValueError, match=hint) as caught:
        adapter_class(settings, name)
    assert str(caught.value).startswith(f"{name} ") and "\n" not in str(caught.value)
    # The same sentence through the public call, from a folder of that name.
    folder = tmp_path / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=hint):
        SpatialSpeculativePipeline.from_pretrained(folder)


def test_llamagen_as_published_is_refused_with_how_to_convert_it(tmp_path):
    (tmp_path / "t2i_XL_stage2_512.pt").write_bytes(b"never opened")
    assert "`ssd-pipelines convert llamagen`" in refusal(SpatialSpeculativePipeline.from_pretrained, tmp_path)


def test_a_chameleon_in_memory_that_is_no_lumina_is_refused():
    model, tokenizer = tiny_lumina()
    del model.config.image_size
    assert "no Lumina-mGPT" in refusal(SpatialSpeculativePipeline, model, tokenizer)


@pytest.mark.parametrize("other", FAMILIES)
def test_heads_of_another_family_are_refused_naming_both_and_the_pipe_stays(families, pipe, family, other):
    if other == family:
        return
    before, expected = pipe.heads, draw(pipe)
    message = refusal(pipe.load_ssd_heads, families[other].heads)
    for part in (type(families[other].backbone).__name__, type(pipe.backbone).__name__):
        assert part in message
    assert pipe.heads is before and torch.equal(draw(pipe), expected)


PROGRAM = """
import json, sys, torch
from ssd_pipelines import SpatialSpeculativePipeline

report = {}
for folder in sys.argv[1:]:
    pipe = SpatialSpeculativePipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    output = pipe("blue", generator=torch.Generator().manual_seed(0), output_type="pt")
    report[folder] = [output.codes.tolist(), float(output.images.sum()), sorted(pipe.components)]
print(json.dumps(report))
"""


@pytest.mark.slow
def test_saved_pipelines_draw_the_same_in_a_fresh_process(families, tmp_path):
    folders, expected = [], {}
    for family, pipe in families.items():
        pipe.verifier = SpatialDraftVerifier()
        folders.append(str(tmp_path / family))
        pipe.save_pretrained(folders[-1])
        output = pipe(SHORT, generator=torch.Generator().manual_seed(0), output_type="pt")
        expected[folders[-1]] = [output.codes.tolist(), float(output.images.sum()), sorted(pipe.components)]
    run = subprocess.run([sys.executable, "-c", PROGRAM, *folders], capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout.splitlines()[-1])
    for folder, (codes, pixels, components) in expected.items():
        assert report[folder][0] == codes, Path(folder).name
        assert report[folder][1] == pytest.approx(pixels, rel=1e-5)
        assert report[folder][2] == components


# --- sizes ------------------------------------------------------------------------------------------------------------

PIXELS = {"janus": 16, "emu3": 32, "lumina": 64, "llamagen": 64}  # sides of the tiny models' pictures


@pytest.mark.parametrize("name", ["height", "width"])
@pytest.mark.parametrize("size", [383, 0, -16, "384", 384.0, True, 4096], ids=repr)
def test_a_size_that_cannot_be_drawn_is_refused_with_those_that_can(pipe, family, name, size):
    message = refusal(draw, pipe, **{name: size})
    assert f"`{name}` is {size!r}" in message
    side = PIXELS[family]
    assert f"{side} x {side}" in message or f"{side}x{side}" in message


@pytest.mark.parametrize(
    ("family", "width", "height"),
    [("emu3", 16, 64), ("emu3", 64, 16), ("emu3", 24, 40), ("lumina", 32, 128), ("lumina", 128, 32)],
)
def test_a_picture_of_another_shape_has_the_announced_size(families, family, width, height):
    pipe = families[family]
    pipe.verifier = AutoregressiveVerifier()
    assert pipe(PROMPT, width=width, height=height).images[0].size == (width, height)
    pipe.verifier = SpatialDraftVerifier()
    message = refusal(draw, pipe, width=width, height=height)
    assert f"grid columns 4 against {width // pipe.adapter().patch_size}" in message, "heads for another row width"


def ratio_size(ratio: tuple[int, int], area: int, patch: int) -> tuple[int, int]:
    """The published recipe: both sides scaled to the area, each rounded to whole codes."""
    width, height = ratio
    scale = (area / (width * height)) ** 0.5 / patch
    return round(width * scale) * patch, round(height * scale) * patch


@pytest.mark.parametrize("ratio", [(1, 1), (4, 3), (3, 4), (16, 9), (9, 16), (3, 2), (2, 3), (21, 9), (1, 2)], ids=str)
def test_every_usual_ratio_of_the_released_emu3_is_a_size(families, ratio):
    config = families["emu3"].backbone.config
    stated = config.image_area
    try:
        config.image_area = 720 * 720
        width, height = ratio_size(ratio, 720 * 720, 8)
        grid = families["emu3"].adapter().grid(height, width)
        assert (grid.columns * 8, grid.rows * 8) == (width, height)
        assert families["emu3"].adapter().grid(height=height).rows == height // 8
    finally:
        config.image_area = stated


@pytest.mark.parametrize("family", ["emu3", "lumina"])
@pytest.mark.parametrize("verifier", [AutoregressiveVerifier(), SpatialDraftVerifier()], ids=["plain", "drafts"])
def test_a_model_that_would_rather_end_the_row_or_the_picture_still_fills_its_grid(families, family, verifier):
    pipe = families[family]
    pipe.verifier = verifier
    expected = draw(pipe)
    backbone = pipe.adapter()
    first, number = backbone._first_visual_token(), backbone.image_vocab_size
    weight = pipe.backbone.lm_head.weight
    before = weight.detach().clone()
    try:
        with torch.no_grad():  # every other token is far likelier now
            weight[:first] *= 1000
            weight[first + number :] *= 1000
        assert torch.equal(draw(pipe), expected)
        assert expected.shape == (1, 4, 4) and (expected >= 0).all()
    finally:
        with torch.no_grad():
            weight.copy_(before)


# --- guidance ---------------------------------------------------------------------------------------------------------

OFFICIAL = {
    "janus": (5.0, 1.0, None),
    "emu3": (3.0, 1.0, 2048),
    "lumina": (4.0, 1.0, 2000),
    "llamagen": (7.5, 1.0, 1000),
}


def test_defaults_are_those_of_the_official_recipe(pipe, family):
    backbone = pipe.adapter()
    recommended = backbone.recommended_sampling
    found = (backbone.recommended_guidance_scale, recommended.temperature, recommended.top_k or None)
    assert found == OFFICIAL[family]
    assert recommended.top_p in (None, 1.0)
    scale, temperature, top_k = found
    stated = draw(pipe, guidance_scale=scale, temperature=temperature, top_k=top_k or 0)
    assert torch.equal(draw(pipe), stated)


@pytest.mark.parametrize(("scale", "rows"), [(None, 2), (0, 1), (1, 1), (1.0001, 2), (5, 2)])
def test_the_guided_pair_is_one_pass_and_the_unconditional_branch_runs_only_when_it_guides(pipe, scale, rows):
    batches: list[int] = []
    hook = pipe.adapter().decoder.register_forward_pre_hook(
        lambda _, args, kwargs: batches.append(len(kwargs["inputs_embeds"])), with_kwargs=True
    )
    try:
        output = pipe(PROMPT, guidance_scale=scale, output_type="latent")
    finally:
        hook.remove()
    assert set(batches) == {rows}
    assert len(batches) == output.stats.nfe


@torch.no_grad()
def test_the_branches_of_guidance_differ_and_the_prompt_matters(pipe):
    backbone = pipe.adapter()
    codes = draw(pipe)
    hidden, _ = backbone.read(
        torch.cat([codes, codes]), backbone.encode_prompt([PROMPT, SHORT], None, True), backbone.grid()
    )
    logits = backbone.logits(hidden)
    assert (logits[0] - logits[2]).abs().max() > 0.05, "conditional and unconditional"
    assert (logits[0] - logits[1]).abs().max() > 0.05, "one prompt and another"


@pytest.mark.parametrize("scale", [-1, float("nan"), float("inf"), "5"], ids=repr)
def test_a_senseless_guidance_scale_is_refused(pipe, scale):
    assert "`guidance_scale`" in refusal(draw, pipe, guidance_scale=scale)


@pytest.mark.parametrize("negative", [["a", "b"], [], 5, [5]], ids=repr)
def test_a_negative_prompt_of_the_wrong_length_or_kind_is_refused(pipe, negative):
    assert "`negative_prompt`" in refusal(draw, pipe, negative_prompt=negative)


def test_a_negative_prompt_of_its_own_replaces_the_usual_one_and_batches_as_alone(pipe):
    def greedy(prompts, negatives=None):
        return pipe(prompts, negative_prompt=negatives, temperature=0, output_type="latent").codes

    together = greedy([PROMPT, SHORT], ["red", PROMPT])
    assert torch.equal(together[:1], greedy(PROMPT, "red"))
    assert torch.equal(together[1:], greedy(SHORT, PROMPT))
    assert not torch.equal(together[:1], greedy(PROMPT))


# --- devices ----------------------------------------------------------------------------------------------------------


def test_a_backbone_that_refuses_to_be_moved_is_not_moved(family):
    pipe = tiny_family(family)
    expected = draw(pipe)

    def refuse(*args, **kwargs):
        raise ValueError("`.to` is not supported for quantized models")

    pipe.backbone.to = refuse
    heads = pipe.heads.to(torch.float64)
    pipe.load_ssd_heads(heads.float())
    assert torch.equal(draw(pipe), expected)
    assert torch.equal(draw(SpatialSpeculativePipeline.from_pipe(pipe)), expected)


@pytest.mark.parametrize("heads_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("decoder_dtype", [torch.float32, torch.float16], ids=str)
def test_mixed_dtypes_draw_without_an_error_inside(family, heads_dtype, decoder_dtype):
    pipe = tiny_family(family)
    pipe.to(torch.bfloat16)
    pipe.heads.to(heads_dtype)
    if pipe.image_tokenizer is not None:
        pipe.image_tokenizer.to(decoder_dtype)
    output = pipe(PROMPT, output_type="pt")
    assert output.images.isfinite().all() and output.images.std() > 0
    assert pipe.heads.dtype == heads_dtype, "heads keep their dtype"
