"""Checks of the arguments of a pipeline call; each error explains in one sentence what is wrong and what is allowed."""

from typing import Any

import torch

from ssd_pipelines.backbones import Prompt
from ssd_pipelines.grid import TokenGrid


def check_prompts(
    prompt: Any,
    negative_prompt: Any,
    num_images_per_prompt: Any,
    prompt_embeds: Any,
    guidance_scale: float,
    grid: TokenGrid,
) -> int:
    """Check the prompts of a call, and return the number of pictures that it asks for.

    Raises:
        ValueError: if a prompt is not a string, the negative prompts don't match the prompts, or
            `num_images_per_prompt` is not a positive whole number; also see `check_prompt_embeds`.
    """
    if prompt_embeds is not None:
        given = (prompt, negative_prompt, num_images_per_prompt)
        num_prompts = check_prompt_embeds(prompt_embeds, *given, guidance_scale, grid)
    elif isinstance(prompt, str):
        num_prompts = 1
    elif isinstance(prompt, list | tuple) and prompt and all(isinstance(text, str) for text in prompt):
        num_prompts = len(prompt)
    else:
        raise ValueError(f"`prompt` must be a string or a list of at least one string, got {prompt!r}.")
    if not isinstance(negative_prompt, str | None) and (
        not isinstance(negative_prompt, list | tuple)
        or len(negative_prompt) != num_prompts
        or not all(isinstance(text, str) for text in negative_prompt)
    ):
        raise ValueError(
            f"`negative_prompt` must be one string or {num_prompts} of them, one per prompt, got {negative_prompt!r}."
        )
    if isinstance(num_images_per_prompt, bool) or not isinstance(num_images_per_prompt, int):
        raise ValueError(f"`num_images_per_prompt` must be a whole number, got {num_images_per_prompt!r}.")
    if num_images_per_prompt < 1:
        raise ValueError(f"`num_images_per_prompt` must be at least 1, got {num_images_per_prompt}.")
    return num_prompts * num_images_per_prompt


def check_prompt_embeds(
    prompt_embeds: Any,
    prompt: Any,
    negative_prompt: Any,
    num_images_per_prompt: Any,
    guidance_scale: float,
    grid: TokenGrid,
) -> int:
    """Check encoded prompts, and return their number.

    Raises:
        ValueError: if `prompt_embeds` is not a `Prompt`, is given along with `prompt`, `negative_prompt` or
            `num_images_per_prompt`, doesn't have the branches that `guidance_scale` needs, or was encoded for another
            picture size.
    """
    if not isinstance(prompt_embeds, Prompt):
        raise ValueError(
            f"`prompt_embeds` must be what `pipe.encode_prompt` returned, got {type(prompt_embeds).__name__}."
        )
    if prompt is not None or negative_prompt is not None or num_images_per_prompt != 1:
        raise ValueError(
            "`prompt_embeds` already holds prompts, negative prompts and repetitions: leave out `prompt`, "
            "`negative_prompt` and `num_images_per_prompt`."
        )
    guided = guidance_scale > 1
    if prompt_embeds.guided != guided:
        has, wants = ("all", "none") if prompt_embeds.guided else ("none", "all")
        raise ValueError(
            f"`prompt_embeds` has {has} of the unconditional branches, but a `guidance_scale` of {guidance_scale} "
            f"needs {wants}: encode with `do_classifier_free_guidance={guided}`."
        )
    encoded = prompt_embeds.grid
    if encoded is not None and encoded != grid:
        raise ValueError(
            f"`prompt_embeds` was encoded for pictures of {encoded.rows} x {encoded.columns} codes, "
            f"this call draws {grid.rows} x {grid.columns}: give `encode_prompt` the same `height` and `width`."
        )
    return len(prompt_embeds.embeddings) // (1 + prompt_embeds.guided)


def check_generators(generator: Any, batch_size: int, device: torch.device) -> None:
    """Check that `generator` is `None`, one generator, or one per picture, on the CPU or on the model's device.

    Raises:
        ValueError: if there are too many or too few, one is not a `torch.Generator`, or one is on another device.
    """
    several = isinstance(generator, list | tuple)
    if several and len(generator) != batch_size:
        raise ValueError(
            f"{len(generator)} generators were given for {batch_size} pictures: give one per picture, or one for all."
        )
    for single in generator if several else [generator]:
        if not isinstance(single, torch.Generator | None):
            raise ValueError(f"`generator` must be a `torch.Generator` or a list of them, got {single!r}.")
        if single is not None and single.device.type not in ("cpu", device.type):
            raise ValueError(
                f"The generator is on {single.device}, the model on {device}: use a CPU generator, "
                "which works with a model on any device."
            )
