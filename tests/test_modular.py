"""The blocks of Modular Diffusers give the pipeline's picture, without remote code."""

import json
from pathlib import Path

import pytest
import torch

from ssd_pipelines import SpatialDraftVerifier, SpatialSpeculativePipeline
from ssd_pipelines.modular import SSDTextToImageBlocks
from ssd_pipelines.testing import tiny_heads, tiny_janus, tiny_pipeline, tiny_tokenizer


PROMPT = ["a photo of a red circle", "a blue square"]


def expected(pipe: SpatialSpeculativePipeline, **call) -> SpatialSpeculativePipeline:
    pipe.set_progress_bar_config(disable=True)
    return pipe(PROMPT, generator=torch.Generator().manual_seed(0), output_type="np", **call)


def test_blocks_draw_the_pipeline_s_pictures_from_a_saved_pipeline(tmp_path: Path) -> None:
    pipe = tiny_pipeline(verifier=SpatialDraftVerifier(rounds=1))
    pipe.save_pretrained(tmp_path)
    modular = SSDTextToImageBlocks().init_pipeline(str(tmp_path))
    modular.load_components()
    assert modular.verifier.config.rounds == 1
    for call in ({}, {"guidance_scale": 3.0, "top_k": 9, "negative_prompt": "green"}):
        state = modular(prompt=PROMPT, generator=torch.Generator().manual_seed(0), output_type="np", **call)
        wanted = expected(pipe, **call)
        assert torch.equal(state.get("codes"), wanted.codes)
        assert (state.get("images") == wanted.images).all()
        assert state.get("stats").nfe == wanted.stats.nfe


def test_a_stage_of_one_s_own_can_stand_between_two_of_ours() -> None:
    pipe = tiny_pipeline()
    modular = SSDTextToImageBlocks().init_pipeline()
    modular.update_components(**{name: part for name, part in pipe.components.items() if part is not None})
    whole = expected(pipe, guidance_scale=3.0)
    latents = whole.codes.clone()
    latents[:, 2:] = -1  # the first two rows are given, the others drawn anew
    drawn = modular(
        prompt=PROMPT, latents=latents, guidance_scale=3.0, generator=torch.Generator().manual_seed(1), output="codes"
    )
    assert torch.equal(drawn[:, :2], whole.codes[:, :2])
    assert not torch.equal(drawn, whole.codes)


def test_each_component_comes_from_a_repository_of_its_own(tmp_path: Path) -> None:
    tiny_janus().save_pretrained(tmp_path / "backbone")
    tiny_tokenizer().save_pretrained(tmp_path / "backbone")
    tiny_heads(tiny_janus(), seed=1).save_pretrained(tmp_path / "heads")
    SpatialDraftVerifier(rounds=0).save_pretrained(tmp_path / "heads")
    places = {
        "backbone": ("transformers", "JanusForConditionalGeneration", "backbone"),
        "tokenizer": ("transformers", "PreTrainedTokenizerFast", "backbone"),
        "heads": ("ssd_pipelines", "SpatialDraftHeads", "heads"),
        "verifier": ("ssd_pipelines", "SpatialDraftVerifier", "heads"),
    }
    index = {
        name: [library, kind, {"pretrained_model_name_or_path": str(tmp_path / folder), "type_hint": [library, kind]}]
        for name, (library, kind, folder) in places.items()
    }
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "modular_model_index.json").write_text(json.dumps(index))
    modular = SSDTextToImageBlocks().init_pipeline(str(tmp_path / "index"))
    modular.load_components()
    pipe = SpatialSpeculativePipeline.from_pretrained(tmp_path / "backbone", heads=tmp_path / "heads")
    codes = modular(prompt=PROMPT, generator=torch.Generator().manual_seed(0), output="codes")
    assert torch.equal(codes, expected(pipe).codes)


def test_components_in_memory_are_taken_and_missing_ones_named() -> None:
    pipe = tiny_pipeline()
    modular = SSDTextToImageBlocks().init_pipeline()
    with pytest.raises(ValueError, match="There is no backbone yet: call `load_components"):
        modular(prompt=PROMPT)
    modular.update_components(backbone=pipe.backbone, tokenizer=pipe.tokenizer)
    without_heads = modular(prompt=PROMPT, generator=torch.Generator().manual_seed(0), output="stats")
    assert without_heads.nfe == 16
