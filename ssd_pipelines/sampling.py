"""Classifier-free guidance, filtering and sampling: all functions that turn logits into distributions or tokens.

A distribution is a `float32` tensor of probabilities whose last dimension is the image vocabulary. The order of
operations is fixed: guidance, temperature, top-k, top-p. The logits of the draft heads are processed in the same way as
those of the backbone, so that acceptance compares distributions that are filtered equally.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real

import torch


Generators = torch.Generator | Sequence[torch.Generator] | None


@dataclass(frozen=True)
class SamplingSettings:
    """How logits become a distribution.

    Args:
        temperature: 0 is argmax, 1 leaves the model's distribution unchanged.
        top_k: keep the k most likely codes; 0 keeps all.
        top_p: keep the smallest set of most likely codes whose total probability reaches `top_p`; 1 keeps all.

    Raises:
        ValueError: if a value is outside of its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.temperature, Real) or not self.temperature >= 0:
            raise ValueError(f"`temperature` must be 0 (argmax) or positive, got {self.temperature!r}.")
        if not isinstance(self.top_k, Integral) or isinstance(self.top_k, bool) or self.top_k < 0:
            raise ValueError(f"`top_k` must be 0 (keep all codes) or a positive whole number, got {self.top_k!r}.")
        if not isinstance(self.top_p, Real) or not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p` must lie in (0, 1], where 1 keeps all codes, got {self.top_p!r}.")


def guide(logits: torch.Tensor, guidance_scale: float) -> torch.Tensor:
    """Classifier-free guidance in float32: `uncond + scale * (cond - uncond)`.

    Args:
        logits: `(2 * batch, ..., vocabulary)`, the conditional half first.
        guidance_scale: 1 returns the conditional half.

    Returns:
        `float32` tensor `(batch, ..., vocabulary)`.
    """
    conditional, unconditional = logits.float().chunk(2)
    return torch.lerp(unconditional, conditional, guidance_scale)


def filtered(logits: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
    """Apply temperature, top-k and top-p to logits.

    Args:
        logits: `(..., vocabulary)`.
        settings: temperature and filters.

    Returns:
        `float32` logits of the same shape, whose softmax is the distribution. Excluded codes are minus infinity;
        temperature 0 excludes all but the most likely code.
    """
    logits = logits.float()
    if settings.temperature == 0:
        others = torch.nn.functional.one_hot(likeliest(logits), logits.shape[-1]) == 0
        return torch.zeros_like(logits).masked_fill_(others, -torch.inf)
    if settings.temperature != 1:
        # The maximum is subtracted first so that a temperature of 1e-8 doesn't overflow to inf - inf.
        logits = (logits - logits.amax(-1, keepdim=True)) / settings.temperature
    if 0 < settings.top_k < logits.shape[-1]:
        smallest_kept = logits.topk(settings.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < smallest_kept, -torch.inf)
    if settings.top_p < 1:
        if logits.device.type == "cpu":
            # Sorting is expensive, and most distributions of a confident model don't need it: their most likely code
            # alone reaches `top_p`. The host reads values here; on other devices it would have to wait for them.
            rows = logits.reshape(-1, logits.shape[-1])
            chances = rows.softmax(-1)
            most = chances.amax(-1, keepdim=True)
            narrowed = rows.masked_fill(chances < most, -torch.inf)
            # Only one code can have a probability above one half, so there are no ties.
            wide = (most < max(settings.top_p, 0.51)).nonzero()[:, 0]
            if len(wide):
                narrowed[wide] = _nucleus(rows[wide], settings.top_p)
            return narrowed.view_as(logits)
        logits = _nucleus(logits, settings.top_p)
    return logits


def _nucleus(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Exclude all codes but the smallest set of most likely ones whose total probability reaches `top_p`."""
    ordered, order = logits.softmax(-1).sort(-1, descending=True)
    # A code is kept if the codes before it don't reach `top_p`, so the most likely code is always kept.
    dropped = ordered.cumsum(-1) - ordered >= top_p
    return logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -torch.inf)


def shape(logits: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
    """Apply temperature, top-k and top-p: `(..., vocabulary)` logits to `float32` probabilities of the same shape."""
    return filtered(logits, settings).softmax(-1)


def draw_coupled(logits: torch.Tensor, noise: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
    """Draw `argmax(filtered(logits, settings) + noise)`, in most cases without the sort that top-p needs.

    Args:
        logits: `(..., vocabulary)`, guided but not filtered.
        noise: Gumbel noise of the same shape, see `CoupledNoise`.
        settings: temperature and filters.

    Returns:
        `int64` tensor `(...)`.
    """
    if settings.temperature == 0:
        return likeliest(logits)
    if settings.top_p == 1 or logits.device.type != "cpu":
        return likeliest(filtered(logits, settings) + noise)
    # The most likely code is in the nucleus: if it is drawn from all codes, it is drawn from the nucleus too. The host
    # reads here which rows drew another code; on other devices it would have to wait for them.
    among_all = filtered(logits, replace(settings, top_p=1.0))
    drawn = likeliest(among_all + noise)
    others = (among_all.gather(-1, drawn[..., None]).squeeze(-1) < among_all.amax(-1)).nonzero(as_tuple=True)
    if not len(others[0]):
        return drawn
    # A code is also in the nucleus if the more likely codes don't reach `top_p`. Ties and rounding make this uncertain.
    chances = among_all[others].softmax(-1)
    own = chances.gather(-1, drawn[others][:, None])
    before = chances.masked_fill_(chances < own, 0.0).sum(-1) - own.squeeze(-1)
    doubtful = before >= settings.top_p - 1e-4
    others = tuple(at[doubtful] for at in others)
    if len(others[0]):
        drawn[others] = likeliest(_nucleus(among_all[others], settings.top_p) + noise[others])
    return drawn


def likeliest(values: torch.Tensor) -> torch.Tensor:
    """`values.argmax(-1)` of `(..., vocabulary)`, the first one in case of ties: `int64 (...)`."""
    if values.device.type != "cpu":
        return values.argmax(-1)
    # NumPy's argmax is vectorised and takes an eighth of the time for 64 rows of 512. NumPy has no bfloat16.
    return torch.as_tensor(values.float().numpy(force=True).argmax(-1))


def sample(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw by inverting the cumulative distribution, with one uniform number per draw.

    Args:
        probabilities: `(..., vocabulary)`, not necessarily normalised, at least one entry positive.
        uniforms: `(...)` in [0, 1).

    Returns:
        `int64` tensor `(...)`; a code of probability zero is never drawn.
    """
    cumulative = probabilities.double().cumsum(-1)
    total = cumulative[..., -1:]
    # Rounding can raise u * total to total itself, past the last positive entry: stay one step below it.
    targets = torch.minimum(uniforms[..., None].double() * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, targets, right=True).squeeze(-1)


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """`max(0, p - q)`, not normalised: the weights to resample a rejected token (Leviathan et al., arXiv 2211.17192).

    Where p equals q, only rounding can cause a rejection. The residual is p itself there, so it is never all zero.
    """
    difference = (p - q).clamp_min_(0)
    return torch.where(difference.sum(-1, keepdim=True) > 0, difference, p)


def accept_or_resample(
    tokens: torch.Tensor, p: torch.Tensor, q: torch.Tensor, uniforms: torch.Tensor, near: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep each token with probability `min(1, p / q)`, else resample it from the residual, each independently.

    If `tokens` were drawn from `q`, the result is distributed as `p`.

    Args:
        tokens: `int64` `(batch, n)`.
        p, q: `float32` `(batch, n, vocabulary)`: the target distribution, and the one that `tokens` were drawn from.
        uniforms: `(2, batch, n)` in [0, 1): the first is for acceptance, the second for resampling.
        near: `int64 (vocabulary, k)`: accept a code with the total probability of all codes in its row instead. The
            result no longer follows `p` (LANTERN, arXiv 2410.03355, and GSD).

    Returns:
        the tokens `(batch, n)` and the `bool` mask `(batch, n)` of those that were kept.
    """
    group = tokens[..., None] if near is None else near[tokens]
    p_token, q_token = p.gather(-1, group).sum(-1), q.gather(-1, group).sum(-1)
    accepted = uniforms[0] * q_token < p_token  # u < p / q without dividing by a q of zero
    return torch.where(accepted, tokens, sample(residual(p, q), uniforms[1])), accepted


def nearest_codes(embeddings: torch.Tensor, number: int) -> torch.Tensor:
    """For each code, the code itself and the `number` codes with the nearest embeddings.

    Args:
        embeddings: `(vocabulary, width)`.
        number: neighbours per code.

    Returns:
        `int64 (vocabulary, number + 1)`.
    """
    distances = torch.cdist(embeddings.float(), embeddings.float()).fill_diagonal_(-1.0)
    return distances.topk(min(number + 1, len(embeddings)), largest=False).indices


def draw_uniforms(
    shape: tuple[int, ...], batch_size: int, generators: Generators, device: torch.device | str
) -> torch.Tensor:
    """Uniform numbers in [0, 1), drawn on each generator's own device.

    With a list of generators, picture k takes its numbers from generator k only, so its draws don't depend on the rest
    of the batch. A CPU generator works with a model on any device.

    Returns:
        `float32` tensor `(batch_size, *shape)` on `device`.
    """
    if isinstance(generators, Sequence):
        rows = [torch.rand(shape, generator=g, device=g.device) for g in generators]
        return torch.stack([row.to(device) for row in rows])
    source = generators.device if generators is not None else device
    return torch.rand((batch_size, *shape), generator=generators, device=source).to(device)


def draw_seeds(batch_size: int, generators: Generators) -> list[int]:
    """One seed per picture, each from its own generator; a single generator gives all of them, one after another."""
    rows = list(generators) if isinstance(generators, Sequence) else [generators] * batch_size
    return [
        int(torch.randint(2**62, (), generator=g, device="cpu" if g is None else g.device, dtype=torch.int64))
        for g in rows
    ]


class CoupledNoise:
    """Gumbel noise for each picture and sequence position, the same at every request.

    A code drawn as `argmax(logits + noise)` follows the softmax of the logits. Drawing again from similar logits with
    the same noise mostly gives the same code, so draft tokens, verification rounds and autoregressive decoding differ
    only as far as their logits do. The noise is generated per row of the grid from (picture's seed, row), because the
    noise of a whole Emu3 grid takes 1 GB. Rows in use are kept.

    Args:
        seeds: one per picture, see `draw_seeds`.
        stride: sequence positions per row.
        vocabulary: number of image codes.
        device: where the noise is needed. It is generated on the CPU, so that it is the same on every device.

    Source: shared Gumbel noise as in MC-SJD (arXiv 2510.24211).
    """

    def __init__(self, seeds: Sequence[int], stride: int, vocabulary: int, device: torch.device | str) -> None:
        self._seeds, self._stride, self._vocabulary, self._device = seeds, stride, vocabulary, device
        self._rows: dict[int, torch.Tensor] = {}

    def between(self, start: int, stop: int) -> torch.Tensor:
        """Noise of positions `start` to `stop`, `float32 (batch, stop - start, vocabulary)`."""
        first, last = start // self._stride, (stop - 1) // self._stride
        rows = [self._row(row) for row in range(first, last + 1)]
        joined = rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)
        return joined[:, start - first * self._stride : stop - first * self._stride]

    def at(self, pictures: torch.Tensor, positions: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Noise of pictures `(n,)` at positions `int64 (n, k)` from `start` to `stop`: `(n, k, vocabulary)`."""
        return self.between(start, stop)[pictures[:, None], positions - start]

    def forget(self, before: int) -> None:
        """Free the rows that end before a position; they are not needed any more."""
        for row in [row for row in self._rows if (row + 1) * self._stride <= before]:
            del self._rows[row]

    def _row(self, row: int) -> torch.Tensor:
        if row not in self._rows:
            pictures = []
            for seed in self._seeds:
                # Consecutive rows of a picture, and pictures with consecutive seeds, get very different seeds.
                generator = torch.Generator().manual_seed((seed ^ (row * 0x9E3779B97F4A7C15)) % 2**63)
                pictures.append(torch.empty(self._stride, self._vocabulary).exponential_(generator=generator))
            self._rows[row] = torch.stack(pictures).log_().neg_().to(self._device)
        return self._rows[row]
