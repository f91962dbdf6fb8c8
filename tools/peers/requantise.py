"""Write a GGUF file's weights again in another format. usage: requantise.py IN.gguf OUT.gguf Q4_0|Q8_0

Every matrix goes to the format, except that for Q4_0 the tied embedding stays at Q8_0, as in the file it came from.
"""

from __future__ import annotations

import sys

import gguf
from gguf.quants import dequantize, quantize

EMBEDDING = "token_embd.weight"


def main() -> None:
    source, target, kind = sys.argv[1:]
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in {"general.architecture", "general.file_type"}:
            continue
        value_type = field.types[0]
        sub_type = field.types[-1] if value_type == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), value_type, sub_type=sub_type)
    wanted = gguf.GGMLQuantizationType[kind]
    for tensor in reader.tensors:
        weights = dequantize(tensor.data, tensor.tensor_type)
        if tensor.tensor_type == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(tensor.name, weights)
            continue
        tensor_kind = gguf.GGMLQuantizationType.Q8_0 if tensor.name == EMBEDDING else wanted
        writer.add_tensor(tensor.name, quantize(weights, tensor_kind), raw_dtype=tensor_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
