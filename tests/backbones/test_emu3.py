"""Emu3: the official recipe on a tiny model in the real layout."""

import pytest
import torch
from transformers import LogitsProcessorList

from ssd_pipelines import AutoregressiveVerifier, SpatialDraftVerifier, SpatialSpeculativePipeline
from ssd_pipelines.backbones import adapter_class, wrap_backbone
from ssd_pipelines.backbones.emu3 import NEGATIVE_PROMPT, QUALITY_SUFFIX
from ssd_pipelines.heads import SpatialDraftHeads
from ssd_pipelines.testing import tiny_emu3


PROMPT = "a photo of a red circle"
SIDE = 4


@pytest.fixture(scope="module")
def parts():
    return tiny_emu3(SIDE)


@pytest.fixture
def pipe(parts):
    pipe = SpatialSpeculativePipeline(*parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def with_heads(pipe):
    backbone = wrap_backbone(pipe.backbone, pipe.tokenizer)
    torch.manual_seed(0)
    pipe.load_ssd_heads(SpatialDraftHeads.for_backbone(backbone, num_horizontal=5, num_vertical=2).eval())
    return pipe


def official_greedy(model, tokenizer, prompt: str, rows: int, columns: int, scale: float) -> torch.Tensor:
    """The published loop through the library's own `generate`: forced rows, guidance in two passes, masked head."""
    size = f"<|image start|>{rows}*{columns}<|image token|>"

    def ids(text):
        text = f"{tokenizer.bos_token}{text}{size}"
        return torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])

    positive, negative = ids(prompt + QUALITY_SUFFIX), ids(NEGATIVE_PROMPT)
    mapping = model.model.vocabulary_mapping
    start = positive.shape[1]

    def allowed(_, sequence):
        column = (len(sequence) - start) % (columns + 1)
        return [mapping.eol_token_id] if column == columns else mapping.image_tokens

    generated = model.generate(
        positive,
        attention_mask=torch.ones_like(positive),
        negative_prompt_ids=negative,
        negative_prompt_attention_mask=torch.ones_like(negative),
        guidance_scale=scale,
        prefix_allowed_tokens_fn=allowed,
        logits_processor=LogitsProcessorList(),
        do_sample=False,
        top_k=None,
        temperature=None,
        top_p=None,
        max_new_tokens=rows * (columns + 1),
        min_new_tokens=rows * (columns + 1),
        eos_token_id=None,
    )[0, start:]
    codes = generated.view(rows, columns + 1)
    assert (codes[:, -1] == mapping.eol_token_id).all()
    return codes[:, :-1] - mapping.image_tokens[0]


