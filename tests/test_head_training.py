import json

import pytest
import torch

from ssd_pipelines.backbones import wrap_backbone
from ssd_pipelines.testing import tiny_pipeline
from ssd_pipelines.training import HeadTrainingConfig, TokenGrids, draw_token_grids, train_heads
from ssd_pipelines.training.head_training import backbone_states, learning_rate, offset_pairs


PROMPTS = ["a red circle", "a photo of a blue square and a green circle", "a green triangle"] * 4
CONFIG = HeadTrainingConfig(
    num_horizontal=3,
    num_vertical=2,
    epochs=4,
    batch_size=4,
    lr=3e-3,
    warmup_steps=2,
    checkpoint_every=1,
    validation_share=0.1,
)


@pytest.fixture(scope="module")
def pipe():
    return tiny_pipeline(side=4)


@pytest.fixture(scope="module")
def data(pipe, tmp_path_factory):
    return draw_token_grids(pipe, PROMPTS, tmp_path_factory.mktemp("data"), batch_size=5, seed=3)


@pytest.mark.parametrize("direction", ["horizontal", "vertical"])
@pytest.mark.parametrize("offset", [1, 2])
def test_a_head_learns_the_cell_at_its_offset_and_nothing_wraps_around(direction, offset):
    rows, columns = torch.meshgrid(torch.arange(4), torch.arange(5), indexing="ij")
    cells = torch.stack([rows, columns], dim=-1)[None]
    source, target = offset_pairs(cells, direction, offset)
    step = torch.tensor([0, offset] if direction == "horizontal" else [offset, 0])
    assert torch.equal(target, source + step)
    assert source.shape[1:3] == ((4, 5 - offset) if direction == "horizontal" else (4 - offset, 5))


@pytest.mark.parametrize("row_end", [False, True])
def test_training_states_are_those_that_decoding_meets(row_end):
    """The state of a cell predicts that cell: its logits draw the very code that greedy decoding drew."""
    pipe = tiny_pipeline(side=4, row_end=row_end)
    pipe.unload_ssd_heads()
    prompts = ["a red circle", "a photo of a blue square and a green circle"]
    codes = pipe(prompts, temperature=0.0, guidance_scale=1.0, output_type="latent").codes
    backbone = wrap_backbone(pipe.backbone, pipe.tokenizer)
    conditional = torch.zeros(2, dtype=torch.bool)
    states = backbone_states(backbone, backbone.grid(), codes, prompts, conditional)
    assert torch.equal(backbone.logits(states.hidden).argmax(-1), codes)
    torch.testing.assert_close(states.embeddings.flatten(1, 2), backbone.embed_codes(codes.flatten(1)))
    unconditional = backbone_states(backbone, backbone.grid(), codes, prompts, ~conditional)
    assert not torch.allclose(unconditional.hidden, states.hidden)


def test_drawing_is_independent_of_batches_and_resumes_where_it_stopped(pipe, data, tmp_path):
    in_twos = draw_token_grids(pipe, PROMPTS[:4], tmp_path / "twos", batch_size=2, seed=3)
    assert torch.equal(in_twos.codes, data.codes[:4])
    last = sorted((tmp_path / "twos").glob("shard-*.safetensors"))[-1]
    last.unlink()
    first = sorted((tmp_path / "twos").glob("shard-*.safetensors"))[0]
    untouched = first.stat().st_mtime_ns
    again = draw_token_grids(pipe, PROMPTS[:4], tmp_path / "twos", batch_size=2, seed=3)
    assert torch.equal(again.codes, in_twos.codes)
    assert first.stat().st_mtime_ns == untouched


def test_pictures_of_other_settings_are_not_mixed_in(pipe, tmp_path):
    draw_token_grids(pipe, PROMPTS[:1], tmp_path, seed=3)
    with pytest.raises(ValueError, match="drawn with other settings"):
        draw_token_grids(pipe, PROMPTS[:1], tmp_path, seed=4)


