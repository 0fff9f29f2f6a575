import dataclasses

import pytest
import torch
from accelerate import Accelerator

from ssd_pipelines.backbones import wrap_backbone
from ssd_pipelines.grid import TokenGrid
from ssd_pipelines.heads import SpatialDraftHeads
from ssd_pipelines.testing import tiny_pipeline
from ssd_pipelines.training import HeadTrainingConfig, TokenGrids, measure_passes, train_heads
from ssd_pipelines.training.head_training import describe_training, learning_rate
from ssd_pipelines.training.losses import (
    StateReader,
    States,
    backbone_states,
    head_losses,
    head_names,
    offset_pairs,
    predictions,
    targets,
    total_loss,
)


CONFIG = HeadTrainingConfig(
    num_horizontal=3,
    num_vertical=2,
    epochs=4,
    batch_size=4,
    lr=3e-3,
    warmup_steps=2,
    checkpoint_every=1,
    log_every=1,
    validation_share=0.1,
    validation_prompts=1,
)


def quiet(row):
    pass


def changed(**settings):
    return dataclasses.replace(CONFIG, **settings)


def sequence_of_places(grid: TokenGrid) -> torch.Tensor:
    """States that say where they predict: (row, column) at every place of the sequence, and -9 at forced row ends."""
    places = torch.arange(grid.length)
    states = torch.stack([places // grid.stride, places % grid.stride], dim=-1).float()
    states[places % grid.stride >= grid.columns] = -9
    return states[None]


@pytest.mark.parametrize("row_end", [False, True])
@pytest.mark.parametrize("neighborhood", ["cell", "three"])
def test_every_head_learns_the_cell_at_its_offset_and_nothing_wraps_around(row_end, neighborhood):
    """Heads that repeat their source: between it and what they are to match lies their offset, in every cell."""
    grid = TokenGrid(4, 5, row_end)
    hidden = grid.to_codes(sequence_of_places(grid))
    states = States(hidden, torch.zeros_like(hidden), hidden[..., 0].long(), hidden)
    heads = SpatialDraftHeads(2, 8, 4, 5, row_end, 3, 2, neighborhood, row_head=True, architecture="linear")
    with torch.no_grad():
        for (kind, _), head in zip(head_names(heads), [*heads.horizontal, *heads.vertical, heads.row], strict=True):
            # Features are state and embedding of one cell, or of above left, above, above right (and left).
            begin = {"horizontal": 0, "vertical": 4 if neighborhood == "three" else 0, "row": 12}[kind]
            head.w0.weight.zero_()[:, begin : begin + 2] = torch.eye(2)
        found = dict(predictions(heads, states))
    assert set(found) == {*(("horizontal", k) for k in (1, 2, 3)), ("vertical", 1), ("vertical", 2), ("row", 1)}
    for (kind, offset), source in found.items():
        target = targets(hidden, (kind, offset))
        step = torch.tensor([offset, 0.0] if kind == "vertical" else [0.0, offset])
        assert torch.equal(target, source + step), (kind, offset)
        assert target.min() >= 0 and target[..., 0].max() == 3 and target[..., 1].max() == 4
        assert target.shape[1:3] == ((4 - offset, 5) if kind == "vertical" else (4, 5 - offset))


@pytest.mark.parametrize("row_end", [False, True])
def test_the_state_of_a_cell_is_taken_from_the_place_before_it_in_the_sequence(row_end, monkeypatch):
    """A backbone whose state is the number of the place that was fed: row ends have theirs and are left out."""
    pipe = tiny_pipeline(side=4, row_end=row_end)
    backbone = pipe.adapter()
    grid = backbone.grid()

    def count(embeddings, context, window=None):
        places = torch.arange(embeddings.shape[1], dtype=torch.float32) - context.prompt_length
        return places[None, :, None].expand(len(embeddings), -1, 2)

    monkeypatch.setattr(backbone, "forward", count)
    none = torch.zeros(1, dtype=torch.bool)
    hidden, _ = backbone_states(backbone, grid, torch.zeros(1, 4, 4, dtype=torch.long), ["a red circle"], none)
    rows, columns = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
    assert torch.equal(hidden[0, ..., 0].long(), rows * (4 + row_end) + columns - 1)


def test_horizontal_heads_can_learn_from_the_first_rows_alone():
    cells = torch.arange(20).view(1, 4, 5)
    assert torch.equal(targets(cells, ("horizontal", 2), 1), cells[:, :1, 2:])
    assert torch.equal(targets(cells, ("vertical", 1), 1), offset_pairs(cells, "vertical", 1)[1])


@pytest.mark.parametrize("row_end", [False, True])
def test_training_states_are_those_that_decoding_meets(row_end):
    """The state of a cell predicts that cell: its logits draw the very code that greedy decoding drew."""
    pipe = tiny_pipeline(side=4, row_end=row_end)
    pipe.unload_ssd_heads()
    prompts = ["a red circle", "a photo of a blue square and a green circle"]
    codes = pipe(prompts, temperature=0.0, guidance_scale=1.0, output_type="latent").codes
    backbone = wrap_backbone(pipe.backbone, pipe.tokenizer)
    conditional = torch.zeros(2, dtype=torch.bool)
    hidden, embeddings = backbone_states(backbone, backbone.grid(), codes, prompts, conditional)
    assert torch.equal(backbone.logits(hidden).argmax(-1), codes)
    torch.testing.assert_close(embeddings.flatten(1, 2), backbone.embed_codes(codes.flatten(1)))
    unconditional, _ = backbone_states(backbone, backbone.grid(), codes, prompts, ~conditional)
    assert not torch.allclose(unconditional, hidden)


def read(pipe, data, indices, stale):
    backbone = pipe.adapter()
    return StateReader(backbone, backbone.grid(), data).read(
        indices, torch.zeros(len(indices), dtype=torch.bool), torch.tensor(stale)
    )


def test_stale_states_are_met_beside_other_codes_but_matched_with_the_true_ones(pipe, data):
    clean, mixed = read(pipe, data, [0, 1, 2], [False] * 3), read(pipe, data, [0, 1, 2], [False, True, False])
    assert torch.equal(clean.hidden, clean.met)
    torch.testing.assert_close(mixed.hidden, clean.hidden)
    torch.testing.assert_close(mixed.met[::2], clean.hidden[::2])
    assert torch.equal(mixed.codes, clean.codes) and torch.equal(mixed.embeddings, clean.embeddings)
    # The state that predicts the very first cell has seen no code; the later ones have.
    torch.testing.assert_close(mixed.met[1, 0, 0], clean.hidden[1, 0, 0])
    assert not torch.allclose(mixed.met[1, -1, -1], clean.hidden[1, -1, -1])
    alone = read(pipe, data, [1], [True])
    torch.testing.assert_close(alone.met[0], mixed.met[1])


def test_training_lowers_the_loss_and_leaves_the_backbone_as_it_was(pipe, data, tmp_path):
    before = {name: tensor.clone() for name, tensor in pipe.backbone.state_dict().items()}
    rows = []
    heads = train_heads(pipe, data, changed(kl_weight=0.1), tmp_path, report=rows.append)
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < 0.8 * losses[0]
    assert all(parameter.requires_grad for parameter in pipe.backbone.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in pipe.backbone.state_dict().items())
    assert not any(parameter.grad is not None for parameter in pipe.backbone.parameters())
    validations = [row["validation"] for row in rows if "validation" in row]
    assert len(validations) == CONFIG.epochs
    assert set(validations[-1]) == {"horizontal+1", "horizontal+2", "horizontal+3", "vertical+1", "vertical+2"}
    for figures in validations[-1].values():
        assert 0 < figures["expected_acceptance"] <= 1 and figures["kl"] >= 0 and figures["loss"] > 0
    training = heads.config.training
    assert training["validation"] == validations[-1]
    assert training["data"] == {name: value for name, value in data.manifest.items() if name != "backbone"}
    pipe.load_ssd_heads(tmp_path)
    assert (pipe("a red circle", output_type="latent").codes >= 0).all()


@pytest.mark.parametrize(
    "settings",
    [
        {"neighborhood": "three", "row_head": True, "kl_weight": 1.0, "horizontal_rows": 2},
        {"states": "post_norm"},
        {"states": "post_norm", "inputs": "hidden", "neighborhood": "three", "row_head": True},
        {"inputs": "embedding", "target": "token"},
        {"shared_weights": True, "row_head": True},
        {"architecture": "mlp"},
        {"architecture": "linear", "stale_share": 1.0},
        {"normalize_states": False, "alpha": 0.5, "beta": 2.0},
    ],
    ids=lambda settings: ",".join(settings),
)
def test_every_kind_of_head_learns_draws_and_reloads(pipe, data, tmp_path, settings):
    rows = []
    heads = train_heads(pipe, data, changed(**settings), tmp_path, report=rows.append)
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < 0.97 * losses[0]
    assert ("row+1" in heads.config.training["validation"]) == settings.get("row_head", False)
    again = SpatialDraftHeads.from_pretrained(tmp_path)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in heads.state_dict().items())
    for name, value in settings.items():
        assert again.config.get(name, value) == value
    # Whatever the heads are like, lossless decoding draws the autoregressive picture.
    pipe.unload_ssd_heads()
    plain = pipe("a red circle", generator=torch.Generator().manual_seed(1), output_type="latent").codes
    pipe.load_ssd_heads(again)
    drafted = pipe("a red circle", generator=torch.Generator().manual_seed(1), output_type="latent").codes
    assert torch.equal(plain, drafted)


def test_a_post_norm_head_that_is_right_drafts_what_the_backbone_would(pipe, data):
    """What heads predict behind the norm comes back to states before it, from which the same codes follow."""
    backbone = pipe.adapter()
    with torch.no_grad():
        backbone.final_norm.weight.uniform_(0.5, 1.5)
    try:
        heads = changed(states="post_norm").new_heads(backbone, hidden_scale=3.0)
        hidden = read(pipe, data, [0, 1], [False, False]).hidden
        exact = heads.to_own_states(hidden) / 3.0
        torch.testing.assert_close(heads.to_own_states(hidden), backbone.final_norm(hidden))
        torch.testing.assert_close(backbone.logits(heads.to_pre_norm(exact)), backbone.logits(hidden))
    finally:
        torch.nn.init.ones_(backbone.final_norm.weight)


def test_alpha_and_beta_weigh_the_directions(pipe, data):
    backbone = pipe.adapter()
    heads = CONFIG.new_heads(backbone)
    losses = head_losses(heads, backbone, read(pipe, data, [0, 1], [False, False]), CONFIG)
    of = {kind: sum(loss.match for (k, _), loss in losses.items() if k == kind) for kind in ("horizontal", "vertical")}
    torch.testing.assert_close(total_loss(losses, changed(alpha=0.0)), of["vertical"] / 5)
    torch.testing.assert_close(
        total_loss(losses, changed(alpha=2.0, beta=3.0)), (2 * of["horizontal"] + 3 * of["vertical"]) / 5
    )


def test_the_parts_of_an_accumulated_batch_add_up_to_it(pipe, data, tmp_path):
    whole = train_heads(pipe, data, CONFIG, tmp_path / "whole", report=quiet)
    parts = train_heads(pipe, data, changed(gradient_accumulation=3), tmp_path / "parts", report=quiet)
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(tensor, parts.state_dict()[name], rtol=1e-3, atol=1e-4)


def test_bfloat16_learns_with_float32_weights(pipe, data, tmp_path):
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
    rows = []
    try:
        accelerator = Accelerator(mixed_precision="bf16", cpu=True)
        heads = train_heads(pipe, data, CONFIG, tmp_path, report=rows.append, accelerator=accelerator)
    finally:
        AcceleratorState._reset_state()
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < 0.8 * losses[0]
    assert {parameter.dtype for parameter in heads.parameters()} == {torch.float32}
    assert heads.config.training["mixed_precision"] == "bf16"


def test_a_bfloat16_backbone_trains_float32_heads(data, tmp_path):
    pipe = tiny_pipeline(side=4).to(torch.bfloat16)
    rows = []
    heads = train_heads(pipe, data, changed(kl_weight=1.0), tmp_path, report=rows.append)
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < 0.9 * losses[0]
    assert {parameter.dtype for parameter in heads.parameters()} == {torch.float32}


def test_passes_are_counted_at_equal_quality(pipe, data, tmp_path):
    """Heads that were never trained cost passes, but none more than autoregressive decoding takes."""
    heads = CONFIG.new_heads(pipe.adapter())
    passes = measure_passes(pipe, heads, data.prompts[:2])
    assert passes["autoregressive"] == 16 and passes["prompts"] == 2
    assert 1 < passes["mean"] <= 16
    assert pipe.heads is not heads


def test_a_dry_run_names_the_heads_alone_and_writes_nothing(pipe, data):
    plan = "\n".join(describe_training(pipe, data, CONFIG))
    parameters = sum(parameter.numel() for parameter in CONFIG.new_heads(pipe.adapter()).parameters())
    assert "trained: the heads alone, 3 horizontal, 2 vertical" in plan
    assert f"{parameters / 1e6:.1f} million parameters" in plan
    assert "frozen" in plan and "11 pictures to learn from, 1 to measure on" in plan
    assert "s a step" in plan and "GiB" in plan


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
        (torch.zeros(2, 5, 4), ["a", "b"], "5 x 4 codes per picture, the backbone draws 4 x 4"),
        (torch.full((2, 4, 4), 64), ["a", "b"], "the backbone knows 0 to 63"),
        (torch.full((2, 4, 4), -2), ["a", "b"], "or not completely"),
    ],
)
def test_data_that_does_not_fit_is_refused(pipe, tmp_path, codes, prompts, message):
    with pytest.raises(ValueError, match=message):
        train_heads(pipe, TokenGrids(codes.long(), prompts), CONFIG, tmp_path)


