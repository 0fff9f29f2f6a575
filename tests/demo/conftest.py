import pytest
import torch

from ssd_pipelines.demo import DemoModel, create_app, launch, load_model


@pytest.fixture(scope="session")
def model() -> DemoModel:
    return load_model(device="cpu")


@pytest.fixture(scope="session")
def page(model) -> str:
    """Address of the page with the embedded model, and a second model to choose."""
    other = DemoModel("Another one", model.pipe, model.machine, "", ("a ring",))
    app = create_app([model, other])
    _, address, _ = launch(app, prevent_thread_lock=True, quiet=True)
    yield address
    app.close()


@pytest.fixture(autouse=True)
def one_thread_as_before():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
