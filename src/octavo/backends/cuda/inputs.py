"""A step's inputs as one block of numbers, which goes to the device in one copy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from octavo.backends.base import BLOCK, Ints, StepInput
from octavo.backends.cuda.constants import padded, up
from octavo.backends.cuda.formats import Array
from octavo.backends.cuda.memory import ALIGNED, SEGMENT
from octavo.backends.cuda.pack import allocate
from octavo.backends.cuda.tensors import StepRows
from octavo.errors import RequestError


class StepBlock:
    """The block on the host (pinned, for a GPU) and on the device, and its arrays by name.

    Block tables come last, so that a step copies only what it has of them.
    """

    def __init__(self, arrays: dict[str, Array], embeddings: Array, device: torch.device) -> None:
        pinned = device.type == "cuda"
        places, at = {}, 0
        for name, array in arrays.items():
            count = array.nbytes // 4
            places[name] = slice(at, at + count)
            at += up(count, ALIGNED)
        self._host = torch.zeros(at, dtype=torch.int32, pin_memory=pinned)
        self._device = torch.zeros(at, dtype=torch.int32, device=device)
        self.embeddings = allocate(embeddings, device)
        self._given = torch.zeros(embeddings.shape, pin_memory=pinned)
        numbers = self._host.numpy()
        self._arrays = {n: numbers[p].reshape(arrays[n].shape) for n, p in places.items()}
        self._views = {n: self._device[p].view(arrays[n].shape) for n, p in places.items()}
        self._tables = places["tables"].start

    @property
    def memory(self) -> list[torch.Tensor]:
        """What it takes on the device."""
        return [self._device, self.embeddings]

    def rows(self, tokens: int) -> StepRows:
        """The arrays of a step of so many padded rows."""
        v = self._views
        own = {n: v[n][:tokens] for n in StepRows._fields if n not in ("coordinates", "tables")}
        return StepRows(**own, coordinates=v["coordinates"][:, :tokens], tables=v["tables"])

    def segment_rows(self, tokens: int) -> StepRows:
        """Likewise, where each row sees its segment alone."""
        first, last = (self._views[name][:tokens] for name in SEGMENT)
        return self.rows(tokens)._replace(first=first, last=last)

    def select(self, count: int) -> torch.Tensor:
        return self._views["select"][:count]

    def pairs(self, count: int) -> torch.Tensor:
        return self._views["pairs"][:count]

    def send(self, step: StepInput, causal: bool) -> None:
        """Writes a step and copies it. Raises RequestError for more KV
        writes than rows of the largest step."""
        a, count = self._arrays, len(step.ids)
        for name in a.keys() - {"coordinates", "tables"}:
            a[name].fill(-1 if name in ("key", "given", "pairs") else 0)
        a["ids"][:count], a["positions"][:count] = step.ids, step.positions
        a["types"][: len(step.token_type_ids)] = step.token_type_ids
        a["coordinates"][:, :count] = (
            step.positions if step.coordinates is None else step.coordinates
        )
        a["select"][: len(step.logits_indices)] = step.logits_indices
        a["tables"][: len(step.block_tables)] = step.block_tables
        self._spans(step, causal)
        if step.kv_writes is not None:
            self._pairs(step, step.kv_writes)
        if step.embeddings is not None and step.embedding_rows is not None:
            given = torch.from_numpy(np.ascontiguousarray(step.embeddings, np.float32))
            a["given"][step.embedding_rows] = np.arange(len(given))
            self._given[: len(given), : given.shape[1]] = given
            self.embeddings[: len(given)].copy_(self._given[: len(given)], non_blocking=True)
        used = self._tables + len(step.block_tables)
        self._device[:used].copy_(self._host[:used], non_blocking=True)

    def advance(self, drawn: torch.Tensor) -> None:
        """Makes the step that follows one of a token for each of several sequences, on the device:
        of the tokens that were drawn."""
        count = len(drawn)
        self._views["ids"][:count] = drawn
        for name in ("positions", "key", "last"):
            self._views[name][:count] += 1
        self._views["coordinates"][:, :count] += 1

    def _spans(self, step: StepInput, causal: bool) -> None:
        """Where rows lie in the cache, and what they see there."""
        a = self._arrays
        for span in step.spans:
            if span.adapter >= 0:
                raise RequestError("LoRA adapters are not supported on this device yet")
            own = slice(span.first, span.first + span.length)
            key = np.arange(span.position, span.position + span.length, dtype=np.int32)
            a["table"][own], a["key"][own] = span.table, key
            if causal:
                reach = 0 if step.reach is None else step.reach[own]
                a["last"][own] = key + 1 + reach
                continue
            a["first"][own], a["last"][own] = span.position, span.position + span.length
            if step.segments is not None and "segment_first" in a:
                segments = step.segments[own]
                first, last = (np.searchsorted(segments, segments, s) for s in ("left", "right"))
                a["segment_first"][own] = span.position + first
                a["segment_last"][own] = span.position + last

    def _pairs(self, step: StepInput, writes: Ints) -> None:
        """Places of rows whose keys and values are stored twice, and the second places."""
        a = self._arrays
        if len(writes) > len(a["pairs"]):
            raise RequestError(f"{len(writes)} KV writes in one step, of {len(a['pairs'])} at most")
        rows, tables = writes.T
        key = a["key"][rows]

        def slot(table: Ints) -> Ints:
            return np.asarray(a["tables"][table + key // BLOCK] * BLOCK + key % BLOCK, np.int32)

        a["pairs"][: len(writes), 0] = slot(a["table"][rows])
        a["pairs"][: len(writes), 1] = slot(tables)


class StepSize(NamedTuple):
    """What the launches of a step depend on: padded rows, selected rows and KV writes."""

    rows: int
    selected: int
    pairs: int


def step_size(step: StepInput) -> StepSize:
    """What a step is computed with."""
    writes = 0 if step.kv_writes is None else len(step.kv_writes)
    rows, selected = padded(len(step.ids)), padded(max(1, len(step.logits_indices)))
    return StepSize(rows, selected, padded(writes) if writes else 0)
