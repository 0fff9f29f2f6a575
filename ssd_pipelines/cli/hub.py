"""`ssd-pipelines push-heads` and `push-pipeline`: publish on the Hub."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ssd_pipelines.cli.common import EMBEDDED, Device, Heads, Precision, console, load_pipeline


RepoId = Annotated[str, typer.Argument(help="Repository to publish to: user/name.")]
Private = Annotated[bool, typer.Option("--private", help="Make a new repository private.")]
Revision = Annotated[str | None, typer.Option("--revision", "--branch", help="Branch, created if it doesn't exist.")]
CreatePr = Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead of committing.")]
CommitMessage = Annotated[str | None, typer.Option(help="Message of the commit.")]
Token = Annotated[str | None, typer.Option(help="Hub token. Default: that of `hf auth login`, or HF_TOKEN.")]
License = Annotated[str | None, typer.Option(help="Like mit. Default: what the base model's repository states.")]
Prompt = Annotated[str | None, typer.Option(help="Prompt of the card's code example and the notebook.")]


def push_heads(
    folder: Annotated[Path, typer.Argument(help="Folder that `train-heads` or `save_ssd_heads` wrote.")],
    repo_id: RepoId,
    base_model: Annotated[
        str | None, typer.Option(help="The backbone's name on the Hub, if the heads name a local path.")
    ] = None,
    verifier: Annotated[Path | None, typer.Option(help="Folder with a verifier_config.json to use instead.")] = None,
    figures: Annotated[
        Path | None, typer.Option(help="JSON of `benchmark decoders` or `benchmark scenes`, for the card.")
    ] = None,
    conditions: Annotated[
        str | None, typer.Option(help="Conditions of the figures: machine, precision, guidance, filters.")
    ] = None,
    picture: Annotated[
        list[Path] | None, typer.Option(help="PNG of `generate` or GIF of `race` for the card; repeatable.")
    ] = None,
    prompt: Prompt = None,
    card: Annotated[Path | None, typer.Option(help="Your own README.md instead of the rendered one.")] = None,
    license: License = None,
    license_name: Annotated[str | None, typer.Option(help="Name of the licence, for `--license other`.")] = None,
    license_link: Annotated[str | None, typer.Option(help="URL of the licence, for `--license other`.")] = None,
    private: Private = False,
    revision: Revision = None,
    create_pr: CreatePr = False,
    commit_message: CommitMessage = None,
    token: Token = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show card and files without uploading.")] = False,
) -> None:
    """Publish draft heads with a card, a notebook and the verifier settings tuned for them."""
    from ssd_pipelines.publishing import Destination, prepared_head_repo, read_base_model
    from ssd_pipelines.publishing import push_heads as publish
    from ssd_pipelines.publishing.cards import Figures, license_terms

    to = Destination(repo_id, private or None, revision, create_pr, commit_message, token).resolved()
    named = read_base_model(folder, base_model)
    measured = Figures.read(figures, conditions) if figures is not None else None  # before any request to the Hub
    content: dict[str, Any] = {
        "base_model": named,
        "terms": license_terms(named, token, license, license_name, license_link),
        "verifier": verifier,
        "figures": measured,
        "pictures": picture or (),
        "card": card,
        "prompt": prompt,
    }
    if not dry_run:
        commit = publish(folder, to, **content)
        console.print(commit.pr_url or commit.commit_url)
        return
    with prepared_head_repo(folder, to, **content) as repository:
        console.print((repository / "README.md").read_text("utf-8"), markup=False)
        files = sorted(path for path in repository.rglob("*") if path.is_file())
        console.print(f"Would upload to {to.repo_id}:")
        for path in files:
            console.print(f"  {path.relative_to(repository)}  {path.stat().st_size:,} bytes", markup=False)


def push_pipeline(
    model: Annotated[str, typer.Argument(help="Hub repository or folder, or `embedded`.")],
    repo_id: RepoId,
    heads: Heads = None,
    license: License = None,
    private: Private = False,
    revision: Revision = None,
    create_pr: CreatePr = False,
    commit_message: CommitMessage = None,
    token: Token = None,
    device: Device = "cpu",
    dtype: Precision = None,
) -> None:
    """Publish a whole pipeline, including the backbone, so that heads can name it as their base model."""
    pipe = load_pipeline(model, heads, device, dtype)
    if model == EMBEDDED and license is None:
        license = "apache-2.0"  # the licence of this package
    console.print(
        pipe.push_to_hub(
            repo_id,
            commit_message=commit_message,
            private=private or None,
            token=token,
            create_pr=create_pr,
            revision=revision,
            license=license,
        )
    )
