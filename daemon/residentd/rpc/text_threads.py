"""Threads in which long texts become tokens: 4 MB take the tokenizer seconds, without the interpreter's lock.

A tokenizer that an operator installed may hold an expression which a caller's text keeps busy for hours, and nothing
ends a thread. So these are not asyncio's own, on which administration waits and for which the process would wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Final, TypeVar

THREADS_MAX: Final = 8
"""Long texts beyond so many wait their turn; short ones need no thread."""

T = TypeVar("T")


class TextThreads:
    """Owned by the Inference servicer; used on its event loop."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(THREADS_MAX)

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` gives or raises. Cancelled, the work goes on and keeps its place until it ends."""
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def tell(settle: Callable[[], None]) -> None:
            self._free.release()
            if not future.done():
                settle()

        def working() -> None:
            try:
                result = work()
            except Exception as raised:  # noqa: BLE001 - whatever it is, the caller gets it
                error = raised
                settle = lambda: future.set_exception(error)  # noqa: E731
            else:
                settle = lambda: future.set_result(result)  # noqa: E731
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(tell, settle)

        threading.Thread(target=working, daemon=True, name="text").start()
        return await future
