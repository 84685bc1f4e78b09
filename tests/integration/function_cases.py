"""Generate functions that the tests of kind ``custom`` run: good ones, and every bad kind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from evald.custom import Client, GenerationError, Question, Result

ENDLESS_S = 600.0


async def echo(client: Client, question: Question) -> str:
    answer = await client.generate(question.prompt)
    return answer.text


async def misbehave(client: Client, question: Question) -> str | Result:
    """Do what the metadata says."""
    answer = await client.generate(question.prompt)
    if question.metadata is None:
        return answer.text
    result: str | Result = await CASES[question.metadata](client)
    return result


async def fail(_client: Client) -> str:
    raise ValueError("no such tool:\n  hammer")


async def wait(_client: Client) -> str:
    await asyncio.sleep(1.0)
    return "7"


async def hang(_client: Client) -> str:
    await asyncio.sleep(ENDLESS_S)
    return "7"


async def be_deaf(_client: Client) -> str:
    """Go on, whatever cancels it."""
    while True:
        try:
            await asyncio.sleep(ENDLESS_S)
        except asyncio.CancelledError:
            print("not me")


async def block(_client: Client) -> str:
    sleep = time.sleep
    sleep(ENDLESS_S)
    return "7"


async def kill(_client: Client) -> str:
    print("last words", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGKILL)
    return "7"


async def leave(_client: Client) -> str:
    sys.exit(3)


async def leave_in_a_task(client: Client) -> str:
    return await asyncio.create_task(leave(client))


async def leave_in_a_thread(_client: Client) -> str:
    return await asyncio.to_thread(_leave_later)


def _leave_later() -> str:
    time.sleep(0.3)
    os._exit(4)


async def give_nan(_client: Client) -> Result:
    return Result("x", score=float("nan"))


async def give_a_number(_client: Client) -> int:
    return 7


async def give_half(_client: Client) -> Result:
    return Result("half a pair \ud83d", score=0.5, messages=["\ud83d"])


async def give_a_score(_client: Client) -> Result:
    return Result("7", score=True, answer="seven", values={"calls": 1})


async def ask_too_much(client: Client) -> str:
    try:
        await client.generate([5] * 3000)
    except GenerationError as error:
        return f"{error.kind}: {error}"
    return "7"


async def ask_with_bad_ids(client: Client) -> str:
    return (await client.generate([1, 2, 1_000_000])).text


async def ask_with_bad_sampling(client: Client) -> str:
    return (await client.generate("x", temprature=1.0)).text


CASES: dict[str, Callable[[Client], Awaitable[Any]]] = {
    "raise": fail,
    "wait": wait,
    "hang": hang,
    "deaf": be_deaf,
    "block": block,
    "kill": kill,
    "exit": leave,
    "exit in a task": leave_in_a_task,
    "exit in a thread": leave_in_a_thread,
    "nothing": give_nan,
    "no text": give_a_number,
    "half": give_half,
    "own number": give_a_score,
    "too long": ask_too_much,
    "bad ids": ask_with_bad_ids,
    "bad sampling": ask_with_bad_sampling,
}


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
