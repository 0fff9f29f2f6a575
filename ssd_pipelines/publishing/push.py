"""Publish draft heads and saved pipelines on the Hub; everything is checked before anything is uploaded."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitInfo, HfApi, ModelCard
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError

from ssd_pipelines import hub
from ssd_pipelines.heads import SpatialDraftHeads
from ssd_pipelines.pictures import copy_picture, read_settings
from ssd_pipelines.publishing.cards import (
    Figures,
    LicenseTerms,
    check_card,
    heads_card,
    heads_notebook,
    license_terms,
    pipeline_card,
)
from ssd_pipelines.resources import package_version
from ssd_pipelines.verifiers import SpatialDraftVerifier, verifier_from_config


WEIGHTS = "diffusion_pytorch_model"
VERIFIER = "verifier_config.json"


@dataclass(frozen=True)
class Destination:
    """Where to push, with the conventions of Diffusers' `push_to_hub`.

    Args:
        repo_id: user/name.
        private: whether a new repository is private; by default as set for the organisation.
        revision: a branch, created if it does not exist; by default main.
        create_pr: open a pull request instead of committing.
        commit_message: message of the commit.
        token: token for the Hub; by default that of `hf auth login`.
    """

    repo_id: str
    private: bool | None = None
    revision: str | None = None
    create_pr: bool = False
    commit_message: str | None = None
    token: str | bool | None = None

    def resolved(self) -> "Destination":
        """Return the destination with the user's namespace added to a `repo_id` without one, as the Hub does."""
        _check_repo_id(self.repo_id)
        if "/" in self.repo_id:
            return self
        with hub.explained(self.repo_id):
            user = HfApi(token=self.token).whoami()["name"]
        return replace(self, repo_id=f"{user}/{self.repo_id}")


def check_base_model(base_model: str | None, said: bool = False) -> str:
    """Check the name of the backbone's repository that published heads refer to, and return it.

    Args:
        base_model: the name.
        said: whether the user stated it explicitly as the name on the Hub; then a local folder may have the same name.

    Raises:
        ValueError: if there is none, or it looks like a local path.
    """
    if not base_model:
        raise ValueError(
            "The heads don't name their backbone, so nobody could load them: give its repository with `--base-model` "
            "(`base_model=` in Python)."
        )
    reason = hub.local_path_reason(base_model, may_be_here=said)
    if reason is not None:
        raise ValueError(
            f"The heads name {base_model} as their backbone, which {reason}, not a repository that others can load: "
            "give the name of the same model on the Hub with `--base-model` (`base_model=` in Python)."
        )
    return base_model


def read_base_model(folder: str | os.PathLike[str], base_model: str | None = None) -> str:
    """Return the repository of the backbone of heads in a folder: the given one, or the one that their config names.

    Raises:
        ValueError: see `check_base_model`; or if the folder holds no draft heads.
    """
    return check_base_model(base_model or _read_config(Path(folder)).get("base_model"), said=base_model is not None)


def check_weights(folder: Path, config: Mapping[str, Any]) -> list[Path]:
    """Return the weight files of heads, after checking that they are safetensors and match the config.

    Raises:
        ValueError: if there are pickles or no weights, or names or shapes of tensors differ; the message names the
            file or the tensors.
    """
    files = sorted(folder.glob(f"{WEIGHTS}*.safetensors"))
    pickles = sorted(path.name for kind in ("bin", "pt", "pth", "ckpt") for path in folder.glob(f"{WEIGHTS}*.{kind}"))
    if pickles:
        raise ValueError(
            f"{folder} has {', '.join(pickles)}, a pickle, which can run code when it is opened: save the heads as "
            "safetensors, and delete the pickle."
        )
    if not files:
        raise ValueError(f"{folder} has no {WEIGHTS}.safetensors: give the folder that `train-heads` or "
                         "`save_ssd_heads` wrote.")  # fmt: skip
    wanted = _expected_shapes(config)
    for variant in {_variant(path) for path in files}:
        found: dict[str, tuple[int, ...]] = {}
        for path in files:
            if _variant(path) == variant:
                found |= _shapes(path)
        wrong = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
        if wrong:
            raise ValueError(
                f"The weights in {folder} don't fit its config.json, in {', '.join(wrong[:3])}"
                f"{f' and {len(wrong) - 3} more' if len(wrong) > 3 else ''}: save the heads again."
            )
    return files


