"""Packed sequences and recurrent layers on them, as operators on padded sequences.

The data of a packed sequence is the selection of the padded sequence by the mask of valid steps, in time-major order.
A recurrent layer runs on the padded sequence. The final state of a sample is its output at its last valid step. An
additional input feature carries the cell state of an LSTM over padded steps: it closes the input gate and opens the
forget gate. The backward direction runs forward on a sequence whose valid steps are reversed.

Of the lengths, only the largest is a Python number in the trace. A call with another largest length is traced again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from autopart.tracing.dynamic.sized_calls import Read, largest
from autopart.tracing.python.concrete_constants import UNKNOWN, ConcreteConstants

_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_GATE = 1e4
"""Number whose sigmoid is exactly 1, and exactly 0 if it is negated, in every dtype."""


class _Steps(NamedTuple):
    """The valid steps of a padded sequence: `mask` [steps, samples], and the number of steps per sample."""

    mask: Tensor
    lengths: Tensor


class PackedSequences:
    """The packed sequences of one trace, looked up by the tensors of a `PackedSequence`."""

    def __init__(self, known: ConcreteConstants) -> None:
        self.known = known
        self._steps = WeakIdKeyDictionary()  # {batch_sizes: _Steps}
        self._padded = WeakIdKeyDictionary()  # {data of a packed sequence: padded sequence}

    def run(self, func: Callable[..., Any], args: tuple, read: Read) -> Any:
        """Return the result of a function of packed sequences; UNKNOWN for other functions."""
        name = getattr(func, "__name__", "")
        if name == "_pack_padded_sequence":
            return self._pack(read, *args)
        if name not in _RECURRENT | {"_pad_packed_sequence"} or not isinstance(args[1], Tensor):
            return UNKNOWN
        steps = self._steps.get(args[1])
        if steps is None:
            return UNKNOWN
        if name == "_pad_packed_sequence":
            return self._pad(args[0], steps, *args[2:])
        return self._recurrent(func, args[0], steps, *args[2:])

    def _pack(self, read: Read, source: Tensor, lengths: Tensor, batch_first: bool) -> Any:
        num_steps = read(largest, lengths)
        if num_steps is UNKNOWN:
            return UNKNOWN
        padded = (source.transpose(0, 1) if batch_first else source)[:num_steps]
        mask = _mask(lengths.to(padded.device), num_steps)
        batch_sizes = mask.sum(1).cpu()
        self.known.note((_batch_sizes, (lengths, num_steps), {}), [lengths], batch_sizes)
        self._steps[batch_sizes] = _Steps(mask, lengths)
        return self._data(padded, mask), batch_sizes

    def _data(self, padded: Tensor, mask: Tensor) -> Tensor:
        data = padded[mask]
        self._padded[data] = padded
        return data

    def _unpacked(self, data: Tensor, mask: Tensor) -> Tensor:
        if data in self._padded:
            padded: Tensor = self._padded[data]
            return padded
        return data.new_zeros(*mask.shape, *data.shape[1:]).index_put((mask,), data)

    def _pad(self, data: Tensor, steps: _Steps, batch_first: bool, padding: float, total: int) -> tuple[Tensor, Tensor]:
        padded = self._unpacked(data, steps.mask)
        valid = steps.mask.reshape(*steps.mask.shape, *[1] * (padded.dim() - 2))
        padded = padded.masked_fill(~valid, padding)
        missing = total - padded.size(0)
        if missing:
            padded = torch.cat([padded, padded.new_full((missing, *padded.shape[1:]), padding)])
        lengths = steps.lengths.clone()
        self.known.note((torch.clone, (steps.lengths,), {}), [steps.lengths], lengths)
        return padded.transpose(0, 1) if batch_first else padded, lengths

    def _recurrent(
        self, func: Callable[..., Any], data: Tensor, steps: _Steps, states: Any, weights: Sequence[Tensor],
        has_biases: bool, num_layers: int, dropout: float, training: bool, bidirectional: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        directions, mask = 1 + bidirectional, steps.mask
        per_cell = len(weights) // (num_layers * directions)
        is_lstm = func.__name__ == "lstm"
        firsts = list(states) if is_lstm else [states]
        padded, finals = self._unpacked(data, mask), list[tuple[Tensor, ...]]()
        for layer in range(num_layers):
            if layer and dropout and training:  # draw for the packed data, as torch does
                padded = self._unpacked(F.dropout(padded[mask], dropout, training), mask)
            outputs = []
            for direction in range(directions):
                cell = layer * directions + direction
                of_cell = list(weights[cell * per_cell : (cell + 1) * per_cell])
                initial = [first[cell : cell + 1] for first in firsts]
                source = _reversed(padded, steps) if direction else padded
                if is_lstm:
                    source, of_cell[0] = _carrying(source, of_cell[0], mask)
                results = func(
                    source, initial if is_lstm else initial[0], of_cell, has_biases, 1, 0.0, training, False, False
                )
                last = (steps.lengths.to(mask.device) - 1)[None, :, None].expand(1, -1, results[0].size(2))
                finals.append((results[0].gather(0, last), *results[2:]))
                outputs.append(_reversed(results[0], steps) if direction else results[0])
            padded = torch.cat(outputs, 2) if bidirectional else outputs[0]
        return self._data(padded, mask), *(torch.cat(parts) for parts in zip(*finals, strict=True))


def _mask(lengths: Tensor, num_steps: int) -> Tensor:
    return torch.arange(num_steps, device=lengths.device)[:, None] < lengths


def _batch_sizes(lengths: Tensor, num_steps: int) -> Tensor:
    return _mask(lengths, num_steps).sum(1)


def _reversed(padded: Tensor, steps: _Steps) -> Tensor:
    """Reverse the valid steps of every sample."""
    places = torch.arange(padded.size(0), device=padded.device)[:, None]
    places = (steps.lengths.to(padded.device) - 1 - places).clamp(min=0)
    return padded.gather(0, places[:, :, None].expand_as(padded))


def _carrying(source: Tensor, weight: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return an LSTM's input and input weight, extended by a feature that marks padded steps.

    In padded steps this feature closes the input gate and opens the forget gate, so that the cell state stays.
    """
    ones = weight.new_ones(weight.size(0) // 4, 1)  # gates: input, forget, cell, output
    column = torch.cat([-_GATE * ones, _GATE * ones, 0 * ones, 0 * ones])
    is_padding = mask.logical_not().to(source.dtype)[:, :, None]
    return torch.cat([source, is_padding], 2), torch.cat([weight, column], 1)
