import pytest
import torch
from transformers import LlamaConfig, LlamaModel

from ssd_pipelines.cache import DecodingCache


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    return LlamaModel(config).eval()


@torch.no_grad()
def forward(model, cache, embeddings, start):
    positions = torch.arange(start, start + embeddings.shape[1])[None].expand(embeddings.shape[0], -1)
    return model(inputs_embeds=embeddings, position_ids=positions, use_cache=True, **cache.argument(model))[0]


def embeddings(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, length, 32, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_a_pass_over_the_cache_equals_the_plain_forward(model):
    cache = DecodingCache(model.config, capacity=12)
    x = embeddings(12)
    parts = [
        forward(model, cache, x[:, :5], 0),
        forward(model, cache, x[:, 5:6], 5),
        forward(model, cache, x[:, 6:], 6),
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(inputs_embeds=x)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("keep", [0, 1, 5, 9])
def test_what_was_rolled_back_was_never_written(model, keep):
    x, drafts = embeddings(9), embeddings(9, seed=1)
    cache = DecodingCache(model.config, capacity=12)
    forward(model, cache, torch.cat([x[:, :keep], drafts[:, keep:]], dim=1), 0)
    cache.truncate(keep)
    assert len(cache) == keep
    if keep < 9:
        again = forward(model, cache, x[:, keep:], keep)
        fresh = DecodingCache(model.config, capacity=12)
        torch.testing.assert_close(again, forward(model, fresh, x, 0)[:, keep:], atol=1e-5, rtol=1e-5)


def test_rolling_back_copies_nothing(model):
    cache = DecodingCache(model.config, capacity=12)
    forward(model, cache, embeddings(9), 0)
    layer = cache._layers[0]
    before = layer.keys.data_ptr()
    cache.truncate(4)
    forward(model, cache, embeddings(3), 4)
    assert layer.keys.data_ptr() == before
    assert layer.keys.shape[2] == layer.get_seq_length() == 7


@torch.no_grad()
def test_writing_to_places_of_each_row_s_own_replaces_them_alone(model):
    cache = DecodingCache(model.config, capacity=12)
    forward(model, cache, embeddings(9), 0)
    layer = cache._layers[0]
    before = layer.keys.clone()
    slots = torch.tensor([[2, 10], [7, 8]])
    mask = torch.zeros(2, 1, 2, 11)
    with cache.writing_to(slots, 11):
        model(
            inputs_embeds=embeddings(2, 1),
            attention_mask=mask,
            position_ids=slots,
            use_cache=True,
            **cache.argument(model),
        )
    assert len(cache) == 11
    changed = (layer.keys[:, :, :9] != before).any(3).any(1)
    assert changed[0].nonzero().flatten().tolist() == [2]
    assert changed[1].nonzero().flatten().tolist() == [7, 8]
    with pytest.raises(ValueError, match="Can't write up to 13: the cache holds 12"), cache.writing_to(slots, 13):
        pass
    assert layer.slots is None


@pytest.mark.parametrize("length", [-1, 10])
def test_more_than_there_is_can_not_be_removed(model, length):
    cache = DecodingCache(model.config, capacity=12)
    forward(model, cache, embeddings(9), 0)
    with pytest.raises(ValueError, match=f"cache of 9 positions to {length}"):
        cache.truncate(length)


def test_a_pass_beyond_the_capacity_is_refused(model):
    cache = DecodingCache(model.config, capacity=4)
    with pytest.raises(ValueError, match="holds 4 positions, but the pass would write up to 5"):
        forward(model, cache, embeddings(5), 0)


def test_a_backbone_that_forgets_positions_is_refused(model):
    config = LlamaConfig(num_hidden_layers=2)
    config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match="sliding_attention, whose cache can't be rolled back"):
        DecodingCache(config, capacity=4)
