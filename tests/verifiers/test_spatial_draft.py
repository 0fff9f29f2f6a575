import pytest
import torch
from scipy.stats import chisquare

from ssd_pipelines import AutoregressiveVerifier, SpatialDraftVerifier
from ssd_pipelines.backbones import wrap_backbone
from ssd_pipelines.sampling import SamplingSettings, guide, shape
from ssd_pipelines.testing import tiny_pipeline
from ssd_pipelines.verifiers import staged


PROMPT = "a photo of a red circle"


def paper(**settings):
    return SpatialDraftVerifier.paper(**{"draft": "sample", **settings})


def draw(pipe, verifier, prompt=PROMPT, seed=0, **call):
    pipe.verifier = verifier
    return pipe(prompt, generator=torch.Generator().manual_seed(seed), output_type="latent", **call)


@pytest.mark.parametrize("row_end", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"rounds": 6},
        {"rounds": 12, "block_size": 2},
        {"rounds": 6, "trailing_rounds": 6, "block_size": 2},
        {"horizontal_only": True},
        {"rounds": 6, "draft": "argmax", "horizontal_block": 3, "horizontal_rounds": 3},
    ],
)
def test_greedy_decoding_with_enough_rounds_equals_greedy_autoregressive_decoding(row_end, settings):
    """Each round settles at least one more position, so as many rounds as a block is long are exact."""
    pipe = tiny_pipeline(side=6, row_end=row_end)
    prompts = [PROMPT, "a blue square"]
    reference = draw(pipe, AutoregressiveVerifier(temperature=0.0), prompts)
    verifier = paper(**{"horizontal_rounds": 5, "temperature": 0.0, **settings})
    assert torch.equal(draw(pipe, verifier, prompts).codes, reference.codes)
    assert len(reference.codes.unique()) > 2


def test_too_few_rounds_are_not_exact():
    pipe = tiny_pipeline(side=6)
    reference = draw(pipe, AutoregressiveVerifier(temperature=0.0))
    assert not torch.equal(draw(pipe, paper(rounds=1, temperature=0.0)).codes, reference.codes)


def first_of_a_block(verifier: SpatialDraftVerifier, **call) -> tuple[torch.Tensor, torch.Tensor]:
    """The first code below a given row, drawn 6,000 times, and the backbone's distribution of it."""
    draws, row = 6000, torch.tensor([[5, 2]])
    pipe = tiny_pipeline(side=2, image_vocab_size=8)
    latents = torch.full((draws, 2, 2), -1)
    latents[:, 0] = row
    codes = draw(pipe, verifier, num_images_per_prompt=draws, latents=latents, seed=1, **call).codes
    assert torch.equal(codes[:, 0], latents[:, 0])

    backbone = wrap_backbone(pipe.backbone, pipe.tokenizer)
    scale = call["guidance_scale"]
    prompt = backbone.encode_prompt([PROMPT], None, guided=scale > 1)
    given = backbone.embed_codes(row).expand(prompt.embeddings.shape[0], -1, -1)
    with torch.no_grad():
        context = backbone.new_context(prompt, backbone.grid())
        hidden = backbone.forward(torch.cat([prompt.embeddings, given], dim=1), context)[:, -1]
        logits = guide(backbone.logits(hidden), scale) if scale > 1 else backbone.logits(hidden)
    settings = SamplingSettings(call.get("temperature", 1.0), call.get("top_k", 0), call.get("top_p", 1.0))
    return codes[:, 1, 0], shape(logits[0], settings)


def p_value(codes: torch.Tensor, distribution: torch.Tensor) -> float:
    counts = torch.bincount(codes, minlength=8).double()
    possible = distribution > 0
    assert counts[~possible].sum() == 0
    expected = distribution[possible].double()
    return chisquare(counts[possible], expected / expected.sum() * counts.sum()).pvalue


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize(
    "call",
    [
        {"guidance_scale": 1.0},
        {"guidance_scale": 2.0},
        {"guidance_scale": 2.0, "temperature": 0.8, "top_k": 5, "top_p": 0.9},
    ],
)
def test_a_block_s_first_position_follows_the_backbone_s_distribution_exactly(rounds, call):
    codes, distribution = first_of_a_block(paper(rounds=rounds, draft="sample"), **call)
    assert distribution.max() < 0.9
    assert p_value(codes, distribution) > 1e-3


