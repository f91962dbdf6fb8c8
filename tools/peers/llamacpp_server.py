"""llama.cpp's own HTTP server from the xllamacpp wheel. usage: llamacpp_server.py MODEL.gguf THREADS SLOTS CONTEXT

Prints LISTEN HOST:PORT once it answers. Continuous batching on, prompt cache off: every request computes its prompt.
"""

from __future__ import annotations

import sys
import time

import xllamacpp


def main() -> None:
    model, threads, slots, context = sys.argv[1], *map(int, sys.argv[2:5])
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx = context * slots
    params.n_parallel = slots
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.cont_batching = True
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_gpu_layers = 0
    # Into memory, not mapped: a page cache that is reclaimed under the run would be measured, not the server.
    params.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_NONE
    params.cache_ram_mib = 0
    server = xllamacpp.Server(params)
    print("LISTEN", server.listening_address.removeprefix("http://"), flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
