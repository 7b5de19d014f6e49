"""An environment of verifiers, written as its documentation says: a number to guess, with a hint after each guess.

It knows nothing of trl-rollouts; `recipes/verifiers_environment.py` trains on it, as on any other.
"""

import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf


class GameData(vf.TaskData):
    number: int


class GameTask(vf.Task[GameData]):
    """The row, and what an episode of it is worth."""

    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        return float(numbers(trace.last_reply)[-1:] == [self.data.number])

    @vf.reward(weight=0.1)
    async def named_a_number(self, trace: vf.Trace) -> float:
        return sum(bool(numbers(message.content or "")) for message in trace.assistant_messages) / trace.num_turns


class GameConfig(vf.TasksetConfig):
    num_games: int = 1000
    largest: int = 20


class GameTaskset(vf.Taskset[GameTask, GameConfig]):
    def load(self) -> Iterator[GameTask]:
        largest, draw = self.config.largest, random.Random(0)
        for _ in range(self.config.num_games):
            prompt = f"Guess my number, from 1 to {largest}. Answer with a number, and I will say higher or lower."
            yield GameTask(GameData(prompt=prompt, number=draw.randint(1, largest)), self.config.task)


class GameEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(max_turns=6)


class GameEnv(vf.Env[GameEnvConfig]):
    async def run(self, task: GameTask, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as game:
            segment = await game.turn()
            while not segment.terminated:
                guess = [0, *numbers(segment.last_reply)][-1]
                if guess == task.data.number:
                    break
                segment = await game.turn("higher" if guess < task.data.number else "lower")


def numbers(text: str) -> list[int]:
    """Those in a text, in order."""
    return [int(digits) for digits in re.findall(r"\d{1,9}", text)]


__all__ = ["GameEnv", "GameTaskset"]
