"""The bundled checkpoint is an ordinary Janus model for plain transformers."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, DynamicCache, JanusForConditionalGeneration, JanusProcessor

from ssd_pipelines.sampling import SamplingSettings, shape
from ssd_pipelines.scenes import CHECKPOINT, check_scene, evaluation_tasks, parse_prompt


@pytest.fixture(scope="module")
def model() -> Iterator[JanusForConditionalGeneration]:
    yield JanusForConditionalGeneration.from_pretrained(CHECKPOINT).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINT)


def prompt_text(prompt: str) -> str:
    return f"<|User|>: {prompt}\n\n<|Assistant|>:<begin_of_image>"


def by_hand(
    model: JanusForConditionalGeneration,
    ids: torch.Tensor,
    mask: torch.Tensor,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Guided decoding in a few lines, as prompt format and guidance are documented; greedy without generator."""
    settings = model.generation_config
    kept = (ids == settings.bos_token_id) | (ids == settings.generation_kwargs["boi_token_id"])
    both, mask = torch.cat([ids, ids.where(kept, settings.pad_token_id)]), torch.cat([mask, mask])
    embeds, positions = model.get_input_embeddings()(both), (mask.cumsum(1) - 1).clamp(min=0)
    cache, codes = DynamicCache(), []
    for _ in range(256):
        hidden = model.model.language_model(
            inputs_embeds=embeds, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True
        ).last_hidden_state[:, -1]
        conditional, unconditional = model.model.generation_head(hidden).float().chunk(2)
        logits = unconditional + settings.guidance_scale * (conditional - unconditional)
        # The filter of the bundled verifier belongs to the model's recipe.
        probabilities = shape(logits, SamplingSettings(settings.temperature, top_p=0.95))
        drawn = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
        code = logits.argmax(-1) if generator is None else drawn
        codes.append(code)
        embeds = model.prepare_embeddings_for_image_generation(torch.cat([code, code])[:, None])
        mask, positions = torch.cat([mask, torch.ones_like(mask[:, :1])], 1), positions[:, -1:] + 1
    return torch.stack(codes, 1)


def test_the_prompt_is_tokenised_as_documented(tokenizer) -> None:
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(prompt_text("A photo of a red ring and a dog"))["input_ids"])
    words = ["a", "photo", "of", "a", "red", "ring", "and", "a", "<unk>"]
    assert tokens == ["<bos>", "<|User|>", ":", *words, "<|Assistant|>", ":", "<begin_of_image>"]
    assert tokenizer.padding_side == "left"


def test_every_evaluation_prompt_is_known(tokenizer) -> None:
    for task in evaluation_tasks(600):
        assert tokenizer.unk_token_id not in tokenizer(prompt_text(task.prompt))["input_ids"]


def test_the_grid_is_sixteen_by_sixteen_and_the_settings_are_there(model, tokenizer) -> None:
    assert model.config.vq_config.num_patches == 16
    assert model.model.vision_model.config.num_image_tokens == 256
    settings = model.generation_config
    assert settings.generation_kwargs["boi_token_id"] == tokenizer.convert_tokens_to_ids("<begin_of_image>")
    assert (settings.bos_token_id, settings.eos_token_id, settings.pad_token_id) == (
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
    )
    assert settings.top_k == 0 and settings.guidance_scale > 1
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_greedy_decoding_by_hand_equals_transformers_own_generate(model, tokenizer) -> None:
    prompts = [prompt_text("a photo of a red circle"), prompt_text("a photo of a ring left of a blue cross")]
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = model.generate(**batch, generation_mode="image", do_sample=False)
        codes = by_hand(model, batch["input_ids"], batch["attention_mask"])
    assert torch.equal(codes, expected)


def test_left_padding_does_not_change_the_picture(model, tokenizer) -> None:
    short, long = prompt_text("a photo of a ring"), prompt_text("a photo of a red circle and a blue square")
    both = tokenizer([short, long], padding=True, return_tensors="pt")
    alone = tokenizer([short], return_tensors="pt")
    with torch.no_grad():
        together = by_hand(model, both["input_ids"], both["attention_mask"])[0]
        assert torch.equal(together, by_hand(model, alone["input_ids"], alone["attention_mask"])[0])


def test_pictures_decode_to_64_pixels_and_encode_back(model) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, model.config.vq_config.num_embeddings, (2, 256), generator=generator)
    with torch.no_grad():
        pixels = model.model.vqmodel.decode(codes)
        again = model.model.vqmodel.encode(pixels, return_dict=True).image_tokens
    assert pixels.shape == (2, 3, 64, 64) and torch.isfinite(pixels).all()
    assert again.numel() == 512


def test_the_processor_prepares_prompts_and_pictures(model, tokenizer) -> None:
    processor = JanusProcessor.from_pretrained(CHECKPOINT)
    chat = [{"role": "user", "content": [{"type": "text", "text": "a photo of a ring"}]}]
    text = processor.apply_chat_template(chat, add_generation_prompt=True)
    ids = processor(text=text, generation_mode="image", return_tensors="pt")["input_ids"][0].tolist()
    assert ids == tokenizer(prompt_text("a photo of a ring"))["input_ids"]
    assert list(processor.image_processor.image_mean) == [0.5] * 3 == list(processor.image_processor.image_std)


def test_the_model_draws_what_the_prompt_says(model, tokenizer) -> None:
    prompts = [f"a photo of a {colour} {shape}" for colour, shape in (("red", "ring"), ("blue", "square"))] * 6
    batch = tokenizer([prompt_text(prompt) for prompt in prompts], padding=True, return_tensors="pt")
    with torch.no_grad():
        codes = by_hand(model, batch["input_ids"], batch["attention_mask"], torch.Generator().manual_seed(0))
        pixels = model.model.vqmodel.decode(codes)
    images = ((pixels.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy().astype(np.uint8)
    right = [check_scene(image, parse_prompt(prompt)).correct for image, prompt in zip(images, prompts, strict=True)]
    assert sum(right) >= 10


def test_all_files_together_stay_below_30_megabytes() -> None:
    files = [path for path in CHECKPOINT.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 30e6
    assert not [path for path in files if path.suffix in (".bin", ".pt", ".pkl")]
