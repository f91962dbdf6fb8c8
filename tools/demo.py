"""Install, serve, chat, measure: what an operator and an application developer do, in one go."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from rich.console import Console

from resident.v1 import inference_pb2, inference_pb2_grpc

MODEL = "smollm2"
READY_S_MAX = 120
SHOWN_CHARACTERS = 60
CONTROL = Path(sys.executable).parent / "residentctl"


@dataclass(frozen=True, slots=True)
class Question:
    """`expected`: any of these words, lower case, in a sensible answer."""

    text: str
    expected: tuple[str, ...]


QUESTIONS = (
    Question("What is the capital of France?", ("paris",)),
    Question("Explain gravity to a child in two sentences.", ("gravity", "pull", "force", "fall")),
    Question("List three primary colors.", ("red", "blue", "yellow")),
    Question("Write two lines about the sea.", ("sea", "wave", "ocean", "blue")),
    Question("What is the largest planet in the solar system?", ("jupiter", "planet", "sun")),
    Question("Why is sleep important?", ("sleep", "rest", "health", "body")),
    Question("Give me a short recipe for tomato soup.", ("tomato", "soup", "onion", "salt")),
    Question("What do plants need to grow?", ("water", "light", "sun", "soil")),
)


@dataclass(slots=True)
class Answer:
    question: Question
    text: str = ""
    finish: inference_pb2.Finish = field(default_factory=inference_pb2.Finish)

    @property
    def sensible(self) -> bool:
        """Words that an answer to this question would use, in printable text of more than a few words."""
        lowered = self.text.lower()
        printable = all(character.isprintable() or character.isspace() for character in self.text)
        return printable and len(lowered.split()) >= 4 and any(word in lowered for word in self.question.expected)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("export", type=Path)
    parser.add_argument("state", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    state = arguments.state.resolve()
    shutil.rmtree(state, ignore_errors=True)

    console.rule("compile the ONNX export for this machine")
    control(state, "install", str(arguments.export.resolve()), "--name", MODEL)
    console.rule("serve it")
    daemon = subprocess.Popen([CONTROL, "serve", "--dev", "--state", state, "--listen", "127.0.0.1:0"])
    try:
        address = wait_until_ready(state, daemon)
        console.rule(f"{len(QUESTIONS)} overlapping chats in one running batch")
        answers = asyncio.run(ask_all(address, console))
        report(answers, console)
        console.rule("benchmark")
        control(state, "bench", "--model", MODEL, "--concurrency", "8", "--requests", "16", "--output-tokens", "48")
        console.rule("status")
        control(state, "status")
        problems = problems_of(answers, status_of(state))
    finally:
        daemon.terminate()
        daemon.wait(timeout=60)
    if arguments.check:
        for problem in problems:
            console.print(f"[bold red]FAIL[/] {problem}")
        sys.exit(1 if problems else 0)


def control(state: Path, *words: str) -> None:
    subprocess.run([CONTROL, "--state", state, *words], check=True)


def status_of(state: Path) -> dict[str, object]:
    done = subprocess.run([CONTROL, "--state", state, "--json", "status"], check=True, capture_output=True, text=True)
    status: dict[str, object] = json.loads(done.stdout)
    return status


def wait_until_ready(state: Path, daemon: subprocess.Popen[bytes]) -> str:
    """The daemon's address, once it serves the model. Exits when it does not come up."""
    deadline = time.monotonic() + READY_S_MAX
    path = state / "run" / "address"
    while time.monotonic() < deadline and daemon.poll() is None:
        if path.exists() and asyncio.run(serves(path.read_text().strip())):
            return path.read_text().strip()
        time.sleep(0.2)
    sys.exit(f"the daemon did not serve {MODEL} within {READY_S_MAX} s")


async def serves(address: str) -> bool:
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            models = await inference_pb2_grpc.InferenceStub(channel).ListModels(inference_pb2.ListModelsRequest())
        except grpc.aio.AioRpcError:
            return False
        return any(model.ready for model in models.models)


async def ask_all(address: str, console: Console) -> list[Answer]:
    answers = [Answer(question) for question in QUESTIONS]
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        await asyncio.gather(*(ask(stub, number, answer, console) for number, answer in enumerate(answers)))
    return answers


async def ask(stub: inference_pb2_grpc.InferenceAsyncStub, number: int, answer: Answer, console: Console) -> None:
    """Stream one chat, printing it line by line among the others."""
    await asyncio.sleep(0.1 * number)
    style = f"color({number % 7 + 1})"
    console.print(f"[{style}]chat {number} [bold]asks[/]    {answer.question.text}[/]")
    request = inference_pb2.GenerateRequest(
        model=MODEL,
        chat=inference_pb2.Chat(messages=[inference_pb2.Message(role="user", content=answer.question.text)]),
        sampling=inference_pb2.Sampling(temperature=0, max_tokens=64),
    )
    pending = ""
    async for message in stub.Generate(request):
        answer.text += message.text
        pending += message.text
        while len(pending) >= SHOWN_CHARACTERS or "\n" in pending:
            line, pending = cut(pending)
            show(console, style, number, line)
        if message.HasField("finish"):
            answer.finish = message.finish
    if pending.strip():
        show(console, style, number, pending)


def cut(pending: str) -> tuple[str, str]:
    """One line to show, and the rest: at a line break, else at the last space that fits."""
    line, found, rest = pending.partition("\n")
    if found and len(line) <= SHOWN_CHARACTERS:
        return line, rest
    at = pending.rfind(" ", 0, SHOWN_CHARACTERS)
    at = at if at > 0 else SHOWN_CHARACTERS
    return pending[:at], pending[at:]


def show(console: Console, style: str, number: int, line: str) -> None:
    if line.strip():
        console.print(f"chat {number} streams {line.strip()}", style=style, markup=False)


def report(answers: list[Answer], console: Console) -> None:
    for number, answer in enumerate(answers):
        timing, usage = answer.finish.timing, answer.finish.usage
        console.print(
            f"chat {number}: {usage.prompt_tokens} + {usage.completion_tokens} tokens, "
            f"first after {timing.ttft_ms:.0f} ms, then {timing.decode_tokens_per_s:.1f} tokens/s"
        )


def problems_of(answers: list[Answer], status: dict[str, object]) -> list[str]:
    problems = [
        f"chat {number} has no sensible answer to {answer.question.text!r}: {answer.text!r}"
        for number, answer in enumerate(answers)
        if not answer.sensible
    ]
    engines = status["engines"]
    assert isinstance(engines, list)
    rows = max((int(engine["batch_rows_max"]) for engine in engines), default=0)
    if rows < 2:
        problems.append(f"the batch never held more than {rows} row")
    return problems


if __name__ == "__main__":
    main()
