"""What every family promises, with every verifier: one suite for all backbones."""

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import (
    ChameleonConfig,
    ChameleonForConditionalGeneration,
    Emu3Config,
    Emu3ForConditionalGeneration,
    JanusConfig,
    JanusForConditionalGeneration,
)

from ssd_pipelines import (
    AutoregressiveVerifier,
    JacobiVerifier,
    LlamaGenConfig,
    LlamaGenModel,
    SpatialDraftHeads,
    SpatialDraftVerifier,
    SpatialSpeculativePipeline,
    WavefrontVerifier,
)
from ssd_pipelines.backbones import Prompt, registry, wrap_backbone
from ssd_pipelines.cache import DecodingCache
from ssd_pipelines.grid import ROW_END, Cells
from ssd_pipelines.sampling import guide
from ssd_pipelines.testing import FAMILIES, SIZES, tiny_family, tiny_lumina
from ssd_pipelines.verifiers import DecodingState


SHORT, LONG = "blue", "a photo of a red circle left of a green square"
SIDE = 4
FILTERS = {"top_k": 5, "top_p": 0.8}  # the recipes keep thousands of codes, more than the tiny models have


@pytest.fixture(scope="module")
def families():
    return {family: tiny_family(family) for family in FAMILIES}


@pytest.fixture(params=FAMILIES)
def pipe(request, families):
    return families[request.param]


def prompts_of(pipe) -> tuple[str, str]:
    """A short and a long prompt, or two classes."""
    return ("3", "17") if getattr(pipe.backbone.config, "condition", None) == "class" else (SHORT, LONG)


def some_sequence(pipe, pictures: int) -> torch.Tensor:
    grid = pipe.adapter().grid()
    sequence = grid.empty_sequence(pictures)
    codes = torch.randint(0, 64, (pictures, grid.rows, grid.columns), generator=torch.Generator().manual_seed(0))
    grid.to_codes(sequence)[:] = codes
    return sequence


@torch.no_grad()
def feed(backbone, prompt: Prompt, *chunks: torch.Tensor):
    grid = backbone.grid()
    context = backbone.new_context(prompt, grid)
    states = [backbone.forward(prompt.embeddings, context)]
    states += [backbone.forward(backbone.embed(chunk, grid), context) for chunk in chunks]
    return torch.cat(states, dim=1), context


def visible(prompt: Prompt, states: torch.Tensor) -> torch.Tensor:
    mask = prompt.attention_mask.bool()
    return torch.cat([mask, torch.ones(len(mask), states.shape[1] - mask.shape[1], dtype=torch.bool)], dim=1)


@torch.no_grad()
def test_the_norm_of_our_states_is_the_decoder_s_own_output(pipe):
    backbone = pipe.adapter()
    prompt = backbone.encode_prompt(prompts_of(pipe), None, guided=True)
    sequence = some_sequence(pipe, 4)
    hidden, _ = feed(backbone, prompt, sequence)
    embeddings = torch.cat([prompt.embeddings, backbone.embed(sequence, backbone.grid())], dim=1)
    mask = torch.cat([prompt.attention_mask, torch.ones_like(sequence)], dim=1)
    positions = backbone.new_context(prompt, backbone.grid()).positions
    plain = backbone.decoder(inputs_embeds=embeddings, attention_mask=mask, position_ids=positions, use_cache=False)
    plain = plain if isinstance(plain, torch.Tensor) else plain.last_hidden_state
    seen = visible(prompt, hidden)
    torch.testing.assert_close(backbone.final_norm(hidden)[seen], plain[seen], rtol=0, atol=2e-5)
    assert (hidden - plain)[seen].abs().max() > 0.1, "before the norm they are something else"


