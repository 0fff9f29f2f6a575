"""Janus-Pro as its repositories are laid out: sharded weights, a processor's files, an older library's configs.

The folders are made by the library's own classes and then given the fields and names that the conversion of the
released weights wrote (transformers 4.5x, as deepseek-community/Janus-Pro-1B and -7B have them); only the sizes are
small.
"""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import JanusForConditionalGeneration, JanusImageProcessor, JanusProcessor, PreTrainedTokenizerFast

from ssd_pipelines import AutoregressiveVerifier, SpatialDraftHeads, SpatialDraftVerifier, SpatialSpeculativePipeline
from ssd_pipelines.testing import tiny_janus


PROMPTS = ["a red fox in the snow", "", "Ein Fuchs,\n im  Schnee! 你好"]
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
SPECIAL = [BOS, EOS, PAD, "<begin_of_image>", "<end_of_image>", "<image_placeholder>", "<|User|>", "<|Assistant|>"]
TEMPLATE = (
    "{% for message in messages %}<|User|>: {{ message['content'][0]['text'] | trim }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>:{% endif %}"
)
SIZES = {"1B": {"hidden_size": 32, "num_layers": 2}, "7B": {"hidden_size": 64, "num_layers": 3}}


def released_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, so that every blank has its id, with DeepSeek's names."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate([*SPECIAL, *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=["<|User|>", "<|Assistant|>"],
        extra_special_tokens={
            "image_token": "<image_placeholder>", "boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>",
        },
        padding_side="left",
        model_max_length=16384,
    )  # fmt: skip


def rewrite(file: Path, change) -> None:
    content = json.loads(file.read_text("utf-8"))
    change(content)
    file.write_text(json.dumps(content, indent=2), "utf-8")


def as_earlier_transformers_wrote_it(config: dict) -> None:
    config["torch_dtype"] = config.pop("dtype", "float32")
    config["transformers_version"] = "4.52.0.dev0"
    text = config["text_config"]
    rope = text.pop("rope_parameters", None) or {"rope_theta": 10000.0}
    text.update(
        rope_theta=rope["rope_theta"], rope_scaling=None, torch_dtype="float32", _attn_implementation_autoset=True
    )
    config["vq_config"]["num_patches"] = config["vision_config"]["image_size"] // config["vision_config"]["patch_size"]


@pytest.fixture(scope="module", params=SIZES)
def repository(request, tmp_path_factory) -> Path:
    return make_repository(tmp_path_factory.mktemp("hub"), request.param)


@pytest.fixture(scope="module")
def repository_1b(tmp_path_factory) -> Path:
    return make_repository(tmp_path_factory.mktemp("hub"), "1B")


def make_repository(parent: Path, size: str) -> Path:
    folder = parent / f"Janus-Pro-{size}"
    tokenizer = released_tokenizer()
    model = tiny_janus(seed=3, **SIZES[size])
    model.resize_token_embeddings(len(tokenizer))
    settings = model.generation_config
    settings.bos_token_id, settings.eos_token_id, settings.pad_token_id = 0, 1, 2
    settings.temperature, settings.guidance_scale = 1.0, 5.0
    settings.generation_kwargs = {"boi_token_id": SPECIAL.index("<begin_of_image>")}
    model.save_pretrained(folder, max_shard_size="300KB")
    JanusProcessor(JanusImageProcessor(), tokenizer, chat_template=TEMPLATE).save_pretrained(folder)
    JanusImageProcessor().save_pretrained(folder)  # preprocessor_config.json, a file of its own then
    rewrite(folder / "config.json", as_earlier_transformers_wrote_it)
    rewrite(
        folder / "tokenizer_config.json",
        lambda content: content.update(
            tokenizer_class="LlamaTokenizerFast", processor_class="JanusProcessor", add_bos_token=True,
            add_eos_token=False, legacy=True, use_default_system_prompt=False, clean_up_tokenization_spaces=False,
        ),
    )  # fmt: skip
    return folder


def load(folder: Path, **kwargs) -> SpatialSpeculativePipeline:
    pipe = SpatialSpeculativePipeline.from_pretrained(folder, **kwargs)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe: SpatialSpeculativePipeline) -> torch.Tensor:
    generators = [torch.Generator().manual_seed(k) for k in range(len(PROMPTS))]
    return pipe(PROMPTS, generator=generators, output_type="latent").codes


