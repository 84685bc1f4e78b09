"""Generate functions that the tests of kind ``custom`` run: good ones, and every bad kind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from typing import Any

from evald.custom import Client, GenerationError, Question, Result

ENDLESS_S = 600.0


async def echo(client: Client, question: Question) -> str:
    answer = await client.generate(question.prompt)
    return answer.text


async def misbehave(client: Client, question: Question) -> str | Result:
    """Do what the metadata says."""
    answer = await client.generate(question.prompt)
    match question.metadata:
        case "raise":
            raise ValueError("no such tool:\n  hammer")
        case "hang":
            await asyncio.sleep(ENDLESS_S)
        case "deaf":
            # whatever cancels it, it goes on
            while True:
                try:
                    await asyncio.sleep(ENDLESS_S)
                except asyncio.CancelledError:
                    print("not me")
        case "block":
            time.sleep(ENDLESS_S)
        case "kill":
            print("last words", file=sys.stderr)
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            sys.exit(3)
        case "exit in a task":
            await asyncio.create_task(_leave())
        case "exit in a thread":
            await asyncio.to_thread(os._exit, 4)
        case "wait":
            await asyncio.sleep(1.0)
        case "nothing":
            return Result("x", score=float("nan"))
        case "no text":
            return 7  # type: ignore[return-value] # what a user may do
        case "half":
            return Result("half a pair \ud83d", score=0.5, messages=["\ud83d"])
        case "too long":
            try:
                await client.generate([5] * 3000)
            except GenerationError as error:
                return f"{error.kind}: {error}"
        case "bad ids":
            await client.generate([1, 2, 1_000_000])
        case "bad sampling":
            await client.generate("x", temprature=1.0)
        case "own number":
            return Result(answer.text, score=True, answer="seven", values={"calls": 1})
    return answer.text


async def _leave() -> None:
    sys.exit(5)


async def talk(client: Client, question: Question) -> Result:
    """Ask twice, the second time with the first answer and a tool's in the conversation."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question.prompt}]
    first = await client.generate(messages, max_new_tokens=8)
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "tool", "content": str(add(2, int(client.config.get("add", 0))))},
    ]
    second = await client.generate(messages)
    ids = await client.generate([*second.prompt_ids, *second.output_ids], stop=["."])
    messages.append({"role": "assistant", "content": second.text})
    values = {"turns": 3.0, "same": float(ids.text == first.text)}
    return Result(second.text, values=values, messages=messages)


def add(a: int, b: int) -> int:
    return a + b


async def silent(_client: Client, _question: Question) -> str:
    return "7"


def sync(_client: Client, _question: Question) -> str:
    return "7"


async def one_argument(_client: Client) -> str:
    return "7"


not_callable = 7