@pytest.mark.parametrize(("height", "width"), [(32, 32), (16, 64), (64, 16)])
def test_greedy_decoding_with_batched_guidance_equals_the_library_s_generate_in_two_passes(pipe, height, width):
    pipe.verifier = AutoregressiveVerifier(temperature=0.0)
    ours = pipe(PROMPT, height=height, width=width, output_type="latent").codes[0]
    theirs = official_greedy(pipe.backbone, pipe.tokenizer, PROMPT, height // 8, width // 8, 3.0)
    assert torch.equal(ours, theirs)
    assert len(ours.unique()) > 3


@pytest.mark.parametrize("settings", [{"lossless": True}, {"rounds": 9, "horizontal_rounds": 9}], ids=str)
def test_speculative_decoding_draws_the_autoregressive_picture(pipe, settings):
    with_heads(pipe)
    prompts = [PROMPT, "blue"]
    generators = [torch.Generator().manual_seed(k) for k in range(2)]
    pipe.verifier = AutoregressiveVerifier()
    reference = pipe(prompts, generator=generators, output_type="latent")
    pipe.verifier = SpatialDraftVerifier(**settings)
    generators = [torch.Generator().manual_seed(k) for k in range(2)]
    ours = pipe(prompts, generator=generators, output_type="latent")
    assert torch.equal(ours.codes, reference.codes)
    assert reference.stats.nfe == SIDE * (SIDE + 1) >= ours.stats.nfe


def test_the_sliced_head_is_the_whole_head_s_visual_rows(pipe):
    backbone = wrap_backbone(pipe.backbone, pipe.tokenizer)
    normed = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    first = pipe.backbone.model.vocabulary_mapping.image_tokens[0]
    assert torch.equal(backbone.image_head(normed), pipe.backbone.lm_head(normed)[..., first : first + 64])


def test_the_prompt_is_the_official_one_and_names_the_size(pipe):
    backbone = wrap_backbone(pipe.backbone, pipe.tokenizer)
    positive, negative = backbone.branches([PROMPT], None, True, backbone.grid(16, 64))
    text = pipe.tokenizer.decode(positive)
    assert text.startswith("<|extra_203|>") and text.replace(" ", "").endswith("<|imagestart|>2*8<|imagetoken|>")
    assert len(negative) != len(positive)
    own = backbone.branches([PROMPT], ["blue"], True, backbone.grid())[1]
    assert len(own) < len(negative)


def test_sizes_of_the_model_s_area_are_supported_and_others_refused(pipe):
    backbone = wrap_backbone(pipe.backbone, pipe.tokenizer)
    assert (backbone.grid().rows, backbone.grid().columns, backbone.grid().row_end) == (4, 4, True)
    assert backbone.grid(width=64).rows == 2
    for size in ((720, 720), (30, 32), (-32, 32), (32.0, 32)):
        with pytest.raises(ValueError, match=r"about 1024 pixels whose sides are multiples of 8, .* 32x32"):
            backbone.grid(*size)


def test_the_released_sizes_are_the_published_ones(parts):
    model, tokenizer = parts
    backbone = wrap_backbone(model, tokenizer)
    del model.config.image_area
    try:
        assert (backbone.grid().rows, backbone.grid().length) == (90, 8190)
        assert backbone.grid(height=624).columns == 104  # 4:3, 832 x 624
    finally:
        model.config.image_area = 1024


@torch.no_grad()
@pytest.mark.parametrize(("rows", "columns"), [(4, 4), (2, 8), (5, 3)])
def test_pictures_are_the_first_frame_of_the_library_s_clip(pipe, rows, columns):
    codes = torch.randint(0, 64, (2, rows, columns), generator=torch.Generator().manual_seed(0))
    ours = pipe.adapter().decode(codes)
    assert ours.shape == (2, 3, 8 * rows, 8 * columns)
    torch.testing.assert_close(ours, pipe.backbone.model.vqmodel.decode(codes), rtol=0, atol=2e-5)
    assert ours.std() > 0.05 and not torch.equal(ours[0], ours[1])


def peak_bytes(work) -> int:
    """The most that is allocated at a time while `work` runs, above what was before."""
    with torch.profiler.profile(profile_memory=True) as profile:
        work()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@torch.no_grad()
def test_the_picture_decoder_needs_a_quarter_of_the_library_s_memory_however_many_pictures(pipe):
    codes = torch.randint(0, 64, (4, 8, 8), generator=torch.Generator().manual_seed(0))
    one = peak_bytes(lambda: pipe.adapter().decode(codes[:1]))
    four = peak_bytes(lambda: pipe.adapter().decode(codes))
    library = peak_bytes(lambda: pipe.backbone.model.vqmodel.decode(codes[:1]))
    picture = 3 * 64 * 64 * 4
    assert one > picture, "something was measured"
    assert one < 0.3 * library
    assert four <= one + 2 * 4 * picture, "all that grows is the pictures themselves"


def test_a_saved_model_loads_by_its_folder_and_draws_the_same(pipe, tmp_path):
    pipe.backbone.save_pretrained(tmp_path)
    pipe.tokenizer.save_pretrained(tmp_path)
    again = SpatialSpeculativePipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    expected = pipe(PROMPT, generator=generator, output_type="np").images
    assert expected.shape == (1, 32, 32, 3)
    assert (again(PROMPT, generator=generator.manual_seed(0), output_type="np").images == expected).all()


def test_the_older_format_is_refused_with_the_name_of_the_newer():
    with pytest.raises(ValueError, match="use BAAI/Emu3-Gen-hf"):
        adapter_class({"model_type": "Emu3"}, "BAAI/Emu3-Gen")
