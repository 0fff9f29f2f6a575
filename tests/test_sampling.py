import pytest
import torch
from scipy.stats import chisquare

from ssd_pipelines import sampling
from ssd_pipelines.sampling import (
    CoupledNoise,
    SamplingSettings,
    accept_or_resample,
    draw_coupled,
    draw_seeds,
    draw_uniforms,
    filtered,
    guide,
    likeliest,
    nearest_codes,
    residual,
    sample,
    shape,
)


VOCABULARY = 8


def logits(seed: int, *size: int) -> torch.Tensor:
    return torch.randn(*size, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def p_value(tokens: torch.Tensor, expected: torch.Tensor) -> float:
    """Of a chi-square test; codes of probability zero must not occur at all."""
    counts = torch.bincount(tokens.flatten(), minlength=expected.numel()).double()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    if possible.sum() == 1:
        return 1.0
    expected = expected[possible].double()
    return chisquare(counts[possible], expected / expected.sum() * counts.sum()).pvalue


def test_guidance_is_uncond_plus_scale_times_the_difference_in_float32():
    both = logits(0, 4).bfloat16()
    conditional, unconditional = both.float().chunk(2)
    guided = guide(both, 5.0)
    assert guided.dtype == torch.float32
    torch.testing.assert_close(guided, unconditional + 5 * (conditional - unconditional))
    torch.testing.assert_close(guide(both, 1.0), conditional)


@pytest.mark.parametrize("top_k", [0, VOCABULARY, VOCABULARY + 1, 10**9])
def test_top_k_of_the_whole_vocabulary_or_more_keeps_all(top_k):
    torch.testing.assert_close(shape(logits(0, 3), SamplingSettings(top_k=top_k)), logits(0, 3).softmax(-1))


def test_top_k_keeps_the_k_likeliest_and_renormalises():
    probabilities = shape(logits(0, 3), SamplingSettings(top_k=3))
    full = logits(0, 3).softmax(-1)
    assert (probabilities > 0).sum(-1).tolist() == [3, 3, 3]
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(3))
    kept = full.topk(3).indices
    ratio = probabilities.gather(-1, kept) / full.gather(-1, kept)
    torch.testing.assert_close(ratio, ratio[:, :1].expand(-1, 3))


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    assert shape(probabilities.log(), SamplingSettings(top_p=0.6)).tolist() == pytest.approx([0.625, 0.375, 0, 0])
    assert shape(probabilities.log(), SamplingSettings(top_p=1e-9)).tolist() == pytest.approx([1, 0, 0, 0])
    torch.testing.assert_close(shape(probabilities.log(), SamplingSettings(top_p=1.0)), probabilities)


@pytest.mark.parametrize("temperature", [0.0, 1e-8])
def test_temperature_towards_zero_is_argmax(temperature):
    probabilities = shape(logits(1, 5), SamplingSettings(temperature=temperature))
    assert probabilities.argmax(-1).tolist() == logits(1, 5).argmax(-1).tolist()
    torch.testing.assert_close(probabilities.amax(-1), torch.ones(5))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1}, "`temperature` must be 0"),
        ({"temperature": float("nan")}, "`temperature` must be 0"),
        ({"top_k": -1}, "`top_k` must be 0"),
        ({"top_k": 1.5}, "`top_k` must be 0"),
        ({"top_p": 0.0}, r"`top_p` must lie in \(0, 1\]"),
        ({"top_p": 1.1}, r"`top_p` must lie in \(0, 1\]"),
        ({"top_p": -0.1}, r"`top_p` must lie in \(0, 1\]"),
    ],
)
def test_senseless_settings_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        SamplingSettings(**settings)


def test_draws_follow_the_distribution():
    probabilities = shape(logits(2), SamplingSettings(top_k=5, top_p=0.95))
    uniforms = torch.rand(40_000, generator=torch.Generator().manual_seed(0))
    assert p_value(sample(probabilities.expand(40_000, -1), uniforms), probabilities) > 1e-3


