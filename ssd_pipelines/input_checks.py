"""What a call of the pipeline is given in objects of its own, refused in one sentence where it can't work."""

from typing import Any

import torch

from ssd_pipelines.backbones import Prompt
from ssd_pipelines.grid import TokenGrid


def check_prompt_embeds(
    prompt_embeds: Any,
    prompt: Any,
    negative_prompt: Any,
    num_images_per_prompt: Any,
    guidance_scale: float,
    grid: TokenGrid,
) -> int:
    """How many prompts are encoded in it.

    Raises:
        ValueError: if it is no encoded prompt, comes beside a plain one, has other branches than guidance
            needs, or asks for a picture of another size.
    """
    if not isinstance(prompt_embeds, Prompt):
        raise ValueError(
            f"`prompt_embeds` must be what `pipe.encode_prompt` returned, got {type(prompt_embeds).__name__}."
        )
    if prompt is not None or negative_prompt is not None or num_images_per_prompt != 1:
        raise ValueError(
            "`prompt_embeds` holds prompts, negative prompts and repetitions already: leave out `prompt`, "
            "`negative_prompt` and `num_images_per_prompt`."
        )
    guided = guidance_scale > 1
    if prompt_embeds.guided != guided:
        has, wants = ("all", "none") if prompt_embeds.guided else ("none", "all")
        raise ValueError(
            f"`prompt_embeds` has {has} of the unconditional branches, a `guidance_scale` of {guidance_scale} "
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
    """Refuse anything but `None`, one generator, or one a picture, on the CPU or on the model's device.

    Raises:
        ValueError: saying which of these it is not.
    """
    several = isinstance(generator, list | tuple)
    if several and len(generator) != batch_size:
        raise ValueError(
            f"{len(generator)} generators were given for {batch_size} pictures: give one a picture, or one for all."
        )
    for single in generator if several else [generator]:
        if not isinstance(single, torch.Generator | None):
            raise ValueError(f"`generator` must be a `torch.Generator` or a list of them, got {single!r}.")
        if single is not None and single.device.type not in ("cpu", device.type):
            raise ValueError(
                f"The generator is on {single.device}, the model on {device}: use a CPU generator, "
                "which works everywhere."
            )
