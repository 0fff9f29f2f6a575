"""From trained heads to a picture by the Hub's name, by commands alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import TOKEN, FakeHub, check_card
from PIL import Image

from ssd_pipelines import SpatialSpeculativePipeline, scenes
from ssd_pipelines.training import HeadTrainingConfig, draw_token_grids, train_heads
from ssd_pipelines.training.prompts import read_prompts


PROMPT = "a red circle and a blue square"


@pytest.mark.slow
def test_heads_for_the_embedded_model_are_pushed_and_drawn_with_by_name(tmp_path: Path) -> None:
    pipe = SpatialSpeculativePipeline.from_pretrained(scenes.CHECKPOINT)
    pipe.set_progress_bar_config(disable=True)
    data = draw_token_grids(pipe, read_prompts("scenes", 6, 0), tmp_path / "pictures", batch_size=6)
    config = HeadTrainingConfig(epochs=1, batch_size=4, neighborhood="three", row_head=True)
    train_heads(pipe, data, config, tmp_path / "heads", report=lambda row: None)

    def command(*arguments: object, ok: bool = True) -> str:
        line = [sys.executable, "-m", "ssd_pipelines", *(str(argument) for argument in arguments)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=300, env=environment)
        assert (done.returncode == 0) == ok, done.stdout + done.stderr
        return done.stdout if ok else done.stderr

    with FakeHub().reachable() as fake:
        environment = {**os.environ, **fake.environment(tmp_path / "home", TOKEN)}
        refused = command("push-heads", tmp_path / "heads", "user/ssd-scenes", ok=False)
        assert "is a path on this machine" in refused
        assert refused.count("\n") == 1
        assert fake.writes() == []

        command("push-pipeline", "embedded", "user/scenes")
        command("push-heads", tmp_path / "heads", "user/ssd-scenes", "--base-model", "user/scenes", "--prompt", PROMPT)
        files = fake.repositories["user/ssd-scenes"].files()
        data = check_card(files["README.md"].decode(), files)
        assert (data["base_model"], data["license"]) == ("user/scenes", "apache-2.0")
        assert "| vertical+1 |" in files["README.md"].decode(), "what training measured"
        assert json.loads(files["config.json"])["base_model"] == "user/scenes"

        for name, model in (("alone", "user/ssd-scenes"), ("with the embedded model", "embedded")):
            heads = ["--heads", "user/ssd-scenes"] if model == "embedded" else []
            output = command("generate", PROMPT, "-m", model, *heads, "--seed", 0, "-o", tmp_path / name)
            assert "spatially speculative" in output, name
        reference = command("generate", PROMPT, "--decoder", "ar", "--seed", 0, "-o", tmp_path / "ar")
        assert "autoregressive: 256 passes" in reference
    file = "a-red-circle-and-a-blue-square-0.png"
    drawn = {name: Image.open(tmp_path / name / file).tobytes() for name in ("alone", "with the embedded model", "ar")}
    assert drawn["with the embedded model"] == drawn["ar"], "lossless, whatever the heads are worth"
    assert len(drawn["alone"]) == len(drawn["ar"])
