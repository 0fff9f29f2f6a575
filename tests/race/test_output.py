"""A race as an animation and as JSON for the page; the recorded races that travel with the page."""

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image

from ssd_pipelines.cli import app
from ssd_pipelines.demo.race_tab import recorded_examples
from ssd_pipelines.race import draw_cells, draw_frame, race_decoders, race_to_dict, record, write_animation
from ssd_pipelines.race.replay import FINAL, REPLACED, SHEET_COLUMNS


def test_cells_are_grey_before_a_token_blue_as_drafts_and_plain_when_final(race):
    recording = race.recordings[-1]
    empty = np.asarray(draw_cells(recording, 0, 320), int)
    assert (empty[10, 10] == (0xE8, 0xEA, 0xEF)).all()
    done = draw_cells(recording, len(recording.passes), 320)
    plain = recording.pictures[len(recording.passes) - 1].resize((320, 320), Image.Resampling.NEAREST)
    assert np.array_equal(np.asarray(done), np.asarray(plain))
    passes = 3
    codes, final = recording.after(passes)
    drafted = np.argwhere((codes >= 0) & ~final & ~recording.changed_by(passes - 1))
    row, column = drafted[-1]
    red, _, blue = np.asarray(draw_cells(recording, passes, 320), int)[20 * row + 10, 20 * column + 10]
    assert blue > red + 40


def test_a_frame_shows_every_decoder_at_the_same_moment(race):
    assert draw_frame(race, 0.0).size == draw_frame(race, 1e9).size
    slow, fast = race.recordings[0], race.recordings[-1]
    assert slow.passes_until(fast.seconds) < len(slow.passes)


def test_a_gif_has_the_asked_length(race, tmp_path):
    path = tmp_path / "new" / "race.gif"
    write_animation(race, path, length=1.0, hold=0.2, fps=10, size=64)
    with Image.open(path) as gif:
        assert gif.n_frames == 10, "equal frames at the end are one"
        total = 0
        for frame in range(gif.n_frames):
            gif.seek(frame)
            total += gif.info["duration"]
    assert total == 1200


def test_an_mp4_can_be_read_back(race, tmp_path):
    imageio = pytest.importorskip("imageio", reason="MP4 comes with the extra demo")
    path = tmp_path / "race.mp4"
    write_animation(race, path, length=1.0, hold=0.2, fps=10, size=64)
    frames = imageio.mimread(path, memtest=False)
    assert len(frames) == 12
    expected = np.asarray(draw_frame(race, 1e9, 64), int)[: frames[-1].shape[0], : frames[-1].shape[1]]
    assert np.abs(frames[-1].astype(int)[20:60] - expected[20:60]).mean() < 12


def test_another_ending_is_refused_before_anything_is_drawn(capsys, monkeypatch):
    from ssd_pipelines.cli import main

    monkeypatch.setattr("sys.argv", ["ssd-pipelines", "race", "a ring", "-o", "race.avi"])
    with pytest.raises(SystemExit):
        main()
    assert "An animation is a .gif or .mp4 file, got race.avi." in capsys.readouterr().err


def test_the_json_replays_to_the_recorded_codes(race):
    told = json.loads(json.dumps(race_to_dict(race)))
    assert (told["prompt"], told["seed"], told["machine"]) == ("a ring above a cross", 0, "a test machine")
    for recording, lane in zip(race.recordings, told["lanes"], strict=True):
        final, replaced = np.zeros(256, bool), np.zeros(256, int)
        for changes in lane["changes"]:
            for change in changes:
                final[change // 4] = change & FINAL
                replaced[change // 4] += bool(change & REPLACED)
        assert final.all() and replaced.tolist() == recording.corrections().ravel().tolist()
        assert lane["codes"] == recording.after(len(recording.passes))[0].ravel().tolist()
        assert lane["matches"] == recording.matches_reference
        data = base64.b64decode(lane["sheet"].removeprefix("data:image/webp;base64,"))
        sheet = Image.open(io.BytesIO(data)).convert("RGB")
        index = len(lane["shown"]) - 1
        left, top = index % SHEET_COLUMNS * lane["width"], index // SHEET_COLUMNS * lane["height"]
        tile = sheet.crop((left, top, left + lane["width"], top + lane["height"]))
        assert np.array_equal(np.asarray(tile), np.asarray(recording.pictures[lane["shown"][-1]])), "lossless if small"


def test_recorded_races_are_what_the_decoders_draw_today(pipe):
    examples = recorded_examples()
    assert len(examples) == 3
    for prompt, told in examples.items():
        for (title, decoder), lane in zip(race_decoders(pipe), told["lanes"], strict=True):
            made = record(pipe, decoder, prompt, told["seed"])
            again = f"`ssd-pipelines race {prompt!r} -o x.json` records it again"
            assert lane["title"] == title and len(made.passes) == len(lane["seconds"]), again
            assert lane["codes"] == made.after(len(made.passes))[0].ravel().tolist(), again


def test_the_command_prints_what_it_recorded(tmp_path):
    from typer.testing import CliRunner

    path = tmp_path / "race.json"
    arguments = ["race", "a ring", "-o", str(path), "--decoder", "lossless", "--repeats", "1", "--device", "cpu"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "SSD, lossless" in result.output and "256" in result.output
    assert [lane["title"] for lane in json.loads(path.read_text("utf-8"))["lanes"]] == [
        "Autoregressive",
        "SSD, lossless",
    ]
