"""Tiny random backbones and heads in the real formats, for tests and documentation: milliseconds to build, no download.

They draw noise, but every rule of decoding holds on them: pass counts, equality with the plain library, batches.
"""

from typing import Any, Literal

import torch
from diffusers import VQModel
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    ChameleonConfig,
    ChameleonForConditionalGeneration,
    ChameleonVQVAEConfig,
    Emu3Config,
    Emu3ForConditionalGeneration,
    Emu3TextConfig,
    Emu3VQVAEConfig,
    JanusConfig,
    JanusForConditionalGeneration,
    JanusVQVAEConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)
from transformers.models.janus.configuration_janus import JanusVisionConfig

from ssd_pipelines.backbones import LlamaGenConfig, LlamaGenModel, register_backbone, wrap_backbone
from ssd_pipelines.backbones.janus import BEGIN_OF_IMAGE, JanusBackbone
from ssd_pipelines.grid import TokenGrid
from ssd_pipelines.heads import SpatialDraftHeads
from ssd_pipelines.pipeline import SpatialSpeculativePipeline
from ssd_pipelines.verifiers import Verifier


WORDS = "a photo of red green blue circle square triangle left right above below the in and".split()
SPECIAL = ["<bos>", "<eos>", "<pad>", "<unk>", BEGIN_OF_IMAGE, "<|User|>", "<|Assistant|>"]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer with the special tokens of Janus."""
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, ":", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=[BEGIN_OF_IMAGE, "<|User|>", "<|Assistant|>"],
        padding_side="left",
    )


def tiny_janus(
    side: int = 4,
    image_vocab_size: int = 64,
    hidden_size: int = 32,
    num_layers: int = 2,
    seed: int = 0,
    model_class: type[JanusForConditionalGeneration] = JanusForConditionalGeneration,
) -> JanusForConditionalGeneration:
    """A random Janus model that draws `side` x `side` codes; pictures are 4 pixels a code.

    Args:
        side: rows and columns of the token grid.
        image_vocab_size: number of image codes.
        seed: of the weights; torch's global generator is left as it was.
    """
    text = LlamaConfig(
        vocab_size=len(SPECIAL) + 1 + len(WORDS),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16384,
        pad_token_id=2,
        bos_token_id=0,
        eos_token_id=1,
    )
    vision = JanusVisionConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=side * 4,
        patch_size=4,
        num_image_tokens=side * side,
        projection_dim=hidden_size,
    )
    pictures = JanusVQVAEConfig(
        embed_dim=8,
        num_embeddings=image_vocab_size,
        latent_channels=32,
        base_channels=32,
        channel_multiplier=[1, 1, 1],
        num_res_blocks=1,
        projection_dim=hidden_size,
        image_token_embed_dim=hidden_size,
    )
    config_class = model_class.config_class
    config = config_class(
        text_config=text.to_dict(),
        vision_config=vision.to_dict(),
        vq_config=pictures.to_dict(),
        image_token_id=SPECIAL.index("<unk>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        # The library's initialisation gives nearly uniform predictions that hardly look at their context: every draft
        # would pass. Larger weights give distributions of middling entropy that change from cell to cell.
        for module, std in (
            (model.model.language_model.layers, 0.15),
            (model.model.generation_head, 0.25),
            (model.model.generation_embeddings, 1.5),
        ):
            for parameter in module.parameters():
                if parameter.ndim > 1:
                    torch.nn.init.normal_(parameter, std=std)
    model.generation_config.pad_token_id = SPECIAL.index("<pad>")
    model.generation_config.bos_token_id = SPECIAL.index("<bos>")
    model.generation_config.eos_token_id = SPECIAL.index("<eos>")
    model.generation_config.generation_kwargs = {"boi_token_id": SPECIAL.index(BEGIN_OF_IMAGE)}
    return model.eval()


def tiny_emu3(side: int = 4, image_vocab_size: int = 64, hidden_size: int = 32, seed: int = 0) -> Any:
    """A random Emu3 model and its tokenizer, in the layout of BAAI/Emu3-Gen-hf; pictures are 8 pixels a code.

    Args:
        side: rows and columns of the default grid.
        image_vocab_size: number of image codes, at most 1,000,000.
        seed: of the weights.

    Returns:
        `(model, tokenizer)`.
    """
    special = ["<|extra_203|>", "<|extra_204|>", "<|endoftext|>", "<unk>", "<image>", "<|extra_200|>", "<|extra_201|>"]
    special += ["<|image start|>", "<|image end|>", "<|image token|>"]
    visual = [f"<|visual token {code:06d}|>" for code in range(image_vocab_size)]
    words = [*WORDS, *"0123456789*.,"]
    words += "masterpiece film grained best quality lowres bad anatomy hands".split()
    vocabulary = {word: index for index, word in enumerate([*special, *words, *visual])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|extra_203|>",
        eos_token="<|extra_204|>",
        pad_token="<|endoftext|>",
        unk_token="<unk>",
        additional_special_tokens=special[4:],
        padding_side="left",
    )
    text = Emu3TextConfig(
        vocab_size=len(vocabulary),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=9216,
        pad_token_id=2,
        bos_token_id=0,
        eos_token_id=1,
    )
    pictures = Emu3VQVAEConfig(
        codebook_size=image_vocab_size,
        base_channels=32,
        channel_multiplier=[1, 1, 1, 1],
        num_res_blocks=1,
        attn_resolutions=[3],
        hidden_size=32,
    )
    config = Emu3Config(text_config=text.to_dict(), vq_config=pictures.to_dict(), vocabulary_map=vocabulary)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Emu3ForConditionalGeneration(config)
        for module, std in (
            (model.model.text_model.layers, 0.15),
            (model.model.text_model.embed_tokens, 1.5),
            (model.lm_head, 0.25),
        ):
            for parameter in module.parameters():
                if parameter.ndim > 1:
                    torch.nn.init.normal_(parameter, std=std)
    model.config.image_area = (8 * side) ** 2
    return model.eval(), fast


def tiny_lumina(side: int = 4, image_vocab_size: int = 64, hidden_size: int = 32, seed: int = 0) -> Any:
    """A random Chameleon model with the special tokens of Lumina-mGPT, and its tokenizer; 16 pixels a code.

    Args:
        side: rows and columns of the default grid, an even number.
        image_vocab_size: number of image codes.
        seed: of the weights.

    Returns:
        `(model, tokenizer)`; the model holds no picture decoder.
    """
    letters = str.maketrans("0123456789", "ABCDEFGHIJ")
    visual = [f"IMGIMG{str(code).translate(letters)}Z" for code in range(image_vocab_size)]
    sizes = [f"<reserved{8800 + units:05d}>" for units in range(1, 4 * side)]
    special = ["<s>", "<pad>", "</s>", "<unk>", *visual, "<image>", "<eoss>", "<racm3:break>", "<reserved08706>"]
    special += ["<reserved08799>", *sizes]
    words = [*WORDS, *"Generate an image of according to following prompt 0 1 2 3 4 5 6 7 8 9 x :".split()]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys([*special, *words]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    config = ChameleonConfig(
        vocab_size=len(vocabulary),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
        vq_config=ChameleonVQVAEConfig(
            embed_dim=32, num_embeddings=image_vocab_size, latent_channels=32, resolution=32, base_channels=32,
            channel_multiplier=[1, 1], num_res_blocks=1,
        ).to_dict(),
        vocabulary_map=vocabulary,
    )  # fmt: skip
    config.image_size = 16 * side
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ChameleonForConditionalGeneration(config)
        for module, std in ((model.model.layers, 0.15), (model.model.embed_tokens, 1.5), (model.lm_head, 0.25)):
            for parameter in module.parameters():
                if parameter.ndim > 1:
                    torch.nn.init.normal_(parameter, std=std)
        for name, parameter in model.named_parameters():
            if "q_norm.weight" in name or "k_norm.weight" in name:
                torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
    return model.eval(), fast


def tiny_llamagen(
    side: int = 4,
    image_vocab_size: int = 64,
    hidden_size: int = 32,
    condition: Literal["text", "class"] = "text",
    seed: int = 0,
) -> Any:
    """A random LlamaGen model with a tokenizer and a T5 encoder; it holds no picture decoder.

    Args:
        condition: a model from text, or one from 20 classes, which has neither tokenizer nor encoder.
        seed: of the weights.

    Returns:
        `(model, tokenizer, text_encoder)`.
    """
    from_text = condition == "text"
    config = LlamaGenConfig(
        hidden_size=hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=2 * hidden_size,
        vocab_size=image_vocab_size,
        grid_size=side,
        condition=condition,
        prefix_length=120 if from_text else 1,
        caption_width=24,
        num_classes=20,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaGenModel(config).eval()
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                table = "tok_embeddings" in name or "embedding_table" in name
                torch.nn.init.normal_(parameter, std=1.5 if table else 0.25)
        if not from_text:
            return model, None, None
        model.cls_embedding.uncond_embedding.normal_()
        tokenizer = tiny_tokenizer()
        text = T5Config(vocab_size=len(tokenizer), d_model=24, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
        encoder = T5EncoderModel(text).eval()
        for parameter in encoder.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.5)
    return model, tokenizer, encoder


def tiny_image_tokenizer(image_vocab_size: int = 64, seed: int = 0) -> VQModel:
    """A random picture decoder for the families whose model holds none: 16 pixels a code."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return VQModel(
            down_block_types=("DownEncoderBlock2D",) * 5,
            up_block_types=("UpDecoderBlock2D",) * 5,
            block_out_channels=(32,) * 5,
            latent_channels=32,
            num_vq_embeddings=image_vocab_size,
            vq_embed_dim=8,
            lookup_from_codebook=True,
        ).eval()