def push_heads(folder: str | os.PathLike[str], to: Destination, **content: Any) -> CommitInfo:
    """Publish the heads of a folder, with a card, a notebook and the verifier settings tuned for them.

    Args:
        folder: the folder of the heads.
        to: where to publish.
        content: other contents of the repository: `base_model`, `terms`, `verifier`, `figures`, `pictures`, `card`,
            `prompt`; see [`prepared_head_repo`].

    Raises:
        ValueError: if anything can't be published; nothing is uploaded then.
        OSError: if the Hub refuses; the message is one sentence.

    Example:
        >>> push_heads("heads", Destination("user/ssd-janus-pro-7b", private=True))
    """
    to = to.resolved()
    with prepared_head_repo(folder, to, **content) as repository:
        return send(repository, to, "Upload draft heads with ssd-pipelines")


def push_folder(
    folder: str | os.PathLike[str],
    repo_id: str,
    base_model: str | None = None,
    license: str | None = None,
    **destination: Any,
) -> str:
    """Run `push_heads` with the arguments of `push_to_hub`; returns the URL of the commit or the pull request.

    Args:
        folder: the folder of the heads.
        base_model, license: by default the backbone that the heads name, and its licence.
        destination: other arguments of [`Destination`].
    """
    to = Destination(repo_id, **destination)
    terms = None
    if license is not None:
        terms = license_terms(read_base_model(folder, base_model), to.token, license)
    commit = push_heads(folder, to, base_model=base_model, terms=terms)
    return commit.pr_url or commit.commit_url


SpatialDraftHeads.publish_folder = staticmethod(push_folder)


@contextmanager
def prepared_head_repo(
    folder: str | os.PathLike[str],
    to: Destination,
    *,
    base_model: str | None = None,
    terms: LicenseTerms | None = None,
    verifier: str | os.PathLike[str] | None = None,
    figures: Figures | None = None,
    pictures: Sequence[str | os.PathLike[str]] = (),
    card: str | os.PathLike[str] | None = None,
    prompt: str | None = None,
) -> Iterator[Path]:
    """Context manager that creates a temporary folder with exactly the files that `push_heads` would upload.

    Args:
        folder: the folder of the heads.
        to: where they are to be published.
        base_model: the backbone's repository, for heads that don't name it or name a path.
        terms: the licence; by default the one that the backbone's repository states.
        verifier: folder with a `verifier_config.json` to use instead of the one in `folder`.
        figures: measured figures for the card.
        pictures: PNGs of `ssd-pipelines generate` and GIFs of `race`, for the top of the page.
        card: your own README.md to use instead of the rendered card.
        prompt: prompt of the card's code example; by default that of the first picture.

    Raises:
        ValueError: if anything can't be published.
    """
    source = Path(folder)
    _check_repo_id(to.repo_id)
    config = _read_config(source)
    named = read_base_model(source, base_model)
    if named != config.get("base_model"):
        config["base_model"], config["base_model_revision"] = named, None  # a revision belongs to one repository
    config.pop("_name_or_path", None)
    weights = check_weights(source, config)
    settings = _read_verifier(Path(verifier) if verifier else source)
    if terms is None:
        terms = license_terms(config["base_model"], to.token)

    with tempfile.TemporaryDirectory() as temporary:
        target = Path(temporary)
        _write_json(target / "config.json", config)
        _write_json(target / VERIFIER, settings)
        for path in [*weights, *source.glob(f"{WEIGHTS}*.safetensors.index*.json")]:
            shutil.copyfile(path, target / path.name)
        widgets = [_add_picture(Path(path), number, target, to.repo_id) for number, path in enumerate(pictures)]
        words = prompt or (widgets[0][0] if widgets else "a red fox in the snow")
        if card is None:
            rendered = heads_card(config, settings, to.repo_id, terms, figures, widgets, words)
        else:
            rendered = check_card(Path(card).read_text("utf-8"))
            _check_names_base(rendered, config["base_model"], card)
        rendered.save(target / "README.md")
        notebook = heads_notebook(to.repo_id, config["base_model"], words, _requirement())
        (target / "notebook.ipynb").write_text(notebook, "utf-8")
        yield target


def push_pipeline(
    pipe: Any, to: Destination, *, license: str | None = None, prompt: str | None = None, **saving: Any
) -> CommitInfo:
    """Publish a whole pipeline, including the backbone, with a card.

    Args:
        pipe: a [`~ssd_pipelines.SpatialSpeculativePipeline`].
        to: where to publish.
        license: licence of the weights; by default the one of the backbone's repository, if it came from one.
        prompt: prompt of the card's code example.
        saving: arguments of `save_pretrained`, like `variant` or `with_remote_code_shim`.

    Raises:
        OSError: if the Hub refuses; the message is one sentence.
    """
    to = to.resolved()
    adapter = pipe.adapter()
    base_model = adapter.name_or_path
    if not base_model or hub.local_path_reason(base_model) is not None:
        base_model = None
    terms = LicenseTerms(license, f"{license}, as stated by who published this.") if license is not None else None
    if base_model is not None:
        try:
            terms = license_terms(base_model, to.token, license, what="pipeline")
        except ValueError:  # the card then says that the licence was not stated
            terms = None
    card = pipeline_card(to.repo_id, base_model, terms, prompt or "a red fox in the snow", **pipeline_facts(pipe))
    with tempfile.TemporaryDirectory() as temporary:
        target = Path(temporary)
        pipe.save_pretrained(target, **saving)
        _name_published_backbone(target / "heads" / "config.json", to.repo_id)
        card.save(target / "README.md")
        return send(target, to, "Upload pipeline with ssd-pipelines")


