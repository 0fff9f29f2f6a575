"""Lumina-mGPT: the published files, converted; then the official recipe."""

import json
import shutil

import pytest
import torch
from plain_vqgan import Vqgan
from refusals import refusal
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from ssd_pipelines import AutoregressiveVerifier, SpatialDraftVerifier, SpatialSpeculativePipeline, cli
from ssd_pipelines.backbones import wrap_backbone
from ssd_pipelines.conversion import convert_lumina_mgpt, expand_head_norms, load_pickled_tensors, vq_model_from_vqgan
from ssd_pipelines.heads import SpatialDraftHeads
from ssd_pipelines.testing import tiny_lumina


PROMPT = "a photo of a red circle"
CODES = 64


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Files as they were published: norms stored once for all heads, no picture decoder, a pickled VQGAN."""
    folder = tmp_path_factory.mktemp("published") / "Lumina-mGPT-7B-64"
    folder.mkdir()
    model, tokenizer = tiny_lumina(side=8)  # tokens for sides up to 992 pixels
    tensors = {}
    for name, value in model.state_dict().items():
        if "vqmodel" in name:
            continue
        shared = "q_norm" in name or "k_norm" in name
        tensors[name] = (value[:1] if shared else value).clone().contiguous()
    save_file(tensors, folder / "model-00001-of-00001.safetensors")
    extra = {"mask_image_logits": False, "dropout": 0.05, "z_loss_weight": 0.0}
    config = {**model.config.to_dict(), **extra, "architectures": ["ChameleonXLLMXForConditionalGeneration"]}
    config.pop("image_size")
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(3)
    vqgan = Vqgan(CODES).eval()
    torch.save({"state_dict": {**vqgan.state_dict(), "loss.weight": torch.zeros(1)}}, folder.parent / "vqgan.ckpt")
    return folder, folder.parent / "vqgan.ckpt", vqgan


@pytest.fixture(scope="module")
def converted(published, tmp_path_factory):
    folder, vqgan, _ = published
    target = tmp_path_factory.mktemp("converted") / "pipeline"
    arguments = [folder, "--vqgan", vqgan, "-o", target, "--image-size", 64, "--dtype", "float32"]
    result = CliRunner().invoke(cli.app, ["convert", "lumina-mgpt", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return target


@pytest.fixture
def pipe(converted):
    pipe = SpatialSpeculativePipeline.from_pretrained(converted)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_a_converted_folder_loads_without_options_and_holds_safetensors_alone(pipe, converted):
    assert pipe.verifier.config.trailing_rounds == 4, "the paper's settings for Lumina-mGPT"
    assert not [path for path in converted.rglob("*") if path.suffix in (".bin", ".pt", ".ckpt", ".pkl")]
    output = pipe(PROMPT, generator=torch.Generator().manual_seed(0), output_type="np")
    assert output.images.shape == (1, 64, 64, 3)


def test_its_norms_are_those_of_every_head(pipe):
    norms = pipe.backbone.model.layers[0].self_attn.q_norm.weight
    assert norms.shape == (4, 8)
    assert all(torch.equal(norms[0], row) for row in norms)


def test_the_picture_decoder_paints_what_the_published_one_paints(pipe, published):
    _, _, vqgan = published
    codes = torch.randint(0, CODES, (2, 4, 6), generator=torch.Generator().manual_seed(0))
    backbone = wrap_backbone(pipe.backbone, pipe.tokenizer, pipe.image_tokenizer)
    with torch.no_grad():
        torch.testing.assert_close(backbone.decode(codes), vqgan.decode(codes), atol=2e-5, rtol=1e-4)


def plain_greedy(pipe, prompt: str, rows: int, columns: int, scale: float) -> torch.Tensor:
    """The published loop written out: two contexts apart, one token at a time, whole forwards without a cache."""
    model, tokenizer = pipe.backbone, pipe.tokenizer
    mapping = model.model.vocabulary_mapping
    vocabulary = mapping.vocab_map
    height, width = 16 * rows, 16 * columns
    header = [vocabulary["<racm3:break>"]]
    header += [vocabulary[f"<reserved{8800 + pixels // 32:05d}>"] for pixels in (height, width)]
    text = f"Generate an image of {width}x{height} according to the following prompt:\n{prompt}"
    words = tokenizer(text, add_special_tokens=False)["input_ids"]
    conditional = [tokenizer.bos_token_id, *words, vocabulary["<reserved08706>"], *header]
    unconditional, codes = list(header), []
    for position in range(rows * (columns + 1)):
        if position % (columns + 1) == columns:
            token = vocabulary["<reserved08799>"]
        else:
            with torch.no_grad():
                c, u = (
                    model.lm_head(model.model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1])
                    for ids in (conditional, unconditional)
                )
            allowed = torch.full_like(c, -torch.inf)
            allowed[mapping.image_tokens] = 0
            token = int((u + scale * (c - u) + allowed).argmax())
            codes.append(mapping.bpe2img[token])
        conditional.append(token)
        unconditional.append(token)
    return torch.tensor(codes).view(rows, columns)


@pytest.mark.parametrize(("height", "width"), [(64, 64), (32, 128)])
def test_greedy_decoding_is_the_published_recipe_token_for_token(pipe, height, width):
    pipe.verifier = AutoregressiveVerifier(temperature=0.0)
    ours = pipe(PROMPT, height=height, width=width, output_type="latent").codes[0]
    assert torch.equal(ours, plain_greedy(pipe, PROMPT, height // 16, width // 16, 4.0))
    assert len(ours.unique()) > 3


def test_speculative_decoding_draws_the_autoregressive_picture(pipe):
    backbone = wrap_backbone(pipe.backbone, pipe.tokenizer)
    torch.manual_seed(0)
    pipe.load_ssd_heads(SpatialDraftHeads.for_backbone(backbone, num_horizontal=5, num_vertical=2).eval())
    codes = []
    for verifier in (AutoregressiveVerifier(), SpatialDraftVerifier(lossless=True)):
        pipe.verifier = verifier
        generators = [torch.Generator().manual_seed(k) for k in range(2)]
        codes.append(pipe([PROMPT, "blue"], generator=generators, output_type="latent").codes)
    assert torch.equal(*codes)


def test_sizes_are_multiples_of_32_within_the_area(pipe):
    backbone = wrap_backbone(pipe.backbone, pipe.tokenizer)
    assert (backbone.grid().rows, backbone.grid().columns) == (4, 4)
    assert backbone.grid(width=128).rows == 2
    for size in ((768, 768), (48, 64), (32, 32)):
        with pytest.raises(ValueError, match="up to 4096 pixels whose sides are multiples of 32, for instance"):
            backbone.grid(*size)


def test_without_a_picture_decoder_codes_can_be_drawn_and_pictures_are_refused():
    pipe = SpatialSpeculativePipeline(*tiny_lumina())
    pipe.set_progress_bar_config(disable=True)
    codes = pipe(PROMPT, output_type="latent").codes
    with pytest.raises(ValueError, match="ssd-pipelines convert lumina-mgpt"):
        pipe.decode_latents(codes)


class Canary:
    def __reduce__(self):
        return print, ("sung",)


def test_a_pickle_with_code_is_not_run(tmp_path, capsys):
    torch.save({"state_dict": Canary()}, tmp_path / "evil.ckpt")
    with pytest.raises(ValueError, match="can't be read as plain tensors"):
        load_pickled_tensors(tmp_path / "evil.ckpt")
    assert "sung" not in capsys.readouterr().out


SHARD, INDEX = "model-00001-of-00001.safetensors", "model.safetensors.index.json"


@pytest.fixture
def copied(published, tmp_path):
    """The published folder, to be changed."""
    folder = tmp_path / "copied" / "Lumina-mGPT-7B-64"
    shutil.copytree(published[0], folder)
    return folder


def changed_settings(folder, without=(), **changes) -> None:
    settings = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in settings.items() if k not in without}))


def changed_tensors(folder, without=(), **changes) -> None:
    tensors = {**load_file(folder / SHARD), **changes}
    save_file({name: value for name, value in tensors.items() if name not in without}, folder / SHARD)


def split_in_three(folder) -> None:
    tensors = load_file(folder / SHARD)
    (folder / SHARD).unlink()
    files = {name: f"model-{1 + number % 3:05d}-of-00003.safetensors" for number, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def without_shard(folder):
    split_in_three(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()


def without_shard_and_index(folder):
    without_shard(folder)
    (folder / INDEX).unlink()


WRONG_FOLDERS = {
    "no weights": (lambda f: (f / SHARD).unlink(), "needs a config.json and *.safetensors of Lumina-mGPT"),
    "a shard missing": (without_shard, f"lacks model-00002-of-00003.safetensors, which its {INDEX} names"),
    "a shard and the index missing": (without_shard_and_index, " more: download it again"),
    "a broken index": (lambda f: (f / INDEX).write_text("{}"), f"{INDEX} can't be read as an index ('weight_map')"),
    "a tensor missing": (lambda f: changed_tensors(f, without=["lm_head.weight"]), "lacks lm_head.weight: download"),
    "a tensor too much": (lambda f: changed_tensors(f, other=torch.zeros(1)), "has the unexpected other: download it"),
    "another shape": (
        lambda f: changed_tensors(f, **{"lm_head.weight": torch.zeros(3, 32)}),
        "has lm_head.weight of shape (3, 32), not (",
    ),
    "norms of no rows": (
        lambda f: changed_tensors(f, **{"model.layers.0.self_attn.q_norm.weight": torch.zeros(0, 8)}),
        "has shape (0, 8), which 4 heads can't share",
    ),
    "cut short": (lambda f: (f / SHARD).write_bytes((f / SHARD).read_bytes()[:200]), f"{SHARD} can't be read as safe"),
    "a git-lfs pointer": (lambda f: (f / SHARD).write_text("version https://git-lfs.github.com/spec/v1\n"), "git-lfs"),
    "a broken config": (lambda f: (f / "config.json").write_text("{"), "config.json can't be read as settings (Expect"),
    "a config that is a list": (lambda f: (f / "config.json").write_text("[1]"), "config.json can't be read as settin"),
    "a config of no model": (lambda f: changed_settings(f, hidden_size="wide"), "config.json can't be read as Lumina-"),
    "another model": (
        lambda f: (f / "config.json").write_text('{"model_type": "llama"}'),
        "its config.json has model type 'llama', not 'chameleon': give the folder of Alpha-VLLM/Lumina-mGPT-7B-768",
    ),
    "no tokens of sizes": (
        lambda f: changed_settings(f, vocabulary_map={"<racm3:break>": 0}),
        "its config.json lacks <reserved08706> in its vocabulary_map: give the folder",
    ),
    "Meta's Chameleon": (
        lambda f: changed_settings(f, ["mask_image_logits"], architectures=["ChameleonForConditionalGeneration"]),
        "its config.json lacks mask_image_logits, as Meta's own Chameleon does: give the folder",
    ),
    "a broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "can't be read as a tokenizer ("),
}


@pytest.mark.parametrize("case", WRONG_FOLDERS)
def test_nothing_is_written_when_the_folder_is_wrong(case, copied, published, tmp_path):
    spoil, part = WRONG_FOLDERS[case]
    spoil(copied)
    assert part in refusal(convert_lumina_mgpt, copied, published[1], tmp_path / "out")
    assert not (tmp_path / "out").exists()


WRONG_VQGANS = {
    "no file": (None, "is not a file"),
    "another model": (lambda t: {"a": torch.zeros(1)}, "it is not a VQGAN"),
    "a list": (lambda t: [1, 2], "contains no named tensors"),
    "a tensor": (lambda t: torch.zeros(2), "contains no named tensors"),
    "no names": (lambda t: {1: torch.zeros(2)}, "contains no named tensors"),
    "a tensor missing": (lambda t: t.pop("decoder.conv_in.weight") is None or t, "lacks decoder.conv_in.weight"),
    "sizes missing": (lambda t: t.pop("post_quant_conv.weight") is None or t, "lacks post_quant_conv.weight, so"),
    "a level missing": (lambda t: t.pop("encoder.down.2.block.0.conv1.weight") is None or t, "lacks encoder.down.2."),
    "sizes of another shape": (
        lambda t: {**t, "quantize.embedding.weight": torch.zeros(64)},
        "has quantize.embedding.weight of shape (64,), so the sizes of the model are unknown",
    ),
    "another shape": (
        lambda t: {**t, "decoder.conv_in.weight": torch.zeros(3)},
        "has decoder.conv_in.weight of shape (3,), not (64, 32, 3, 3)",
    ),
    "no widths of a decoder": (
        lambda t: {**t, "encoder.down.4.block.0.conv1.weight": torch.zeros(3, 64, 3, 3)},
        "can't be read as a picture tokenizer (",
    ),
    "other codes": (lambda t: Vqgan(32).state_dict(), "has 32 codes, the backbone draws 64"),
}


@pytest.mark.parametrize("case", WRONG_VQGANS)
def test_nothing_is_written_when_the_picture_tokenizer_is_wrong(case, published, tmp_path):
    spoil, part = WRONG_VQGANS[case]
    path = tmp_path / "wrong.ckpt"
    if spoil is not None:
        torch.save(spoil(dict(published[2].state_dict())), path)
    message = refusal(convert_lumina_mgpt, published[0], path, tmp_path / "out")
    assert part in message and message.startswith(str(path))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"PK\x03\x04 cut short"])
def test_a_pickle_that_is_not_whole_is_refused(content, tmp_path):
    (tmp_path / "vqgan.ckpt").write_bytes(content)
    assert "vqgan.ckpt can't be read as plain tensors (" in refusal(load_pickled_tensors, tmp_path / "vqgan.ckpt")


def test_a_folder_that_holds_something_is_not_written_to(published):
    folder, vqgan, _ = published
    assert "is not empty" in refusal(convert_lumina_mgpt, folder, vqgan, folder)


@pytest.mark.parametrize("image_size", [500, 50, 0, -32, 1024, 4096, 64.0, True])
def test_a_size_that_the_model_cannot_draw_is_refused_before_files_are_read(image_size, published, tmp_path):
    message = refusal(convert_lumina_mgpt, published[0], tmp_path / "no", tmp_path / "out", image_size=image_size)
    assert f"`image_size` is {image_size!r}, but" in message and "a multiple of 32 up to 992" in message
    assert not (tmp_path / "out").exists()


def test_a_size_with_more_codes_than_positions_is_refused(copied, published, tmp_path):
    changed_settings(copied, max_position_embeddings=4 * 5 + 1)
    assert "up to 64: give" in refusal(convert_lumina_mgpt, copied, published[1], tmp_path / "out", image_size=96)


def converted_tensors(folder, vqgan, target) -> dict[str, torch.Tensor]:
    convert_lumina_mgpt(folder, vqgan, target, dtype=torch.float32, image_size=64)
    return load_file(target / "backbone" / "model.safetensors")


def test_shards_are_put_together(copied, converted, published, tmp_path):
    split_in_three(copied)
    (copied / "consolidated.safetensors").write_bytes(b"not named in the index")
    ours = converted_tensors(copied, published[1], tmp_path / "out")
    expected = load_file(converted / "backbone" / "model.safetensors")
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_a_config_without_mask_image_logits_is_known_by_its_architecture(copied, converted, published, tmp_path):
    changed_settings(copied, without=["mask_image_logits"])
    ours = converted_tensors(copied, published[1], tmp_path / "out")
    assert torch.equal(ours["lm_head.weight"], load_file(converted / "backbone/model.safetensors")["lm_head.weight"])


def test_a_picture_whose_sides_have_no_token_is_refused_in_a_sentence(pipe):
    pipe.backbone.config.image_size = 1024
    message = refusal(pipe, PROMPT, output_type="latent")
    assert "has no token <reserved08832> in its `vocabulary_map`" in message


def test_a_sibling_takes_its_size_from_its_name_and_the_tokenizer_from_another_folder(published, tmp_path):
    folder, vqgan, _ = published
    sibling = tmp_path / "Lumina-mGPT-7B-512"
    sibling.mkdir()
    for name in ("config.json", SHARD):
        (sibling / name).symlink_to(folder / name)
    with pytest.raises(ValueError, match="only Lumina-mGPT-7B-768 has a tokenizer, so give its folder"):
        convert_lumina_mgpt(sibling, vqgan, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    convert_lumina_mgpt(sibling, vqgan, tmp_path / "out", tokenizer=folder)
    pipe = SpatialSpeculativePipeline.from_pretrained(tmp_path / "out")
    grid = pipe.adapter().grid()
    assert (grid.rows, grid.columns) == (32, 32)
    assert pipe.backbone.dtype == torch.bfloat16 and pipe.image_tokenizer.dtype == torch.float32


def test_norms_that_heads_cannot_share_are_refused():
    with pytest.raises(ValueError, match=r"shape \(3, 8\), which 4 heads can't share"):
        expand_head_norms({"model.layers.0.self_attn.q_norm.weight": torch.ones(3, 8)}, 4, 4)


def test_a_vqgan_with_something_left_over_is_refused(published):
    tensors = published[2].state_dict()
    with pytest.raises(ValueError, match="has .*decoder.other"):
        vq_model_from_vqgan({**tensors, "decoder.other": torch.zeros(1)})
