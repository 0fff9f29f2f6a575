"""The checker: right on drawn scenes, and not to be talked into anything else."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from ssd_pipelines.scenes import (
    COLOURS,
    SHAPES,
    Background,
    Scene,
    SceneObject,
    TrainingScene,
    check_scene,
    find_objects,
    parse_prompt,
    render,
    render_array,
)


PLAIN = Background("plain", "white")


def picture(*objects: SceneObject, background: Background = PLAIN) -> np.ndarray:
    return render_array(Scene(background, objects))


def test_every_drawn_scene_is_right(scenes: list[TrainingScene]) -> None:
    wrong = [(item.prompt, check_scene(render_array(item.scene), item.task).reason) for item in scenes]
    assert [pair for pair in wrong if pair[1]] == []


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("colour", COLOURS)
def test_shape_colour_place_and_size_are_read_from_pixels(shape: str, colour: str) -> None:
    for size in (16, 20, 24, 28):
        for background in (PLAIN, Background("stripes", "black", "grey", cell=1), Background("dots", "beige", "white")):
            (found,) = find_objects(picture(SceneObject(shape, colour, 24, 36, size), background=background))
            assert (found.shape, found.colour, found.flaw) == (shape, colour, "")
            assert abs(found.x - 24) <= 1.5 and abs(found.y - 36) <= 1.5 and abs(found.size - size) <= 2


def test_wrong_colour_shape_count_and_relation_fail() -> None:
    ring, cross = SceneObject("ring", "red", 16, 32, 20), SceneObject("cross", "blue", 46, 32, 20)
    both = picture(ring, cross)
    assert check_scene(both, parse_prompt("a ring left of a cross")).correct
    assert not check_scene(both, parse_prompt("a ring right of a cross")).correct
    assert not check_scene(both, parse_prompt("a ring above a cross")).correct
    assert check_scene(both, parse_prompt("a red ring and a blue cross")).correct
    swapped = check_scene(both, parse_prompt("a blue ring and a red cross"))
    assert not swapped.correct and "No blue ring" in swapped.reason
    assert not check_scene(both, parse_prompt("a ring and a circle")).correct
    assert not check_scene(picture(ring), parse_prompt("a blue ring")).correct
    assert not check_scene(picture(ring), parse_prompt("two rings")).correct
    three = [replace(ring, x=x, y=y) for x, y in ((14, 14), (48, 14), (14, 48))]
    assert check_scene(picture(*three), parse_prompt("three rings")).correct
    assert not check_scene(picture(*three), parse_prompt("four rings")).correct
    assert not check_scene(picture(*three), parse_prompt("two rings")).correct


def test_nothing_else_may_be_in_the_picture() -> None:
    ring, extra = SceneObject("ring", "red", 20, 20, 20), SceneObject("circle", "green", 48, 48, 16)
    verdict = check_scene(picture(ring, extra), parse_prompt("a ring"))
    assert not verdict.correct and "2 objects instead of 1" in verdict.reason
    assert not check_scene(picture(), parse_prompt("a ring")).correct


def test_diagonal_neighbours_stand_in_no_relation() -> None:
    image = picture(SceneObject("ring", "red", 16, 16, 20), SceneObject("cross", "blue", 46, 46, 20))
    assert not check_scene(image, parse_prompt("a ring left of a cross")).correct
    assert not check_scene(image, parse_prompt("a ring above a cross")).correct


@pytest.mark.parametrize("shape", SHAPES)
def test_a_broken_shape_fails(shape: str) -> None:
    task = parse_prompt(shape)
    whole = picture(SceneObject(shape, "blue", 32, 32, 24))
    assert check_scene(whole, task).correct
    cut = whole.copy()
    cut[20:44, 33:] = 248
    sheared = whole.copy()
    sheared[34:] = np.roll(whole[34:], 8, axis=1)
    half_coloured = whole.copy()
    blue = (whole[..., 2].astype(int) - whole[..., 0] > 60) & (np.arange(64)[:, None] > 34)
    half_coloured[blue] = (222, 36, 36)
    for broken in (cut, sheared, half_coloured):
        assert not check_scene(broken, task).correct


def test_small_large_and_stretched_objects_fail() -> None:
    task = parse_prompt("a circle")
    assert not check_scene(picture(SceneObject("circle", "red", 32, 32, 8)), task).correct
    assert not check_scene(picture(SceneObject("circle", "red", 32, 32, 44)), task).correct
    stretched = render(Scene(PLAIN, (SceneObject("circle", "red", 32, 32, 20),))).resize((96, 64)).crop((16, 0, 80, 64))
    assert not check_scene(stretched, task).correct


def test_noise_is_nothing() -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    for prompt in ("a circle", "two squares", "a red ring"):
        assert not check_scene(noise, parse_prompt(prompt)).correct


def test_a_little_blur_is_forgiven_and_pil_and_array_agree(scenes: list[TrainingScene]) -> None:
    right = 0
    for item in scenes[:200]:
        noisy = render_array(item.scene).astype(float) + np.random.default_rng(1).normal(0, 6, (64, 64, 3))
        image = noisy.clip(0, 255).astype(np.uint8)
        assert check_scene(image, item.task) == check_scene(Image.fromarray(image), item.task)
        right += check_scene(image, item.task).correct
    assert right >= 196


def test_other_picture_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"64x64.*\(32, 32, 3\)"):
        find_objects(np.zeros((32, 32, 3), np.uint8))
