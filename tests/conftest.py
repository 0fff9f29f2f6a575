import os

import pytest
import torch


# Tiny models gain nothing from threads, and lose a lot where other processes want the cores.
torch.set_num_threads(1)
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items):
    # The file that takes longest first: with several processes it would else be what all wait for at the end.
    items.sort(key=lambda item: item.path.name != "test_embedded_model.py")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
