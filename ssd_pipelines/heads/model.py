"""Draft heads: predict the hidden state some positions away from the hidden state and token of one position.

Source: Spatially Speculative Decoding, arXiv 2606.20543, section 3.1, equations 2 and 3, and table 8.
"""

import os
import tempfile
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

from ssd_pipelines import hub
from ssd_pipelines.grid import Direction
from ssd_pipelines.heads.layers import DraftHead, GatedLayer, with_neighbors


Target = Literal["hidden", "token"]
StateKind = Literal["pre_norm", "post_norm"]
FORMAT_VERSION = 1
_PUSH_ARGUMENTS = ("repo_id", "commit_message", "private", "token", "create_pr", "revision", "base_model", "license")


def _check_is_heads(source: str | os.PathLike[str], kwargs: dict[str, Any]) -> None:
    """Raise an error of one sentence if `source` can't be reached on the Hub or does not hold draft heads."""
    arguments = {name: kwargs[name] for name in hub.HUB_ARGUMENTS if name in kwargs}
    subfolder = kwargs.get("subfolder")
    place = f"{source}{f' in its folder {subfolder}' if subfolder else ''}"
    config = hub.read_json(source, "config.json", subfolder, **arguments)
    if config is None:
        if hub.is_offline(arguments) and not os.path.isdir(source):
            raise hub.not_in_cache(source, "no config.json")
        raise OSError(f"{place} has no config.json: give a Hub repository or a folder with draft heads.")
    if config.get("_class_name") != "SpatialDraftHeads":
        other = config.get("_class_name") or " ".join(config.get("architectures") or []) or "something unnamed"
        raise ValueError(f"{place} holds {other}, not draft heads: give a repository or folder of SpatialDraftHeads.")