def test_a_block_pass_is_the_passes_one_by_one_and_rollback_leaves_no_trace(pipe):
    backbone = pipe.adapter()
    prompt = backbone.encode_prompt(prompts_of(pipe), None, guided=True)
    sequence = some_sequence(pipe, 4)
    seen = visible(prompt, torch.zeros(4, prompt.length + sequence.shape[1], 1))
    one_by_one, _ = feed(backbone, prompt, *sequence.split(1, dim=1))
    for size in (3, 7):
        in_blocks, _ = feed(backbone, prompt, *sequence.split(size, dim=1))
        torch.testing.assert_close(in_blocks[seen], one_by_one[seen], rtol=0, atol=2e-5)
    others = torch.where(sequence == ROW_END, sequence, (sequence + 5) % 64)
    _, context = feed(backbone, prompt, sequence[:, :3], others[:, 3:9])
    context.cache.truncate(prompt.length + 3)
    with torch.no_grad():
        again = backbone.forward(backbone.embed(sequence[:, 3:9], backbone.grid()), context)
    torch.testing.assert_close(again, one_by_one[:, prompt.length + 3 : prompt.length + 9], rtol=0, atol=2e-5)


def test_a_left_padded_batch_and_batched_guidance_are_the_solo_passes(pipe):
    backbone = pipe.adapter()
    sequence = some_sequence(pipe, 1)
    together = backbone.encode_prompt(prompts_of(pipe), None, guided=True)
    batched, _ = feed(backbone, together, sequence.expand(4, -1))
    n = sequence.shape[1]
    for k, text in enumerate(prompts_of(pipe)):
        alone = backbone.encode_prompt([text], None, guided=True)
        for branch in (0, 1):
            # Each branch in a cache of its own, as official code runs them.
            one = Prompt(alone.embeddings[branch : branch + 1], alone.attention_mask[branch : branch + 1], guided=False)
            solo, _ = feed(backbone, one, sequence)
            torch.testing.assert_close(batched[k + 2 * branch, -n:], solo[0, -n:], rtol=0, atol=2e-5)


def test_guidance_of_one_is_the_conditional_branch_alone(pipe):
    backbone, prompt = pipe.adapter(), prompts_of(pipe)[1]
    assert len(backbone.encode_prompt([prompt], None, guided=False).embeddings) == 1
    pipe.verifier = AutoregressiveVerifier(temperature=0.0)
    codes = pipe(prompt, guidance_scale=1.0, output_type="latent").codes
    hidden, _ = backbone.read(codes, backbone.encode_prompt([prompt], None, guided=False), backbone.grid())
    assert torch.equal(backbone.logits(hidden).argmax(-1), codes)
    assert not torch.equal(pipe(prompt, guidance_scale=6.0, output_type="latent").codes, codes)


LOSSLESS = {  # with shared noise: the very picture of `AutoregressiveVerifier`
    "autoregressive": AutoregressiveVerifier(),
    "default": SpatialDraftVerifier(),
    "lossless, a small window, no refresh": SpatialDraftVerifier(lossless=True, window=3, refresh=0, block_size=2),
    "lossless, copies of the row above": SpatialDraftVerifier(draft="above"),
    "jacobi": JacobiVerifier(coupling="gumbel", window=7),
    "wavefront, a row ahead": WavefrontVerifier(lead=SIDE),
    "wavefront, a row a step": WavefrontVerifier(lead=SIDE, row_window=SIDE),
}
OTHERS = {
    "one round": SpatialDraftVerifier(rounds=1),
    "rows in flight": SpatialDraftVerifier(rounds=2, row_lag=1, confidence_threshold=0.2),
    "blocks, argmax": SpatialDraftVerifier(rounds=2, block_size=2, draft="argmax", adaptive=False),
    "no rounds": SpatialDraftVerifier(rounds=0, horizontal_rounds=1),
    "residual, lossless": SpatialDraftVerifier(coupling="residual", lossless=True),
    "relaxed": SpatialDraftVerifier(rounds=1, coupling="residual", num_neighbors=3),
    "random drafts": SpatialDraftVerifier(rounds=1, draft="random"),
    "paper": SpatialDraftVerifier.paper(),
    "paper, emu3": SpatialDraftVerifier.paper("emu3"),
    "paper, lumina": SpatialDraftVerifier.paper("lumina_mgpt"),
    "along rows": SpatialDraftVerifier.paper(horizontal_only=True),
    "sjd": JacobiVerifier(initial="random"),
    "gsd": JacobiVerifier(coupling="residual", initial="left", num_neighbors=3),
    "scan": WavefrontVerifier(lead=1, fusion=0.5, confidence_threshold=0.3),
    "zipar": WavefrontVerifier(lead=2, coupling="residual"),
}


