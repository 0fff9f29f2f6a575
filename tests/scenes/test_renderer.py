"""The renderer: deterministic, anti-aliased, objects inside the picture and apart."""

import time
from random import Random

import numpy as np
import pytest
from PIL import Image

from ssd_pipelines.scenes import (
    SHAPES,
    Background,
    Scene,
    SceneObject,
    TrainingScene,
    render,
    render_array,
    sample_scene,
)
from ssd_pipelines.scenes.renderer import OBJECT_RGB, signed_distance
from ssd_pipelines.scenes.sampler import GAP, MARGIN, PATTERNS


def test_a_scene_is_drawn_the_same_every_time(scenes: list[TrainingScene]) -> None:
    for item in scenes[:50]:
        first = render_array(item.scene)
        assert first.shape == (64, 64, 3) and first.dtype == np.uint8
        assert np.array_equal(first, render_array(item.scene))
        assert np.array_equal(first, np.asarray(render(item.scene)))


def test_the_same_seed_gives_the_same_scenes() -> None:
    assert [sample_scene(Random(7)) for _ in range(3)] == [sample_scene(Random(7)) for _ in range(3)]


def test_all_patterns_occur_and_differ_from_plain(scenes: list[TrainingScene]) -> None:
    assert {item.scene.background.pattern for item in scenes} == set(PATTERNS)
    for item in scenes:
        background = item.scene.background
        if background.pattern in ("stripes", "checks", "dots"):
            empty = render_array(Scene(background, ()))
            assert len(np.unique(empty.reshape(-1, 3), axis=0)) >= 2


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_fills_its_box_and_has_soft_edges(shape: str) -> None:
    scene = Scene(Background("plain", "black"), (SceneObject(shape, "red", 32, 32, 24),))
    red = render_array(scene)[..., 0].astype(int)
    rows, columns = np.flatnonzero((red > 120).any(1)), np.flatnonzero((red > 120).any(0))
    assert abs(len(rows) - 24) <= 1 and abs(len(columns) - 24) <= 1
    between = (red > 40) & (red < OBJECT_RGB["red"][0] - 10)
    assert between.any() or shape in ("square", "cross")


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="Unknown shape 'star'"):
        signed_distance("star", np.zeros(1), np.zeros(1), 10)


def test_objects_keep_their_distance(scenes: list[TrainingScene]) -> None:
    for item in scenes:
        objects = item.scene.objects
        for index, a in enumerate(objects):
            assert MARGIN <= a.x - a.size / 2 and a.x + a.size / 2 <= 64 - MARGIN
            assert MARGIN <= a.y - a.size / 2 and a.y + a.size / 2 <= 64 - MARGIN
            for b in objects[:index]:
                assert max(abs(a.x - b.x), abs(a.y - b.y)) >= (a.size + b.size) / 2 + GAP


def test_drawing_is_fast(scenes: list[TrainingScene]) -> None:
    start = time.process_time()
    for item in scenes:
        render_array(item.scene)
    assert (time.process_time() - start) / len(scenes) < 0.0025


def test_render_gives_a_picture(scenes: list[TrainingScene]) -> None:
    image = render(scenes[0].scene)
    assert isinstance(image, Image.Image) and image.size == (64, 64) and image.mode == "RGB"
