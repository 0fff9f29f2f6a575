"""What the backbone sees when: from one centred object on a plain background to everything.

Shown everything at once, such a small model learns the backgrounds and never looks at the prompt: of a picture's
hundred nats the prompt explains a handful. A single object in the middle is mostly the prompt, so the text is used from
the first minute on, and stays in use while place, size, background, a second object, counts and relations are added one
by one.
"""

from ssd_pipelines.scenes import FAMILIES, SceneOptions


FULL_LEVEL = 6.0
PATTERNS = (6.0, 1.5, 1.0, 1.0, 1.0, 1.0)


def _ramp(level: float, start: float, end: float) -> float:
    return min(max((level - start) / (end - start), 0.0), 1.0)


def options_at(level: float, family_weights: dict[str, float] | None = None) -> SceneOptions:
    """The scenes of a level: 0 one object in the centre, 1-2 place, 2 size, 2.5-3.5 pattern, 3-4 pairs, 4-5.5 all."""
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
