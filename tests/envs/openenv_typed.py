"""An episode of the environment that `openenv init` writes, through its own client class. JSON out.

python openenv_typed.py BASE_URL
"""

import asyncio
import json
import sys
from typing import Any

from word_echo import WordEchoAction, WordEchoEnv

from trl_rollouts.envs.openenv import openenv_env


def to_text(observation: Any) -> str:
    return f"{observation.echoed_message} ({observation.message_length})"


async def play() -> list[Any]:
    factory = openenv_env(
        sys.argv[1],
        max_concurrency=1,
        client=WordEchoEnv,
        to_action=lambda text: WordEchoAction(message=text),
        to_text=to_text,
    )
    env = factory()
    opening = await env.reset([{"role": "user", "content": "Play.", "task": {"seed": 0}}])
    steps = [await env.step({"role": "assistant", "content": text}) for text in ("Hey", "Hello, world")]
    await env.close()
    return [opening[0]["content"], *([step.messages[0]["content"], step.reward] for step in steps)]


print(json.dumps(asyncio.run(play())))