GREEDY = [*LOSSLESS][1:] + ["residual, lossless", "sjd"]  # exact: at temperature 0 all draw the same picture
# Classes differ from captions in the prefix alone: one verifier of each kind is enough for them.
FOR_CLASSES = ("autoregressive", "default", "jacobi", "wavefront, a row a step", "residual, lossless", "paper")


def draw(pipe, verifier, prompts, seed=0, **settings):
    pipe.verifier = verifier
    generators = [torch.Generator().manual_seed(seed + len(prompt)) for prompt in prompts]
    return pipe(list(prompts), generator=generators, output_type="latent", **settings).codes


@cache
def autoregressive(pipe):
    return draw(pipe, AutoregressiveVerifier(), prompts_of(pipe), **FILTERS)


@cache
def likeliest(pipe):
    return draw(pipe, AutoregressiveVerifier(), prompts_of(pipe)[:1], temperature=0)


@pytest.mark.parametrize(
    ("pipe", "name"),
    [
        (family, name)
        for family in FAMILIES
        for name in (FOR_CLASSES if family == "llamagen classes" else [*LOSSLESS, *OTHERS])
    ],
    indirect=["pipe"],
)
def test_every_verifier_draws_whole_grids_and_solo_pictures_in_batches(pipe, name, monkeypatch):
    verifier, grid, prompts = {**LOSSLESS, **OTHERS}[name], pipe.adapter().grid(), prompts_of(pipe)
    fed = []
    tokens_of = DecodingState.tokens

    def spy(state, window):
        tokens = tokens_of(state, window)
        span = torch.arange(window.start, window.stop)
        fed.append((tokens.clone(), window.positions if isinstance(window, Cells) else span.expand_as(tokens)))
        return tokens

    monkeypatch.setattr(DecodingState, "tokens", spy)
    together = draw(pipe, verifier, prompts, **FILTERS)
    assert together.shape == (2, SIDE, SIDE) and ((together >= 0) & (together < 64)).all()
    assert torch.equal(together, torch.cat([draw(pipe, verifier, [prompt], **FILTERS) for prompt in prompts]))
    if name in LOSSLESS:
        assert torch.equal(together, autoregressive(pipe))
    if name in GREEDY:
        assert torch.equal(draw(pipe, verifier, prompts[:1], temperature=0), likeliest(pipe))
    # In every pass the forced tokens stand behind the rows and nowhere else, and no cell is fed empty.
    tokens, positions = (torch.cat([part.flatten() for part in parts]) for parts in zip(*fed, strict=True))
    behind_a_row = positions % grid.stride == grid.columns
    assert torch.equal(tokens == ROW_END, behind_a_row) and behind_a_row.any() == grid.row_end
    assert (tokens[~behind_a_row] >= 0).all()


@pytest.mark.parametrize("name", sorted({*OTHERS} - {*GREEDY, "random drafts"}))
def test_one_code_left_by_the_filters_or_no_temperature_leaves_nothing_to_chance(families, name):
    pipe, verifier = families["janus"], OTHERS[name]
    greedy = draw(pipe, verifier, [LONG], temperature=0)
    assert torch.equal(draw(pipe, verifier, [LONG], seed=1, top_k=1), greedy)