def test_the_largest_uniform_number_draws_no_impossible_code():
    probabilities = torch.tensor([0.2, 0.8, 0.0, 0.0])
    almost_one = torch.tensor(1 - 2**-24)
    assert sample(probabilities, almost_one).item() == 1
    assert sample(torch.tensor([0.0, 1.0, 0.0]), torch.tensor(0.0)).item() == 1


def test_the_residual_is_never_all_zero():
    p = logits(3, 2).softmax(-1)
    torch.testing.assert_close(residual(p, p.clone()), p)
    q = logits(4, 2).softmax(-1)
    torch.testing.assert_close(residual(p, q), (p - q).clamp(0))


@pytest.mark.parametrize("settings", [SamplingSettings(), SamplingSettings(0.7, 4, 0.9), SamplingSettings(0.0)])
def test_accepting_or_redrawing_drafts_gives_exactly_the_target_distribution(settings):
    """The rule of speculative sampling, with guidance and filters applied to both sides alike."""
    draws = 40_000
    p = shape(guide(logits(5, 2), 3.0), settings)
    q = shape(guide(logits(6, 2), 3.0), settings)
    generator = torch.Generator().manual_seed(1)
    drafts = sample(q.expand(draws, -1), torch.rand(draws, generator=generator))[None]
    uniforms = torch.rand(2, 1, draws, generator=generator)
    tokens, accepted = accept_or_resample(drafts, p.expand(1, draws, -1), q.expand(1, draws, -1), uniforms)
    assert p_value(tokens, p[0]) > 1e-3
    assert accepted.float().mean().item() == pytest.approx(torch.minimum(p, q).sum().item(), abs=0.01)
    assert torch.equal(tokens[accepted], drafts[accepted])


def test_a_draft_that_the_target_rules_out_is_never_kept():
    p, q = torch.tensor([[[0.0, 1.0]]]), torch.tensor([[[1.0, 0.0]]])
    tokens, accepted = accept_or_resample(torch.zeros(1, 1, dtype=torch.long), p, q, torch.zeros(2, 1, 1))
    assert tokens.item() == 1 and not accepted.item()


def test_each_picture_draws_from_its_own_generator():
    generators = [torch.Generator().manual_seed(seed) for seed in (7, 8)]
    together = draw_uniforms((2, 3), 2, generators, "cpu")
    alone = draw_uniforms((2, 3), 1, [torch.Generator().manual_seed(8)], "cpu")
    assert together.shape == (2, 2, 3)
    assert torch.equal(together[1:], alone)


def test_a_given_generator_leaves_the_global_one_alone():
    before = torch.random.get_rng_state()
    draw_uniforms((5,), 2, torch.Generator().manual_seed(0), "cpu")
    assert torch.equal(before, torch.random.get_rng_state())


def test_coupled_noise_is_the_same_whenever_and_however_it_is_asked_for():
    noise = CoupledNoise([3, 4], stride=5, vocabulary=VOCABULARY, device="cpu")
    whole = noise.between(0, 20).clone()
    noise.forget(12)
    assert torch.equal(noise.between(7, 13), whole[:, 7:13])
    pictures, positions = torch.tensor([1, 0, 1]), torch.tensor([[6, 11], [4, 5], [0, 19]])
    at = noise.at(pictures, positions, 0, 20)
    assert torch.equal(at, whole[pictures[:, None], positions])
    alone = CoupledNoise([4], stride=5, vocabulary=VOCABULARY, device="cpu")
    assert torch.equal(alone.between(0, 20), whole[1:]), "a picture's noise is its own"
    assert not torch.equal(whole[0], whole[1])
    assert len({tuple(row) for row in whole.flatten(0, 1).tolist()}) == 40, "no position repeats another's"


@pytest.mark.parametrize("settings", [SamplingSettings(), SamplingSettings(0.7, 5, 0.9)])
def test_an_argmax_with_gumbel_noise_follows_the_distribution(settings):
    given = logits(1, 1)
    noise = CoupledNoise(range(20), stride=500, vocabulary=VOCABULARY, device="cpu").between(0, 500)
    tokens = draw_coupled(given.expand_as(noise), noise, settings)
    assert p_value(tokens, shape(given, settings)[0]) > 1e-3


