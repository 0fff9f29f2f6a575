"""Load pipelines and check that their weights are complete."""