@torch.no_grad()
def test_only_codes_that_the_filters_leave_are_drawn(pipe):
    backbone, codes = pipe.adapter(), autoregressive(pipe)
    hidden, _ = backbone.read(codes, backbone.encode_prompt(prompts_of(pipe), None, guided=True), backbone.grid())
    logits = guide(backbone.logits(hidden), backbone.recommended_guidance_scale)
    chosen, five = logits.gather(-1, codes[..., None]), logits.topk(5).values
    likelier = five > chosen
    assert (likelier.sum(-1) < 5).all()
    assert ((five.softmax(-1) * likelier).sum(-1) < 0.8).all()


def test_a_run_leaves_the_models_and_their_configs_as_they_were(pipe):
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}

    def state():
        return {
            name: (
                {key: value.numpy().tobytes() for key, value in part.state_dict().items()},
                str(part.config),
                {key: set(vars(module)) for key, module in part.named_modules()},
                sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in part.modules()),
                part.training,
            )
            for name, part in parts.items()
        }

    before = state()
    pipe.verifier = SpatialDraftVerifier()
    pipe(prompts_of(pipe), output_type="pt" if pipe.backbone.config.model_type != "janus_with_row_ends" else "latent")
    assert state() == before


@pytest.mark.parametrize("family", FAMILIES)
def test_forced_row_ends_are_fed_and_never_drawn(families, family):
    pipe = families[family]
    grid, fed = pipe.adapter().grid(), []
    backbone_class = type(pipe.adapter())
    original = backbone_class.embed

    def spy(self, sequence, grid):
        fed.append(sequence.clone())
        return original(self, sequence, grid)

    backbone_class.embed = spy
    try:
        draw(pipe, AutoregressiveVerifier(), prompts_of(pipe)[1:])
    finally:
        backbone_class.embed = original
    tokens = torch.cat([part.flatten() for part in fed])
    # All but the last position is fed, once.
    assert len(tokens) == grid.length - 1
    ends = (tokens == ROW_END).nonzero().flatten().tolist()
    assert ends == ([row * 5 + 4 for row in range(3)] if grid.row_end else [])
    assert grid.row_end == (family in ("emu3", "lumina", "row ends"))


# --- real sizes, without weights --------------------------------------------------------------------------------------


PAPER_HEAD = 134.2e6
REAL = {  # parameters of the language model with its head, cache bytes a token and branch in bfloat16, grid, draft head
    "janus-pro-1b": (1.65e9, 196_608, (24, 24, 576), 33.6e6),
    "janus-pro-7b": (6.91e9, 491_520, (24, 24, 576), PAPER_HEAD),
    "emu3": (8.49e9, 131_072, (90, 90, 8190), PAPER_HEAD),
    "lumina": (7.01e9, 524_288, (48, 48, 2352), PAPER_HEAD),
    "llamagen": (0.775e9, 184_320, (16, 16, 256), 13.1e6),
}


def real_backbone(name: str):
    """The released sizes on the meta device: shapes, and no weights."""
    if name.startswith("janus"):
        sizes = SIZES[name]
        text = {**sizes, "num_key_value_heads": sizes["num_attention_heads"], "vocab_size": 102400}
        width = {"projection_dim": sizes["hidden_size"]}
        vision = {"image_size": 384, "patch_size": 16, "num_image_tokens": 576, "num_hidden_layers": 1, **width}
        pictures = {"num_embeddings": 16384, "image_token_embed_dim": sizes["hidden_size"], **width}
        config = JanusConfig(text_config=text, vision_config=vision, vq_config=pictures, tie_word_embeddings=False)
        return wrap_backbone(JanusForConditionalGeneration(config), None)
    if name == "emu3":
        vocabulary = {"<image>": 151646, "<|extra_200|>": 151846}
        vocabulary |= {f"<|visual token {code:06d}|>": 151854 + code for code in range(32768)}
        return wrap_backbone(Emu3ForConditionalGeneration(Emu3Config(vocabulary_map=vocabulary)), None)
    if name == "lumina":
        letters = str.maketrans("0123456789", "ABCDEFGHIJ")
        names = ["<racm3:break>", "<reserved08706>", "<reserved08799>", "<reserved08801>", "<image>"]
        vocabulary = {token: 8197 + index for index, token in enumerate(names)}
        vocabulary |= {f"IMGIMG{str(code).translate(letters)}Z": 4 + code for code in range(8192)}
        config = ChameleonConfig(vocabulary_map=vocabulary)
        config.image_size = 768
        return wrap_backbone(ChameleonForConditionalGeneration(config), None)
    return wrap_backbone(LlamaGenModel(LlamaGenConfig()), None)


