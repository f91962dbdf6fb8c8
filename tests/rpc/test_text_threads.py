"""Long texts in threads of their own: what never ends holds nothing else up."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from residentd.rpc.text_threads import THREADS_MAX, TextThreads


def test_results_and_errors_come_back() -> None:
    """As if the work had been called."""

    def broken() -> int:
        raise ValueError("no token")

    async def scenario() -> None:
        threads = TextThreads()
        assert await threads.run(lambda: 7) == 7
        with pytest.raises(ValueError, match="no token"):
            await threads.run(broken)

    asyncio.run(scenario())


def test_no_more_than_so_many_work_at_once_and_all_get_their_turn() -> None:
    """At THREADS_MAX the next waits; it runs once one has ended. A caller that leaves does not free its place."""

    async def scenario() -> None:
        threads, ends = TextThreads(), threading.Event()
        begun = [threading.Event() for _ in range(THREADS_MAX)]

        def busy(index: int) -> None:
            begun[index].set()
            ends.wait()

        held = [asyncio.ensure_future(threads.run(lambda index=index: busy(index))) for index in range(THREADS_MAX)]
        for event in begun:
            await asyncio.to_thread(event.wait)
        held[0].cancel()
        last = asyncio.ensure_future(threads.run(lambda: "done"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(last), 0.05)
        assert await asyncio.to_thread(lambda: "administration") == "administration"
        ends.set()
        assert await last == "done"
        await asyncio.gather(*held[1:])

    asyncio.run(scenario())


def test_a_text_that_never_ends_does_not_hold_the_process() -> None:
    """The loop ends, and the process with it."""
    script = (
        "import asyncio, threading\n"
        "from residentd.rpc.text_threads import TextThreads\n"
        "async def main():\n"
        "    try:\n"
        "        await asyncio.wait_for(TextThreads().run(threading.Event().wait), 0.1)\n"
        "    except TimeoutError:\n"
        "        print('left')\n"
        "asyncio.run(main())\n"
    )
    result = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=30)
    assert result.stdout == "left\n"
