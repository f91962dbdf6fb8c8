"""The lowered engine and the export it came from, both run directly on ONNX Runtime: the two sides of a comparison."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime

POISON = 9.0


def session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


class LoweredEngine:
    """Feeds the engine as its contract says. Every cache starts as noise far larger than any activation.

    The kernel wants room for the padded chunk behind every slot's last token, so the memory has `slack` more rows than
    the context; they are never written.
    """

    def __init__(self, path: Path, *, slots: int, context: int, slack: int = 64) -> None:
        self._session = session(path)
        self._context, self._capacity = context, context + slack
        self._inputs = {value.name: value for value in self._session.get_inputs()}
        self._outputs = [value.name for value in self._session.get_outputs()]
        generator = np.random.default_rng(7)
        self.caches = {
            name: (generator.standard_normal((slots, value.shape[1], self._capacity, value.shape[3])) * POISON).astype(
                np.float32
            )
            for name, value in self._inputs.items()
            if re.fullmatch(r"past_key_values\.\d+\.(key|value)", name)
        }
        self.lengths = np.zeros(slots, np.int64)

    @property
    def input_names(self) -> set[str]:
        return set(self._inputs)

    def free(self, slot: int) -> None:
        self.lengths[slot] = 0

    def step(self, work: Mapping[int, Sequence[int]], **wrong: np.ndarray) -> np.ndarray:
        """Logits [len(work), vocab] of the last token of each slot in `work`, in its order. `wrong` overrides feeds."""
        used = max(work) + 1
        feeds = self._feeds(work, used) | wrong
        binding = self._session.io_binding()
        for name, array in feeds.items():
            if name in self._inputs:
                binding.bind_cpu_input(name, array)
        for name, array in self.caches.items():
            value = onnxruntime.OrtValue.ortvalue_from_numpy(array[:used])
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(name.replace("past_key_values", "present"), value)
        binding.bind_output("logits", "cpu")
        self._session.run_with_iobinding(binding)
        result: np.ndarray = binding.get_outputs()[-1].numpy()
        return result

    def _feeds(self, work: Mapping[int, Sequence[int]], used: int) -> dict[str, np.ndarray]:
        chunk, total = max(map(len, work.values())), sum(map(len, work.values()))
        ids, positions, unpack = (np.zeros(total, np.int64) for _ in range(3))
        pack = np.zeros((used, chunk), np.int64)
        lengths = np.zeros(used, np.int32)
        rows, place = [], 0
        for slot, tokens in work.items():
            count, places = len(tokens), np.arange(len(tokens))
            ids[place : place + count] = tokens
            positions[place : place + count] = self.lengths[slot] + places
            pack[slot, :count] = place + places
            unpack[place : place + count] = slot * chunk + places
            lengths[slot] = count
            self.lengths[slot] += count
            place += count
            rows.append(place - 1)
        assert self.lengths.max() <= self._context
        return {
            "input_ids": ids[None],
            "position_ids": positions[None],
            "pack_index": pack,
            "unpack_index": unpack,
            "query_lengths": lengths,
            "seqlens_k": np.maximum(self.lengths[:used] - 1, 0).astype(np.int32),
            "total_sequence_length": np.array(self._capacity, np.int32),
            "logits_index": np.array(rows, np.int64),
        }


class Export:
    """The export as its author meant it: one sequence, the whole history at once, no cache."""

    def __init__(self, path: Path) -> None:
        self._session = session(path)
        self._inputs = {value.name: value for value in self._session.get_inputs()}

    def logits(self, history: Sequence[int]) -> np.ndarray:
        """float32 [vocab] after the last token."""
        feeds = {
            "input_ids": np.array([history], np.int64),
            "attention_mask": np.ones((1, len(history)), np.int64),
            "position_ids": np.arange(len(history), dtype=np.int64)[None],
        }
        for name, value in self._inputs.items():
            if name.startswith("past_key_values."):
                feeds[name] = np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32)
        known = {name: array for name, array in feeds.items() if name in self._inputs}
        result: np.ndarray = self._session.run(["logits"], known)[0][0, -1]
        return result
