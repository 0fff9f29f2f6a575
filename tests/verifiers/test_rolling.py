"""Merged commits, coupled noise, lossless decoding, refresh, rows in flight: what the rolling window promises."""

import pytest
import torch
from scipy.stats import chisquare

from ssd_pipelines import AutoregressiveVerifier, JacobiVerifier, SpatialDraftVerifier
from ssd_pipelines.backbones import wrap_backbone
from ssd_pipelines.sampling import SamplingSettings, guide, shape
from ssd_pipelines.testing import tiny_heads, tiny_pipeline
from ssd_pipelines.training.losses import States, predictions
from ssd_pipelines.verifiers import DecodingState
from ssd_pipelines.verifiers.predictions import (
    features_above,
    predict_from_above,
    predict_from_neighbors,
    predict_offsets,
)
from ssd_pipelines.verifiers.refresh import refresh


PROMPTS = ["a photo of a red circle", "a blue square", "a photo of a green triangle left of a red square"]


def draw(pipe, verifier, prompts=PROMPTS[:1], seed=0, **call):
    pipe.verifier = verifier
    generators = [torch.Generator().manual_seed(seed + k) for k in range(len(prompts))]
    return pipe(list(prompts), generator=generators, output_type="latent", **call)


LOSSLESS = [
    (False, {}),
    (True, {}),
    (False, {"refresh": 0}),
    (True, {"refresh": 3}),
    (False, {"window": 4}),
    (True, {"window": 40, "block_size": 2}),
    (False, {"horizontal_only": True}),
    (True, {"draft": "argmax", "horizontal_block": 2}),
]


@pytest.mark.parametrize("row_end", [False, True])
@pytest.mark.parametrize(("row_head", "settings"), LOSSLESS, ids=str)
def test_lossless_coupled_decoding_draws_the_autoregressive_picture_of_the_same_seed(row_end, row_head, settings):
    pipe = tiny_pipeline(side=6, row_end=row_end, neighborhood="three" if row_head else "cell", row_head=row_head)
    for seed in (0, 7):
        reference = draw(pipe, AutoregressiveVerifier(), PROMPTS, seed)
        ours = draw(pipe, SpatialDraftVerifier(lossless=True, **settings), PROMPTS, seed)
        assert torch.equal(ours.codes, reference.codes)
        assert ours.stats.nfe <= reference.stats.nfe, "never more passes, even with random heads"
    assert len(reference.codes.unique()) > 10


@pytest.mark.parametrize("call", [{"guidance_scale": 1.0}, {"temperature": 0.7, "top_k": 9}, {"top_p": 0.8}], ids=str)
def test_it_does_so_with_every_filter_and_without_guidance(call):
    pipe = tiny_pipeline(side=6)
    reference = draw(pipe, AutoregressiveVerifier(), PROMPTS, **call)
    assert torch.equal(draw(pipe, SpatialDraftVerifier(lossless=True), PROMPTS, **call).codes, reference.codes)


@pytest.mark.parametrize("row_end", [False, True])
@pytest.mark.parametrize(
    "verifier",
    [
        SpatialDraftVerifier(window=10),
        SpatialDraftVerifier(window=17, draft="above"),
        SpatialDraftVerifier(window=17, coupling="residual"),
        JacobiVerifier(window=10),
    ],
    ids=["heads", "above", "fresh noise", "jacobi"],
)
def test_a_window_is_filled_to_its_end_wherever_in_a_row_that_lies(verifier, row_end):
    pipe = tiny_pipeline(side=6, row_end=row_end)
    length, stride, window = 36 + 6 * row_end, 6 + row_end, verifier.config.window
    stats = draw(pipe, verifier).stats
    ends = set()
    for start, stop in stats.windows[1:]:
        wanted = min(start + window, length)
        wanted += int(row_end and wanted % stride == 6)  # a row end goes with its row
        assert stop == wanted
        ends.add(stop % stride)
    assert len(ends) > 2, "within rows too"


def test_refresh_redraws_stale_cells_first_and_then_what_stands_beside_a_changed_one():
    pipe = tiny_pipeline(side=6, neighborhood="three", row_head=True)
    seen = {}

    class Refreshing(SpatialDraftVerifier):
        """Hands out its state."""

        def step(self, state):
            super().step(state)
            seen["state"] = state

    draw(pipe, Refreshing(refresh=0, window=36))
    state = seen["state"]
    state.sequence[:] = torch.arange(36) % 5  # the heads will want others
    stale, movable = (torch.zeros(1, 36, dtype=torch.bool) for _ in range(2))
    stale[0, [8, 20]] = True
    movable[0, 8:12] = True
    zero, end = torch.tensor([0]), torch.tensor([36])
    for sweeps in (1, 2, 3):
        before = state.sequence.clone()
        refresh(state, stale, movable, zero, end, sweeps, "gumbel")
        changed = (state.sequence != before)[0].nonzero().flatten().tolist()
        assert changed[:1] == [8], "stale and movable"
        assert set(changed) <= set(range(8, 8 + sweeps)), "one cell further a sweep, never an immovable one"
        state.sequence[:] = before