def test_at_temperature_zero_noise_changes_nothing():
    given = logits(1, 4)
    noise = CoupledNoise([0], stride=4, vocabulary=VOCABULARY, device="cpu").between(0, 4)[0]
    assert torch.equal(draw_coupled(given, noise, SamplingSettings(temperature=0)), given.argmax(-1))


@pytest.mark.parametrize("top_p", [0.2, 0.6, 0.95, 1.0])
def test_coupled_draws_are_those_among_the_filtered_codes(top_p):
    given = torch.cat([logits(seed, 50) * scale for seed, scale in ((0, 1), (1, 3), (2, 9))])
    noise = CoupledNoise([5], stride=len(given), vocabulary=VOCABULARY, device="cpu").between(0, len(given))[0]
    settings = SamplingSettings(temperature=0.8, top_k=VOCABULARY - 3, top_p=top_p)
    drawn = draw_coupled(given, noise, settings)
    assert torch.equal(drawn, (filtered(given, settings) + noise).argmax(-1))
    assert torch.equal(draw_coupled(given[:, None], noise[:, None], settings)[:, 0], drawn)
    assert not torch.equal(drawn, given.argmax(-1)) or top_p == 0.2


def test_seeds_come_from_each_picture_s_own_generator():
    def generators():
        return [torch.Generator().manual_seed(k) for k in (5, 6)]

    assert draw_seeds(2, generators()) == [draw_seeds(1, [g])[0] for g in generators()]
    first = torch.Generator().manual_seed(5)
    assert draw_seeds(2, first) == draw_seeds(2, torch.Generator().manual_seed(5))


def test_the_nearest_codes_begin_with_the_code_itself():
    embeddings = torch.tensor([[0.0], [10.0], [1.0], [12.0]])
    assert nearest_codes(embeddings, 1).tolist() == [[0, 2], [1, 3], [2, 0], [3, 1]]
    assert nearest_codes(embeddings, 9).shape == (4, 4)


def test_relaxed_acceptance_takes_the_mass_of_the_group():
    p, q = torch.tensor([[[0.1, 0.5, 0.4]]]), torch.tensor([[[0.9, 0.05, 0.05]]])
    near = torch.tensor([[0, 1], [1, 0], [2, 1]])
    tokens, uniforms = torch.zeros(1, 1, dtype=torch.long), torch.full((2, 1, 1), 0.5)
    assert not accept_or_resample(tokens, p, q, uniforms)[1].item(), "0.5 > 0.1 / 0.9"
    assert accept_or_resample(tokens, p, q, uniforms, near)[1].item(), "0.5 < 0.6 / 0.95"


@pytest.mark.parametrize("top_p", [0.2, 0.5, 0.9, 0.99])
def test_the_filter_that_spares_sorting_keeps_what_sorting_keeps(top_p):
    given = torch.cat([logits(0, 30), logits(1, 30) * 5, torch.zeros(1, VOCABULARY)])
    given[0, :2], given[0, 2:] = 9.0, 0.0  # two likeliest codes alike
    settings = SamplingSettings(top_p=top_p)
    assert torch.equal(filtered(given, settings), sampling._nucleus(given, top_p))
    assert torch.equal(filtered(given.view(1, 61, -1), settings)[0], filtered(given, settings))


def test_the_likeliest_code_is_the_first_among_equals():
    values = torch.tensor([[[1.0, 3.0, 3.0], [-torch.inf, -torch.inf, 0.0]], [[2.0, 2.0, 2.0], [5.0, -1.0, 4.0]]])
    assert likeliest(values).tolist() == [[1, 2], [0, 0]]
    assert torch.equal(likeliest(values), values.argmax(-1))
    assert likeliest(values[0, 0]).item() == 1
    assert likeliest(values[:0]).shape == (0, 2)
    assert torch.equal(likeliest(values.bfloat16()), likeliest(values))
