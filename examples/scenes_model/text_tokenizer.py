"""A word-level transformers tokenizer for the model's prompts, in Janus-Pro's prompt format."""

import re
from random import Random

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ssd_pipelines.scenes import FAMILIES, SceneOptions, all_tasks, sample_scene


SPECIAL = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "boi_token": "<begin_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_placeholder>",
}
ROLES = ("<|User|>", "<|Assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|User|>: ' if message['role'] == 'user' else '<|Assistant|>: ' }}"
    "{% for part in message['content'] %}"
    "{{ part['text'] if part['type'] == 'text' else '<image_placeholder>' }}"
    "{% endfor %}"
    "{{ '\\n\\n' if message['role'] == 'user' else '<eos>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>:{% endif %}"
)


def known_words() -> list[str]:
    """Return all words of the families' tasks and of 5,000 dense prompts, which is enough to include every word."""
    random, options = Random("words"), SceneOptions(dense=1.0)
    prompts = [task.prompt for family in FAMILIES for task in all_tasks(family)]
    prompts += [sample_scene(random, options).prompt for _ in range(5000)]
    return sorted({word for prompt in prompts for word in re.findall(r"\w+", prompt)})


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a word-level tokenizer.

    It converts to lower case, splits off punctuation, drops white space, puts <bos> first and pads on the left.
    """
    tokens = [*SPECIAL.values(), *ROLES, ":", *known_words()]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL["unk_token"]))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    bos = SPECIAL["bos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, vocabulary[bos])]
    )
    standard = {key: SPECIAL[key] for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
    own = {key: SPECIAL[key] for key in ("boi_token", "eoi_token", "image_token")}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        padding_side="left",
        model_max_length=256,
        extra_special_tokens=own,
        chat_template=CHAT_TEMPLATE,
        **standard,
    )
    fast.add_special_tokens({"additional_special_tokens": list(ROLES)}, replace_extra_special_tokens=False)
    return fast


def image_prompt(prompt: str) -> str:
    """Format a prompt for image generation as Janus-Pro does; the tokenizer adds <bos>."""
    return f"<|User|>: {prompt}\n\n<|Assistant|>:{SPECIAL['boi_token']}"


class PromptEncoder:
    """Encodes prompts as left-padded ids of fixed length, with a cache of the prompts it has seen.

    Args:
        tokenizer: from `build_tokenizer`.
        length: number of ids per prompt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, length: int) -> None:
        self.tokenizer, self.length, self.seen = tokenizer, length, dict[str, list[int]]()
        self.pad, self.bos = tokenizer.pad_token_id, tokenizer.bos_token_id
        self.boi = tokenizer.convert_tokens_to_ids(SPECIAL["boi_token"])

    def __call__(self, prompts: list[str], dropped: list[bool] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode a batch of prompts.

        Args:
            prompts: the texts.
            dropped: for each prompt, whether to replace all tokens but <bos> and <begin_of_image> by pads. These pads
                are attended to, as in Janus; only the padding on the left is masked.

        Returns:
            ids and attention mask, both `int64 (batch, length)`.

        Raises:
            ValueError: if a prompt has more than `length` tokens.
        """
        ids = torch.full((len(prompts), self.length), self.pad)
        mask = torch.zeros(len(prompts), self.length, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            if prompt not in self.seen:
                self.seen[prompt] = self.tokenizer(image_prompt(prompt))["input_ids"]
            tokens = self.seen[prompt]
            if len(tokens) > self.length:
                raise ValueError(f"{prompt!r} has {len(tokens)} tokens, at most {self.length} are allowed: shorten it.")
            if dropped is not None and dropped[row]:
                tokens = [tokens[0], *[self.pad] * (len(tokens) - 2), tokens[-1]]
            ids[row, self.length - len(tokens) :] = torch.tensor(tokens)
            mask[row, self.length - len(tokens) :] = 1
        return ids, mask
