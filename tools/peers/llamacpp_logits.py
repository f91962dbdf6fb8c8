"""llama.cpp's logits of text, from the xllamacpp wheel. usage: llamacpp_logits.py MODEL.gguf PASSAGES.json OUT

Reads each passage, a list of token ids, one token a step, and writes the logits after every token but the last: float32
[positions, vocab], one passage after the other. The wheel's own classes give no logits but through JSON; its library
has llama.cpp's C interface, whose context defaults (KV cache, attention, repacked weights) are the server's as well.

One token a step needs no field of llama.cpp's structures: they pass through as they came, so a newer wheel may lay them
out otherwise. It gives what 8 passages in flight give, to the bit (Q4_0, Q4_1, Q8_0: 2026-12).
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import xllamacpp


class Opaque(ctypes.Structure):
    """A structure passed by value, larger than any of them: it goes through memory, and only its own part is read."""

    _fields_ = (("words", ctypes.c_uint64 * 256),)


POINTER, INT = ctypes.c_void_p, ctypes.c_int32
FUNCTIONS = {  # name: (result, arguments)
    "llama_backend_init": (None, ()),
    "llama_model_default_params": (Opaque, ()),
    "llama_model_load_from_file": (POINTER, (ctypes.c_char_p, Opaque)),
    "llama_model_get_vocab": (POINTER, (POINTER,)),
    "llama_vocab_n_tokens": (INT, (POINTER,)),
    "llama_context_default_params": (Opaque, ()),
    "llama_init_from_model": (POINTER, (POINTER, Opaque)),
    "llama_n_ctx": (INT, (POINTER,)),
    "llama_set_n_threads": (None, (POINTER, INT, INT)),
    "llama_get_memory": (POINTER, (POINTER,)),
    "llama_memory_clear": (None, (POINTER, ctypes.c_bool)),
    "llama_batch_get_one": (Opaque, (POINTER, INT)),
    "llama_decode": (INT, (POINTER, Opaque)),
    "llama_get_logits": (POINTER, (POINTER,)),
}


def library() -> ctypes.CDLL:
    found = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


class Model:
    def __init__(self, path: str) -> None:
        self._llama = library()
        self._llama.llama_backend_init()
        model = self._llama.llama_model_load_from_file(path.encode(), self._llama.llama_model_default_params())
        if not model:
            sys.exit(f"llama.cpp cannot load {path}")
        self._vocab = self._llama.llama_vocab_n_tokens(self._llama.llama_model_get_vocab(model))
        self._context = self._llama.llama_init_from_model(model, self._llama.llama_context_default_params())
        if not self._context:
            sys.exit(f"llama.cpp makes no context for {path}")
        self.context_tokens: int = self._llama.llama_n_ctx(self._context)
        # One thread gives the same answer, and does not spin at barriers where cores are shared.
        self._llama.llama_set_n_threads(self._context, 1, 1)

    def forget(self) -> None:
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), True)

    def read(self, token: int) -> bytes:
        """Append `token`; float32 [vocab] after it."""
        batch = self._llama.llama_batch_get_one(ctypes.byref(INT(token)), 1)
        if status := self._llama.llama_decode(self._context, batch):
            sys.exit(f"llama.cpp's decode gave {status}")
        return ctypes.string_at(self._llama.llama_get_logits(self._context), 4 * self._vocab)


def main() -> None:
    path, passages_path, out = sys.argv[1:]
    passages = json.loads(Path(passages_path).read_text(encoding="utf-8"))
    model = Model(path)
    longest = max(map(len, passages))
    if longest > model.context_tokens:
        sys.exit(f"a passage has {longest} tokens; llama.cpp's default context has {model.context_tokens}")
    with Path(out).open("wb") as file:
        for passage in passages:
            model.forget()
            file.writelines(model.read(token) for token in passage[:-1])


if __name__ == "__main__":
    main()
