import dataclasses
import json

import pytest
import torch
from safetensors import safe_open

from ssd_pipelines import SpatialDraftVerifier
from ssd_pipelines.testing import tiny_pipeline
from ssd_pipelines.training import TokenGrids, draw_token_grids, weights_fingerprint


def shards(folder):
    return sorted(folder.glob("shard-*.safetensors"))


def test_drawing_is_independent_of_batches_and_resumes_where_it_stopped(pipe, prompts, data, tmp_path):
    in_twos = draw_token_grids(pipe, prompts[:4], tmp_path, batch_size=2, seed=3)
    assert torch.equal(in_twos.codes, data.codes[:4])
    first, last = shards(tmp_path)
    last.unlink()
    untouched = first.stat().st_mtime_ns
    again = draw_token_grids(pipe, prompts[:4], tmp_path, batch_size=2, seed=3)
    assert torch.equal(again.codes, in_twos.codes)
    assert first.stat().st_mtime_ns == untouched
    assert not list(tmp_path.glob("*.partial"))


def test_more_prompts_go_on_behind_those_that_are_drawn(pipe, prompts, data, tmp_path):
    draw_token_grids(pipe, prompts[:7], tmp_path, batch_size=5, seed=3)
    more = draw_token_grids(pipe, prompts, tmp_path, batch_size=5, seed=3)
    assert torch.equal(more.codes, data.codes) and more.prompts == prompts


@pytest.mark.parametrize("processes", [2, 3])
def test_several_processes_share_the_drawing(pipe, prompts, data, tmp_path, processes):
    for index in reversed(range(processes)):
        drawn = draw_token_grids(
            pipe, prompts, tmp_path, batch_size=5, seed=3, process_index=index, num_processes=processes
        )
    assert torch.equal(drawn.codes, data.codes)
    assert drawn.prompts == prompts


@pytest.mark.parametrize("verifier", [None, SpatialDraftVerifier.paper(top_k=20), SpatialDraftVerifier(refresh=1)])
def test_draft_heads_draw_the_same_shards_sooner(pipe, prompts, tmp_path, monkeypatch, verifier):
    """The same but for the name of the decoder, in fewer passes, though these heads know nothing."""
    before, call = pipe.verifier, type(pipe).__call__
    passes = []

    def counting(*arguments, **keywords):
        output = call(*arguments, **keywords)
        passes.append(output.stats.nfe)
        return output

    monkeypatch.setattr(type(pipe), "__call__", counting)
    try:
        pipe.verifier = verifier or before
        for decoder in ("autoregressive", "speculative"):
            draw_token_grids(pipe, prompts[:4], tmp_path / decoder, batch_size=2, seed=3, decoder=decoder)
        assert pipe.verifier is (verifier or before)
    finally:
        pipe.verifier = before
    for plain, drafted in zip(shards(tmp_path / "autoregressive"), shards(tmp_path / "speculative"), strict=True):
        with safe_open(plain, "pt") as one, safe_open(drafted, "pt") as other:
            assert torch.equal(one.get_tensor("codes"), other.get_tensor("codes"))
            settings = [json.loads(file.metadata()["drawn"]) for file in (one, other)]
        decoders = [about["settings"].pop("decoder") for about in settings]
        assert decoders == ["AutoregressiveVerifier", "SpatialDraftVerifier"]
        assert settings[0] == settings[1]
    assert sum(passes[2:]) < sum(passes[:2]) == 32


def test_an_interrupted_drawing_is_recognised(pipe, prompts, tmp_path):
    draw_token_grids(pipe, prompts[:4], tmp_path, batch_size=2, seed=3)
    shards(tmp_path)[0].unlink()
    with pytest.raises(ValueError, match="holds 2 of 4 pictures: run `distill` again"):
        TokenGrids.load(tmp_path)
    assert TokenGrids.load(tmp_path, partial=True).prompts == prompts[2:4]


def test_pictures_of_other_settings_prompts_or_weights_are_not_mixed_in(pipe, prompts, tmp_path):
    draw_token_grids(pipe, prompts[:2], tmp_path, seed=3)
    with pytest.raises(ValueError, match="other settings .seed 3 there, 4 here"):
        draw_token_grids(pipe, prompts[:2], tmp_path, seed=4)
    with pytest.raises(ValueError, match="drawn from other prompts"):
        draw_token_grids(pipe, ["a blue circle", "a fox"], tmp_path, seed=3)
    with pytest.raises(ValueError, match="another model .*fingerprint"):
        draw_token_grids(tiny_pipeline(side=4, seed=1), prompts[:2], tmp_path, seed=3)


def test_a_folder_without_pictures_or_manifest_is_refused(pipe, prompts, tmp_path):
    with pytest.raises(ValueError, match="has no shard"):
        TokenGrids.load(tmp_path)
    draw_token_grids(pipe, prompts[:1], tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ValueError, match="no manifest.json"):
        TokenGrids.load(tmp_path)


def test_drawing_asks_for_what_it_needs(pipe, prompts, tmp_path):
    with pytest.raises(ValueError, match="at least one prompt"):
        draw_token_grids(pipe, [], tmp_path)
    with pytest.raises(ValueError, match="`decoder` must be"):
        draw_token_grids(pipe, prompts, tmp_path, decoder="fast")
    without = tiny_pipeline(side=4)
    without.unload_ssd_heads()
    with pytest.raises(ValueError, match="needs draft heads"):
        draw_token_grids(without, prompts, tmp_path, decoder="speculative")


def test_the_manifest_names_backbone_weights_and_settings(pipe, prompts, tmp_path):
    draw_token_grids(pipe, prompts[:1], tmp_path, seed=3, guidance_scale=2.0)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["fingerprint"] == weights_fingerprint(pipe.backbone)
    assert manifest["architecture"] == "JanusForConditionalGeneration"
    expected = {
        "guidance_scale": 2.0,
        "seed": 3,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "rows": 4,
        "pictures": 1,
    }
    assert {name: manifest[name] for name in expected} == expected
    assert {"backbone", "revision", "dtype"} <= set(manifest)


def test_a_digest_tells_data_apart(data, prompts):
    assert dataclasses.replace(data).digest() == data.digest()
    assert dataclasses.replace(data, prompts=["other", *prompts[1:]]).digest() != data.digest()
    assert dataclasses.replace(data, codes=data.codes.flip(0)).digest() != data.digest()


def test_a_fingerprint_is_of_the_weights_and_not_of_how_they_are_stored():
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(60, 70), torch.nn.Linear(70, 2)).bfloat16()
    fingerprint = weights_fingerprint(layer)
    assert weights_fingerprint(layer.float()) == fingerprint
    assert weights_fingerprint(layer.bfloat16()) == fingerprint
    moved = torch.nn.Sequential(layer[1], layer[0])
    assert weights_fingerprint(moved) != fingerprint
    with torch.no_grad():
        layer[0].weight += 0.01
    assert weights_fingerprint(layer) != fingerprint
    assert weights_fingerprint(torch.nn.Linear(2, 2, device="meta")) is None