def test_training_lowers_the_loss_and_leaves_the_backbone_as_it_was(pipe, data, tmp_path):
    before = {name: tensor.clone() for name, tensor in pipe.backbone.state_dict().items()}
    rows = []
    heads = train_heads(pipe, data, CONFIG, tmp_path, report=rows.append)
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < 0.8 * losses[0]
    assert all(torch.equal(tensor, before[name]) for name, tensor in pipe.backbone.state_dict().items())
    heads_of_both_directions = {"horizontal+1", "horizontal+2", "horizontal+3", "vertical+1", "vertical+2"}
    assert set(heads.config.training["validation"]) == heads_of_both_directions
    pipe.load_ssd_heads(tmp_path)
    assert (pipe("a red circle", output_type="latent").codes >= 0).all()


def test_heads_that_see_more_are_trained_and_measured_too(pipe, data, tmp_path):
    more = {"neighborhood": "three", "row_head": True, "kl_weight": 1.0, "horizontal_rows": 2}
    config = HeadTrainingConfig(**{**CONFIG.__dict__, **more})
    rows = []
    heads = train_heads(pipe, data, config, tmp_path, report=rows.append)
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < 0.8 * losses[0]
    assert "row+1" in heads.config.training["validation"]
    again = type(heads).from_pretrained(tmp_path)
    assert (again.config.neighborhood, again.config.row_head) == ("three", True)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in heads.state_dict().items())


def test_several_processes_share_the_drawing(pipe, data, tmp_path):
    for index in (1, 0):
        drawn = draw_token_grids(pipe, PROMPTS, tmp_path, batch_size=5, seed=3, process_index=index, num_processes=2)
    assert torch.equal(drawn.codes, data.codes)
    assert drawn.prompts == data.prompts


@pytest.mark.parametrize("kl_weight", [0.0, 0.5])
def test_a_killed_run_ends_with_the_weights_of_an_unbroken_one(pipe, data, tmp_path, kl_weight):
    config = HeadTrainingConfig(**{**CONFIG.__dict__, "kl_weight": kl_weight})
    unbroken = train_heads(pipe, data, config, tmp_path / "unbroken", report=lambda row: None)

    class Killed(Exception):
        pass

    def kill(row):
        # Reported before its checkpoint is written: the run resumes from the step before.
        if row.get("step") == 5:
            raise Killed

    with pytest.raises(Killed):
        train_heads(pipe, data, config, tmp_path / "killed", report=kill)
    resumed = train_heads(pipe, data, config, tmp_path / "killed", report=lambda row: None)
    for name, tensor in unbroken.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_the_learning_rate_warms_up_and_decays_to_its_minimum():
    config = HeadTrainingConfig()
    assert learning_rate(0, 352, config) == pytest.approx(1e-4 / 20)
    assert learning_rate(20, 352, config) == pytest.approx(1e-4)
    assert learning_rate(351, 352, config) == pytest.approx(1e-5, rel=0.01)


@pytest.mark.parametrize(
    ("codes", "prompts", "message"),
    [
        (torch.zeros(1, 4, 4), ["a"], "at least two pictures"),
        (torch.zeros(2, 4, 4), ["a"], "got 2 pictures and 1 prompts"),
        (torch.zeros(2, 5, 4), ["a", "b"], "5 x 4 codes a picture, the backbone draws 4 x 4"),
        (torch.full((2, 4, 4), 64), ["a", "b"], "the backbone knows 0 to 63"),
        (torch.full((2, 4, 4), -2), ["a", "b"], "or interrupted"),
    ],
)
def test_data_that_does_not_fit_is_refused(pipe, tmp_path, codes, prompts, message):
    with pytest.raises(ValueError, match=message):
        train_heads(pipe, TokenGrids(codes.long(), prompts), CONFIG, tmp_path)


def test_a_folder_without_pictures_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no shard"):
        TokenGrids.load(tmp_path)


def test_the_manifest_names_backbone_and_settings(pipe, tmp_path):
    draw_token_grids(pipe, PROMPTS[:1], tmp_path, seed=3, guidance_scale=2.0)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["guidance_scale"] == 2.0 and manifest["seed"] == 3
