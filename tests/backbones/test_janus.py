"""The Janus adapter beside transformers' own code: the same prompts, states, codes, pixels, and an untouched model."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import JanusForConditionalGeneration, JanusImageProcessor, JanusProcessor, PreTrainedTokenizerFast

from ssd_pipelines import AutoregressiveVerifier, SpatialSpeculativePipeline
from ssd_pipelines.backbones import Context, Prompt, adapter_class, wrap_backbone
from ssd_pipelines.backbones.janus import JanusBackbone
from ssd_pipelines.grid import UNDRAWN, Cells
from ssd_pipelines.sampling import guide
from ssd_pipelines.testing import tiny_heads, tiny_janus, tiny_pipeline, tiny_tokenizer


SHORT = "a red circle"
LONG = "a photo of a red square above a green triangle and a blue circle below the red square and a green square left"
SIDE = 4


@pytest.fixture(scope="module")
def model() -> JanusForConditionalGeneration:
    return tiny_janus()


@pytest.fixture(scope="module")
def backbone(model: JanusForConditionalGeneration) -> JanusBackbone:
    adapter = wrap_backbone(model, tiny_tokenizer())
    assert isinstance(adapter, JanusBackbone)
    return adapter


def official_text(prompt: str) -> str:
    return f"<|User|>: {prompt}\n\n<|Assistant|>:<begin_of_image>"


def library_inputs(prompts: Sequence[str]) -> dict[str, torch.Tensor]:
    """Left-padded ids and mask, made from the official prompt string with plain transformers."""
    tokenizer = tiny_tokenizer()
    texts = [f"<bos>{official_text(prompt)}" for prompt in prompts]
    encoded = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}


def greedy_pipeline(model: JanusForConditionalGeneration) -> SpatialSpeculativePipeline:
    pipe = SpatialSpeculativePipeline(model, tiny_tokenizer(), verifier=AutoregressiveVerifier(temperature=0))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def some_codes(batch_size: int, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(64, (batch_size, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def feed(backbone: JanusBackbone, prompt: Prompt, *chunks: torch.Tensor) -> tuple[torch.Tensor, Context]:
    """Pre-norm states of the prompt and then of chunks of codes, each chunk one pass."""
    context = backbone.new_context(prompt, backbone.grid())
    states = [backbone.forward(prompt.embeddings, context)]
    states += [backbone.forward(backbone.embed(chunk, backbone.grid()), context) for chunk in chunks]
    return torch.cat(states, dim=1), context


# --- the same picture as the library's --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompts", [[SHORT], [LONG], [SHORT, LONG], [LONG, "red", SHORT]], ids=["short", "long", "two unequal", "three"]
)
@pytest.mark.parametrize("seed", [3, 8])  # of models whose likeliest codes are not all the same
def test_greedy_decoding_is_the_librarys_token_for_token(prompts: list[str], seed: int) -> None:
    model = tiny_janus(seed=seed)
    codes = greedy_pipeline(model)(prompts, guidance_scale=5, output_type="latent").codes
    reference = model.generate(
        **library_inputs(prompts), generation_mode="image", do_sample=False, guidance_scale=5, use_cache=True
    )
    assert len(reference.unique()) > 4, "a picture of one code would prove little"
    assert torch.equal(codes.flatten(1), reference)


def test_a_short_prompt_beside_a_long_one_gives_its_solo_picture(model: JanusForConditionalGeneration) -> None:
    pipe = greedy_pipeline(model)
    for guidance_scale in (1.0, 5.0):
        together = pipe([SHORT, LONG], guidance_scale=guidance_scale, output_type="latent").codes
        for row, prompt in enumerate((SHORT, LONG)):
            alone = pipe(prompt, guidance_scale=guidance_scale, output_type="latent").codes
            assert torch.equal(together[row : row + 1], alone)


def test_a_short_negative_prompt_beside_a_long_prompt_gives_its_solo_picture(
    model: JanusForConditionalGeneration,
) -> None:
    pipe = greedy_pipeline(model)
    together = pipe([LONG, SHORT], negative_prompt=["blue", LONG], output_type="latent").codes
    assert torch.equal(together[:1], pipe(LONG, negative_prompt="blue", output_type="latent").codes)
    assert torch.equal(together[1:], pipe(SHORT, negative_prompt=LONG, output_type="latent").codes)
    assert not torch.equal(together[:1], pipe(LONG, output_type="latent").codes)


# --- states -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompts", [[SHORT], [SHORT, LONG]], ids=["solo", "left padded"])
@torch.no_grad()
def test_the_norm_of_our_states_is_the_librarys_last_hidden_state(backbone: JanusBackbone, prompts: list[str]) -> None:
    encoded = backbone.encode_prompt(prompts, None, guided=True)
    codes = some_codes(2 * len(prompts), SIDE * SIDE)
    hidden, _ = feed(backbone, encoded, codes)

    embeddings = torch.cat([encoded.embeddings, backbone.model.prepare_embeddings_for_image_generation(codes)], dim=1)
    mask = torch.cat([encoded.attention_mask, torch.ones_like(codes)], dim=1)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    plain = backbone.model.model.language_model(
        inputs_embeds=embeddings, attention_mask=mask, position_ids=positions, use_cache=False
    ).last_hidden_state
    visible = mask.bool()
    torch.testing.assert_close(backbone.final_norm(hidden)[visible], plain[visible], rtol=0, atol=1e-5)
    logits = backbone.logits(hidden)
    assert logits.dtype == torch.float32
    assert logits.shape[-1] == backbone.image_vocab_size == 64
    reference = backbone.model.model.generation_head(plain)
    torch.testing.assert_close(logits[visible], reference[visible], rtol=0, atol=1e-5)
    # Before the norm, that is: the states themselves are something else.
    assert (hidden - plain)[visible].abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_float32_whatever_the_model_is(dtype: torch.dtype) -> None:
    backbone = wrap_backbone(tiny_pipeline().backbone.to(dtype), None)
    hidden = torch.zeros(1, 3, backbone.hidden_size, dtype=dtype)
    assert backbone.logits(hidden).dtype == torch.float32


@pytest.mark.parametrize("prompts", [[SHORT], [SHORT, LONG]], ids=["solo", "left padded"])
def test_a_block_pass_is_the_passes_one_by_one(backbone: JanusBackbone, prompts: list[str]) -> None:
    encoded = backbone.encode_prompt(prompts, None, guided=True)
    codes = some_codes(2 * len(prompts), SIDE * SIDE)
    one_by_one, _ = feed(backbone, encoded, *codes.split(1, dim=1))
    for size in (2, 5, 16):
        in_blocks, context = feed(backbone, encoded, *codes.split(size, dim=1))
        torch.testing.assert_close(in_blocks, one_by_one, rtol=0, atol=1e-5)
        assert len(context.cache) == encoded.length + SIDE * SIDE


@pytest.mark.parametrize("prompts", [[SHORT], [SHORT, LONG]], ids=["solo", "left padded"])
@torch.no_grad()
def test_pictures_that_feed_positions_of_their_own_get_their_solo_states(
    backbone: JanusBackbone, prompts: list[str]
) -> None:
    """One picture is five codes ahead of the other, feeds fewer, and repeats its last position to make up."""
    encoded = backbone.encode_prompt(prompts * 2, None, guided=True)
    pictures = 2 * len(prompts)
    codes = some_codes(pictures, SIDE * SIDE)
    both = torch.cat([codes, codes])
    expected, _ = feed(backbone, encoded, both)
    context = backbone.new_context(encoded, backbone.grid())
    backbone.forward(torch.cat([encoded.embeddings, backbone.embed(both[:, :4], backbone.grid())], dim=1), context)
    ahead = torch.arange(pictures)[:, None] % 2 == 1
    for own, other in ((range(4, 9), range(4, 9)), ([9, 10, 11, 12], [9, 10, 10, 10]), ([13, 14], [11, 12])):
        positions = torch.where(ahead, torch.tensor(list(own)), torch.tensor(list(other)))
        window = Cells(positions, int(positions.min()), int(positions.max()) + 1)
        fed = backbone.embed(both.gather(1, torch.cat([positions, positions])), backbone.grid())
        hidden = backbone.forward(fed, context, window)
        at = (torch.cat([positions, positions]) + encoded.length)[..., None].expand_as(hidden)
        torch.testing.assert_close(hidden, expected.gather(1, at), rtol=0, atol=1e-5)


@torch.no_grad()
def test_an_own_mask_hides_the_last_codes_and_nothing_else(backbone: JanusBackbone) -> None:
    encoded = backbone.encode_prompt([SHORT], None, guided=False)
    visible = torch.arange(7) < 4
    visible[6] = True

    def state(given: torch.Tensor) -> torch.Tensor:
        context = backbone.new_context(encoded, backbone.grid())
        backbone.forward(torch.cat([encoded.embeddings, backbone.embed(given, backbone.grid())], dim=1), context)
        window = Cells(torch.tensor([[6]]), 6, 7, visible[None, None])
        return backbone.forward(backbone.embed(codes[:, :1], backbone.grid()), context, window)

    codes = some_codes(1, 6)
    hidden, seen = codes.clone(), codes.clone()
    hidden[:, 4:] = (hidden[:, 4:] + 1) % 64
    seen[:, 3:] = (seen[:, 3:] + 1) % 64
    assert torch.equal(state(codes), state(hidden))
    assert not torch.allclose(state(codes), state(seen), atol=1e-3)


@pytest.mark.parametrize("prompts", [[SHORT], [SHORT, LONG]], ids=["solo", "left padded"])
def test_what_was_rolled_back_was_never_written(backbone: JanusBackbone, prompts: list[str]) -> None:
    encoded = backbone.encode_prompt(prompts, None, guided=True)
    batch_size = 2 * len(prompts)
    kept, rejected, then = (some_codes(batch_size, count, seed) for seed, count in enumerate((3, 6, 4)))

    _, context = feed(backbone, encoded, kept, rejected)
    context.cache.truncate(encoded.length + 3)
    with torch.no_grad():
        after_rollback = backbone.forward(backbone.embed(then, backbone.grid()), context)
    never, _ = feed(backbone, encoded, kept, then)
    assert torch.equal(after_rollback, never[:, -4:])
    assert len(context.cache) == encoded.length + 7
    wrong, _ = feed(backbone, encoded, kept, rejected, then)
    assert not torch.allclose(after_rollback, wrong[:, -4:], atol=1e-3), "rejected codes have to matter"


@torch.no_grad()
def test_a_left_padded_row_has_its_solo_states(backbone: JanusBackbone) -> None:
    codes = some_codes(1, 8)
    together = backbone.encode_prompt([SHORT, LONG], None, guided=True)
    alone = backbone.encode_prompt([SHORT], None, guided=True)
    assert together.length > alone.length
    batched, _ = feed(backbone, together, codes.expand(4, -1))
    solo, _ = feed(backbone, alone, codes.expand(2, -1))
    states = alone.length + 8
    torch.testing.assert_close(batched[[0, 2], -states:], solo, rtol=0, atol=1e-5)


# --- guidance ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_guided_pair_in_one_pass_is_the_two_passes(backbone: JanusBackbone) -> None:
    codes = some_codes(1, 8)
    encoded = backbone.encode_prompt([SHORT], None, guided=True)
    both = backbone.logits(feed(backbone, encoded, codes.expand(2, -1))[0])
    halves = [Prompt(encoded.embeddings[k : k + 1], encoded.attention_mask[k : k + 1], guided=False) for k in range(2)]
    conditional, unconditional = (backbone.logits(feed(backbone, half, codes)[0]) for half in halves)
    torch.testing.assert_close(both, torch.cat([conditional, unconditional]), rtol=0, atol=1e-5)
    expected = unconditional + 5 * (conditional - unconditional)
    torch.testing.assert_close(guide(both, 5.0), expected, rtol=0, atol=1e-4)
    assert (conditional - unconditional)[:, encoded.length - 1 :].abs().max() > 0.05, "guidance has nothing to do"


def decoder_batches(pipe: SpatialSpeculativePipeline) -> list[int]:
    """Grows by the batch size of every pass that the decoder sees."""
    seen: list[int] = []

    def note(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["inputs_embeds"].shape[0])

    pipe.backbone.model.language_model.register_forward_pre_hook(note, with_kwargs=True)
    return seen


@pytest.mark.parametrize(("scale", "rows"), [(0, 2), (0.5, 2), (1, 2), (1.0001, 4), (5, 4)])
def test_the_unconditional_branch_runs_only_when_it_guides(scale: float, rows: int) -> None:
    pipe = tiny_pipeline()
    seen = decoder_batches(pipe)
    pipe([SHORT, LONG], guidance_scale=scale, output_type="latent")
    assert seen
    assert set(seen) == {rows}


def test_guidance_one_is_the_conditional_branch_alone(model: JanusForConditionalGeneration) -> None:
    codes = greedy_pipeline(model)(SHORT, guidance_scale=1, output_type="latent").codes.flatten(1)
    inputs = library_inputs([SHORT])
    embeddings = model.get_input_embeddings()(inputs["input_ids"])
    with torch.no_grad():
        for position in range(SIDE * SIDE):
            hidden = model.model.language_model(inputs_embeds=embeddings, use_cache=False).last_hidden_state[:, -1]
            likeliest = model.model.generation_head(hidden).argmax(-1)
            assert codes[:, position] == likeliest
            embeddings = torch.cat([embeddings, model.prepare_embeddings_for_image_generation(likeliest[None])], dim=1)


# --- prompts ----------------------------------------------------------------------------------------------------------


def spelling_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer, so that every space and line break of a prompt has its id."""
    special = ["<bos>", "<eos>", "<pad>", "<begin_of_image>", "<end_of_image>", "<image_placeholder>"]
    special += ["<|User|>", "<|Assistant|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate([*special, *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        additional_special_tokens=["<|User|>", "<|Assistant|>"],
        extra_special_tokens={
            "image_token": "<image_placeholder>",
            "boi_token": "<begin_of_image>",
            "eoi_token": "<end_of_image>",
        },
        padding_side="left",
    )