@pytest.fixture(scope="module")
def expected(repository_1b) -> torch.Tensor:
    return draw(load(repository_1b))


def test_the_folder_has_the_files_of_the_released_repositories(repository):
    names = {path.name for path in repository.iterdir()}
    assert names >= {
        "config.json", "generation_config.json", "model.safetensors.index.json", "preprocessor_config.json",
        "processor_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    }  # fmt: skip
    assert len(list(repository.glob("model-*-of-*.safetensors"))) > 1


def test_prompts_become_the_ids_of_the_repository_s_own_tokenizer_file(repository):
    pipe = load(repository)
    plain = Tokenizer.from_file(str(repository / "tokenizer.json"))
    for prompt in PROMPTS:
        (ids,) = pipe.adapter().branches([prompt], None, False, pipe.adapter().grid())
        text = f"{BOS}<|User|>: {prompt.strip()}\n\n<|Assistant|>:<begin_of_image>"
        assert ids == plain.encode(text, add_special_tokens=False).ids


def test_a_batch_of_prompts_is_what_the_library_draws_with_its_processor(repository):
    pipe = load(repository)
    pipe.verifier = AutoregressiveVerifier(temperature=0)
    assert pipe.adapter().recommended_guidance_scale == 5.0, "as the repository's generation_config says"
    ours = pipe(PROMPTS, output_type="latent").codes
    texts = [f"{BOS}<|User|>: {prompt.strip()}\n\n<|Assistant|>:<begin_of_image>" for prompt in PROMPTS]
    inputs = released_tokenizer()(texts, padding=True, return_tensors="pt")
    model = JanusForConditionalGeneration.from_pretrained(repository)
    # The library asks for what its own loading has dropped from generation_config.json.
    model.generation_config.generation_kwargs = {"boi_token_id": SPECIAL.index("<begin_of_image>")}
    theirs = model.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], generation_mode="image",
        do_sample=False, guidance_scale=5, use_cache=True,
    )  # fmt: skip
    assert len(theirs.unique()) > 4
    assert torch.equal(ours.flatten(1), theirs)


def test_heads_and_config_fit_and_the_config_stays_as_it_was(repository):
    pipe = load(repository)
    expected = draw(pipe)
    before = pipe.backbone.config.to_dict(), pipe.backbone.generation_config.to_dict()
    torch.manual_seed(0)
    pipe.load_ssd_heads(SpatialDraftHeads.for_backbone(pipe.adapter(), num_horizontal=5, num_vertical=2).eval())
    pipe.verifier = SpatialDraftVerifier()
    assert torch.equal(draw(pipe), expected), "the default decoder draws the autoregressive picture"
    assert pipe(PROMPTS[0]).images[0].size == (16, 16)
    assert (pipe.backbone.config.to_dict(), pipe.backbone.generation_config.to_dict()) == before


@pytest.mark.parametrize("device_map", ["auto", "balanced", "sequential", "cpu", {"": "cpu"}], ids=str)
def test_a_device_map_draws_the_same(repository_1b, expected, device_map):
    assert torch.equal(draw(load(repository_1b, device_map=device_map)), expected)


PARTS = ("language_model", "vqmodel", "generation_embeddings", "generation_aligner", "generation_head")


@pytest.mark.parametrize("away", ["language_model", "vqmodel", "generation_head", "all"])
def test_parts_on_disk_draw_the_same(repository_1b, expected, away, tmp_path):
    parts = PARTS if away == "all" else (away,)
    device_map = {f"model.{part}": "disk" if part in parts else "cpu" for part in (*PARTS, "vision_model", "aligner")}
    device_map["lm_head"] = device_map["model.language_model"]  # they share their weights
    pipe = load(repository_1b, device_map=device_map, offload_folder=tmp_path)
    assert any(parameter.is_meta for parameter in pipe.backbone.parameters())
    for _ in range(2):
        assert torch.equal(draw(pipe), expected)
    picture = pipe.decode_latents(expected, "np")
    assert (picture == load(repository_1b).decode_latents(expected, "np")).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "auto"], ids=str)
def test_a_dtype_reaches_the_shards_and_pictures_are_finite(repository_1b, dtype):
    pipe = load(repository_1b, dtype=dtype)
    assert pipe.backbone.dtype == (torch.float32 if dtype == "auto" else dtype)
    if dtype != torch.float16:  # slow on a CPU
        assert torch.from_numpy(pipe(PROMPTS[:2], output_type="np").images).isfinite().all()
