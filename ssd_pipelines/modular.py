"""The pipeline as Modular Diffusers blocks, to be combined with other blocks; no code from a model repository is run.

The blocks call the pipeline's own methods, so backbones, verifiers and decoding work as they do there. Diffusers still
calls the interface experimental; this file follows diffusers 0.42.
"""

from typing import Any

import torch
from diffusers import VQModel
from diffusers.modular_pipelines import ModularPipelineBlocks, SequentialPipelineBlocks
from diffusers.modular_pipelines.modular_pipeline_utils import ComponentSpec, InputParam, OutputParam
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ssd_pipelines.backbones import Prompt
from ssd_pipelines.heads import SpatialDraftHeads
from ssd_pipelines.pipeline import SpatialSpeculativePipeline
from ssd_pipelines.pipeline_output import DecodingStats
from ssd_pipelines.verifiers import SpatialDraftVerifier


COMPONENTS: dict[str, Any] = {
    "backbone": PreTrainedModel,
    "tokenizer": PreTrainedTokenizerBase,
    "heads": SpatialDraftHeads,
    "verifier": SpatialDraftVerifier,
    "image_tokenizer": VQModel,
    "text_encoder": PreTrainedModel,
}


def _pipeline(components: Any) -> SpatialSpeculativePipeline:
    """The pipeline with the components that were loaded."""
    present = {name: getattr(components, name, None) for name in COMPONENTS}
    if present["backbone"] is None:
        raise ValueError("There is no backbone yet: call `load_components()`, or `update_components(backbone=...)`.")
    return SpatialSpeculativePipeline(**present)


class _Step(ModularPipelineBlocks):
    model_name = "ssd"

    @property
    def expected_components(self) -> list[ComponentSpec]:
        return [ComponentSpec(name, type_hint) for name, type_hint in COMPONENTS.items()]


class SSDEncodePromptStep(_Step):
    """Encodes prompts in the backbone's own format."""

    @property
    def description(self) -> str:
        return "Encodes prompts, including the unconditional branch if classifier-free guidance is used."

    @property
    def inputs(self) -> list[InputParam]:
        return [
            InputParam("prompt", required=True, description="A string, or a list of strings."),
            InputParam("negative_prompt"),
            InputParam("num_images_per_prompt", default=1),
            InputParam("guidance_scale", description="By default the one recommended for the backbone."),
            InputParam("height"),
            InputParam("width"),
        ]

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        return [OutputParam("prompt_embeds", type_hint=Prompt, description="As `encode_prompt` returns them.")]

    @torch.no_grad()
    def __call__(self, components: Any, state: Any) -> Any:
        block = self.get_block_state(state)
        pipe = _pipeline(components)
        scale = block.guidance_scale
        scale = pipe.adapter().recommended_guidance_scale if scale is None else scale
        block.prompt_embeds = pipe.encode_prompt(
            block.prompt, block.negative_prompt, block.num_images_per_prompt, scale > 1, block.height, block.width
        )
        self.set_block_state(state, block)
        return components, state


class SSDPrepareLatentsStep(_Step):
    """Prepares a token grid that is empty, or whose first rows are given."""

    @property
    def description(self) -> str:
        return "Prepares the token grid that decoding fills."

    @property
    def inputs(self) -> list[InputParam]:
        return [
            InputParam("prompt_embeds", required=True, type_hint=Prompt),
            InputParam("latents", type_hint=torch.Tensor, description="Codes of the given rows; negative for none."),
            InputParam("height"),
            InputParam("width"),
        ]

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        return [OutputParam("latents", type_hint=torch.Tensor, description="`int64 (batch, rows, columns)`.")]

    @torch.no_grad()
    def __call__(self, components: Any, state: Any) -> Any:
        block = self.get_block_state(state)
        pipe = _pipeline(components)
        grid, prompt = pipe.adapter().grid(block.height, block.width), block.prompt_embeds
        batch_size = len(prompt.embeddings) // (1 + prompt.guided)
        sequence, _ = pipe.prepare_latents(batch_size, grid, block.latents, prompt.embeddings.device)
        block.latents = grid.to_codes(sequence)
        self.set_block_state(state, block)
        return components, state


class SSDDecodeStep(_Step):
    """Runs the decode loop with the loaded verifier: prompt embeddings to codes."""

    @property
    def description(self) -> str:
        return "Generates the token grid of a picture for a prompt, with the verifier's decoding algorithm."

    @property
    def inputs(self) -> list[InputParam]:
        optional = ("guidance_scale", "temperature", "top_k", "top_p", "height", "width", "generator")
        required = [InputParam("prompt_embeds", required=True), InputParam("latents", required=True)]
        return [*required, *(InputParam(name) for name in optional)]

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        return [
            OutputParam("codes", type_hint=torch.Tensor, description="`int64 (batch, rows, columns)`."),
            OutputParam("stats", type_hint=DecodingStats, description="Statistics of decoding."),
        ]

    @torch.no_grad()
    def __call__(self, components: Any, state: Any) -> Any:
        block = self.get_block_state(state)
        pipe = _pipeline(components)
        pipe.set_progress_bar_config(**getattr(components, "_progress_bar_config", {}))
        given: dict[str, Any] = {parameter.name: getattr(block, parameter.name, None) for parameter in self.inputs}
        output = pipe(output_type="latent", **given)
        block.codes, block.stats = output.codes, output.stats
        self.set_block_state(state, block)
        return components, state


class SSDDecodeCodesStep(_Step):
    """Decodes codes to pictures."""

    @property
    def description(self) -> str:
        return "Decodes a token grid to pictures."

    @property
    def inputs(self) -> list[InputParam]:
        return [
            InputParam("codes", required=True, type_hint=torch.Tensor, description="`int64 (batch, rows, columns)`."),
            InputParam("output_type", default="pil", description='"pil", "np" or "pt".'),
        ]

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        return [OutputParam("images", description="As `output_type` says.")]

    @torch.no_grad()
    def __call__(self, components: Any, state: Any) -> Any:
        block = self.get_block_state(state)
        block.images = _pipeline(components).decode_latents(block.codes, block.output_type)
        self.set_block_state(state, block)
        return components, state


class SSDTextToImageBlocks(SequentialPipelineBlocks):
    """Text to image in four stages: encode the prompt, prepare the grid, generate the codes, decode them.

    Example:
        >>> pipe = SSDTextToImageBlocks().init_pipeline("path/to/saved_pipeline")
        >>> pipe.load_components()
        >>> image = pipe(prompt="a red circle", generator=torch.Generator().manual_seed(0), output="images")[0]
    """

    model_name = "ssd"
    block_classes = [SSDEncodePromptStep, SSDPrepareLatentsStep, SSDDecodeStep, SSDDecodeCodesStep]
    block_names = ["encode_prompt", "prepare_latents", "decode", "decode_codes"]

    @property
    def description(self) -> str:
        return "Text to image with spatially speculative decoding."

    def init_pipeline(self, *args: Any, **kwargs: Any) -> Any:
        """As in Diffusers, but components that `model_index.json` marks as absent are not searched for."""
        pipe = super().init_pipeline(*args, **kwargs)
        for spec in pipe._component_specs.values():
            if spec.type_hint is None:
                spec.pretrained_model_name_or_path = None
        return pipe
