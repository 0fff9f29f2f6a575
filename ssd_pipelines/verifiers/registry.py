"""The closed list of verifiers that a saved configuration can name."""

import os
from typing import Any

from ssd_pipelines.verifiers.autoregressive import AutoregressiveVerifier
from ssd_pipelines.verifiers.base import Verifier
from ssd_pipelines.verifiers.jacobi import JacobiVerifier
from ssd_pipelines.verifiers.spatial_draft import SpatialDraftVerifier
from ssd_pipelines.verifiers.wavefront import WavefrontVerifier


VERIFIERS: tuple[type[Verifier], ...] = (
    AutoregressiveVerifier,
    JacobiVerifier,
    SpatialDraftVerifier,
    WavefrontVerifier,
)


def verifier_from_config(config: dict[str, Any], source: str | os.PathLike[str]) -> Verifier:
    """The verifier that a `verifier_config.json` describes; only classes of this package are known.

    Raises:
        ValueError: naming the file, for another class or settings that the class refuses.
    """
    known = {verifier.__name__: verifier for verifier in VERIFIERS}
    name = config.get("_class_name")
    if name not in known:
        raise ValueError(
            f"The {Verifier.config_name} of {source} is of class {name!r}, this release knows "
            f"{', '.join(sorted(known))}: upgrade ssd-pipelines, or remove the file."
        )
    try:
        return known[name].from_config(config)
    except (ValueError, TypeError) as error:
        raise ValueError(f"The {Verifier.config_name} of {source} can't be used: {error}") from error