FAMILIES = ("janus", "emu3", "lumina", "llamagen", "llamagen classes", "row ends")
"""What `tiny_family` builds; "llamagen classes" takes numbers below 20 as prompts, "row ends" is the stand-in."""


def tiny_family(family: str, side: int = 4, **heads: Any) -> SpatialSpeculativePipeline:
    """A pipeline of a tiny random backbone of one of `FAMILIES`, with random heads and a picture decoder."""
    parts: dict[str, Any]
    if family in ("janus", "row ends"):
        model = tiny_janus(side, model_class=RowEndJanus if family == "row ends" else JanusForConditionalGeneration)
        parts = {"backbone": model, "tokenizer": tiny_tokenizer()}
    elif family.startswith("llamagen"):
        made = tiny_llamagen(side, condition="class" if family == "llamagen classes" else "text")
        parts = dict(zip(("backbone", "tokenizer", "text_encoder"), made, strict=True))
    else:
        make = {"emu3": tiny_emu3, "lumina": tiny_lumina}[family]
        parts = dict(zip(("backbone", "tokenizer"), make(side), strict=True))
    if family.startswith(("lumina", "llamagen")):
        parts["image_tokenizer"] = tiny_image_tokenizer()
    pipe = SpatialSpeculativePipeline(**parts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        settings = {"num_horizontal": 5, "num_vertical": 2, **heads}
        pipe.load_ssd_heads(SpatialDraftHeads.for_backbone(pipe.adapter(), **settings).eval())
    pipe.set_progress_bar_config(disable=True)
    return pipe


class RowEndJanusConfig(JanusConfig):
    model_type = "janus_with_row_ends"


class RowEndJanus(JanusForConditionalGeneration):
    """A stand-in for the families that force a token after every row (Lumina-mGPT, Emu3)."""

    config_class = RowEndJanusConfig


@register_backbone
class RowEndJanusBackbone(JanusBackbone):
    """Adapter of the stand-in: the end-of-text token stands for the row end."""

    model_type = "janus_with_row_ends"
    model_class = RowEndJanus

    def grid(self, height: int | None = None, width: int | None = None) -> TokenGrid:
        square = super().grid(height, width)
        return TokenGrid(square.rows, square.columns, row_end=True)

    def row_end_embedding(self) -> torch.Tensor:
        return self.model.get_input_embeddings().weight[self.tokenizer.eos_token_id]


def tiny_heads(
    model: JanusForConditionalGeneration,
    num_horizontal: int = 5,
    num_vertical: int = 2,
    neighborhood: Literal["cell", "three"] = "cell",
    row_head: bool = False,
    seed: int = 0,
) -> SpatialDraftHeads:
    """Random draft heads that fit `model`."""
    backbone = wrap_backbone(model, tiny_tokenizer())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        heads = SpatialDraftHeads.for_backbone(
            backbone,
            num_horizontal=num_horizontal,
            num_vertical=num_vertical,
            neighborhood=neighborhood,
            row_head=row_head,
        )
    return heads.eval()


def tiny_pipeline(
    side: int = 4,
    row_end: bool = False,
    verifier: Verifier | None = None,
    num_vertical: int = 2,
    neighborhood: Literal["cell", "three"] = "cell",
    row_head: bool = False,
    **model: int,
) -> SpatialSpeculativePipeline:
    """A pipeline of a tiny random backbone with random heads.

    Example:
        >>> tiny_pipeline()("a red circle", output_type="latent").codes.shape
        torch.Size([1, 4, 4])
    """
    backbone = tiny_janus(side, model_class=RowEndJanus if row_end else JanusForConditionalGeneration, **model)
    heads = tiny_heads(backbone, num_vertical=num_vertical, neighborhood=neighborhood, row_head=row_head)
    pipe = SpatialSpeculativePipeline(backbone, tiny_tokenizer(), heads=heads, verifier=verifier)
    pipe.set_progress_bar_config(disable=True)
    return pipe


SIZES = {
    "100m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 2048},
    "janus-pro-1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 5632,
    },
    "janus-pro-7b": {
        "hidden_size": 4096,
        "num_hidden_layers": 30,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
    },
}
"""Language models of the Janus family by size; the first is no release."""