class SpatialDraftHeads(ModelMixin, ConfigMixin):
    """The draft heads of one backbone: `num_horizontal` along the row, `num_vertical` down the column.

    Each head is a separate predictor; by default the heads share no weights. The backbone stays frozen. Its final norm
    and image head turn a predicted state into draft logits. Head `horizontal[k-1]` predicts the state k cells to the
    right and `vertical[k-1]` the state k rows below, both from the same input.

    Args:
        hidden_size: width d of the backbone's hidden states and token embeddings.
        image_vocab_size: number of codes that the backbone's image head can output.
        rows, columns, row_end: the token grid that the heads were trained on. Heads fit any grid with the same number
            of columns and the same row ends.
        num_horizontal, num_vertical: number of offsets that each direction drafts.
        neighborhood: what a vertical head reads from the source row: only the "cell" above its target (as in the
            paper), or "three" cells: above left, above and above right. Both draft equally many cells in parallel.
        row_head: adds one more head, which predicts a cell from the three cells above it and its left neighbour.
            Verifiers use it to refresh a prediction whose left neighbour has changed.
        inputs: what a head reads at its source position: the "hidden" state, its token's "embedding", or "both".
        states: which of the backbone's states the heads read and predict: those before its final norm, "pre_norm" (as
            in the paper), or after it, "post_norm". `forward` returns pre-norm states in both cases.
        target: what the heads were trained to match: the "hidden" state at their offset, or only the "token" drawn
            there. It does not affect drafting.
        architecture: "swiglu" (as in the paper), "mlp" or "linear".
        shared_weights: whether all heads share one gated layer, so that each has only its own first projection.
        inner_width: width of the gated layer; by default 2d, as in the paper.
        hidden_scale, embedding_scale: root mean square of the backbone's states and embeddings on the training data.
            The heads divide their inputs by these and multiply their outputs by `hidden_scale`, so that weights and
            loss work with numbers near 1 for every backbone (raw states have an rms near 100).
        base_model, base_model_revision, base_architecture: the backbone that the heads were trained for.
        training: settings and measured figures of the training run, for the model card.
        format_version: version of this file format.

    Raises:
        ValueError: for a setting with an unknown value, a newer format version, or `shared_weights` with "linear".

    Source: arXiv 2606.20543; the paper uses 5 horizontal and 1 (Janus, Emu3) or 2 (Lumina) vertical heads.
    """

    _supports_gradient_checkpointing = False
    _no_split_modules = ["DraftHead"]
    _repeated_blocks = ["DraftHead"]
    _skip_layerwise_casting_patterns = ["norm"]

    publish_folder: ClassVar[Callable[..., str] | None] = None
    """`publishing.push_folder`, which registers itself here, so that this module needs no import of `publishing`."""

    @register_to_config
    def __init__(
        self,
        hidden_size: int,
        image_vocab_size: int,
        rows: int,
        columns: int,
        row_end: bool = False,
        num_horizontal: int = 5,
        num_vertical: int = 1,
        neighborhood: Literal["cell", "three"] = "cell",
        row_head: bool = False,
        inputs: Literal["hidden", "embedding", "both"] = "both",
        states: StateKind = "pre_norm",
        target: Target = "hidden",
        architecture: Literal["swiglu", "mlp", "linear"] = "swiglu",
        shared_weights: bool = False,
        inner_width: int | None = None,
        hidden_scale: float = 1.0,
        embedding_scale: float = 1.0,
        base_model: str | None = None,
        base_model_revision: str | None = None,
        base_architecture: str | None = None,
        training: dict[str, Any] | None = None,
        format_version: int = FORMAT_VERSION,
    ) -> None:
        super().__init__()
        for name, value, allowed in (
            ("inputs", inputs, ("hidden", "embedding", "both")),
            ("states", states, ("pre_norm", "post_norm")),
            ("target", target, ("hidden", "token")),
            ("architecture", architecture, ("swiglu", "mlp", "linear")),
            ("neighborhood", neighborhood, ("cell", "three")),
        ):
            if value not in allowed:
                raise ValueError(f"`{name}` of draft heads must be one of {', '.join(allowed)}, got {value!r}.")
        if format_version > FORMAT_VERSION:
            raise ValueError(
                f"These draft heads have format version {format_version}, this release reads up to {FORMAT_VERSION}: "
                "upgrade ssd-pipelines."
            )
        if shared_weights and architecture == "linear":
            raise ValueError(
                '`shared_weights` shares the gated layer, which `architecture="linear"` lacks: change one of the two.'
            )
        input_width = hidden_size * (2 if inputs == "both" else 1)
        inner_width = 2 * hidden_size if inner_width is None else inner_width
        own = "linear" if shared_weights else architecture
        self.horizontal = nn.ModuleList(
            DraftHead(input_width, hidden_size, inner_width, own) for _ in range(num_horizontal)
        )
        above_width = input_width * (3 if neighborhood == "three" else 1)
        self.vertical = nn.ModuleList(
            DraftHead(above_width, hidden_size, inner_width, own) for _ in range(num_vertical)
        )
        self.row = DraftHead(4 * input_width, hidden_size, inner_width, own) if row_head else None
        self.shared = GatedLayer(hidden_size, inner_width, architecture) if shared_weights else None
        # A copy of the backbone's final norm, to convert between pre-norm and post-norm states; not trained.
        self.final_norm = nn.RMSNorm(hidden_size, eps=1e-6).requires_grad_(False) if states == "post_norm" else None

    @classmethod
    def for_backbone(cls, backbone: Any, **settings: Any) -> "SpatialDraftHeads":
        """Create untrained heads with the sizes that a backbone needs.

        Args:
            backbone: a [`~ssd_pipelines.Backbone`] adapter.
            settings: the settings that do not depend on the backbone, like `num_vertical` or `architecture`.
        """
        grid = backbone.grid()
        heads = cls(
            hidden_size=backbone.hidden_size,
            image_vocab_size=backbone.image_vocab_size,
            rows=grid.rows,
            columns=grid.columns,
            row_end=grid.row_end,
            base_model=backbone.name_or_path or None,
            base_model_revision=getattr(backbone.model.config, "_commit_hash", None),
            base_architecture=backbone.architecture,
            **settings,
        )
        if heads.final_norm is not None:
            heads.final_norm.load_state_dict(backbone.final_norm.state_dict())
        return heads

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any) -> Any:
        """Load heads from a folder or Hub repository; safetensors only.

        Args:
            kwargs: as in `ModelMixin.from_pretrained`, like `dtype`, `subfolder`, `revision`, `token`, `variant`.

        Raises:
            ValueError: if there are no draft heads there, or tensors are missing, which Diffusers would initialize at
                random; the message names them.
            OSError: if the files can't be found or downloaded.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        _check_is_heads(pretrained_model_name_or_path, kwargs)
        kwargs = {"use_safetensors": True, **kwargs}
        try:
            heads, info = super().from_pretrained(pretrained_model_name_or_path, output_loading_info=True, **kwargs)
        except (RuntimeError, ValueError) as error:
            # Diffusers then advises to ignore mismatched sizes, which would leave random weights.
            reason = str(error).split(" If you want")[0]
            raise ValueError(f"The draft heads in {pretrained_model_name_or_path} can't be loaded: {reason}") from error
        missing = sorted(info["missing_keys"])
        if missing:
            raise ValueError(
                f"The draft heads in {pretrained_model_name_or_path} lack {', '.join(missing)}: the file is incomplete "
                "or does not match the settings in its config.json; download or save it again."
            )
        return (heads, info) if wants_info else heads

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        safe_serialization: bool = True,
        variant: str | None = None,
        max_shard_size: int | str = "10GB",
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Save `config.json` and `diffusion_pytorch_model.safetensors`, which holds only the heads' tensors.

        Args:
            save_directory: the folder to write.
            safe_serialization, variant, max_shard_size: as in `ModelMixin.save_pretrained`. Diffusers' pipelines look
                for these names in the signature, so they are explicit.
            push_to_hub: also publish the folder, with a card; by default under the folder's name.
            kwargs: other arguments of `ModelMixin.save_pretrained`; when pushing also those of `push_to_hub`.

        Raises:
            ValueError: if the heads are to be pushed but can't be published; see `push_to_hub`.
        """
        pushing = {name: kwargs.pop(name) for name in _PUSH_ARGUMENTS if name in kwargs}
        super().save_pretrained(
            save_directory,
            safe_serialization=safe_serialization,
            variant=variant,
            max_shard_size=max_shard_size,
            **kwargs,
        )
        if push_to_hub:
            repo_id = pushing.pop("repo_id", None) or os.path.basename(os.path.normpath(save_directory))
            self._publisher()(save_directory, repo_id, **pushing)

    def push_to_hub(self, repo_id: str, *, verifier: Any = None, variant: str | None = None, **kwargs: Any) -> str:
        """Publish these heads, with a rendered card, a notebook and verifier settings.

        Args:
            repo_id: user/name.
            verifier: the [`~ssd_pipelines.SpatialDraftVerifier`] with the settings tuned for them; by default one with
                default settings.
            variant: of the weight file, like "fp16".
            kwargs: `commit_message`, `private`, `token`, `create_pr` as in Diffusers; `revision`, a branch;
                `base_model`, the backbone's name on the Hub; `license`, by default the backbone's.

        Returns:
            the URL of the commit, or of the pull request.

        Raises:
            ValueError: if the backbone's name looks like a local path or its licence is unknown; nothing is uploaded
                then.
            OSError: if the Hub refuses; the message is one sentence.

        Example:
            >>> heads.push_to_hub("user/ssd-janus-pro-7b", private=True)
        """
        publish = self._publisher()
        with tempfile.TemporaryDirectory() as folder:
            if verifier is not None:
                verifier.save_pretrained(folder)
            self.save_pretrained(folder, variant=variant)
            return publish(folder, repo_id, **kwargs)

    @classmethod
    def _publisher(cls) -> Callable[..., str]:
        if cls.publish_folder is None:
            raise RuntimeError("Publishing isn't set up: import `SpatialDraftHeads` from `ssd_pipelines` itself.")
        return cls.publish_folder

    def forward(
        self, hidden: torch.Tensor, embeddings: torch.Tensor, direction: Direction, num_offsets: int
    ) -> torch.Tensor:
        """Predict the states at offsets 1 to `num_offsets` from every source position.

        Args:
            hidden: `(batch, n, hidden_size)`, the states that predicted the source tokens; for vertical heads with
                `neighborhood="three"`, one whole row of the grid.
            embeddings: `(batch, n, hidden_size)`, the backbone's embeddings of the source tokens.
            direction: "horizontal" or "vertical".
            num_offsets: at most the number of heads of that direction.

        Returns:
            `(batch, num_offsets, n, hidden_size)` pre-norm states in the dtype of `hidden`.

        Raises:
            ValueError: if there are fewer heads of that direction than `num_offsets`.
        """
        heads = self.horizontal if direction == "horizontal" else self.vertical
        if not 1 <= num_offsets <= len(heads):
            raise ValueError(
                f"{num_offsets} {direction} offsets were asked for, these draft heads have {len(heads)}: lower the "
                "verifier's block size or load heads with more offsets."
            )
        z = self.source_features(hidden, embeddings)
        if direction == "vertical" and self.config.neighborhood == "three":
            z = with_neighbors(z)
        predicted = torch.stack([self.predict(head, z) for head in list(heads)[:num_offsets]], dim=1)
        return self.to_pre_norm(predicted).to(hidden.dtype)

    def predict(self, head: nn.Module, z: torch.Tensor) -> torch.Tensor:
        """Apply one of these heads to features.

        Args:
            head: one of the heads of this model.
            z: `(..., f)`, features as `source_features` returns them.

        Returns:
            `(..., hidden_size)`, a state of the kind `config.states`, divided by `config.hidden_scale`. `to_pre_norm`
            converts it to a backbone state.
        """
        predicted = head(z)
        return predicted if self.shared is None else predicted + self.shared(predicted)

    def to_pre_norm(self, predicted: torch.Tensor) -> torch.Tensor:
        """Convert scaled predictions to the pre-norm states that the backbone's final norm reads; same shape."""
        state = predicted * self.config.hidden_scale
        if self.final_norm is None:
            return state
        # The norm divides by the root mean square and multiplies by its weight, so it maps this quotient to the
        # predicted direction. Where the weight is 0, the value does not matter.
        weight = self.final_norm.weight
        return torch.where(weight == 0, 0.0, state / torch.where(weight == 0, 1.0, weight))

    def to_own_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Convert the backbone's pre-norm states to the kind that these heads read; same shape and dtype."""
        if self.final_norm is None:
            return hidden
        return self.final_norm(hidden.to(self.final_norm.weight.dtype)).to(hidden.dtype)

    def predict_cells(self, above: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
        """Predict the states of single cells from the cells around them, with the row head.

        Args:
            above: `(..., 3, f)`, features (see `source_features`) of the cells above left, above and above right; zeros
                outside the grid.
            left: `(..., f)`, features of the left neighbour.

        Returns:
            `(..., hidden_size)`, pre-norm states in the heads' dtype.

        Raises:
            ValueError: if these heads have no row head.
        """
        if self.row is None:
            raise ValueError("These draft heads have no row head: train some with `row_head=True`.")
        return self.to_pre_norm(self.predict(self.row, torch.cat([above.flatten(-2), left], dim=-1)))

    def source_features(self, hidden: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """Compute `z` of equation 2: the scaled inputs, concatenated.

        Args:
            hidden: `(..., d)`, pre-norm states of the backbone.
            embeddings: `(..., d)`, the backbone's embeddings of the tokens that these states predicted.

        Returns:
            `(..., d)`, or `(..., 2 * d)` if `config.inputs` is "both"; in the heads' dtype.
        """
        first: DraftHead = self.horizontal[0]  # type: ignore[assignment]
        dtype = first.w0.weight.dtype  # `self.dtype` would iterate over all modules in every pass
        if dtype.itemsize == 1:  # stored in float8; the layerwise casting hook says which dtype to compute in
            dtype = self.dtype
        parts = []
        if self.config.inputs != "embedding":
            parts.append(self.to_own_states(hidden).to(dtype) / self.config.hidden_scale)
        if self.config.inputs != "hidden":
            parts.append(embeddings.to(dtype) / self.config.embedding_scale)
        return torch.cat(parts, dim=-1)

    def check_compatible(self, backbone: Any, grid: Any = None) -> None:
        """Check, before any forward pass, that these heads were trained for a backbone and fit a grid.

        Args:
            backbone: a [`~ssd_pipelines.Backbone`] adapter.
            grid: the [`~ssd_pipelines.TokenGrid`] to be decoded; by default the backbone's default grid.

        Raises:
            ValueError: if they don't fit; the message names the heads' backbone, this one, and every property that
                differs.
        """
        grid = backbone.grid() if grid is None else grid
        pairs = {
            "hidden size": (self.config.hidden_size, backbone.hidden_size),
            "image vocabulary": (self.config.image_vocab_size, backbone.image_vocab_size),
            "grid columns": (self.config.columns, grid.columns),
            "row-end tokens": (self.config.row_end, grid.row_end),
            "architecture": (self.config.base_architecture or backbone.architecture, backbone.architecture),
        }
        different = [f"{name} {ours} against {theirs}" for name, (ours, theirs) in pairs.items() if ours != theirs]
        if different:
            raise ValueError(
                f"The draft heads were trained for {self.config.base_model or 'an unnamed backbone'} and do not fit "
                f"{backbone.name_or_path or 'this backbone'}: {'; '.join(different)}. Load heads trained for this "
                "backbone, or train some."
            )