@pytest.mark.parametrize("name", list(REAL))
def test_real_sizes_have_the_published_parameters_caches_grids_and_heads(name):
    parameters, cache_bytes, grid, head = REAL[name]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            backbone = real_backbone(name)
            heads = SpatialDraftHeads.for_backbone(backbone, num_horizontal=5, num_vertical=1)
            embeddings = torch.empty(1, 4, backbone.hidden_size)
    finally:
        torch.set_default_dtype(before)
    found = backbone.grid()
    assert (found.rows, found.columns, found.length) == grid
    assert found.row_end == (name in ("emu3", "lumina"))
    assert sum(p.numel() for p in heads.parameters()) / 6 == pytest.approx(head, rel=0.01)
    # The same cache that decoding uses, as the decoder fills it.
    cache = DecodingCache(backbone.model.config.get_text_config(), 4)
    backbone.decoder(inputs_embeds=embeddings, use_cache=True, **cache.argument(backbone.decoder))
    layers = cache._layers
    assert sum(layer.keys.nbytes + layer.values.nbytes for layer in layers) / 4 == cache_bytes
    assert len(cache) == 4
    counted = sum(p.numel() for p in backbone.decoder.parameters())
    counted += 0 if name == "llamagen" else sum(p.numel() for p in backbone.model.lm_head.parameters())
    picture_reader = getattr(backbone.decoder, "vqmodel", None)  # Chameleon keeps it inside
    counted -= 0 if picture_reader is None else sum(p.numel() for p in picture_reader.parameters())
    assert counted == pytest.approx(parameters, rel=0.01)


# --- a family that a friend adds --------------------------------------------------------------------------------------


def test_the_documented_adapter_of_another_family_works_as_it_stands():
    """The code block of `examples/backbones.md`, run on a tiny chameleon that doesn't state Lumina's settings."""
    page = (Path(__file__).parents[2] / "examples" / "backbones.md").read_text("utf-8")
    block = next(part for part in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "register_backbone" in part)
    assert len(block.splitlines()) <= 65
    before = list(registry._ADAPTERS)
    namespace: dict = {}
    try:
        exec(block, namespace)  # our own page
        model, tokenizer = tiny_lumina()
        pipe = SpatialSpeculativePipeline(model, tokenizer)
        assert type(pipe.adapter()).__name__ == "LuminaBackbone", "other chameleons keep their adapter"
        del model.config.image_size
        pipe = SpatialSpeculativePipeline(model, tokenizer)
        assert isinstance(pipe.adapter(), namespace["AnoleBackbone"])
        pipe.set_progress_bar_config(disable=True)
        heads = SpatialDraftHeads.for_backbone(pipe.adapter(), num_horizontal=5, num_vertical=1)
        pipe.load_ssd_heads(heads.eval())
        pipe.verifier = SpatialDraftVerifier(rounds=1)
        output = pipe("a red circle", output_type="latent")
        assert output.codes.shape == (1, 32, 32) and (output.codes >= 0).all()
        assert output.stats.nfe < 100
    finally:
        registry._ADAPTERS[:] = before
