"""Draws the pictures of `how_it_works.md`: the token grid after some of the passes.

python examples/how_it_works.py
"""

from pathlib import Path

from ssd_pipelines import SpatialSpeculativePipeline, scenes
from ssd_pipelines.pictures import side_by_side
from ssd_pipelines.race import draw_cells, race_decoders, record_race


PROMPT = "a ring above a cross"
HERE = Path(__file__).parent


def main() -> None:
    pipe = SpatialSpeculativePipeline.from_pretrained(scenes.CHECKPOINT)
    race = record_race(pipe, race_decoders(pipe, ["lossless"]), PROMPT, seed=0, max_pictures=64)
    recording = race.recordings[1]
    shown = []
    for passes in (1, 2, 3, 4, 7, len(recording.passes)):
        codes, final = recording.after(passes)
        caption = [f"after pass {passes}", f"{final.sum()} final, {((codes >= 0) & ~final).sum()} drafts"]
        shown.append((draw_cells(recording, passes, 240), caption))
    side_by_side(shown, f"{PROMPT} · seed 0 · {len(recording.passes)} passes", 240).save(HERE / "how_it_works.png")


if __name__ == "__main__":
    main()
