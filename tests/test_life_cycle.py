"""The whole life of draft heads by commands alone: distil, train, push, and draw by the Hub's name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_hub import TOKEN, FakeHub, check_card
from PIL import Image

from ssd_pipelines import SpatialSpeculativePipeline, scenes


PROMPT = "a red circle and a blue square"


@pytest.mark.slow
def test_heads_for_the_embedded_model_are_distilled_trained_pushed_and_drawn_with_by_name(tmp_path: Path) -> None:
    with FakeHub().reachable() as fake:
        environment = {**os.environ, **fake.environment(tmp_path / "home", TOKEN)}

        def command(*arguments: object) -> str:
            line = [sys.executable, "-m", "ssd_pipelines", *(str(argument) for argument in arguments)]
            done = subprocess.run(line, capture_output=True, text=True, timeout=300, env=environment)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        pictures, heads = tmp_path / "pictures", tmp_path / "heads"
        command("distill", "--preset", "tiny", "--num", 12, "-o", pictures)
        trained = command("train-heads", "--preset", "tiny", "--epochs", 2, "--data", pictures, "-o", heads)
        assert "vertical+1" in trained and "passes" in trained, "validated"
        command("push-pipeline", "embedded", "user/scenes")
        command("push-heads", heads, "user/ssd-scenes", "--base-model", "user/scenes", "--prompt", PROMPT)
        files = fake.repositories["user/ssd-scenes"].files()
        card = files["README.md"].decode()
        metadata = check_card(card, files)
        assert (metadata["base_model"], metadata["license"]) == ("user/scenes", "apache-2.0")
        assert "| vertical+1 |" in card, "what training measured"
        output = command("generate", PROMPT, "--model", "user/ssd-scenes", "--seed", 0, "-o", tmp_path / "drawn")
    assert "spatially speculative" in output
    drawn = Image.open(tmp_path / "drawn" / "a-red-circle-and-a-blue-square-0.png")
    pipe = SpatialSpeculativePipeline.from_pretrained(scenes.CHECKPOINT, heads=None)
    reference = pipe(PROMPT, generator=torch.Generator().manual_seed(0)).images[0]
    assert drawn.tobytes() == reference.tobytes(), "lossless, whatever the heads are worth"
