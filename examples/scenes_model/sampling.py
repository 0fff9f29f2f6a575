"""Draws pictures with the model and scores them, batched, for the training log."""

import torch
from text_tokenizer import PromptEncoder
from transformers import DynamicCache, JanusForConditionalGeneration

from ssd_pipelines.scenes import SceneTask


@torch.no_grad()
def draw_codes(
    model: JanusForConditionalGeneration,
    encoder: PromptEncoder,
    prompts: list[str],
    generator: torch.Generator,
    guidance: float = 3.0,
    temperature: float = 1.0,
    top_p: float = 1.0,
    num_codes: int = 256,
) -> torch.Tensor:
    """Samples one picture a prompt, conditional and unconditional branch in one batch; returns codes (B, num_codes)."""
    guided = guidance != 1.0
    ids, mask = encoder(prompts)
    if guided:
        dropped_ids, _ = encoder(prompts, [True] * len(prompts))
        ids, mask = torch.cat([ids, dropped_ids]), torch.cat([mask, mask])
    language_model = model.model.language_model
    embeds = model.get_input_embeddings()(ids)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    mask = torch.cat([mask, torch.ones(len(mask), num_codes, dtype=mask.dtype)], 1)
    cache, length = DynamicCache(), ids.shape[1]
    drawn = torch.empty(len(prompts), num_codes, dtype=torch.long)
    for index in range(num_codes):
        hidden = language_model(
            inputs_embeds=embeds,
            attention_mask=mask[:, : length + index],
            position_ids=positions,
            cache=cache,
            use_cache=True,
        ).last_hidden_state[:, -1]
        logits = model.model.generation_head(hidden).float()
        if guided:
            conditional, unconditional = logits.chunk(2)
            logits = unconditional + guidance * (conditional - unconditional)
        probabilities = (logits / temperature).softmax(-1)
        if top_p < 1:
            ordered, order = probabilities.sort(descending=True)
            ordered[ordered.cumsum(-1) - ordered > top_p] = 0
            probabilities = torch.zeros_like(probabilities).scatter(1, order, ordered)
        code = torch.multinomial(probabilities, 1, generator=generator)
        drawn[:, index] = code[:, 0]
        embeds = model.prepare_embeddings_for_image_generation(torch.cat([code, code]) if guided else code)
        positions = positions[:, -1:] + 1
    return drawn


def families_of(tasks: list[SceneTask], right: list[bool]) -> dict[str, tuple[int, int]]:
    """(right, all) by family."""
    result: dict[str, tuple[int, int]] = {}
    for task, value in zip(tasks, right, strict=True):
        good, total = result.get(task.family, (0, 0))
        result[task.family] = (good + int(value), total + 1)
    return result
