"""Synthetic scenes for the embedded model: prompts, a renderer, a checker that reads pictures, and a checkpoint.

`CHECKPOINT` is the folder of a small text-to-image model in the Janus layout, trained on these scenes by the recipe in
`examples/scenes_model/`. It loads with plain transformers:

    model = JanusForConditionalGeneration.from_pretrained(CHECKPOINT)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
"""

from pathlib import Path

from ssd_pipelines.scenes.checker import FoundObject, SceneVerdict, check_scene, find_objects
from ssd_pipelines.scenes.prompts import (
    COLOURS,
    COUNTS,
    FAMILIES,
    RELATIONS,
    SHAPES,
    ObjectRequirement,
    SceneTask,
    all_tasks,
    evaluation_tasks,
    is_held_out,
    parse_prompt,
)
from ssd_pipelines.scenes.renderer import IMAGE_SIZE, Background, Scene, SceneObject, render, render_array
from ssd_pipelines.scenes.sampler import SceneOptions, TrainingScene, sample_scene


CHECKPOINT = Path(__file__).parent / "checkpoint"
"""Folder of the bundled checkpoint."""

__all__ = [
    "CHECKPOINT",
    "COLOURS",
    "COUNTS",
    "FAMILIES",
    "IMAGE_SIZE",
    "RELATIONS",
    "SHAPES",
    "Background",
    "FoundObject",
    "ObjectRequirement",
    "Scene",
    "SceneObject",
    "SceneOptions",
    "SceneTask",
    "SceneVerdict",
    "TrainingScene",
    "all_tasks",
    "check_scene",
    "evaluation_tasks",
    "find_objects",
    "is_held_out",
    "parse_prompt",
    "render",
    "render_array",
    "sample_scene",
]