@pytest.mark.parametrize(
    "settings", [{"rounds": 1}, {"rounds": 2, "row_lag": 1}, {"rounds": 2, "coupling": "residual"}]
)
def test_what_refresh_resamples_is_not_final_before_the_backbone_has_verified_it(monkeypatch, settings):
    resampled, counts = [], []
    original = refresh

    def recorded(state, stale, *arguments, **keywords):
        resampled.append(keywords.setdefault("resampled", torch.zeros_like(stale)))
        original(state, stale, *arguments, **keywords)

    class Watching(SpatialDraftVerifier):
        """Looks after every pass which of the resampled tokens are final."""

        def step(self, state):
            resampled.clear()
            super().step(state)
            final = torch.arange(state.grid.length) < state.settled[:, None]
            counts.append(sum(int(mask.sum()) for mask in resampled))
            assert not any(bool((mask & final).any()) for mask in resampled)

    monkeypatch.setattr("ssd_pipelines.verifiers.refresh.refresh", recorded)
    pipe = tiny_pipeline(side=6, neighborhood="three", row_head=True)
    draw(pipe, Watching(**settings), PROMPTS)
    assert sum(counts) > 0


SETTINGS = [
    {"lossless": True},
    {"lossless": True, "coupling": "residual"},
    {"rounds": 2},
    {"rounds": 3, "coupling": "residual", "refresh": 2},
    {"rounds": 3, "row_lag": 1},
    {"rounds": 2, "adaptive": False, "refresh": 0, "block_size": 2},
    {"rounds": 1, "confidence_threshold": 0.3},
    {"horizontal_only": True, "rounds": 1},
]


@pytest.mark.parametrize("row_end", [False, True])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_each_picture_of_a_batch_is_its_solo_run_whatever_its_neighbours_accept(row_end, settings):
    pipe = tiny_pipeline(side=6, row_end=row_end)
    verifier = SpatialDraftVerifier(**settings)
    together = draw(pipe, verifier, PROMPTS, seed=5)
    alone = [draw(pipe, verifier, [prompt], seed=5 + k) for k, prompt in enumerate(PROMPTS)]
    for k, solo in enumerate(alone):
        assert torch.equal(together.codes[k], solo.codes[0])
        assert together.stats.passes[k] == solo.stats.nfe
    if settings.get("lossless"):
        assert len(set(together.stats.passes)) > 1, "they progressed differently"


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_every_cell_is_drawn(settings):
    pipe = tiny_pipeline(side=6)
    codes = draw(pipe, SpatialDraftVerifier(**settings), PROMPTS).codes
    assert ((codes >= 0) & (codes < 64)).all()


@pytest.mark.parametrize(("rounds", "passes"), [(0, 27), (1, 28), (2, 55), (3, 82)])
def test_a_merged_commit_saves_a_pass_a_row_and_a_block(rounds, passes):
    """24 x 24: the prompt's pass, 4 blocks in row 1 (0-5, 6-11, 12-17, 18-23), 23 rows, `rounds` passes each.

    Without rounds the last row is never fed. The paper's schedule takes 34, 57, 80 and 103.
    """
    pipe = tiny_pipeline(side=24, hidden_size=16, num_layers=1)
    verifier = SpatialDraftVerifier(rounds=rounds, adaptive=False, refresh=0)
    assert draw(pipe, verifier).stats.nfe == passes == 1 + 27 * rounds + 26 * (rounds == 0)


def test_rows_in_flight_take_one_pass_a_row():
    pipe = tiny_pipeline(side=12, hidden_size=16, num_layers=1)
    verifier = SpatialDraftVerifier(rounds=4, row_lag=1, horizontal_rounds=1, adaptive=False, refresh=0)
    # the prompt, two blocks in row 1, 11 rows of which each is drafted one pass after the one above, and three more
    # rounds of the last
    assert draw(pipe, verifier).stats.nfe == 1 + 2 + 11 + 3


def test_more_rounds_agree_more_with_the_autoregressive_picture():
    pipe = tiny_pipeline(side=8)
    reference = draw(pipe, AutoregressiveVerifier(), PROMPTS).codes
    agreement = []
    for rounds in (1, 4, 8):
        verifier = SpatialDraftVerifier(rounds=rounds, horizontal_rounds=6, adaptive=False, refresh=0)
        agreement.append(float((draw(pipe, verifier, PROMPTS).codes == reference).float().mean()))
    assert agreement[0] < agreement[1] < agreement[2] == 1.0


