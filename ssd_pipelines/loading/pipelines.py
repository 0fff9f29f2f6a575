"""Load a pipeline from a backbone, from draft heads that name their backbone, from a saved or from another pipeline."""

import os
import warnings
from pathlib import Path
from typing import Any, Self

import torch
from diffusers import DiffusionPipeline, PipelineQuantizationConfig
from transformers import AutoTokenizer

from ssd_pipelines import hub
from ssd_pipelines.backbones import adapter_class
from ssd_pipelines.heads.loading import DEFAULT_NAME, HeadSet, SSDHeadsLoaderMixin, load_head_set
from ssd_pipelines.hub.remote_code import without_code, write_remote_code_shim
from ssd_pipelines.loading.weights import check_nothing_is_missing, check_saved_parts
from ssd_pipelines.publishing import Destination, push_pipeline


PUSH_ARGUMENTS = ("repo_id", "commit_message", "private", "token", "create_pr", "revision", "license")


class PipelineLoaderMixin(SSDHeadsLoaderMixin, DiffusionPipeline):
    """Adds `from_pretrained`, `from_pipe`, `save_pretrained`, `push_to_hub` and `download` to a pipeline."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any) -> Self:
        """Load from a backbone's repository, a head repository that names its backbone, or a saved pipeline.

        Args:
            pretrained_model_name_or_path: a Hub repository or a folder of any of the three kinds.
            kwargs:
                `heads`: a head repository, a folder, a `SpatialDraftHeads` object, or `None` for no heads.
                `verifier`: a verifier to use instead of the one that comes with the heads, the saved or the default
                one.
                `backbone`, `tokenizer`, `image_tokenizer`, `text_encoder`: objects to use instead of loading them.
                `revision`: branch, tag or commit of the repository in the first argument. If that is a head
                repository, it is the revision of the heads; their backbone is loaded at the commit that they were
                trained on.
                `heads_revision`, `heads_subfolder`: the same for the repository in `heads`.
                `subfolder`: folder that holds the backbone or the heads within the repository in the first argument.
                `dtype`, `device_map`, `quantization_config`, `variant`, `token`, `cache_dir`, `local_files_only`,
                `force_download` and all others: as in Diffusers and transformers.

        Raises:
            ValueError: for a model of an unknown family, or heads of another backbone; no pipeline is created then.
            OSError: for a repository that is missing or not accessible, or a wrong token; the message is one sentence.

        Example:
            >>> pipe = SpatialSpeculativePipeline.from_pretrained(
            ...     "deepseek-community/Janus-Pro-7B", heads="user/ssd-janus-pro-7b", dtype=torch.bfloat16
            ... ).to("cuda")
        """
        _rename_torch_dtype(kwargs)
        for name in ("trust_remote_code", "custom_pipeline"):
            if kwargs.pop(name, None):
                raise ValueError(f"`{name}` was given, but code from a repository is never run here: leave it out.")
        kwargs["use_safetensors"] = True
        source, subfolder = pretrained_model_name_or_path, kwargs.pop("subfolder", None)
        heads_hub = {"revision": kwargs.pop("heads_revision", None), "subfolder": kwargs.pop("heads_subfolder", None)}
        hub_arguments = {name: kwargs[name] for name in hub.HUB_ARGUMENTS if name in kwargs}
        kind, config = hub.repo_kind(source, subfolder, **hub_arguments)

        if kind == "heads":
            if "heads" not in kwargs:
                kwargs["heads"] = source
                heads_hub = {"revision": heads_hub["revision"] or kwargs.get("revision"), "subfolder": subfolder}
            source, subfolder = _backbone_named_by(config, source), None
            kwargs["revision"] = hub_arguments["revision"] = config.get("base_model_revision")
            kind, config = hub.repo_kind(source, **hub_arguments)
            if kind == "heads":
                raise ValueError(
                    f"The draft heads in {pretrained_model_name_or_path} name {source} as their backbone, which holds "
                    "draft heads too: load the backbone, and pass `heads=`."
                )

        if kwargs.get("quantization_config") is not None:
            kwargs["quantization_config"] = _quantization_of(kwargs["quantization_config"], kind)

        dtype = kwargs.get("dtype")
        heads = kwargs.get("heads")
        head_set: HeadSet | None = None
        if isinstance(heads, str | os.PathLike):
            heads_dtype = dtype.get("heads", dtype.get("default")) if isinstance(dtype, dict) else dtype
            head_set = load_head_set(heads, heads_dtype, **{**hub_arguments, **heads_hub})
            kwargs["heads"] = None
        chosen_verifier = kwargs.get("verifier")

        if kind == "pipeline":
            if subfolder:
                raise ValueError(
                    f"A saved pipeline can't be loaded in part: leave out `subfolder`, which was {subfolder!r}."
                )
            pipe = cls._from_saved_pipeline(source, kwargs, hub_arguments)
        else:
            pipe = cls._from_backbone(source, config, subfolder, kwargs, hub_arguments)
        if chosen_verifier is None:
            pipe._replaceable_verifier = pipe.verifier
        if head_set is not None:
            pipe._add_head_set(head_set, DEFAULT_NAME)
        if pipe.heads is not None and "device_map" in kwargs:
            pipe.heads.to(pipe.adapter().device)  # `backbone.device` is meta if its weights are offloaded to disk
        return pipe

    @classmethod
    def load_config(cls, *args: Any, **kwargs: Any) -> Any:
        """Load `model_index.json`; the pipeline class is always this package's, even if the file names a module too.

        `save_pretrained(..., with_remote_code_shim=True)` adds such a module for Diffusers' own loader. It is not read
        here.
        """
        loaded = super().load_config(*args, **kwargs)
        config = loaded[0] if isinstance(loaded, tuple) else loaded
        if isinstance(config.get("_class_name"), list):
            config["_class_name"] = config["_class_name"][-1]
        return loaded

    @classmethod
    def _from_saved_pipeline(
        cls, source: str | os.PathLike[str], kwargs: dict[str, Any], hub_arguments: dict[str, Any]
    ) -> Self:
        if os.path.isdir(source):
            with without_code(Path(source)) as seen:
                pipe = super().from_pretrained(seen, **kwargs)
            if seen != Path(source) and "backbone" not in kwargs:
                pipe.backbone.config.name_or_path = os.path.join(source, "backbone")
            check_saved_parts(pipe, source, kwargs)
            pipe.register_to_config(_name_or_path=str(source))
            return pipe
        folder = cls.download(str(source), variant=kwargs.get("variant"), **hub_arguments)
        pipe = super().from_pretrained(folder, **kwargs)
        check_saved_parts(pipe, folder, kwargs)
        pipe.register_to_config(_name_or_path=str(source))
        if "backbone" not in kwargs:
            # Heads that are trained for this backbone must name the repository, not a folder of the local cache.
            pipe.backbone.config.name_or_path = str(source)
            pipe.backbone.config._commit_hash = hub.commit_of(folder)
        return pipe

    @classmethod
    def _from_backbone(
        cls,
        source: str | os.PathLike[str],
        config: dict[str, Any],
        subfolder: str | None,
        kwargs: dict[str, Any],
        hub_arguments: dict[str, Any],
    ) -> Self:
        adapter = adapter_class(config, str(source))
        kwargs = dict(kwargs)
        components = {name: kwargs.pop(name) for name in cls._get_signature_keys(cls)[0] if name in kwargs}
        dtype = kwargs.get("dtype")
        if isinstance(dtype, dict):
            kwargs["dtype"] = dtype.get("backbone", dtype.get("default", torch.float32))
        if subfolder:
            kwargs["subfolder"] = hub_arguments["subfolder"] = subfolder
        if components.get("tokenizer") is None:
            components["tokenizer"] = _load_tokenizer(source, hub_arguments)
        if components.get("backbone") is None:
            backbone, report = adapter.model_class.from_pretrained(source, **kwargs, output_loading_info=True)
            check_nothing_is_missing(report["missing_keys"], adapter.unused_parts, str(source))
            components["backbone"] = backbone.eval()
        pipe = cls(**components)
        pipe.register_to_config(_name_or_path=str(source))
        return pipe

    @classmethod
    def from_pipe(cls, pipeline: DiffusionPipeline, **kwargs: Any) -> Self:
        """Create a pipeline with the same components as another one; they are shared, not copied.

        Unlike Diffusers' own `from_pipe`, this does not change their dtype. (Diffusers casts to float32, which also
        changes the source pipeline and fails on a quantised backbone.)

        Args:
            pipeline: the other pipeline.
            kwargs: components to replace, and optionally `dtype` to cast to.

        Raises:
            ValueError: for a component that the pipeline does not have.

        Example:
            >>> plain = SpatialSpeculativePipeline.from_pipe(pipe, verifier=AutoregressiveVerifier())
        """
        _rename_torch_dtype(kwargs)
        dtype = kwargs.pop("dtype", None)
        names = cls._get_signature_keys(cls)[0]
        unknown = sorted(set(kwargs) - set(names))
        if unknown:
            known = ", ".join(sorted(names))
            raise ValueError(f"{cls.__name__} has no component {', '.join(unknown)}; it has {known}.")
        components = {name: pipeline.components[name] for name in names if name in pipeline.components}
        pipe = cls(**{**components, **kwargs})
        if "_name_or_path" in pipeline.config:
            pipe.register_to_config(_name_or_path=pipeline.config["_name_or_path"])
        pipe._share_heads_of(pipeline)
        return pipe.to(dtype) if dtype is not None else pipe

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        safe_serialization: bool = True,
        variant: str | None = None,
        max_shard_size: int | str | None = None,
        push_to_hub: bool = False,
        with_remote_code_shim: bool = False,
        **kwargs: Any,
    ) -> None:
        """Save all components, so that `from_pretrained` loads the folder. Only the active set of heads is saved.

        Args:
            save_directory: the folder to write.
            safe_serialization: pickles are neither read nor written here, so this must be True.
            variant, max_shard_size: as in Diffusers.
            push_to_hub: also publish the pipeline, under `repo_id` or by default the folder's name; takes the
                arguments of `push_to_hub`.
            with_remote_code_shim: add `pipeline.py` and one file per component of this package, each with one import,
                so that plain `DiffusionPipeline.from_pretrained(..., trust_remote_code=True)` can load the folder. It
                needs this package to be installed; this package's own loader never runs these files.

        Raises:
            ValueError: if `safe_serialization` is False.

        Example:
            >>> pipe.save_pretrained("folder", with_remote_code_shim=True)
            >>> pipe = DiffusionPipeline.from_pretrained("folder", trust_remote_code=True)
        """
        if not safe_serialization:
            raise ValueError(
                "`safe_serialization=False` would write pickles, which can't be loaded here: leave it True."
            )
        pushing = {name: kwargs.pop(name) for name in PUSH_ARGUMENTS if name in kwargs}
        super().save_pretrained(save_directory, variant=variant, max_shard_size=max_shard_size, **kwargs)
        if with_remote_code_shim:
            write_remote_code_shim(Path(save_directory))
        if push_to_hub:
            repo_id = pushing.pop("repo_id", None) or os.path.basename(os.path.normpath(save_directory))
            self.push_to_hub(repo_id, variant=variant, with_remote_code_shim=with_remote_code_shim, **pushing)

    def push_to_hub(
        self,
        repo_id: str,
        commit_message: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        create_pr: bool = False,
        variant: str | None = None,
        revision: str | None = None,
        license: str | None = None,
        with_remote_code_shim: bool = False,
    ) -> str:
        """Publish the whole pipeline, including the backbone, with a card. To publish only the heads: `save_ssd_heads`.

        Args:
            repo_id: user/name.
            commit_message, private, token, create_pr, variant: as in Diffusers.
            revision: a branch.
            license: licence of the weights; by default the one of the backbone's repository, if it came from one.
            with_remote_code_shim: see `save_pretrained`.

        Returns:
            the URL of the commit, or of the pull request.

        Raises:
            OSError: if the Hub refuses; the message is one sentence.
        """
        to = Destination(repo_id, private, revision, create_pr, commit_message, token)
        commit = push_pipeline(self, to, license=license, variant=variant, with_remote_code_shim=with_remote_code_shim)
        return commit.pr_url or commit.commit_url

    @classmethod
    def download(cls, pretrained_model_name: str, **kwargs: Any) -> str:
        """Download a saved pipeline from the Hub; called by `from_pretrained`.

        Diffusers' own `download` expects a Python file for every component of another library, so it rejects ours. No
        code from a repository is run here: the classes are those of the installed package.

        Args:
            pretrained_model_name: the Hub repository.
            kwargs: `variant`, `revision`, `token`, `cache_dir`, `local_files_only`, `force_download`.

        Returns:
            the local folder.
        """
        hub_arguments = {name: kwargs[name] for name in hub.HUB_ARGUMENTS if name in kwargs}
        return hub.download_pipeline(pretrained_model_name, variant=kwargs.get("variant"), **hub_arguments)


def _backbone_named_by(config: dict[str, Any], heads: str | os.PathLike[str]) -> str:
    """Return the backbone that the config of draft heads names."""
    base_model = config.get("base_model")
    if not base_model:
        raise ValueError(f"The draft heads in {heads} don't name their backbone: load it, and pass `heads=`.")
    reason = None if os.path.isdir(heads) else hub.local_path_reason(base_model)
    if reason is not None and not os.path.isdir(base_model):
        raise ValueError(
            f"The draft heads in {heads} name {base_model} as their backbone, which {reason}, not a repository: load "
            "the backbone from its folder, and pass `heads=`."
        )
    return base_model


def _load_tokenizer(source: str | os.PathLike[str], hub_arguments: dict[str, Any]) -> Any:
    try:
        return AutoTokenizer.from_pretrained(source, **hub_arguments, trust_remote_code=False)
    except (ValueError, ImportError, KeyError, AttributeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"{source} holds no tokenizer that loads ({reason}): add its files, or pass `tokenizer=`."
        ) from error


def _quantization_of(given: Any, kind: hub.RepoKind) -> Any:
    """Convert a quantisation config to the type that the loader of a saved pipeline or of a backbone expects."""
    for_pipeline = isinstance(given, PipelineQuantizationConfig)
    if kind == "pipeline":
        return given if for_pipeline else PipelineQuantizationConfig(quant_mapping={"backbone": given})
    return given._resolve_quant_config(is_diffusers=False, module_name="backbone") if for_pipeline else given


def _rename_torch_dtype(kwargs: dict[str, Any]) -> None:
    """Accept `torch_dtype`, Diffusers' older name of `dtype`, with a warning."""
    if "torch_dtype" not in kwargs:
        return
    if "dtype" in kwargs:
        raise ValueError("`dtype` and `torch_dtype` are the same setting: give `dtype` alone.")
    warnings.warn("`torch_dtype` is deprecated, use `dtype`.", FutureWarning, stacklevel=3)
    kwargs["dtype"] = kwargs.pop("torch_dtype")