def pipeline_facts(pipe: Any) -> dict[str, Any]:
    """What the card of a pipeline says about it; see `pipeline_card`."""
    grid = pipe.adapter().grid()
    return {
        "architecture": pipe.adapter().architecture,
        "has_heads": pipe.heads is not None,
        "rows": grid.rows,
        "columns": grid.columns,
        "verifier": type(pipe.verifier).__name__,
    }


def _name_published_backbone(path: Path, repo_id: str) -> None:
    """Make a pipeline's heads name the pipeline as their backbone, unless they name one that others can load."""
    if not path.is_file():
        return
    config = json.loads(path.read_text("utf-8"))
    if not config.get("base_model") or hub.local_path_reason(config["base_model"]) is not None:
        config["base_model"], config["base_model_revision"] = repo_id, None
    config.pop("_name_or_path", None)
    _write_json(path, config)


def send(folder: Path, to: Destination, message: str) -> CommitInfo:
    """Upload a folder, after the Hub has validated its card.

    Args:
        folder: the folder, with a README.md.
        to: where to upload it.
        message: message of the commit, if `to` has none.

    Raises:
        ValueError: if the Hub rejects the card; nothing is created or uploaded then.
        OSError: for a wrong token or missing permissions; the message is one sentence.
    """
    api = HfApi(token=to.token)
    with hub.explained(to.repo_id, to.revision):
        try:
            check_card((folder / "README.md").read_text("utf-8")).validate()
        except ValueError as error:
            raise ValueError(f"The card is not fit to be published: {_first_line(error)}") from error
        api.create_repo(to.repo_id, private=to.private, exist_ok=True)
        if to.revision is not None and not to.revision.startswith("refs/pr/"):
            api.create_branch(to.repo_id, branch=to.revision, exist_ok=True)
        return api.upload_folder(
            repo_id=to.repo_id,
            folder_path=folder,
            revision=to.revision,
            create_pr=to.create_pr,
            commit_message=to.commit_message or message,
        )


def _check_repo_id(repo_id: str) -> None:
    with hub.explained(repo_id):
        validate_repo_id(repo_id)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    if config.get("_class_name") != "SpatialDraftHeads":
        raise ValueError(
            f"{folder} holds no draft heads: give the folder that `train-heads` or `save_ssd_heads` wrote."
        )
    return config


def _read_verifier(folder: Path) -> dict[str, Any]:
    """Read the verifier settings in a folder of heads; the default settings if there are none."""
    config = hub.read_json(folder, VERIFIER)
    chosen = SpatialDraftVerifier() if config is None else verifier_from_config(config, folder)
    if not chosen.needs_heads:
        raise ValueError(
            f"The {VERIFIER} in {folder} is of a {type(chosen).__name__}, which needs no heads: give the settings of a "
            "verifier that uses the heads."
        )
    return json.loads(chosen.to_json_string())


def _expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        heads = SpatialDraftHeads.from_config(dict(config))
    return {name: tuple(tensor.shape) for name, tensor in heads.state_dict().items()}


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        return hub.stored_shapes(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a safetensors file: {error}. Save the heads again.") from error


def _variant(path: Path) -> str:
    """ "fp16" of `diffusion_pytorch_model.fp16-00001-of-00002.safetensors`."""
    return path.name.removeprefix(WEIGHTS).removesuffix(".safetensors").split("-")[0]


def _add_picture(path: Path, number: int, target: Path, repo_id: str) -> tuple[str, str]:
    # `generate --like` reproduces the picture with the published heads; local paths must not be published.
    settings = {**read_settings(path), "model": repo_id, "heads": None}
    copied = copy_picture(path, target / "images" / str(number), settings)
    return settings["prompt"], copied.relative_to(target).as_posix()


def _check_names_base(card: ModelCard, base_model: str, path: str | os.PathLike[str]) -> None:
    named = card.data.get("base_model")
    if named != base_model and named != [base_model]:
        raise ValueError(f"The card {path} names {named} as base model, the heads name {base_model}: make them equal.")


def _requirement() -> str:
    parts = package_version().split(".")
    return f"=={parts[0]}.{parts[1]}.*" if len(parts) > 1 and parts[1].isdigit() else ""


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", "utf-8")
