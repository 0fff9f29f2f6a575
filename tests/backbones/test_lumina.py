"""Lumina-mGPT: the published files, converted; then the official recipe."""

import json

import pytest
import torch
from plain_vqgan import Vqgan
from safetensors.torch import save_file
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
    model, tokenizer = tiny_lumina()
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


def test_nothing_is_written_when_something_is_wrong(published, tmp_path):
    folder, vqgan, _ = published
    target = tmp_path / "out"
    torch.save({"state_dict": {"a": torch.zeros(1)}}, tmp_path / "other.ckpt")
    for arguments, message in (
        ((tmp_path, vqgan), "needs (a )?config.json and"),
        ((folder, tmp_path / "missing.ckpt"), "is no file"),
        ((folder, tmp_path / "other.ckpt"), "it is no VQGAN"),
    ):
        with pytest.raises(ValueError, match=message):
            convert_lumina_mgpt(*arguments, target)
        assert not target.exists()
    with pytest.raises(ValueError, match="is not empty"):
        convert_lumina_mgpt(folder, vqgan, folder)


def test_a_sibling_takes_its_size_from_its_name_and_the_tokenizer_from_another_folder(published, tmp_path):
    folder, vqgan, _ = published
    sibling = tmp_path / "Lumina-mGPT-7B-512"
    sibling.mkdir()
    for name in ("config.json", "model-00001-of-00001.safetensors"):
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
