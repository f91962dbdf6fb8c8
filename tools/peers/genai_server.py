"""onnxruntime-genai's Engine behind a socket. usage: genai_server.py MODEL_DIR THREADS SLOTS CONTEXT

Prints LISTEN HOST:PORT once it answers. A connection sends one JSON line {"prompt": [ids], "output_tokens": N} and gets
one line with a token id for each token. The Engine batches statically on the CPU: it has no paged cache there.
"""

from __future__ import annotations

import json
import queue
import socket
import sys
import threading
from dataclasses import dataclass

import numpy as np
import onnxruntime_genai as og


@dataclass(frozen=True, slots=True)
class Job:
    prompt: list[int]
    output_tokens: int
    connection: socket.socket


def engine_from(model: str, threads: int, slots: int, context: int) -> og.Engine:
    config = og.Config(model)
    config.overlay(
        json.dumps(
            {
                "model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}},
                "search": {"max_length": context},
                "engine": {"static_batching": {"max_batch_size": slots}},
            }
        )
    )
    return og.Engine(og.Model(config))


def serve(engine: og.Engine, jobs: queue.SimpleQueue[Job], context: int, slots: int) -> None:
    """Runs in the thread that made the Engine: it takes calls from no other."""
    buffer = engine.create_event_buffer(8 * slots)
    running: dict[int, tuple[og.Request, Job]] = {}
    while True:
        while not running or not jobs.empty():
            request, job = begin(engine, jobs.get(), context)
            running[id(request)] = request, job
        for event in engine.run(buffer):
            request, job = running[id(event.request)]
            if event.flags & og.EngineEventFlags.TOKEN:
                job.connection.sendall(b"%d\n" % event.token)
            if event.flags & og.EngineEventFlags.TURN_FINISHED:
                job.connection.shutdown(socket.SHUT_RDWR)
                job.connection.close()
                del running[id(request)]
                request.close()


def begin(engine: og.Engine, job: Job, context: int) -> tuple[og.Request, Job]:
    options = og.RequestOptions()
    options.set_max_session_tokens(context)
    request = engine.create_request(options=options)
    turn = og.TurnOptions(request)
    turn.set_max_generated_tokens(job.output_tokens)
    turn.set_min_generated_tokens(job.output_tokens)
    request.begin_turn(np.array(job.prompt, np.int32), turn)
    return request, job


def accept(listener: socket.socket, jobs: queue.SimpleQueue[Job]) -> None:
    while True:
        connection, _ = listener.accept()
        with connection.makefile("rb") as lines:
            ask = json.loads(lines.readline())
        jobs.put(Job(ask["prompt"], ask["output_tokens"], connection))


def main() -> None:
    model, threads, slots, context = sys.argv[1], *map(int, sys.argv[2:5])
    engine = engine_from(model, threads, slots, context)
    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, args=(listener, jobs), daemon=True).start()
        print("LISTEN", "{}:{}".format(*listener.getsockname()), flush=True)
        serve(engine, jobs, context, slots)


if __name__ == "__main__":
    main()