# What the template that comes with Janus-Pro does to one turn of text: the text is trimmed, two line breaks follow.
TEMPLATE = (
    "{% for message in messages %}<|User|>: {{ message['content'][0]['text'] | trim }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>:{% endif %}"
)


@pytest.mark.parametrize("prompt", [SHORT, "", "Ein Fuchs, im Schnee!\nRot.", "  blanks around  "], ids=repr)
def test_prompt_ids_are_those_of_the_librarys_processor(prompt: str) -> None:
    tokenizer = spelling_tokenizer()
    processor = JanusProcessor(JanusImageProcessor(), tokenizer, chat_template=TEMPLATE)
    conversation = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
    text = processor.apply_chat_template(conversation, add_generation_prompt=True)
    # A list: transformers 5.10 takes a bare string apart into its letters.
    official = processor(text=[f"<bos>{text}"], generation_mode="image", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(official[0]) == f"<bos>{official_text(prompt.strip())}"

    model = tiny_janus()
    model.resize_token_embeddings(len(tokenizer))
    encoded = wrap_backbone(model, tokenizer).encode_prompt([prompt], None, guided=False)
    assert torch.equal(encoded.embeddings, model.get_input_embeddings()(official))
    assert encoded.attention_mask.all()


@torch.no_grad()
def test_the_unconditional_prompt_is_the_prompt_with_padding_between_its_ends(backbone: JanusBackbone) -> None:
    inputs = library_inputs([SHORT, LONG])
    encoded = backbone.encode_prompt([SHORT, LONG], None, guided=True)
    assert encoded.guided
    assert torch.equal(encoded.attention_mask, inputs["attention_mask"].repeat(2, 1))

    ids = inputs["input_ids"].repeat(2, 1)
    tokenizer = tiny_tokenizer()
    ends = (ids[2:] == tokenizer.bos_token_id) | (ids[2:] == tokenizer.convert_tokens_to_ids("<begin_of_image>"))
    ids[2:][~ends] = tokenizer.pad_token_id
    visible = encoded.attention_mask.bool()
    assert torch.equal(encoded.embeddings[visible], backbone.model.get_input_embeddings()(ids)[visible])


def test_a_tokenizer_without_the_image_token_is_refused(model: JanusForConditionalGeneration) -> None:
    vocabulary = {"<unk>": 0, "<bos>": 1, "<pad>": 2}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<bos>", pad_token="<pad>")
    with pytest.raises(ValueError, match="no <begin_of_image> token"):
        wrap_backbone(model, other).encode_prompt([SHORT], None, guided=True)


# --- pixels -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_pixels_are_the_librarys(backbone: JanusBackbone) -> None:
    codes = some_codes(3, SIDE * SIDE)
    pixels = backbone.decode(codes.view(3, SIDE, SIDE))
    assert pixels.shape == (3, 3, 4 * SIDE, 4 * SIDE)
    assert pixels.dtype == torch.float32
    assert torch.equal(pixels, backbone.model.model.vqmodel.decode(codes))
    assert pixels.abs().max() < 10
    assert not torch.equal(pixels[0], pixels[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_a_half_precision_model_is_decoded_in_float32_and_left_alone(dtype: torch.dtype) -> None:
    model = tiny_janus().to(dtype)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    codes = some_codes(1, SIDE * SIDE).view(1, SIDE, SIDE)
    pixels = wrap_backbone(model, tiny_tokenizer()).decode(codes)
    assert pixels.dtype == torch.float32

    after = model.state_dict()
    assert all(after[key].dtype == value.dtype and torch.equal(after[key], value) for key, value in before.items())
    in_float32 = copy.deepcopy(model.model.vqmodel).float().decode(codes.flatten(1))
    torch.testing.assert_close(pixels, in_float32, rtol=0, atol=1e-5)
    assert (pixels - model.model.vqmodel.decode(codes.flatten(1)).float()).abs().max() > 1e-4


def test_rows_without_codes_are_grey(model: JanusForConditionalGeneration) -> None:
    pipe = greedy_pipeline(model)
    codes = some_codes(1, SIDE * SIDE).view(1, SIDE, SIDE)
    codes[:, 2:] = UNDRAWN
    picture = pipe.decode_latents(codes.clone(), "np")
    assert (picture[:, 8:] == 0.5).all()
    assert (picture[:, :8] != 0.5).any()


def test_codes_are_embedded_as_the_library_does(backbone: JanusBackbone) -> None:
    codes = some_codes(2, 5)
    expected = backbone.model.model.generation_aligner(backbone.model.model.generation_embeddings(codes))
    assert torch.equal(backbone.embed(codes, backbone.grid()), expected)


# --- the user's model stays as it is ----------------------------------------------------------------------------------


def test_a_run_leaves_the_users_model_untouched() -> None:
    model = tiny_janus()
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    config, generation = model.config.to_dict(), model.generation_config.to_dict()
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}

    pipe = SpatialSpeculativePipeline(model, tiny_tokenizer(), heads=tiny_heads(model))
    pipe.set_progress_bar_config(disable=True)
    pipe([SHORT, LONG], output_type="np")
    assert pipe.backbone is model

    after = model.state_dict()
    assert after.keys() == weights.keys()
    for key, value in weights.items():
        assert after[key].numpy().tobytes() == value.numpy().tobytes(), key
    assert model.config.to_dict() == config
    assert model.generation_config.to_dict() == generation
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert not model.model.language_model.norm._forward_pre_hooks
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_error_inside_a_pass_leaves_no_hook_on_the_norm(backbone: JanusBackbone) -> None:
    context = backbone.new_context(backbone.encode_prompt([SHORT], None, guided=False), backbone.grid())
    with pytest.raises(RuntimeError):
        backbone.forward(torch.zeros(1, 2, backbone.hidden_size + 1), context)
    assert not backbone.final_norm._forward_pre_hooks


# --- the grid and what can't be loaded --------------------------------------------------------------------------------


def test_the_grid_is_the_librarys_number_of_image_tokens(backbone: JanusBackbone) -> None:
    grid = backbone.grid()
    assert grid.length == backbone.model.model.vision_model.config.num_image_tokens == SIDE * SIDE
    assert backbone.grid(16, 16) == backbone.grid(height=16) == grid
    for size in (15, 0, -16, "16", 384, True):
        with pytest.raises(ValueError, match="16 x 16"):
            backbone.grid(height=size)
        with pytest.raises(ValueError, match="`width`"):
            backbone.grid(width=size)


def test_a_prompt_longer_than_the_model_is_refused(backbone: JanusBackbone) -> None:
    prompt = backbone.encode_prompt(["red " * 16384], None, guided=False)
    with pytest.raises(ValueError, match="16384 positions.*shorten the prompt"):
        backbone.new_context(prompt, backbone.grid())


def test_the_older_format_is_refused_with_the_one_to_use() -> None:
    with pytest.raises(ValueError, match="deepseek-community/Janus-Pro-7B") as refusal:
        adapter_class({"model_type": "multi_modality"}, "deepseek-ai/Janus-Pro-7B")
    assert str(refusal.value).startswith("deepseek-ai/Janus-Pro-7B ")


@pytest.mark.parametrize("model_type", ["llama", "stable_diffusion", "", None])
def test_an_unknown_model_type_is_refused_with_the_known_ones(model_type: str | None) -> None:
    with pytest.raises(ValueError, match=r"known are .*\bjanus\b") as refusal:
        adapter_class({"model_type": model_type}, "user/some-model")
    assert "user/some-model" in str(refusal.value)
    assert repr(model_type) in str(refusal.value)
