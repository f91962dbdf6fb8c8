"""Encoders of text over any graph: pad, run, pool. Rows of a run are padded to its longest, on the right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from residentd.backend.graph import Array, Floats, Graph, GraphError
from residentd.backend.pooling import normalised, pool
from residentd.calls import TextRow
from residentd.models.encoder import Encoder


@dataclass(frozen=True, slots=True)
class EncoderModel:
    """One loaded encoder."""

    encoder: Encoder
    graph: Graph

    def vectors(self, rows: Sequence[TextRow]) -> Floats:
        """One float32 row a text, [rows, width]: embeddings, or logits. Raises GraphError and what the graph raises."""
        lengths = [len(row.ids) for row in rows]
        (output,) = self.graph.run(self._feeds(rows, max(lengths)), [self.encoder.output])
        found = pool(output, lengths, self.encoder.pooling) if self.encoder.pooling else output
        if found.size != len(rows) * self.encoder.width:
            raise GraphError(f"{found.shape} of {len(rows)} texts; {self.encoder.width:,} numbers each are expected")
        vectors = np.asarray(found, dtype=np.float32).reshape(len(rows), self.encoder.width)
        return normalised(vectors) if self.encoder.normalise else vectors

    def _feeds(self, rows: Sequence[TextRow], longest: int) -> dict[str, Array]:
        shape = (len(rows), longest)
        arrays = {
            "input_ids": np.full(shape, self.encoder.pad_id, np.int64),
            "attention_mask": np.zeros(shape, np.int64),
            "token_type_ids": np.zeros(shape, np.int64),
        }
        for index, row in enumerate(rows):
            count = len(row.ids)
            arrays["input_ids"][index, :count] = row.ids
            arrays["attention_mask"][index, :count] = 1
            if row.types:
                arrays["token_type_ids"][index, :count] = row.types
        if "position_ids" in self.encoder.inputs:
            arrays["position_ids"] = np.broadcast_to(np.arange(longest, dtype=np.int64), shape)
        return {name: arrays[name] for name in self.encoder.inputs}
