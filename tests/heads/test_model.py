import pytest
import torch

from ssd_pipelines import SpatialDraftHeads
from ssd_pipelines.heads import FORMAT_VERSION
from ssd_pipelines.testing import tiny_heads, tiny_janus


def heads(**settings) -> SpatialDraftHeads:
    torch.manual_seed(0)
    defaults = {"hidden_size": 8, "image_vocab_size": 16, "rows": 4, "columns": 4}
    return SpatialDraftHeads(**{**defaults, **settings}).eval()


@torch.no_grad()
def test_a_head_computes_the_paper_s_equation():
    """`f(z) = W0 z + W2(SiLU(W1 n) * W3 n)` with `n = RMSNorm(W0 z)` and `z = [h; e]`."""
    model = heads(hidden_scale=3.0, embedding_scale=0.5)
    hidden, embeddings = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    head = model.vertical[0]
    projected = torch.cat([hidden / 3.0, embeddings / 0.5], dim=-1) @ head.w0.weight.T
    normed = projected / (projected.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    gate = normed @ head.mlp.w1.weight.T
    gated = (gate * gate.sigmoid() * (normed @ head.mlp.w3.weight.T)) @ head.mlp.w2.weight.T
    predicted = model(hidden, embeddings, "vertical", 1)
    assert predicted.shape == (2, 1, 5, 8)
    torch.testing.assert_close(predicted[:, 0], 3.0 * (projected + gated))


def test_every_offset_is_a_predictor_of_its_own():
    model = heads(num_horizontal=3)
    predicted = model(torch.randn(1, 2, 8), torch.randn(1, 2, 8), "horizontal", 3)
    assert predicted.shape == (1, 3, 2, 8)
    assert not torch.allclose(predicted[:, 0], predicted[:, 1])
    with pytest.raises(ValueError, match="4 horizontal offsets were asked for, these draft heads have 3"):
        model(torch.randn(1, 2, 8), torch.randn(1, 2, 8), "horizontal", 4)


def test_a_head_of_a_7b_model_has_134_million_parameters():
    """Table 8 of the paper: hidden size 4096, inner width twice that, no biases."""
    with torch.device("meta"):
        model = heads(hidden_size=4096)
    one = sum(parameter.numel() for parameter in model.vertical[0].parameters())
    assert round(one / 1e6) == 134
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]


@pytest.mark.parametrize(("inputs", "width"), [("both", 16), ("hidden", 8), ("embedding", 8)])
@pytest.mark.parametrize("architecture", ["swiglu", "mlp", "linear"])
def test_the_ablations_are_settings_that_survive_saving(tmp_path, inputs, width, architecture):
    model = heads(inputs=inputs, architecture=architecture)
    assert model.vertical[0].w0.in_features == width
    model.save_pretrained(tmp_path)
    again = SpatialDraftHeads.from_pretrained(tmp_path)
    hidden, embeddings = torch.randn(1, 3, 8), torch.randn(1, 3, 8)
    expected = model(hidden, embeddings, "vertical", 1)
    assert torch.equal(again(hidden, embeddings, "vertical", 1), expected)
    ignored = {"hidden": (hidden, embeddings + 1), "embedding": (hidden + 1, embeddings)}.get(inputs)
    if ignored:
        assert torch.equal(model(*ignored, "vertical", 1), expected)


def test_states_of_another_dtype_come_back_in_it():
    predicted = heads()(torch.randn(1, 2, 8).bfloat16(), torch.randn(1, 2, 8).bfloat16(), "vertical", 1)
    assert predicted.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inputs": "all"}, "`inputs` of draft heads must be one of hidden, embedding, both, got 'all'"),
        ({"architecture": "gru"}, "`architecture` of draft heads must be one of"),
        ({"format_version": FORMAT_VERSION + 1}, "upgrade ssd-pipelines"),
    ],
)
def test_unknown_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        heads(**settings)


def test_saved_heads_hold_head_tensors_only(tmp_path):
    """They borrow the backbone's norm and image head, and save neither."""
    from safetensors.torch import load_file

    tiny_heads(tiny_janus()).save_pretrained(tmp_path)
    names = load_file(tmp_path / "diffusion_pytorch_model.safetensors")
    assert {name.split(".")[0] for name in names} == {"horizontal", "vertical"}
