"""Model cards and notebooks of published heads and pipelines, rendered from the templates in `hub_cards/`."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import yaml
from huggingface_hub import HfApi, ModelCard, ModelCardData

from ssd_pipelines import hub
from ssd_pipelines.resources import bundled_folder


LIBRARY_NAME = "ssd-pipelines"
TAGS = ("ssd", "speculative-decoding", "autoregressive-image-generation")
RELATION = "adapter"
"""`base_model_relation` on the Hub, of adapter, merge, quantized and finetune: heads are added to a frozen model."""

DEFINITIONS = {
    "loss": "the training loss: Smooth-L1 between predicted and true states, divided by their root mean square, plus "
    "`kl_weight` times the KL divergence if that is set",
    "kl": "KL divergence between the backbone's distribution and the draft distribution, in nats per code",
    "expected_acceptance": "mean over cells of sum(min(p, q)): the probability that a draft token sampled from the "
    "head's distribution q is accepted under the backbone's distribution p, without guidance and filters",
    "passes": "forward passes of the backbone per picture at batch size 1, including the pass over the prompt; the two "
    "branches of classifier-free guidance count as one",
    "tokens_per_pass": "sequence positions of a picture divided by its passes",
    "six_task": "share of pictures that a checker found correct, averaged over six families of prompts, and its "
    "standard error",
    "agreement": "share of codes equal to those of autoregressive decoding with the same seed",
    "log_likelihood": "mean log-probability of a code under the backbone, in nats",
    "psnr": "PSNR in dB against the autoregressive picture of the same seed, averaged over the pictures that differ",
    "wall_ratio": "wall time of autoregressive decoding in the same loop divided by this decoder's, at batch size 1",
    "drafting_share": "share of the wall time that is spent on drafting",
}
_ALIASES = {"nfe": "passes"}
_HIDDEN = ("by_family", "acceptance", "standard_error")

LICENSE_NOTES = {
    "deepseek-community/janus": "Its repository is tagged MIT; the authors' README also names the DeepSeek Model "
    "License, which restricts uses.",
}
"""Notes that are missing from a repository's licence tag, by the beginning of its name in lower case."""


@dataclass(frozen=True)
class LicenseTerms:
    """A licence, and the reason why it applies.

    Args:
        identifier: the Hub's identifier, like "mit", or "other" with `name` and `link`.
        reason: one or two sentences for the card.
        name, link: name and URL of a licence whose identifier is "other".
    """

    identifier: str
    reason: str
    name: str | None = None
    link: str | None = None


@dataclass(frozen=True)
class Figures:
    """Measured figures of decoders for a card.

    Args:
        decoders: for each decoder, its figures by name.
        conditions: the conditions under which they were measured; figures mean nothing without them.
    """

    decoders: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    conditions: str = ""

    @classmethod
    def read(cls, path: str | Path, conditions: str | None) -> "Figures":
        """Read a JSON file of `ssd-pipelines benchmark decoders` or `scenes`.

        Args:
            path: the file.
            conditions: machine, precision, batch size, guidance and filters; the number of prompts and the seed are
                read from the files.

        Raises:
            ValueError: if the file is not one of these, or the conditions are missing.
        """
        if not conditions:
            raise ValueError(
                f"{path} has figures, but not the conditions that they were measured under: give machine, precision, "
                "guidance and filters, for instance `--conditions 'one A100, bfloat16, guidance 5, no filters'`."
            )
        try:
            data = json.loads(Path(path).read_text("utf-8"))
            beside = Path(path).parent / "settings.json"
            settings = json.loads(beside.read_text("utf-8")) if beside.is_file() and "rows" not in data else data
            rows = data.get("rows", data)
            decoders = {str(name): dict(row) for name, row in rows.items()}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise ValueError(
                f"{path} is not a JSON file of `ssd-pipelines benchmark decoders` or `scenes`: {error}."
            ) from error
        number, seed = settings.get("num_prompts", settings.get("num_tasks")), settings.get("seed")
        known = [f"{number} prompts"] if number is not None else []
        known += [f"seed {seed}"] if seed is not None else []
        return cls(decoders, ", ".join([*known, conditions]))


