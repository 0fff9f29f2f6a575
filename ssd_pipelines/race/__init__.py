"""Decoders side by side: recorded one after the other, replayed together, as an animation or on a page."""

from ssd_pipelines.race.animation import draw_cells, draw_frame, frames, write_animation
from ssd_pipelines.race.maps import cell_map, difference_map
from ssd_pipelines.race.recording import (
    PassRecord,
    Race,
    RaceStopped,
    Recording,
    decode_pictures,
    race_decoders,
    record,
    record_race,
)
from ssd_pipelines.race.replay import race_to_dict, write_replay


__all__ = [
    "PassRecord",
    "Race",
    "RaceStopped",
    "Recording",
    "cell_map",
    "decode_pictures",
    "difference_map",
    "draw_cells",
    "draw_frame",
    "frames",
    "race_decoders",
    "race_to_dict",
    "record",
    "record_race",
    "write_animation",
    "write_replay",
]