def test_pictures_of_another_backbone_are_refused_unless_allowed(data, tmp_path):
    other = tiny_pipeline(side=4, seed=1)
    with pytest.raises(ValueError, match="was drawn by .* with weights .* this is .* with weights"):
        train_heads(other, data, CONFIG, tmp_path)
    train_heads(other, data, changed(epochs=1), tmp_path, report=quiet, allow_foreign_data=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_vertical": 4}, "`num_vertical` must lie between 1 and 3 on a grid of 4 x 4 codes, got 4"),
        ({"num_horizontal": 4}, "`num_horizontal` must lie between 1 and 3"),
        ({"horizontal_rows": 5}, "`horizontal_rows` must lie between 1 and 4"),
        ({"prompt_dropout": 1.5}, "`prompt_dropout` must lie in"),
        ({"batch_size": 0}, "`batch_size` must be at least 1"),
        ({"lr": 0.0}, "`lr` must be greater than 0"),
        ({"architecture": "linear", "shared_weights": True}, "change one of the two"),
        ({"inputs": "pixels"}, "`inputs` of draft heads must be one of"),
        ({"target": "pixels"}, "`target` of draft heads must be one of"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(pipe, data, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        train_heads(pipe, data, changed(**settings), tmp_path)


def test_a_loss_that_is_no_number_stops_the_run_and_names_the_step(pipe, data, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "ssd_pipelines.training.head_training.total_loss",
        lambda losses, config: losses["vertical", 1].match * torch.nan,
    )
    with pytest.raises(FloatingPointError, match="nan at step 1: lower the learning rate"):
        train_heads(pipe, data, CONFIG, tmp_path)