def random_pipeline(size: str, dtype: torch.dtype, device: str | torch.device) -> SpatialSpeculativePipeline:
    """A Janus pipeline of a real size with random weights and heads, to measure time with; it draws noise.

    The picture decoder and the image reader stay tiny: decoding tokens doesn't touch them.

    Args:
        size: one of `SIZES`.
    """
    sizes = SIZES[size]
    config = tiny_janus(side=24, image_vocab_size=16384, hidden_size=32, num_layers=1).config
    for name, value in {**sizes, "num_key_value_heads": sizes["num_attention_heads"]}.items():
        setattr(config.text_config, name, value)
    config.text_config.head_dim = sizes["hidden_size"] // sizes["num_attention_heads"]
    config.vq_config.projection_dim = config.vq_config.image_token_embed_dim = sizes["hidden_size"]
    config.vision_config.projection_dim = sizes["hidden_size"]
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = JanusForConditionalGeneration(config).eval()
            backbone = wrap_backbone(model, tiny_tokenizer())
            heads = SpatialDraftHeads.for_backbone(backbone, num_horizontal=5, num_vertical=1).eval()
    finally:
        torch.set_default_dtype(default)
    model.generation_config.generation_kwargs = {"boi_token_id": SPECIAL.index(BEGIN_OF_IMAGE)}
    model.generation_config.pad_token_id = SPECIAL.index("<pad>")
    pipe = SpatialSpeculativePipeline(model, tiny_tokenizer(), heads=heads)
    pipe.set_progress_bar_config(disable=True)
    return pipe
