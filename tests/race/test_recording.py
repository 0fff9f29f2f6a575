"""A recording has what the decoder did, pass by pass, and changes nothing of it."""

import numpy as np
import pytest
import torch

from ssd_pipelines import AutoregressiveVerifier, SpatialSpeculativePipeline
from ssd_pipelines.race import RaceStopped, cell_map, difference_map, race_decoders, record, record_race
from ssd_pipelines.race.recording import TITLES


PROMPT = "a ring above a cross"


def lane(race, title):
    return next(recording for recording in race.recordings if recording.title == title)


def test_recorded_codes_and_passes_are_those_of_the_plain_call(pipe, race):
    for recording, (_, decoder) in zip(race.recordings, race_decoders(pipe), strict=True):
        kept = pipe.verifier
        pipe.verifier = type(decoder.verifier).from_config(decoder.verifier.config, top_p=kept.config.top_p)
        try:
            plain = pipe(PROMPT, generator=torch.Generator().manual_seed(0), output_type="latent")
        finally:
            pipe.verifier = kept
        assert len(recording.passes) == plain.stats.nfe
        assert recording.tokens == plain.stats.tokens == 256
        assert recording.after(len(recording.passes))[0].tolist() == plain.codes[0].tolist()


def test_a_final_cell_never_changes_and_all_are_final_in_the_end(race):
    for recording in race.recordings:
        codes, final = recording.after(0)
        assert not final.any() and (codes == -1).all()
        for passes in range(1, len(recording.passes) + 1):
            new_codes, new_final = recording.after(passes)
            assert (new_final | ~final).all() and (new_codes[final] == codes[final]).all()
            codes, final = new_codes, new_final
        assert final.all()


def test_time_grows_with_the_passes(race):
    for recording in race.recordings:
        seconds = [record.seconds for record in recording.passes]
        assert seconds == sorted(seconds) and seconds[0] > 0 and recording.seconds == seconds[-1]
        assert recording.passes_until(0) == 0 and recording.passes_until(seconds[-1]) == len(seconds)
        assert recording.passes_until(seconds[0]) == 1


def test_autoregressive_decoding_has_one_new_final_cell_per_pass_and_no_rounds(race):
    recording = lane(race, "Autoregressive")
    assert recording.first_final().ravel().tolist() == list(range(1, 257))
    assert not recording.rounds().any() and not recording.corrections().any()


def test_speculative_decoding_verifies_and_corrects_drafts(race):
    recording = lane(race, "SSD, lossless")
    assert len(recording.passes) < 30
    assert recording.rounds().max() >= 2 and recording.corrections().sum() > 0
    changed = sum(recording.changed_by(index).sum() for index in range(len(recording.passes)))
    assert changed == recording.corrections().sum()


def test_only_lossless_decoding_with_shared_noise_has_to_match_the_reference(race):
    assert lane(race, "Autoregressive").matches_reference and lane(race, "SSD, lossless").matches_reference
    assert not lane(race, "SSD, paper").matches_reference
    difference, count = difference_map(lane(race, "SSD, lossless"), lane(race, "Autoregressive"))
    assert count == 0
    difference, count = difference_map(lane(race, "SSD, paper"), lane(race, "Autoregressive"))
    assert count > 0 and (234, 88, 12) in {colour for _, colour in difference.getcolors(1 << 20)}


def test_pictures_are_spread_over_the_passes_and_end_with_the_last(pipe, race):
    for recording in race.recordings:
        last = len(recording.passes) - 1
        assert 0 in recording.pictures and last in recording.pictures and len(recording.pictures) <= 4
        codes = torch.from_numpy(recording.after(last + 1)[0])[None]
        assert np.array_equal(np.asarray(recording.pictures[last]), np.asarray(pipe.decode_latents(codes)[0]))


def test_the_pipeline_is_left_as_it_was(pipe):
    verifier, calls = pipe.verifier, []

    def stop(title: str, made: int, left: int) -> bool:
        calls.append((title, made))
        return made == 2

    with pytest.raises(RaceStopped):
        record_race(pipe, race_decoders(pipe), PROMPT, on_pass=stop)
    assert pipe.verifier is verifier
    assert calls == [("Autoregressive", 1), ("Autoregressive", 2)], "stops at once, and tells of no warm-up pass"


def test_the_median_of_several_recordings_is_kept(pipe, monkeypatch):
    from ssd_pipelines.race import recording as module

    seconds = iter((3.0, 1.0, 2.0))
    real = module.record

    def slow(*args, **kwargs):
        made = real(*args, **kwargs)
        made.passes[-1] = module.PassRecord(next(seconds), *list(vars(made.passes[-1]).values())[1:])
        return made

    monkeypatch.setattr(module, "_warm_up", lambda *args, **kwargs: None)
    monkeypatch.setattr(module, "record", slow)
    race = module.record_race(pipe, race_decoders(pipe, [])[:1], PROMPT, max_pictures=1, repeats=3)
    assert race.recordings[0].seconds == 2.0


def test_decoders_are_chosen_by_the_names_of_the_benchmark(pipe):
    assert [title for title, _ in race_decoders(pipe)] == list(TITLES.values())
    chosen = race_decoders(pipe, ["lossless", "SJD, window 16"])
    assert [title for title, _ in chosen] == ["Autoregressive", "SSD, lossless", "SJD, window 16"]
    assert isinstance(chosen[0][1].verifier, AutoregressiveVerifier)
    with pytest.raises(ValueError, match="Unknown decoder nobody: choose from AR; "):
        race_decoders(pipe, ["nobody"])


def test_without_heads_the_decoders_that_need_none_are_left(pipe):
    bare = SpatialSpeculativePipeline(**{**pipe.components, "heads": None, "verifier": None})
    assert [title for title, _ in race_decoders(bare)] == ["Autoregressive", "Jacobi (SJD)", "ZipAR"]
    with pytest.raises(ValueError, match="lossless needs draft heads"):
        race_decoders(bare, ["lossless"])


def test_sampling_settings_of_the_pipeline_hold_for_every_decoder(pipe):
    (title, decoder), *_ = race_decoders(pipe)
    kept = pipe.verifier
    pipe.verifier = type(kept).from_config(kept.config, temperature=0.0)
    try:
        first = record(pipe, decoder, PROMPT, seed=0)
        second = record(pipe, decoder, PROMPT, seed=1)
    finally:
        pipe.verifier = kept
    assert first.after(256)[0].tolist() == second.after(256)[0].tolist(), "argmax has no seed"


def test_a_map_is_orange_where_values_are_large(race):
    recording = lane(race, "SSD, lossless")
    values = np.zeros((16, 16))
    values[3, 5] = 2
    colours = np.asarray(cell_map(recording, values, size=160), int)
    assert colours[35, 55, 0] - colours[35, 55, 2] > 100
    assert abs(colours[100, 100, 0] - colours[100, 100, 2]) <= 1, "grey elsewhere"
    with pytest.raises(ValueError, match="must be of shape"):
        cell_map(recording, np.zeros((2, 2)))
