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
"""Of the four relations that the Hub knows (adapter, merge, quantized, finetune): heads are added to a frozen model."""

DEFINITIONS = {
    "loss": "what was trained on: Smooth-L1 between predicted and true state in units of their root mean square, and "
    "`kl_weight` times the divergence where that is set",
    "kl": "divergence of the draft distribution from the backbone's, in nats a code",
    "expected_acceptance": "mean over cells of sum(min(p, q)): the chance that a draft drawn from the head's "
    "distribution q is kept under the backbone's p, without guidance and filters",
    "passes": "backbone forward evaluations of a picture drawn alone; a guided pair is one, the prompt's pass is the "
    "first",
    "tokens_per_pass": "sequence positions of a picture over its passes",
    "six_task": "mean over six families of prompts of the share of pictures that a checker found right, and its "
    "standard error",
    "agreement": "share of codes equal to those of autoregressive decoding with the same seed",
    "log_likelihood": "mean log-probability of a code under the backbone, in nats",
    "psnr": "dB to the autoregressive picture of the same seed, mean of the pictures that differ",
    "wall_ratio": "wall time of autoregressive decoding in the same loop over this decoder's, at batch 1",
    "drafting_share": "share of its wall time that goes into drafting",
}
_ALIASES = {"nfe": "passes"}
_HIDDEN = ("by_family", "acceptance", "standard_error")

LICENSE_NOTES = {
    "deepseek-community/janus": "Its repository is tagged MIT; the authors' README also names the DeepSeek Model "
    "License, which restricts uses.",
}
"""What a repository's tag does not say, by the beginning of its name in lower case."""


@dataclass(frozen=True)
class LicenseTerms:
    """A licence as the Hub names it, and why it is this one.

    Args:
        identifier: like "mit", or "other" with `name` and `link`.
        reason: a sentence or two for the card.
    """

    identifier: str
    reason: str
    name: str | None = None
    link: str | None = None


@dataclass(frozen=True)
class Figures:
    """Measured figures of decoders for a card.

    Args:
        decoders: by name of the decoder, its figures by name.
        conditions: under which they were measured; a figure without them says nothing.
    """

    decoders: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    conditions: str = ""

    @classmethod
    def read(cls, path: str | Path, conditions: str | None) -> "Figures":
        """The JSON that `ssd-pipelines benchmark decoders` or `scenes` wrote.

        Args:
            conditions: model precision, machine, batch, guidance and filters; number of prompts and seed are read from
                the files.

        Raises:
            ValueError: if the file is none of these, or the conditions are missing.
        """
        if not conditions:
            raise ValueError(
                f"{path} has figures, but not the conditions that they were measured under: say machine, precision, "
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
    """The licence that heads inherit from their backbone, as its repository states it; or the one that was chosen.

    Raises:
        OSError: if the backbone's repository can't be asked.
        ValueError: if it states none and none was chosen.
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
        f"drew, and work with it alone. {note}"
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
    """The card of a head repository.

    Args:
        config: of the heads, their `config.json`.
        verifier: the settings that go with them, their `verifier_config.json`.
        widgets: pictures for the top of the page: prompt, and path in the repository.
        prompt: of the snippet.
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
    """The card of a saved pipeline.

    Args:
        base_model: the repository that the backbone was loaded from, if it was one.
        terms: `None` if nobody said under which licence the weights are.
        facts: `architecture`, `has_heads`, `rows`, `columns`, `verifier`.
    """
    unknown = "Who published this did not state the licence of the weights."
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
    """The notebook of a head repository, which the Hub's "Colab" and "Kaggle" buttons open.

    Args:
        version: requirement on the package, like "==0.1.*".
    """
    notebook = json.loads((bundled_folder("hub_cards") / "notebook.ipynb.jinja").read_text("utf-8"))
    facts = {"repo_id": repo_id, "base_model": base_model, "prompt": prompt, "version": version}
    for cell in notebook["cells"]:
        cell["source"] = _environment().from_string(cell["source"]).render(facts)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def check_card(content: str) -> ModelCard:
    """A card whose metadata come back as they were written.

    Raises:
        ValueError: if they don't, or there are none.
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
        raise ValueError(f"The card's metadata change on the way through YAML: {', '.join(changed) or 'its text'}.")
    return card


# --- what the templates are filled with -------------------------------------------------------------------------------


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
        # Not "diffusers": the Hub would print a snippet of its loader, which can't load this.
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
            "the backbone's own, not the same; without `rounds` decoding is lossless."
        )
    if verifier.get("coupling") == "gumbel":
        return (
            "With the settings here decoding is lossless: in float32 the picture is, code for code, the one that "
            "autoregressive decoding draws with the same seed."
        )
    return "With the settings here decoding is lossless: pictures follow the backbone's own distribution."


def _fits(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    end = ", with a row-end token after each row" if config.get("row_end") else ""
    kinds = [f"{config['num_horizontal']} along the row", f"{config['num_vertical']} down the column"]
    kinds += ["1 that sees the row above and the left neighbour"] if config.get("row_head") else []
    rows = [
        ("backbone", f"{config['base_model']} ({config.get('base_architecture') or 'architecture not recorded'})"),
        ("token grid", f"{config['rows']} rows of {config['columns']} codes{end}"),
        ("image vocabulary", f"{config['image_vocab_size']} codes"),
        ("hidden size", str(config["hidden_size"])),
        ("heads", ", ".join(kinds)),
        ("a head", f"{config['architecture']}, of {_INPUTS[config['inputs']]}"),
    ]
    if config.get("neighborhood") == "three":
        rows.append(("vertical heads see", "the cells above left, above and above right"))
    return rows


_INPUTS = {"both": "hidden state and token embedding", "hidden": "the hidden state", "embedding": "the embedding"}


def _validation(training: Mapping[str, Any]) -> dict[str, Any]:
    """The figures that training measured, as a table of heads and lines for the rest."""
    measured = training.get("validation") or {}
    heads = {name: row for name, row in measured.items() if isinstance(row, Mapping)}
    names, rows = _table(heads)
    others = [f"{_title(name)}: {_number(value)}" for name, value in measured.items() if name not in heads]
    passes = training.get("passes")
    if isinstance(passes, Mapping) and "mean" in passes:
        error = f" ± {_number(passes['standard_error'])}" if passes.get("standard_error") else ""
        others.append(
            f"Lossless decoding of {passes.get('prompts', 'some')} prompts: {_number(passes['mean'])}{error} passes a "
            f"picture, where autoregressive decoding makes {passes.get('autoregressive', 'one a token')}"
        )
    settings = [f"{training[n]} {w}" for n, w in (("pictures", "pictures in all"),) if n in training]
    return {
        "names": names,
        "columns": [_title(name) for name in names],
        "heads": rows,
        "others": others,
        "conditions": ", ".join([*settings, "no guidance, no filters"]),
    }


def _table(rows: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Names of the columns that any row has a number in, and the rows as text."""
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