@pytest.mark.parametrize("verifier", [paper(rounds=0), paper(rounds=1, draft="argmax")])
def test_uncorrected_drafts_and_argmax_drafts_do_not_follow_it(verifier):
    """The paper drafts by argmax, which keeps likely tokens more often than their probability."""
    codes, distribution = first_of_a_block(verifier, guidance_scale=1.0)
    assert p_value(codes, distribution) < 1e-6


@pytest.mark.parametrize("row_end", [False, True])
def test_acceptance_is_counted_by_direction_offset_and_round_without_row_ends(row_end):
    pipe = tiny_pipeline(side=6, row_end=row_end)
    stats = draw(pipe, paper(block_size=2, rounds=2, trailing_rounds=1)).stats
    expected = {("horizontal", offset, 1): 1 for offset in range(1, 6)}
    # five rows below the first: two blocks of two, one of one
    expected |= {("vertical", 1, 1): 18, ("vertical", 1, 2): 18}
    expected |= {("vertical", 2, round): 12 for round in (1, 2, 3)}
    assert {tuple(key): count for key, count in stats._verified.items()} == expected
    assert all(0 <= rate <= 1 for rate in stats.acceptance.values())


def test_a_draft_that_equals_the_backbone_s_prediction_is_always_accepted(monkeypatch):
    """Where draft and target distribution agree, `min(1, p / q)` is 1."""
    pipe = tiny_pipeline(side=6)
    original = staged.accept_or_resample

    def same(tokens, p, q, uniforms):
        return original(tokens, p, p, uniforms)

    monkeypatch.setattr(staged, "accept_or_resample", same)
    stats = draw(pipe, paper(rounds=1)).stats
    assert stats.acceptance_rate == 1.0


def test_later_rounds_change_less_and_less():
    pipe = tiny_pipeline(side=6)
    acceptance = draw(pipe, paper(rounds=6, temperature=0.0), num_images_per_prompt=1).stats.acceptance
    assert acceptance["vertical", 1, 6] > acceptance["vertical", 1, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounds": -1}, "`rounds` must be a whole number of at least 0, got -1"),
        ({"rounds": 1.5}, "`rounds` must be a whole number"),
        ({"block_size": 0}, "`block_size` must be a whole number of at least 1"),
        ({"horizontal_block": 0}, "`horizontal_block` must be"),
        ({"draft": "greedy"}, '`draft` must be "sample" or "argmax"'),
    ],
)
def test_senseless_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        paper(**settings)


def test_blocks_longer_than_the_heads_reach_are_refused_before_any_pass():
    pipe = tiny_pipeline(side=6)
    calls = []
    handle = pipe.backbone.model.language_model.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError, match="`block_size` is 3, but the draft heads have 2 vertical offsets"):
        draw(pipe, paper(block_size=3))
    handle.remove()
    assert not calls


def test_settings_survive_swapping_verifiers_and_saving(tmp_path):
    verifier = paper(rounds=3, block_size=2, top_k=7)
    there = AutoregressiveVerifier.from_config(verifier.config)
    assert there.config.top_k == 7
    back = SpatialDraftVerifier.from_config(there.config, rounds=1)
    assert (back.config.rounds, back.config.block_size, back.config.top_k) == (1, 2, 7)
    back.save_pretrained(tmp_path)
    assert (tmp_path / "verifier_config.json").exists()
    assert SpatialDraftVerifier.from_pretrained(tmp_path).config.block_size == 2
    with pytest.raises(ValueError, match="has no setting blocksize; it has adaptive, block_size"):
        SpatialDraftVerifier.from_config(back.config, blocksize=2)


@pytest.mark.parametrize("side", [1, 2])
@pytest.mark.parametrize("row_end", [False, True])
def test_the_smallest_grids_are_drawn_too(side, row_end):
    pipe = tiny_pipeline(side=side, row_end=row_end)
    for verifier in (paper(block_size=2), paper(horizontal_only=True)):
        assert (draw(pipe, verifier).codes >= 0).all()
