"""LlamaGen: the model against its maths written out again, and the published files converted."""

import argparse
import json
import math
import shutil

import pytest
import torch
from plain_vqgan import LlamaGenVq
from refusals import refusal
from safetensors.torch import load_file, save_file
from transformers import T5Config, T5EncoderModel
from typer.testing import CliRunner

from ssd_pipelines import (
    AutoregressiveVerifier,
    LlamaGenConfig,
    LlamaGenModel,
    SpatialDraftVerifier,
    SpatialSpeculativePipeline,
    cli,
)
from ssd_pipelines.conversion import convert_llamagen
from ssd_pipelines.heads import SpatialDraftHeads
from ssd_pipelines.testing import tiny_tokenizer


CODES, SIDE, PREFIX, CAPTION = 64, 4, 120, 24
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": CODES,
    "grid_size": SIDE,
}
PROMPTS = ["a photo of a red circle", "a blue square"]


def random_model(condition: str) -> LlamaGenModel:
    more = {"prefix_length": PREFIX, "caption_width": CAPTION} if condition == "text" else {"prefix_length": 1}
    config = LlamaGenConfig(**SIZES, condition=condition, num_classes=10, **more)
    torch.manual_seed(0)
    model = LlamaGenModel(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            wide = "tok_embeddings" in name or "embedding_table" in name
            torch.nn.init.normal_(parameter, std=1.5 if wide else 0.25)
        else:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
    if condition == "text":
        model.cls_embedding.uncond_embedding.normal_()
    return model


@pytest.fixture(scope="module", params=["text", "class"])
def published(request, tmp_path_factory):
    """Files as they were published: a pickle with the tensors under "model", and the arguments beside them."""
    folder = tmp_path_factory.mktemp("published")
    model = random_model(request.param)
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    tensors["freqs_cis"] = torch.zeros(3)
    torch.save({"model": tensors, "args": argparse.Namespace(cfg=7.5), "steps": 5}, folder / "t2i.pt")
    torch.manual_seed(1)
    vq = LlamaGenVq(CODES).eval()
    torch.save({"model": vq.state_dict()}, folder / "vq.pt")
    if request.param == "text":
        words = tiny_tokenizer()
        words.padding_side = "right"
        words.save_pretrained(folder / "t5")
        config = T5Config(vocab_size=len(words), d_model=CAPTION, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
        T5EncoderModel(config).save_pretrained(folder / "t5")
    return request.param, folder, model, vq


@pytest.fixture(scope="module")
def converted(published, tmp_path_factory):
    condition, folder, _, _ = published
    target = tmp_path_factory.mktemp("converted") / "pipeline"
    arguments = [folder / "t2i.pt", "--vq", folder / "vq.pt", "-o", target, "--image-size", 64, "--num-heads", 2]
    arguments += ["--dtype", "float32"] + (["--text-encoder", folder / "t5"] if condition == "text" else [])
    result = CliRunner().invoke(cli.app, ["convert", "llamagen", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return target


@pytest.fixture
def pipe(converted):
    pipe = SpatialSpeculativePipeline.from_pretrained(converted)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def prompts_for(pipe) -> list[str]:
    return PROMPTS if pipe.backbone.config.condition == "text" else ["3", "7"]


# --- the published maths, written out position by position and head by head ------------------------------------------


def plain_angles(position: int, prefix: int, width: int) -> list[tuple[float, float]]:
    """(cosine, sine) of each pair of a head: rows in the first half, columns in the second, nothing for the prefix."""
    if position < prefix:
        return []  # cosines and sines of zero
    row, column = divmod(position - prefix, SIDE)
    rates = [10000.0 ** (-2 * k / (width // 2)) for k in range(width // 4)]
    return [(math.cos(where * rate), math.sin(where * rate)) for where in (row, column) for rate in rates]


def plain_rotate(vector, angles):
    out = torch.zeros_like(vector)
    for k, (cosine, sine) in enumerate(angles):
        a, b = vector[2 * k], vector[2 * k + 1]
        out[2 * k], out[2 * k + 1] = a * cosine - b * sine, b * cosine + a * sine
    return out


def plain_norm(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def plain_logits(model: LlamaGenModel, embeddings, mask, prefix: int) -> torch.Tensor:
    """Logits at the last position of one sequence `(n, width)`; `mask (prefix,)` says which captions are there."""
    n, heads, width = len(embeddings), 2, 16
    weights = model.state_dict()
    x = embeddings
    for layer in range(2):
        w = {name.split(f"layers.{layer}.")[1]: value for name, value in weights.items() if f"layers.{layer}." in name}
        q, k, v = (plain_norm(x, w["attention_norm.weight"]) @ w["attention.wqkv.weight"].T).split(32, dim=1)
        out = torch.zeros(n, 32)
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            turned_q = torch.stack([plain_rotate(q[i, part], plain_angles(i, prefix, width)) for i in range(n)])
            turned_k = torch.stack([plain_rotate(k[i, part], plain_angles(i, prefix, width)) for i in range(n)])
            for i in range(n):
                seen = [j for j in range(i + 1) if j == i or j >= prefix or mask[j]]
                scores = (turned_k[seen] @ turned_q[i] / math.sqrt(width)).softmax(0)
                out[i, part] = scores @ v[seen, part]
        x = x + out @ w["attention.wo.weight"].T
        h = plain_norm(x, w["ffn_norm.weight"])
        gate = torch.nn.functional.silu(h @ w["feed_forward.w1.weight"].T) * (h @ w["feed_forward.w3.weight"].T)
        x = x + gate @ w["feed_forward.w2.weight"].T
    return plain_norm(x[-1], weights["norm.weight"]) @ weights["output.weight"].T


def plain_prefixes(pipe, prompt: str):
    """Conditional and unconditional embeddings `(prefix, width)` and the mask."""
    model = pipe.backbone
    weights = model.state_dict()
    if model.config.condition == "class":
        table = weights["cls_embedding.embedding_table.weight"]
        return table[int(prompt)][None], table[10][None], torch.ones(1)
    tokens = pipe.tokenizer(prompt, max_length=PREFIX, padding="max_length", return_tensors="pt")
    mask = tokens["attention_mask"][0]
    states = pipe.text_encoder(**tokens).last_hidden_state[0]
    present = states[mask.bool()]
    caption = torch.cat([torch.zeros(PREFIX - len(present), CAPTION), present])

    def projected(rows):
        inner = torch.nn.functional.gelu(rows @ weights["cls_embedding.cap_proj.fc1.weight"].T, approximate="tanh")
        return inner @ weights["cls_embedding.cap_proj.fc2.weight"].T

    aligned = torch.arange(PREFIX) >= PREFIX - len(present)
    return projected(caption), projected(weights["cls_embedding.uncond_embedding"]), aligned


@torch.no_grad()
def test_greedy_decoding_is_the_published_maths(pipe):
    prompt, scale = prompts_for(pipe)[0], 3.0
    conditional, unconditional, mask = plain_prefixes(pipe, prompt)
    table, codes = pipe.backbone.tok_embeddings.weight, []
    adapter = pipe.adapter()
    grid, encoded = adapter.grid(), adapter.encode_prompt([prompt], None, guided=True)
    context = adapter.new_context(encoded, grid)
    hidden = adapter.forward(encoded.embeddings, context)
    for _ in range(6):  # the whole picture would take minutes this way
        drawn = table[codes]
        both = torch.stack(
            [
                plain_logits(pipe.backbone, torch.cat([start, drawn]), mask, len(start))
                for start in (conditional, unconditional)
            ]
        )
        torch.testing.assert_close(adapter.logits(hidden[:, -1]), both, atol=1e-4, rtol=1e-4)
        c, u = both
        codes.append(int((u + scale * (c - u)).argmax()))
        hidden = adapter.forward(adapter.embed(torch.tensor([codes[-1:]] * 2), grid), context)
    pipe.verifier = AutoregressiveVerifier(temperature=0.0)
    ours = pipe(prompt, guidance_scale=scale, output_type="latent").codes.flatten().tolist()
    assert ours[:6] == codes
    assert len(set(ours)) > 3


def test_a_batch_and_speculation_change_nothing(pipe):
    torch.manual_seed(0)
    pipe.load_ssd_heads(SpatialDraftHeads.for_backbone(pipe.adapter(), num_horizontal=5, num_vertical=1).eval())
    prompts = prompts_for(pipe)

    def draw(verifier, which):
        pipe.verifier = verifier
        generators = [torch.Generator().manual_seed(prompts.index(prompt)) for prompt in which]
        return pipe(list(which), generator=generators, output_type="latent").codes

    reference = draw(AutoregressiveVerifier(), prompts)
    assert torch.equal(draw(SpatialDraftVerifier(lossless=True), prompts), reference)
    for k, prompt in enumerate(prompts):
        assert torch.equal(draw(AutoregressiveVerifier(), [prompt])[0], reference[k])


def test_pictures_are_painted_as_the_published_decoder_does(pipe, published):
    codes = torch.randint(0, CODES, (2, SIDE, SIDE), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(pipe.adapter().decode(codes), published[3].decode(codes), atol=2e-5, rtol=1e-4)
    output = pipe(prompts_for(pipe)[0], output_type="np")
    assert output.images.shape == (1, 64, 64, 3)


def test_capitals_make_no_difference_and_words_do(pipe):
    if pipe.backbone.config.condition == "class":
        return
    pipe.verifier = AutoregressiveVerifier(temperature=0.0)
    lower, capitals, other = (
        pipe(text, output_type="latent").codes for text in ("a red circle", " A Red CIRCLE", "blue")
    )
    assert torch.equal(lower, capitals) and not torch.equal(lower, other)


def test_captions_stand_at_the_same_places_whichever_side_the_tokenizer_pads(pipe):
    if pipe.backbone.config.condition == "class":
        return
    prompts, encoded = [*PROMPTS, "red " * (PREFIX + 5)], []
    for side in ("right", "left"):
        pipe.tokenizer.padding_side = side
        encoded.append(pipe.adapter().encode_prompt(prompts, None, guided=True))
    assert torch.equal(encoded[0].embeddings, encoded[1].embeddings)
    assert torch.equal(encoded[0].attention_mask, encoded[1].attention_mask)
    assert encoded[1].attention_mask[0].tolist() == [0] * (PREFIX - 6) + [1] * 6


def test_a_prompt_that_is_no_class_is_refused(pipe):
    if pipe.backbone.config.condition == "text":
        assert pipe.adapter().recommended_guidance_scale == 7.5
        return
    with pytest.raises(ValueError, match="'a red circle' is no class: give a number from 0 to 9"):
        pipe("a red circle")


def spoiled(path, target, without=(), **changes):
    """A copy of a published file with tensors changed."""
    tensors = {**torch.load(path, weights_only=False)["model"], **changes}
    torch.save({"model": {name: value for name, value in tensors.items() if name not in without}}, target)
    return target


def test_wrong_files_are_refused_before_anything_is_written(published, tmp_path):
    condition, folder, _, _ = published
    encoder = folder / "t5" if condition == "text" else None
    good = {"checkpoint": folder / "t2i.pt", "vq": folder / "vq.pt", "image_size": 64, "text_encoder": encoder}
    good |= {"num_heads": 2}
    files = iter(tmp_path / f"{number}.pt" for number in range(99))

    def model(**changes):
        return {"checkpoint": spoiled(good["checkpoint"], next(files), **changes)}

    def vq(**changes):
        return {"vq": spoiled(good["vq"], next(files), **changes)}

    torch.save([torch.zeros(1)], tmp_path / "list.pt")
    prefix = "uncond_embedding" if condition == "text" else "embedding_table.weight"
    wrong = [
        ({"checkpoint": folder / "vq.pt"}, "it is not a LlamaGen"),
        ({"vq": folder / "t2i.pt"}, "no LlamaGen tokenizer"),
        ({"checkpoint": tmp_path / "list.pt"}, "list.pt contains no named tensors"),
        ({"num_heads": 5}, "5 heads don't fit a width of 32"),
        ({"num_heads": 0}, "0 heads don't fit a width of 32"),
        ({"num_heads": 16}, "16 heads don't fit a width of 32"),  # of 2, which have no pairs for rows and columns
        (
            {"num_heads": None},
            "has a width of 32, which no released LlamaGen has: give its number of attention heads",
        ),
        (model(without=["norm.weight"]), "lacks norm.weight: download it again"),
        (model(other=torch.zeros(1)), "has the unexpected other: download it again"),
        (model(**{"norm.weight": torch.zeros(3)}), "has norm.weight of shape (3,), not (32,)"),
        (model(without=["layers.0.feed_forward.w1.weight"]), "lacks layers.0.feed_forward.w1.weight, so"),
        (
            model(without=[f"cls_embedding.{prefix}"]),
            "has neither cls_embedding.uncond_embedding nor cls_embedding.emb",
        ),
        (model(**{f"cls_embedding.{prefix}": torch.zeros(3)}), "of shape (3,), so the sizes of the model are unknown"),
        (model(**{"tok_embeddings.weight": torch.zeros(3)}), "has tok_embeddings.weight of shape (3,), so"),
        (vq(without=["post_quant_conv.weight"]), "lacks post_quant_conv.weight, so"),
        (vq(without=["decoder.conv_in.weight"]), "lacks decoder.conv_in.weight: download it again"),
        (vq(**{"decoder.conv_in.weight": torch.zeros(3)}), "has decoder.conv_in.weight of shape (3,), not ("),
    ]
    if condition == "text":
        (tmp_path / "empty").mkdir()
        for part, name in (("weights", "model.safetensors"), ("config", "config.json"), ("words", "tokenizer.json")):
            shutil.copytree(encoder, tmp_path / part)
            (tmp_path / part / name).write_text("{")
        shutil.copytree(encoder, tmp_path / "lacking")
        stored = load_file(encoder / "model.safetensors")
        del stored["encoder.final_layer_norm.weight"]
        save_file(stored, tmp_path / "lacking" / "model.safetensors", metadata={"format": "pt"})
        needs = "needs a config.json, *.safetensors and a tokenizer.json of a T5: download google/flan-t5-xl there"
        wrong += [
            ({"text_encoder": None}, "give the folder of its T5 encoder"),
            ({"text_encoder": tmp_path / "nope"}, f"nope {needs}"),
            ({"text_encoder": tmp_path / "empty"}, f"empty {needs}"),
            ({"text_encoder": tmp_path / "weights"}, "weights can't be read as a T5 with its tokenizer ("),
            ({"text_encoder": tmp_path / "config"}, "config can't be read as a T5 with its tokenizer ("),
            ({"text_encoder": tmp_path / "words"}, "words can't be read as a T5 with its tokenizer ("),
            ({"text_encoder": tmp_path / "lacking"}, "lack encoder.final_layer_norm.weight"),
        ]
    for changes, part in wrong:
        assert part in refusal(convert_llamagen, **{**good, **changes}, output=tmp_path / "out")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("image_size", [500, 100, 8, 0, -16, 64.0, True])
def test_a_size_that_is_no_multiple_of_16_is_refused_before_files_are_read(image_size, tmp_path):
    message = refusal(convert_llamagen, tmp_path / "no", tmp_path / "no", tmp_path / "out", image_size)
    assert f"`image_size` is {image_size!r}, but LlamaGen's pictures have sides that are multiples of 16" in message


@pytest.mark.parametrize(("width", "heads"), [(1280, 20), (3200, 32)])
def test_the_heads_of_released_sizes_are_known_by_the_width(width, heads, tmp_path):
    sizes = {"hidden_size": width, "num_hidden_layers": 1, "num_attention_heads": heads, "intermediate_size": 4}
    with torch.device("meta"):
        shapes = LlamaGenModel(LlamaGenConfig(**sizes, vocab_size=CODES, condition="class", num_classes=2)).state_dict()
    torch.save({name: torch.zeros(1).expand(value.shape) for name, value in shapes.items()}, tmp_path / "c2i.pt")
    torch.save(LlamaGenVq(CODES).state_dict(), tmp_path / "vq.pt")
    convert_llamagen(tmp_path / "c2i.pt", tmp_path / "vq.pt", tmp_path / "out", image_size=64)
    config = json.loads((tmp_path / "out" / "backbone" / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (heads, heads)
