"""Loading a pipeline: from a backbone, from draft heads that name theirs, a saved pipeline, or another one."""

import os
import warnings
from typing import Any, Self

import torch
from diffusers import DiffusionPipeline, PipelineQuantizationConfig
from transformers import AutoTokenizer

from ssd_pipelines import hub
from ssd_pipelines.backbones import adapter_class
from ssd_pipelines.heads import SpatialDraftHeads


class PipelineLoaderMixin(DiffusionPipeline):
    """Gives a pipeline with a backbone and heads its `from_pretrained`, `from_pipe` and `download`."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any) -> Self:
        """Load from a backbone's repository, a head repository that names its backbone, or a saved pipeline.

        Args:
            pretrained_model_name_or_path: a Hub repository or a folder of any of the three kinds.
            kwargs:
                `heads`: a head repository, a folder, heads in memory, or `None` for none at all.
                `verifier`: a verifier to use instead of the saved or default one.
                `dtype`, `device_map`, `quantization_config`, `variant`, `revision`, `token`, `cache_dir`,
                `local_files_only`, `force_download` and all else: as in Diffusers and transformers.

        Raises:
            ValueError: for a model of an unknown family, or heads of another backbone; nothing is half-loaded.

        Example:
            >>> pipe = SpatialSpeculativePipeline.from_pretrained(
            ...     "deepseek-community/Janus-Pro-7B", heads="user/ssd-janus-pro-7b", dtype=torch.bfloat16
            ... ).to("cuda")
        """
        _rename_torch_dtype(kwargs)
        for name in ("trust_remote_code", "custom_pipeline"):
            if kwargs.pop(name, None):
                raise ValueError(f"`{name}` was given, but no code of a repository is ever run here: leave it out.")
        kwargs["use_safetensors"] = True
        source = pretrained_model_name_or_path
        hub_arguments = {name: kwargs[name] for name in hub.HUB_ARGUMENTS if name in kwargs}
        kind, config = hub.repo_kind(source, **hub_arguments)

        if kind == "heads":
            if not config.get("base_model"):
                raise ValueError(f"The draft heads in {source} don't name their backbone: load it, and pass `heads=`.")
            kwargs.setdefault("heads", source)
            kwargs["revision"] = config.get("base_model_revision")
            source, kind = config["base_model"], "backbone"
            config = hub.repo_kind(source, **{**hub_arguments, "revision": kwargs["revision"]})[1]

        if kwargs.get("quantization_config") is not None:
            kwargs["quantization_config"] = _quantization_of(kwargs["quantization_config"], kind)

        dtype = kwargs.get("dtype")
        heads = kwargs.get("heads")
        if isinstance(heads, str | os.PathLike):
            heads_dtype = dtype.get("heads", dtype.get("default")) if isinstance(dtype, dict) else dtype
            # A revision names a commit of the backbone's repository, not of the heads'.
            elsewhere = {name: value for name, value in hub_arguments.items() if name != "revision"}
            kwargs["heads"] = SpatialDraftHeads.from_pretrained(heads, dtype=heads_dtype, **elsewhere)
        if kind == "pipeline":
            return super().from_pretrained(source, **kwargs)

        model_class = adapter_class(config, str(source)).model_class
        components = {name: kwargs.pop(name) for name in ("heads", "verifier") if name in kwargs}
        if isinstance(dtype, dict):
            kwargs["dtype"] = dtype.get("backbone", dtype.get("default", torch.float32))
        tokenizer = AutoTokenizer.from_pretrained(source, **hub_arguments, trust_remote_code=False)
        backbone = model_class.from_pretrained(source, **kwargs).eval()
        pipe = cls(backbone, tokenizer, **components)
        pipe.register_to_config(_name_or_path=str(source))
        if pipe.heads is not None and "device_map" in kwargs:
            pipe.heads.to(backbone.device)
        return pipe

    @classmethod
    def from_pipe(cls, pipeline: DiffusionPipeline, **kwargs: Any) -> Self:
        """A pipeline around the same components in memory.

        Unlike Diffusers' own, it leaves their dtype as it is (that one casts to float32, which also changes the source
        and fails on a quantised backbone).

        Args:
            kwargs: components to replace, and optionally `dtype` to cast to.

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
        return pipe.to(dtype) if dtype is not None else pipe

    @classmethod
    def download(cls, pretrained_model_name: str, **kwargs: Any) -> str:
        """Fetch a saved pipeline from the Hub; called by `from_pretrained`.

        Diffusers' own `download` looks for a Python file for every component of another library and refuses ours. No
        code of a repository is run here: its classes are those of the installed package.
        """
        hub_arguments = {name: kwargs[name] for name in hub.HUB_ARGUMENTS if name in kwargs}
        return hub.download_pipeline(pretrained_model_name, variant=kwargs.get("variant"), **hub_arguments)


def _quantization_of(given: Any, kind: hub.RepoKind) -> Any:
    """A quantisation config as the loader of a saved pipeline, or of a backbone alone, wants it; both may be given."""
    for_pipeline = isinstance(given, PipelineQuantizationConfig)
    if kind == "pipeline":
        return given if for_pipeline else PipelineQuantizationConfig(quant_mapping={"backbone": given})
    return given._resolve_quant_config(is_diffusers=False, module_name="backbone") if for_pipeline else given


def _rename_torch_dtype(kwargs: dict[str, Any]) -> None:
    """Take Diffusers' older name of `dtype`, with a warning."""
    if "torch_dtype" not in kwargs:
        return
    if "dtype" in kwargs:
        raise ValueError("`dtype` and `torch_dtype` are the same setting: give `dtype` alone.")
    warnings.warn("`torch_dtype` is deprecated, use `dtype`.", FutureWarning, stacklevel=3)
    kwargs["dtype"] = kwargs.pop("torch_dtype")
