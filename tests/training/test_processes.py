"""Runs in processes of their own: several that share the work, and one that is killed."""

import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from one_of_several import main
from safetensors.torch import load_file

from ssd_pipelines.training.checkpoints import CHECKPOINT


pytestmark = pytest.mark.slow

WEIGHTS = "heads/diffusion_pytorch_model.safetensors"
SCRIPT = str(Path(__file__).with_name("one_of_several.py"))


def validation(folder):
    return json.loads((folder / "heads/config.json").read_text())["training"]["validation"]


def test_two_processes_draw_and_train_what_one_does(tmp_path):
    """The pictures are the same; the weights differ by the order in which gradients are added."""
    settings = {"epochs": 3, "gradient_accumulation": 2, "validation_prompts": 1}
    main(tmp_path / "one", settings)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", SCRIPT]
    result = subprocess.run([*launch, str(tmp_path / "two"), json.dumps(settings)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "processes 2" in result.stdout
    shards = sorted(path.name for path in (tmp_path / "one/pictures").iterdir())
    assert len(shards) == 6 and shards == sorted(path.name for path in (tmp_path / "two/pictures").iterdir())
    for name in shards:
        assert (tmp_path / "one/pictures" / name).read_bytes() == (tmp_path / "two/pictures" / name).read_bytes(), name
    one, two = (load_file(tmp_path / folder / WEIGHTS) for folder in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], rtol=1e-3, atol=1e-4)
    for head, figures in validation(tmp_path / "one").items():
        assert figures == pytest.approx(validation(tmp_path / "two")[head], abs=1e-3)


def test_a_run_that_is_killed_at_any_moment_ends_with_the_weights_of_an_unbroken_one(tmp_path):
    settings = {"epochs": 30, "checkpoint_every": 1, "log_every": 1000, "validate_every": 1000, "validation_prompts": 0}
    main(tmp_path / "unbroken", settings)
    shutil.copytree(tmp_path / "unbroken/pictures", tmp_path / "killed/pictures")
    run = subprocess.Popen(
        [sys.executable, SCRIPT, str(tmp_path / "killed"), json.dumps(settings)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not (tmp_path / "killed/heads" / CHECKPOINT).exists():
        assert run.poll() is None, "the run ended before its first checkpoint"
        time.sleep(0.005)
    time.sleep(random.uniform(0, 0.5))
    run.kill()
    run.wait()
    assert not (tmp_path / "killed" / WEIGHTS).exists(), "it was killed in the middle"
    main(tmp_path / "killed", settings)
    assert (tmp_path / "unbroken" / WEIGHTS).read_bytes() == (tmp_path / "killed" / WEIGHTS).read_bytes()
    assert validation(tmp_path / "unbroken") == validation(tmp_path / "killed")
