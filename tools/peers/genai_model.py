"""Make onnxruntime-genai's own int4 model of an export's weights. usage: genai_model.py EXPORT TARGET

Writes the checkpoint that the export came from (its weights have the checkpoint's names) and calls the model builder
with its defaults for the CPU: int4, block 32, accuracy level 4. Runs in an environment of its own, with torch,
transformers and onnxruntime-genai.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx.numpy_helper import to_array
from safetensors.numpy import save_file

EMBEDDING = "model.embed_tokens.weight"
TEXT_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def write_checkpoint(export: Path, target: Path) -> None:
    """Linear weights lie [in, out] in an export and [out, in] in a checkpoint."""
    weights = {}
    for tensor in onnx.load(export / "model.onnx").graph.initializer:
        if tensor.name.startswith(("model.", "lm_head.")):
            array = to_array(tensor)
            is_linear = array.ndim == 2 and tensor.name != EMBEDDING
            weights[tensor.name] = np.ascontiguousarray(array.T if is_linear else array)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    for name in TEXT_FILES:
        shutil.copy(export / name, target)


def main() -> None:
    export, target = map(Path, sys.argv[1:])
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        checkpoint, built = Path(scratch, "checkpoint"), Path(scratch, "built")
        checkpoint.mkdir()
        write_checkpoint(export, checkpoint)
        builder = (sys.executable, "-m", "onnxruntime_genai.models.builder")
        options = ("-i", checkpoint, "-o", built, "-p", "int4", "-e", "cpu", "-c", Path(scratch, "cache"))
        subprocess.run([*builder, *options, "--extra_options", "int4_accuracy_level=4"], check=True)
        built.rename(target)


if __name__ == "__main__":
    main()
