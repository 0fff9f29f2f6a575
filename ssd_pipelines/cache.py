"""The KV cache that decoding writes and rolls back; the only module that touches transformers' `Cache`.

A pass feeds draft tokens, and the next pass feeds their corrections to the same positions, so the cache is rolled back
once per pass. Here a rollback only changes an integer: keys and values lie in buffers that are allocated once for the
whole picture. Transformers' `DynamicCache` would concatenate, and so copy, everything in each pass (2 GB per pass for
Emu3 at 8,000 positions), and its `crop` has had three different meanings within transformers 5.

The pictures of a batch progress at different speeds, and some decoders fill the grid out of order. Such a pass chooses
the cache slots that it writes to. A position always has the same slot, and an explicit mask says what it attends to.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer


class _PreallocatedLayer(DynamicLayer):
    """One layer's keys and values in buffers of fixed capacity; `keys` and `values` are views of the part in use."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0
        self.slots: torch.Tensor | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        # The shape is heads x width; keys and values can differ in width.
        self._key_buffer, self._value_buffer = (
            # Zeros: a masked slot has attention weight 0, but 0 times uninitialised memory can be NaN.
            states.new_zeros((*states.shape[:2], self.capacity, states.shape[3]))
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.slots is not None:
            rows = torch.arange(key_states.shape[0], device=key_states.device)[:, None]
            self._key_buffer[rows, :, self.slots] = key_states.transpose(1, 2)
            self._value_buffer[rows, :, self.slots] = value_states.transpose(1, 2)
            return self.keys, self.values
        start, stop = self.length, self.length + key_states.shape[2]
        if stop > self.capacity:
            raise ValueError(f"The cache holds {self.capacity} positions, but the pass would write up to {stop}.")
        self._key_buffer[:, :, start:stop] = key_states
        self._value_buffer[:, :, start:stop] = value_states
        self._use(stop)
        return self.keys, self.values

    def _use(self, length: int) -> None:
        self.length = length
        self.keys = self._key_buffer[:, :, :length]
        self.values = self._value_buffer[:, :, :length]

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.capacity

    get_max_cache_shape = get_max_length  # its name up to transformers 5.22


class DecodingCache:
    """A KV cache of fixed capacity that is rolled back without copying.

    Args:
        config: the text config of the backbone.
        capacity: prompt positions plus sequence positions of the token grid.

    Raises:
        ValueError: if a layer of the backbone doesn't keep all past positions (sliding window, linear attention). A
            position that was overwritten there can't be restored.

    Example:
        >>> cache = DecodingCache(model.config.get_text_config(), capacity=600)
        >>> model.model.language_model(inputs_embeds=drafts, **cache.argument(model.model.language_model))
        >>> cache.truncate(24)
    """

    def __init__(self, config: Any, capacity: int) -> None:
        layer_types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        others = sorted(set(layer_types) - {"full_attention"})
        if others:
            raise ValueError(
                f"This backbone has layers of type {', '.join(others)}, whose cache can't be rolled back; speculative "
                "decoding needs full attention in every layer."
            )
        self._layers = [_PreallocatedLayer(capacity) for _ in layer_types]
        self._cache = Cache(layers=self._layers)
        self.capacity = capacity

    def __len__(self) -> int:
        return self._layers[0].length

    def argument(self, module: torch.nn.Module) -> dict[str, Cache]:
        """The keyword argument that passes this cache to `module`, named as this version of transformers expects."""
        return {_cache_argument_name(type(module).forward): self._cache}

    def truncate(self, length: int) -> None:
        """Discard all positions from `length` on.

        Raises:
            ValueError: if `length` is negative or more than the cache holds.
        """
        if not 0 <= length <= len(self):
            raise ValueError(f"Can't truncate a cache of {len(self)} positions to {length}.")
        if length < len(self):
            for layer in self._layers:
                layer._use(length)

    @contextmanager
    def writing_to(self, slots: torch.Tensor, length: int) -> Iterator[None]:
        """Context manager in which a pass writes to the given slots instead of appending to the cache.

        Args:
            slots: `int64 (batch, n)`, where n is the number of positions that the pass feeds.
            length: the length of the cache during and after the pass.

        Raises:
            ValueError: if `length` exceeds the capacity, or nothing was written yet.
        """
        if length > self.capacity or not len(self):
            raise ValueError(f"Can't write up to {length}: the cache holds {self.capacity} and has {len(self)} in use.")
        for layer in self._layers:
            layer.slots = slots
            layer._use(length)
        try:
            yield
        finally:
            for layer in self._layers:
                layer.slots = None


@lru_cache
def _cache_argument_name(forward: Callable[..., Any]) -> str:
    """`past_key_values` was renamed to `cache` between transformers 5.22 and 5.24; the signature shows which it is."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"