def test_a_threshold_of_one_is_autoregressive_decoding_and_none_is_rounds_alone():
    pipe = tiny_pipeline(side=6)
    reference = draw(pipe, AutoregressiveVerifier(), PROMPTS)
    for adaptive in (False, True):
        strict = draw(pipe, SpatialDraftVerifier(rounds=1, confidence_threshold=1.0, adaptive=adaptive), PROMPTS)
        assert torch.equal(strict.codes, reference.codes)
    lax = draw(pipe, SpatialDraftVerifier(rounds=1, confidence_threshold=0.0), PROMPTS)
    plain = draw(pipe, SpatialDraftVerifier(rounds=1), PROMPTS)
    assert torch.equal(lax.codes, plain.codes)
    assert plain.stats.nfe < strict.stats.nfe <= reference.stats.nfe


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"commit": "separate"}, "can't be combined with rounds=None, which is lossless, adaptive=True, refresh=4"),
        ({"rounds": 1, "trailing_rounds": 1}, "`trailing_rounds` belongs to the paper's schedule"),
        ({"lossless": True, "row_lag": 1}, "waits for exact tokens alone"),
        ({"lossless": True, "draft": "argmax", "coupling": "residual"}, 'needs `draft="sample"`'),
        ({"coupling": "gumble"}, '`coupling` must be "residual" or "gumbel", got \'gumble\''),
        ({"rounds": 1, "confidence_threshold": 2}, r"`confidence_threshold` must lie in \[0, 1\], got 2"),
        ({"rounds": 1, "lossless": True}, "as many rounds as it needs, but `rounds` is 1"),
        ({"row_lag": 0}, "`row_lag` must be a whole number of at least 1"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SpatialDraftVerifier(**settings)


# --- distributions ----------------------------------------------------------------------------------------------------

VOCABULARY = 6
FILTERS = [
    {"guidance_scale": 1.0},
    {"guidance_scale": 2.0},
    {"guidance_scale": 1.5, "temperature": 1.5, "top_k": 5, "top_p": 0.95},
]


def joint_distribution(pipe, row, **call) -> torch.Tensor:
    """Exact probabilities `(vocabulary, vocabulary)` of the two codes below a given row of two."""
    backbone = wrap_backbone(pipe.backbone, pipe.tokenizer)
    grid, scale = backbone.grid(), call["guidance_scale"]
    settings = SamplingSettings(call.get("temperature", 1.0), call.get("top_k", 0), call.get("top_p", 1.0))
    pictures = torch.tensor([[row, [code, 0]] for code in range(VOCABULARY)])
    prompt = backbone.encode_prompt(PROMPTS[:1] * VOCABULARY, None, scale > 1)
    with torch.no_grad():
        logits = backbone.logits(backbone.read(pictures, prompt, grid)[0][:, 1])
        chances = shape(guide(logits, scale) if scale > 1 else logits, settings)
    return chances[0, 0][:, None] * chances[:, 1]


@pytest.mark.parametrize("call", FILTERS, ids=str)
@pytest.mark.parametrize(
    "verifier",
    [
        AutoregressiveVerifier(),
        SpatialDraftVerifier(lossless=True),
        SpatialDraftVerifier(lossless=True, coupling="residual"),
        SpatialDraftVerifier(lossless=True, coupling="residual", refresh=2, draft="random"),
        JacobiVerifier(window=3),
        JacobiVerifier(window=3, coupling="residual", initial="random"),
    ],
    ids=lambda verifier: type(verifier).__name__[:6] + str(verifier.config.get("coupling")),
)
def test_lossless_decoders_follow_the_backbone_s_joint_distribution(verifier, call):
    draws, row = 4000, [5, 2]
    pipe = tiny_pipeline(side=2, image_vocab_size=VOCABULARY)
    latents = torch.full((draws, 2, 2), -1)
    latents[:, 0] = torch.tensor(row)
    pipe.verifier = verifier
    generator = torch.Generator().manual_seed(1)
    codes = pipe(
        PROMPTS[0], num_images_per_prompt=draws, latents=latents, generator=generator, output_type="latent", **call
    ).codes
    expected = joint_distribution(pipe, row, **call).flatten().double()
    counts = torch.bincount(codes[:, 1, 0] * VOCABULARY + codes[:, 1, 1], minlength=VOCABULARY**2).double()
    possible = expected * draws >= 1
    assert counts[expected == 0].sum() == 0
    observed, wanted = counts[possible], expected[possible] / expected[possible].sum()
    assert len(observed) > 5
    assert chisquare(observed, wanted * observed.sum()).pvalue > 1e-3


def test_relaxed_acceptance_does_not_follow_it():
    pipe = tiny_pipeline(side=8)
    strict = SpatialDraftVerifier(lossless=True, coupling="residual", refresh=0)
    lax = SpatialDraftVerifier.from_config(strict.config, num_neighbors=20)
    assert draw(pipe, lax, PROMPTS).stats.nfe < draw(pipe, strict, PROMPTS).stats.nfe


@pytest.mark.parametrize("row_end", [False, True])
@pytest.mark.parametrize("neighborhood", ["cell", "three"])
def test_heads_see_in_decoding_what_they_saw_in_training(row_end, neighborhood):
    """Every cell's prediction from its neighbours, made position by position, is that of whole grids in training."""
    pipe = tiny_pipeline(side=5, row_end=row_end)
    heads = tiny_heads(pipe.backbone, neighborhood=neighborhood, row_head=True)
    backbone = wrap_backbone(pipe.backbone, pipe.tokenizer)
    grid = backbone.grid()
    codes = torch.randint(0, 64, (2, 5, 5), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        prompt = backbone.encode_prompt(PROMPTS[:2], None, guided=False)
        hidden, embeddings = backbone.read(codes, prompt, grid)
        states = States(hidden, embeddings, codes, met=hidden)
        trained = {name: heads.to_pre_norm(scaled).flatten(1, 2) for name, scaled in predictions(heads, states)}
        sequence = grid.empty_sequence(2)
        grid.to_codes(sequence)[:] = codes
        state = DecodingState(
            grid,
            sequence,
            SamplingSettings(),
            None,
            heads,
            lambda t: backbone.embed(t, grid),
            backbone.logits,
            None,
            None,
        )
        state.hidden._buffer = torch.zeros(2, grid.length + 1, hidden.shape[-1])
        grid.to_codes(state.hidden._buffer[:, :-1])[:] = hidden
        cells = grid.to_codes(torch.arange(grid.length)[None])[0]
        beside = cells[:, 1:].flatten().expand(2, -1)
        ours = predict_from_neighbors(state, torch.arange(2), beside)
        torch.testing.assert_close(ours, trained["row", 1])
        below = cells[1:].flatten().expand(2, -1)
        known = torch.ones_like(sequence, dtype=torch.bool)
        above = features_above(state, torch.arange(2), below, known)
        torch.testing.assert_close(predict_from_above(state, above), trained["vertical", 1])
        row = predict_offsets(state, "vertical", grid.stride, grid.stride + grid.columns, 1)[:, 0]
        torch.testing.assert_close(row, trained["vertical", 1].unflatten(1, (4, 5))[:, 1])


def test_pictures_that_fill_the_first_row_unevenly_are_drawn_alike():
    # One picture has a single cell of its first row left while others have several.
    pipe = tiny_pipeline(side=6)
    for block in (1, 2, 3, 5):
        for window in (3, 4, 5, 7):
            verifier = SpatialDraftVerifier(window=window, horizontal_block=block)
            together = draw(pipe, verifier, PROMPTS, seed=3, guidance_scale=1.0)
            reference = draw(pipe, AutoregressiveVerifier(), PROMPTS, seed=3, guidance_scale=1.0)
            assert torch.equal(together.codes, reference.codes)


@pytest.mark.parametrize("rounds", [1, 2])
def test_drafts_of_whole_rows_are_counted_as_vertical_and_may_be_the_likeliest(rounds):
    pipe = tiny_pipeline(side=6)
    verifier = SpatialDraftVerifier(rounds=rounds, adaptive=False, refresh=0)
    directions = {key.direction for key in draw(pipe, verifier).stats.acceptance}
    assert directions == {"horizontal", "vertical"}
    sampled, likeliest = (
        draw(pipe, SpatialDraftVerifier(rounds=0, horizontal_rounds=6, refresh=0, draft=draft)).codes
        for draft in ("sample", "argmax")
    )
    assert torch.equal(sampled[:, 0], likeliest[:, 0]), "the first row is exact after as many rounds as it has codes"
    assert not torch.equal(sampled[:, 1], likeliest[:, 1])


@pytest.mark.parametrize("row_head", [True, False])
def test_drafts_of_a_new_row_are_refreshed_from_their_left_neighbours_too(row_head):
    """With random heads the row head says something else than the vertical head, so redrawn codes differ."""
    pipe = tiny_pipeline(side=6, neighborhood="three", row_head=row_head)
    given = torch.full((1, 6, 6), -1)
    given[:, 0] = torch.arange(6)
    plain, refreshed = (
        draw(pipe, SpatialDraftVerifier(rounds=0, refresh=refresh), latents=given).codes[0, 1] for refresh in (0, 2)
    )
    assert plain[0] == refreshed[0], "the backbone's own prediction"
    assert torch.equal(plain, refreshed) != row_head