def license_terms(
    base_model: str,
    token: str | bool | None = None,
    license: str | None = None,
    license_name: str | None = None,
    license_link: str | None = None,
    what: str = "heads",
) -> LicenseTerms:
    """Return the licence of heads or a pipeline: the given one, or else the one that the backbone's repository states.

    Args:
        base_model: the backbone's repository.
        token: token for the Hub.
        license, license_name, license_link: the licence, if it is not inherited.
        what: what is published, for the messages: "heads" or "pipeline".

    Raises:
        OSError: if the backbone's repository can't be read.
        ValueError: if it states no licence and none was given.
    """
    with hub.explained(base_model):
        info = HfApi(token=token).model_info(base_model)
    stated: dict[str, Any] = info.card_data.to_dict() if info.card_data else {}
    note = next((text for name, text in LICENSE_NOTES.items() if base_model.lower().startswith(name)), "")
    of_base = stated.get("license_name") or stated.get("license")
    if license is not None:
        theirs = f"The licence of {base_model} is {of_base}." if of_base else f"{base_model} states no licence."
        reason = f"{license_name or license}, chosen by who published these {what}. {theirs} {note}"
        return LicenseTerms(license, reason.strip(), license_name, license_link)
    if not of_base:
        raise ValueError(
            f"{base_model} states no licence that the {what} could inherit: ask its authors, and give one with "
            "`--license` (`license=` in Python)."
        )
    reason = (
        f"{of_base}, inherited from {base_model}: the {what} were trained on its hidden states and on pictures that it "
        f"generated, and work only with it. {note}"
    )
    identifier = stated.get("license") or "other"
    return LicenseTerms(identifier, reason.strip(), stated.get("license_name"), stated.get("license_link"))


def heads_card(
    config: Mapping[str, Any],
    verifier: Mapping[str, Any],
    repo_id: str,
    terms: LicenseTerms,
    figures: Figures | None = None,
    widgets: Sequence[tuple[str, str]] = (),
    prompt: str = "a red fox in the snow",
) -> ModelCard:
    """Render the card of a head repository.

    Args:
        config: `config.json` of the heads.
        verifier: their verifier settings, `verifier_config.json`.
        repo_id: the repository.
        terms: the licence.
        figures: measured figures of decoders.
        widgets: pictures for the top of the page: for each, the prompt and the path in the repository.
        prompt: prompt of the code example.
    """
    training = dict(config.get("training") or {})
    validation = _validation(training)
    figures = figures or Figures()
    columns, rows = _table(figures.decoders)
    return _render(
        "heads.md.jinja",
        _metadata(config["base_model"], terms, [*TAGS, "draft-model"], widgets, RELATION),
        repo_id=repo_id,
        base_model=config["base_model"],
        base_model_revision=config.get("base_model_revision"),
        prompt=prompt,
        lossless=_promise(verifier),
        fits=_fits(config),
        validation=validation,
        figures={"columns": [_title(c) for c in columns], "rows": rows, "conditions": figures.conditions},
        definitions=[
            (_title(name), meaning)
            for name, meaning in DEFINITIONS.items()
            if name in columns or name in validation["names"] or (name == "passes" and training.get("passes"))
        ],
        training=[(name, _number(value)) for name, value in sorted(training.items()) if not isinstance(value, dict)],
        license_reason=terms.reason,
    )


def pipeline_card(
    repo_id: str,
    base_model: str | None,
    terms: LicenseTerms | None,
    prompt: str = "a red fox in the snow",
    **facts: Any,
) -> ModelCard:
    """Render the card of a saved pipeline.

    Args:
        repo_id: the repository.
        base_model: the Hub repository that the backbone was loaded from; `None` if it was not loaded from one.
        terms: the licence; `None` if the licence of the weights is unknown.
        prompt: prompt of the code example.
        facts: `architecture`, `has_heads`, `rows`, `columns`, `verifier`.
    """
    unknown = "The publisher did not state the licence of the weights."
    return _render(
        "pipeline.md.jinja",
        _metadata(base_model, terms, list(TAGS), (), None),
        repo_id=repo_id,
        base_model=base_model,
        prompt=prompt,
        license_reason=terms.reason if terms else unknown,
        **facts,
    )


def heads_notebook(repo_id: str, base_model: str, prompt: str = "a red fox in the snow", version: str = "") -> str:
    """Render the notebook of a head repository, which the Hub's "Colab" and "Kaggle" buttons open.

    Args:
        repo_id: the repository.
        base_model: the backbone's repository.
        prompt: prompt to generate pictures for.
        version: version specifier of this package, like "==0.1.*".
    """
    notebook = json.loads((bundled_folder("hub_cards") / "notebook.ipynb.jinja").read_text("utf-8"))
    facts = {"repo_id": repo_id, "base_model": base_model, "prompt": prompt, "version": version}
    for cell in notebook["cells"]:
        cell["source"] = _environment().from_string(cell["source"]).render(facts)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def check_card(content: str) -> ModelCard:
    """Parse a card, and check that its metadata is unchanged after it is written and read again.

    Args:
        content: the text of the card, with its metadata.

    Raises:
        ValueError: if the metadata changes or can't be read, or there is none.
    """
    try:
        card = ModelCard(content)
        again = ModelCard(str(card))
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise ValueError(f"The card's metadata can't be read: {' '.join(str(error).split())}") from error
    if not card.data.to_dict():
        raise ValueError("The card has no metadata: it must begin with a block of YAML between two lines of ---.")
    written, read = card.data.to_dict(), again.data.to_dict()
    if written != read or card.text != again.text:
        changed = sorted(name for name in {*written, *read} if written.get(name) != read.get(name))
        raise ValueError(
            "The card's metadata changes when it is written as YAML and read again, in "
            f"{', '.join(changed) or 'its text'}: correct the card."
        )
    return card


