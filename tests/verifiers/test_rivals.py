"""Jacobi and wavefront decoding."""

import pytest
import torch

from ssd_pipelines import AutoregressiveVerifier, JacobiVerifier, SpatialDraftVerifier, WavefrontVerifier
from ssd_pipelines.testing import tiny_pipeline


PROMPTS = ["a photo of a red circle", "a blue square", "a photo of a green triangle left of a red square"]


def draw(pipe, verifier, prompts=PROMPTS[:1], seed=0, **call):
    pipe.verifier = verifier
    generators = [torch.Generator().manual_seed(seed + k) for k in range(len(prompts))]
    return pipe(list(prompts), generator=generators, output_type="latent", **call)


@pytest.mark.parametrize("row_end", [False, True])
@pytest.mark.parametrize("initial", ["random", "left", "above"])
def test_jacobi_decoding_with_shared_noise_draws_the_autoregressive_picture(row_end, initial):
    pipe = tiny_pipeline(side=6, row_end=row_end)
    reference = draw(pipe, AutoregressiveVerifier(), PROMPTS)
    for window in (3, 16):
        ours = draw(pipe, JacobiVerifier(window=window, coupling="gumbel", initial=initial), PROMPTS)
        assert torch.equal(ours.codes, reference.codes)
        assert ours.stats.nfe <= reference.stats.nfe


@pytest.mark.parametrize("row_end", [False, True])
@pytest.mark.parametrize("coupling", ["independent", "residual"])
def test_greedy_jacobi_decoding_equals_greedy_autoregressive_decoding(coupling, row_end):
    pipe = tiny_pipeline(side=6, row_end=row_end)
    reference = draw(pipe, AutoregressiveVerifier(temperature=0.0), PROMPTS)
    ours = draw(pipe, JacobiVerifier(coupling=coupling, temperature=0.0), PROMPTS)
    assert torch.equal(ours.codes, reference.codes)


RIVALS = [
    JacobiVerifier(),
    JacobiVerifier(coupling="residual", window=9, initial="random"),
    JacobiVerifier(num_neighbors=4),
    WavefrontVerifier(lead=1),
    WavefrontVerifier(lead=2, fusion=0.5),
    WavefrontVerifier(lead=1, confidence_threshold=0.3, coupling="residual"),
    WavefrontVerifier(lead=3, row_window=4),
]


@pytest.mark.parametrize("row_end", [False, True])
@pytest.mark.parametrize("verifier", RIVALS, ids=lambda verifier: repr(verifier)[:24])
def test_each_picture_of_a_batch_is_its_solo_run(verifier, row_end):
    pipe = tiny_pipeline(side=6, row_end=row_end)
    together = draw(pipe, verifier, PROMPTS, seed=5)
    assert ((together.codes >= 0) & (together.codes < 64)).all()
    for k, prompt in enumerate(PROMPTS):
        solo = draw(pipe, verifier, [prompt], seed=5 + k)
        assert torch.equal(together.codes[k], solo.codes[0])
        assert together.stats.passes[k] == solo.stats.nfe


@pytest.mark.parametrize("row_end", [False, True])
def test_a_wavefront_with_the_lead_of_a_row_draws_the_autoregressive_picture(row_end):
    pipe = tiny_pipeline(side=6, row_end=row_end)
    reference = draw(pipe, AutoregressiveVerifier(), PROMPTS)
    ours = draw(pipe, WavefrontVerifier(lead=6), PROMPTS)
    assert torch.equal(ours.codes, reference.codes)
    assert ours.stats.nfe <= reference.stats.nfe
    in_windows = draw(pipe, WavefrontVerifier(lead=6, row_window=4), PROMPTS)
    assert torch.equal(in_windows.codes, reference.codes)
    assert in_windows.stats.nfe < ours.stats.nfe
    unsure = draw(pipe, WavefrontVerifier(lead=1, fusion=0.5, confidence_threshold=1.0), PROMPTS)
    assert torch.equal(unsure.codes, reference.codes)


@pytest.mark.parametrize("lead", [4, 6])
def test_windows_in_the_rows_in_flight_save_passes(lead):
    pipe = tiny_pipeline(side=8)
    plain = sum(draw(pipe, WavefrontVerifier(lead=lead), PROMPTS, seed).stats.nfe for seed in range(3))
    wide = sum(draw(pipe, WavefrontVerifier(lead=lead, row_window=6), PROMPTS, seed).stats.nfe for seed in range(3))
    assert wide < plain


@pytest.mark.parametrize("row_end", [False, True])
@pytest.mark.parametrize("lead", [1, 2, 4])
def test_the_scan_takes_columns_passes_and_lead_for_each_further_row(row_end, lead):
    pipe = tiny_pipeline(side=6, row_end=row_end)
    assert draw(pipe, WavefrontVerifier(lead=lead), PROMPTS).stats.nfe == 6 + 5 * lead


def test_similar_codes_accepted_for_one_another_save_passes():
    pipe = tiny_pipeline(side=8)
    strict = sum(draw(pipe, JacobiVerifier(), PROMPTS, seed).stats.nfe for seed in range(3))
    lax = sum(draw(pipe, JacobiVerifier(num_neighbors=30), PROMPTS, seed).stats.nfe for seed in range(3))
    assert lax < strict


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: JacobiVerifier(window=0), "`window` must be a whole number of at least 1"),
        (lambda: JacobiVerifier(initial="heads"), '`initial` must be "random" or "left" or "above"'),
        (lambda: JacobiVerifier(coupling="gumbel", num_neighbors=3), "`num_neighbors` relaxes acceptance"),
        (lambda: WavefrontVerifier(lead=0), "`lead` must be a whole number of at least 1"),
        (lambda: WavefrontVerifier(row_window=3, coupling="residual"), "`row_window` above 1 needs"),
        (lambda: WavefrontVerifier(fusion=1.5), r"`fusion` must lie in \[0, 1\], got 1.5"),
    ],
)
def test_senseless_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_fusion_without_heads_is_refused():
    pipe = tiny_pipeline(side=6)
    pipe.unload_ssd_heads()
    with pytest.raises(ValueError, match="`fusion` needs a vertical draft head"):
        draw(pipe, WavefrontVerifier(fusion=0.5))


@pytest.mark.parametrize("there", [AutoregressiveVerifier, SpatialDraftVerifier, JacobiVerifier, WavefrontVerifier])
@pytest.mark.parametrize(
    "here",
    [
        AutoregressiveVerifier(top_p=0.5),
        SpatialDraftVerifier(top_p=0.5),
        JacobiVerifier(top_p=0.5),
        WavefrontVerifier(top_p=0.5),
    ],
    ids=lambda verifier: type(verifier).__name__,
)
def test_any_verifier_can_be_made_from_the_config_of_any_other(here, there):
    other = there.from_config(here.config)
    assert other.config.top_p == 0.5
    again = type(here).from_config(here.config)
    settings = {name: value for name, value in here.config.items() if name[0] != "_"}
    assert {name: again.config[name] for name in settings} == settings
