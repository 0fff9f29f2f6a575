"""Prompts: what they mean, which are refused, and which training never sees."""

from random import Random

import pytest

from ssd_pipelines.scenes import (
    COLOURS,
    FAMILIES,
    RELATIONS,
    SHAPES,
    ObjectRequirement,
    SceneOptions,
    all_tasks,
    evaluation_tasks,
    is_held_out,
    parse_prompt,
    sample_scene,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_task_is_read_back_from_its_own_prompt(family: str) -> None:
    tasks = all_tasks(family)
    assert len({task.prompt for task in tasks}) == len(tasks)
    assert all(parse_prompt(task.prompt) == task for task in tasks)


def test_a_prompt_is_understood_without_its_opening_articles_and_capitals() -> None:
    assert parse_prompt("Orange ring") == parse_prompt("a photo of an orange ring")
    assert parse_prompt("a cross left of ring.") == parse_prompt("a photo of a cross left of a ring")
    assert parse_prompt("  three   crosses ") == parse_prompt("a photo of three crosses")


def test_a_prompt_says_family_objects_and_relation() -> None:
    task = parse_prompt("a photo of a cross above a ring")
    assert (task.family, task.relation) == ("position", "above")
    assert task.objects == (ObjectRequirement("cross"), ObjectRequirement("ring"))
    assert parse_prompt("four rings").objects == (ObjectRequirement("ring", count=4),)
    assert parse_prompt("a red circle and a blue square").objects == (
        ObjectRequirement("circle", "red"),
        ObjectRequirement("square", "blue"),
    )


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        "a dog",
        "a pink ring",
        "five rings",
        "a ring and a ring",
        "a red ring and a cross",
        "a red ring and a red cross",
        "a ring beside a cross",
        "a red ring left of a cross",
        "a ring and a cross and a circle",
    ],
)
def test_a_prompt_outside_the_families_is_refused_with_all_that_is_known(prompt: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_prompt(prompt)
    message = str(error.value)
    assert all(word in message for word in (*SHAPES, *COLOURS, *RELATIONS, "three"))
    assert "\n" not in message


def test_evaluation_is_balanced_and_the_same_for_the_same_seed() -> None:
    tasks = evaluation_tasks(120, seed=3)
    assert tasks == evaluation_tasks(120, seed=3)
    assert tasks != evaluation_tasks(120, seed=4)
    assert tasks[:30] == evaluation_tasks(30, seed=3)
    assert all(sum(task.family == family for task in tasks) == 20 for family in FAMILIES)
    assert evaluation_tasks(0) == []
    with pytest.raises(ValueError, match="num=-1"):
        evaluation_tasks(-1)


def test_evaluation_repeats_no_prompt_before_all_are_used() -> None:
    tasks = [task for task in evaluation_tasks(6 * 36, seed=1) if task.family == "colors"]
    assert len({task.prompt for task in tasks}) == 36


@pytest.mark.parametrize("family", ["position", "color_attribution"])
def test_a_fifth_of_the_large_families_is_held_out_by_meaning(family: str) -> None:
    tasks = all_tasks(family)
    share = sum(is_held_out(task) for task in tasks) / len(tasks)
    assert 0.1 < share < 0.3
    assert is_held_out(parse_prompt("a ring left of a cross")) == is_held_out(parse_prompt("a cross right of a ring"))
    for task in tasks:
        if task.family == "color_attribution":
            a, b = task.objects
            mirrored = parse_prompt(f"{b.colour} {b.shape} and {a.colour} {a.shape}")
            assert is_held_out(task) == is_held_out(mirrored)


def test_evaluation_of_the_large_families_asks_only_for_what_training_never_shows() -> None:
    tasks = [task for task in evaluation_tasks(600) if task.family in ("position", "color_attribution")]
    assert all(is_held_out(task) for task in tasks)
    held_out = {task.prompt for task in tasks}
    random = Random(5)
    for _ in range(4000):
        sampled = sample_scene(random, SceneOptions(families=(0, 1, 0, 0, 1, 1)))
        assert sampled.prompt not in held_out
        a, b = sampled.scene.objects
        if a.colour != b.colour:
            assert not is_held_out(parse_prompt(f"{a.colour} {a.shape} and {b.colour} {b.shape}"))
