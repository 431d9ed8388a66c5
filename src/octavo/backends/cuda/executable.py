"""A program on the device, driven a step at a time."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace

import numpy as np
import torch

from octavo.backends.base import (
    Counters,
    Floats,
    Sample,
    SamplingRow,
    StepInput,
    Traced,
)
from octavo.backends.cuda.device import current, wait
from octavo.backends.cuda.drawn import DrawnTokens
from octavo.backends.cuda.graphs import Call, replay_on
from octavo.backends.cuda.inputs import StepSize, step_size
from octavo.backends.cuda.placed import Placed
from octavo.backends.cuda.sampling import Sampler
from octavo.errors import Unsupported
from octavo.program import Value


class CudaExecutable:
    """A loaded program with its KV cache."""

    adapters = None
    parts = 0  # none can be left out yet
    threads = 1

    def __init__(self, placed: Placed, kernels: str) -> None:
        launches = placed.memory.launches
        self.placed, self.kernels = placed, kernels
        self.limits = placed.memory.limits
        self.program = launches.program
        self.task, self.causal = self.program.task, self.program.causal
        self.pauses = launches.starts[1:]
        self._replay = replay_on(placed.device)
        self._sampler = Sampler(placed.drawn)
        self._calls: dict[StepSize, list[Call]] = {}
        self._size = StepSize(1, 1, 0)  # of the last step
        self._begun = self._steps = 0
        self._seconds = 0.0

    @property
    def operations(self) -> int:
        return self._begun

    @property
    def counters(self) -> Counters:
        return Counters(self._steps, self._seconds, {}, 0)

    def start_trace(self, spans: int) -> None:
        """Nothing yet: a profile has what Python does, and no operations of the device."""

    def take_trace(self) -> Traced:
        return Traced([], [], False)

    def calls(self, size: StepSize) -> list[Call]:
        """The launch list of a size, made once."""
        if size not in self._calls:
            self._calls[size] = self.placed.calls(size)
        return self._calls[size]

    def _send(self, step: StepInput) -> None:
        self._size = step_size(step)
        self.placed.block.send(step, self.causal)

    def step(self, step: StepInput) -> list[Sample]:
        begin = time.perf_counter()
        with current(self.placed.device):
            self._send(step)
            calls = self.calls(self._size)
            self._begun += len(calls)
            self._replay.run(self._size, calls)
            samples = self._sample(step.sampling)
        self._steps += 1
        self._seconds += time.perf_counter() - begin
        return samples

    def _sample(self, rows: list[SamplingRow]) -> list[Sample]:
        if not rows:
            wait(self.placed.device)
            return []
        return self._sampler.sample(self._result(self.program.output), rows)

    def run(self, step: StepInput, first: int, last: int) -> None:
        with current(self.placed.device):
            if first == 0:
                self._send(step)
            calls = self.calls(self._size)[first:last]
            self._begun += len(calls)
            for call in calls:
                call()
            wait(self.placed.device)

    def decode(
        self, step: StepInput, steps: int, ends: list[list[int]], brief: bool = False
    ) -> list[list[Sample]]:
        if steps > 1 and all(map(self._sampler.here, step.sampling)):
            return self._decode_here(step, steps, ends)
        rounds = [self.step(step)]
        for _ in range(steps - 1):
            drawn = [sample.token for sample in rounds[-1]]
            if any(t < 0 or t in stop for t, stop in zip(drawn, ends, strict=True)):
                break
            step = following(step, drawn)
            rounds.append(self.step(step))
        return rounds

    def _decode_here(
        self, step: StepInput, steps: int, ends: list[list[int]]
    ) -> list[list[Sample]]:
        """Steps that follow each other on the device. The host reads what one has drawn while the
        next one runs; what runs after an end is forgotten, and computed again if wanted."""
        begin, count = time.perf_counter(), len(step.ids)
        rounds: list[list[Sample]] = []
        with current(self.placed.device):
            self._send(step)
            calls = self.calls(self._size)
            draws = self._sampler.parameters(step.sampling)
            reading = DrawnTokens(steps, count, self.placed.device)
            for i in range(steps):
                self._begun += len(calls)
                self._replay.run(self._size, calls)
                drawn = self._sampler.draw(self._result(self.program.output)[:count], draws)
                reading.begin(i, drawn)
                self.placed.block.advance(drawn)
                if draws is not None:
                    draws.position.add_(1)
                if i and not self._keep(rounds, reading.end(i - 1), ends):
                    break
            else:
                self._keep(rounds, reading.end(steps - 1), ends)
            wait(self.placed.device)
        self._steps += len(rounds)
        self._seconds += time.perf_counter() - begin
        return rounds

    @staticmethod
    def _keep(rounds: list[list[Sample]], drawn: list[int], ends: list[list[int]]) -> bool:
        """Adds what a step has drawn; False if one of its ends is in it, or no token."""
        rounds.append([Sample(token, 0.0, [], []) for token in drawn])
        return not any(t < 0 or t in stop for t, stop in zip(drawn, ends, strict=True))

    def skip(self, parts: Collection[int]) -> None:
        if parts:
            raise Unsupported("leaving out parts of a model on this device")

    def _result(self, value: Value) -> torch.Tensor:
        return self.placed.view(self.placed.memory.launches.results[value.id], self._size)

    def _rows(self, value: Value, first: int, count: int) -> Floats:
        found: Floats = self._result(value)[first : first + count].cpu().numpy()
        return np.array(found)

    def logits(self, rows: int) -> Floats:
        return self._rows(self.program.output, 0, rows)

    def hidden(self, first: int, count: int) -> Floats:
        return self._rows(self.program.hidden, first, count)

    def tapped(self, tap: int, rows: int) -> Floats:
        return self._rows(self.program.taps[tap], 0, rows)

    def pack_pending(self) -> bool:
        return False

    def prefault_kv(self, reached: int, idle: bool) -> bool:
        return False

    def copy_block(self, source: int, target: int) -> None:
        self.placed.cache[target].copy_(self.placed.cache[source])


def following(step: StepInput, drawn: list[int]) -> StepInput:
    """The step after one of spans of one token each, with the tokens that it drew."""
    coordinates = None if step.coordinates is None else step.coordinates + 1
    return replace(
        step,
        ids=np.array(drawn, np.int32),
        positions=step.positions + 1,
        spans=[span._replace(position=span.position + 1) for span in step.spans],
        sampling=[row._replace(position=row.position + 1) for row in step.sampling],
        coordinates=coordinates,
    )
