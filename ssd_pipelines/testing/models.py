"""Tiny random backbones in the real formats, with the tokenizer and picture decoder of each."""

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
    JanusForConditionalGeneration,
    JanusVQVAEConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)
from transformers.models.janus.configuration_janus import JanusVisionConfig

from ssd_pipelines.backbones import LlamaGenConfig, LlamaGenModel
from ssd_pipelines.backbones.janus import BEGIN_OF_IMAGE


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
    """A random Janus model for `side` x `side` codes of 4 x 4 pixels each.

    Args:
        side: rows and columns of the token grid.
        image_vocab_size: number of image codes.
        hidden_size, num_layers: of the language model.
        seed: of the weights; torch's global generator is not changed.
        model_class: `JanusForConditionalGeneration` or a subclass.
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
        # The default initialisation gives nearly uniform predictions that barely depend on their context, so all draft
        # tokens would be accepted. Larger weights give distributions of medium entropy that change from cell to cell.
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
    """A random Emu3 model and its tokenizer, in the layout of BAAI/Emu3-Gen-hf; a code is 8 x 8 pixels.

    Args:
        side: rows and columns of the default grid.
        image_vocab_size: number of image codes, at most 1,000,000.
        hidden_size: of the language model.
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
    """A random Chameleon model with the special tokens of Lumina-mGPT, and its tokenizer; a code is 16 x 16 pixels.

    Args:
        side: rows and columns of the default grid, an even number.
        image_vocab_size: number of image codes.
        hidden_size: of the language model.
        seed: of the weights.

    Returns:
        `(model, tokenizer)`; the model has no picture decoder.
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
    """A random LlamaGen model with a tokenizer and a T5 encoder; it has no picture decoder.

    Args:
        side: rows and columns of the token grid.
        image_vocab_size: number of image codes.
        hidden_size: of the transformer.
        condition: "text", or "class" for 20 classes without tokenizer and text encoder.
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
    """A random picture decoder for the families whose model has none; a code is 16 x 16 pixels."""
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
