"""The demo: a page that races decoders, draws pictures, and shows what happens inside. Needs the extra "demo"."""

from ssd_pipelines.demo.app import create_app, launch
from ssd_pipelines.demo.models import DemoModel, load_model


__all__ = ["DemoModel", "create_app", "launch", "load_model"]
