"""The Space: the demo of ssd-pipelines, with the model that the variables `SSD_MODEL` and `SSD_HEADS` name."""

import importlib.util
import os


if importlib.util.find_spec("spaces"):
    import spaces  # noqa: F401  # on ZeroGPU it has to be imported before anything touches CUDA

from ssd_pipelines.demo import create_app, launch, load_model


model = load_model(os.environ.get("SSD_MODEL"), os.environ.get("SSD_HEADS"))
demo = create_app([model])

if __name__ == "__main__":
    launch(demo)
