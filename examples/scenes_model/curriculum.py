"""The training curriculum of the backbone: from one centred object on a plain background to all scenes.

With all scenes from the start, such a small model learns the backgrounds and ignores the prompt, because the prompt
explains only a handful of a picture's hundred nats. A single centred object is mostly determined by the prompt, so the
model uses the text from the first minute. It keeps using it while place, size, background, a second object, counts and
relations are added one by one.
"""

from ssd_pipelines.scenes import FAMILIES, SceneOptions


FULL_LEVEL = 6.0
PATTERNS = (6.0, 1.5, 1.0, 1.0, 1.0, 1.0)


def _ramp(level: float, start: float, end: float) -> float:
    return min(max((level - start) / (end - start), 0.0), 1.0)


def options_at(level: float, family_weights: dict[str, float] | None = None) -> SceneOptions:
    """Return the scene options of a level.

    Level 0 has one object in the centre. Levels 1-2 add the place, 2 the size, 2.5-3.5 patterns, 3-4 pairs and 4-5.5
    the rest.

    Args:
        level: 0 to `FULL_LEVEL`.
        family_weights: factor for the weight of each family; 1 for missing ones.
    """
    weights = {
        "single_object": 0.5,
        "colors": 1.0,
        "two_object": 0.5 * _ramp(level, 3.0, 4.0),
        "color_attribution": 1.5 * _ramp(level, 3.0, 4.0),
        "counting": 1.0 * _ramp(level, 4.0, 5.0),
        "position": 1.3 * _ramp(level, 4.5, 5.5),
    }
    spread = _ramp(level, 1.0, 2.0)
    patterned = _ramp(level, 2.5, 3.5)
    return SceneOptions(
        families=tuple(weights[family] * (family_weights or {}).get(family, 1.0) for family in FAMILIES),
        spread=spread,
        sizes=(24,) if level < 1.5 else (20, 24) if level < 2 else (16, 20, 24, 28),
        patterns=(PATTERNS[0], *(weight * patterned for weight in PATTERNS[1:])),
        dense=0.5 if level < FULL_LEVEL else 0.25,
    )
