"""A version's goldens in a worker of their own, beside whatever serves: started, asked once, ended."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

from residentd.config import Config
from residentd.engine.link import Checked, Failed, FrameReader, decode_from_worker, encode
from residentd.errors import LinkError, MachineError
from residentd.supervisor.host import RECEIVE_BYTES, describe_exit, spawn_worker, start_frame


async def check_in_worker(directory: Path, config: Config) -> Checked:
    """What replaying the goldens of the version in `directory` gives. Cancelling ends the worker.

    Raises MachineError when there is no answer: too little memory, a lost worker, or `engine.load_timeout_s` is over.
    """
    try:
        answer = await _answer(directory, config)
    except TimeoutError:
        limit_s = config.engine.load_timeout_s
        answer = Failed(message=f"it took more than {limit_s:g} s (engine.load_timeout_s)", permanent=False)
    except LinkError as error:
        answer = Failed(message=f"protocol error: {error}", permanent=False)
    except OSError as error:  # no process, no memory for one, no descriptor
        answer = Failed(message=f"no engine worker could be started ({error.strerror}). Try again", permanent=False)
    if isinstance(answer, Failed):
        raise MachineError(f"the check could not be made: {answer.message}")
    return answer


async def _answer(directory: Path, config: Config) -> Checked | Failed:
    """What a worker that lives for this question says. Raises TimeoutError, LinkError; OSError where none starts."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with contextlib.closing(ours):
        with contextlib.closing(theirs):
            process = await spawn_worker(theirs)
        try:
            async with asyncio.timeout(config.engine.load_timeout_s):
                answer = await _ask(ours, directory, config)
                return answer or Failed(message=describe_exit(await process.wait()), permanent=False)
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()


async def _ask(link: socket.socket, directory: Path, config: Config) -> Checked | Failed | None:
    """The worker's answer; None when it ends without one."""
    loop = asyncio.get_running_loop()
    reader = FrameReader()
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        await loop.sock_sendall(link, encode(start_frame(directory, config, "check")))
        while chunk := await loop.sock_recv(link, RECEIVE_BYTES):
            for body in reader.feed(chunk):
                frame = decode_from_worker(body)
                if isinstance(frame, Checked | Failed):
                    return frame
    return None
