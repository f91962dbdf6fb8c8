"""onnxruntime-genai's logits of text. usage: genai_logits.py MODEL_DIR PASSAGES.json OUT

Reads each passage, a list of token ids, one token a step, and writes the logits after every token but the last: float32
[positions, vocab], one passage after the other. Its Generator appends to no more than one sequence at a time.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime_genai as og


def main() -> None:
    model_dir, passages_path, out = sys.argv[1:]
    config = og.Config(model_dir)
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": 1}}}}))
    model = og.Model(config)
    with Path(out).open("wb") as file:
        for passage in json.loads(Path(passages_path).read_text(encoding="utf-8")):
            params = og.GeneratorParams(model)
            params.set_search_options(max_length=len(passage))
            generator = og.Generator(model, params)
            for token in passage[:-1]:
                generator.append_tokens(np.array([token], np.int32))
                file.write(np.ascontiguousarray(generator.get_logits(), np.float32).data)


if __name__ == "__main__":
    main()