# --- values for the templates -----------------------------------------------------------------------------------------


def _environment() -> jinja2.Environment:
    return jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)


def _render(template: str, metadata: ModelCardData, **facts: Any) -> ModelCard:
    text = (bundled_folder("hub_cards") / template).read_text("utf-8")
    return check_card(_environment().from_string(text).render(card_data=metadata.to_yaml(), **facts))


def _metadata(
    base_model: str | None,
    terms: LicenseTerms | None,
    tags: list[str],
    widgets: Sequence[tuple[str, str]],
    relation: str | None,
) -> ModelCardData:
    more: dict[str, Any] = {} if relation is None else {"base_model_relation": relation}
    return ModelCardData(
        base_model=base_model,
        license=terms.identifier if terms else None,
        license_name=terms.name if terms else None,
        license_link=terms.link if terms else None,
        # With "diffusers" the Hub would show a code example for Diffusers' own loader, which can't load this.
        library_name=LIBRARY_NAME,
        pipeline_tag="text-to-image",
        tags=tags,
        widget=[{"text": text, "output": {"url": url}} for text, url in widgets] or None,
        **more,
    )


def _promise(verifier: Mapping[str, Any]) -> str:
    if verifier.get("rounds") is not None:
        return (
            f"With the settings here (`{verifier['_class_name']}`, rounds={verifier['rounds']}) pictures are close to "
            "the backbone's own, but not identical; without `rounds`, decoding is lossless."
        )
    if verifier.get("coupling") == "gumbel":
        return (
            "With the settings here decoding is lossless: in float32, every code of a picture equals that of "
            "autoregressive decoding with the same seed."
        )
    return "With the settings here decoding is lossless: pictures follow the backbone's own distribution."


def _fits(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    end = ", with a row-end token after each row" if config.get("row_end") else ""
    kinds = [f"{config['num_horizontal']} along the row", f"{config['num_vertical']} down the column"]
    kinds += ["1 row head that reads the row above and the left neighbour"] if config.get("row_head") else []
    rows = [
        ("backbone", f"{config['base_model']} ({config.get('base_architecture') or 'architecture not recorded'})"),
        ("token grid", f"{config['rows']} rows of {config['columns']} codes{end}"),
        ("image vocabulary", f"{config['image_vocab_size']} codes"),
        ("hidden size", str(config["hidden_size"])),
        ("heads", ", ".join(kinds)),
        ("each head", f"{config['architecture']}, from {_INPUTS[config['inputs']]}"),
    ]
    if config.get("neighborhood") == "three":
        rows.append(("vertical heads read", "the cells above left, above and above right"))
    return rows


_INPUTS = {"both": "hidden state and token embedding", "hidden": "the hidden state", "embedding": "the embedding"}


def _validation(training: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures that were measured in training: a table by head, and lines for the others."""
    measured = training.get("validation") or {}
    heads = {name: row for name, row in measured.items() if isinstance(row, Mapping)}
    names, rows = _table(heads)
    others = [f"{_title(name)}: {_number(value)}" for name, value in measured.items() if name not in heads]
    passes = training.get("passes")
    if isinstance(passes, Mapping) and "mean" in passes:
        error = f" ± {_number(passes['standard_error'])}" if passes.get("standard_error") else ""
        others.append(
            f"Lossless decoding of {passes.get('prompts', 'some')} prompts: {_number(passes['mean'])}{error} passes a "
            f"picture, where autoregressive decoding makes {passes.get('autoregressive', 'one per token')}"
        )
    settings = [f"{training[n]} {w}" for n, w in (("pictures", "pictures in total"),) if n in training]
    return {
        "names": names,
        "columns": [_title(name) for name in names],
        "heads": rows,
        "others": others,
        "conditions": ", ".join([*settings, "no guidance, no filters"]),
    }


def _table(rows: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Return the names of the columns in which any row has a number, and the rows as text."""
    renamed = {
        title: {_ALIASES.get(name, name): value for name, value in row.items() if value is not None}
        for title, row in rows.items()
    }
    numbers = (name for row in renamed.values() for name, value in row.items() if isinstance(value, int | float))
    order = list(DEFINITIONS)
    known = [name for name in dict.fromkeys(numbers) if name not in _HIDDEN]
    columns = sorted(known, key=lambda name: order.index(name) if name in order else len(order))

    def cell(row: Mapping[str, Any], name: str) -> str:
        error = f" ± {_number(row['standard_error'])}" if name == "six_task" and "standard_error" in row else ""
        return _number(row[name]) + error if name in row else ""

    return columns, [(title, [cell(row, name) for name in columns]) for title, row in renamed.items()]


def _title(name: str) -> str:
    return {"kl": "KL", "psnr": "PSNR", "six_task": "six-task score"}.get(name, name.replace("_", " "))


def _number(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, float):
        if math.isinf(value):
            return "no picture differs" if value > 0 else str(value)
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(_number(part) for part in value)
    return str(value)
