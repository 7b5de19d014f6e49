"""An environment of verifiers whose own code answers the model: a number to guess, a hint after each turn."""

import itertools
import re
import sys
import time
from collections.abc import Iterator

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    secret: int
    fails_in: str = ""
    """Where, or how, this task breaks."""


class GuessState(vf.State):
    is_found: bool = False


class GuessTask(vf.Task[GuessData, GuessState]):
    async def setup(self, trace: vf.Trace) -> None:
        if self.data.fails_in == "setup":
            raise OSError("no box")
        if self.data.fails_in == "exit":
            sys.exit("that was all")
        if self.data.fails_in == "block":
            time.sleep(1.5)

    @vf.intercept
    async def words(self, response: vf.Response) -> vf.Response | None:
        if self.data.fails_in != "rewrite":
            return None
        message = response.message.model_copy(update={"content": "8"})
        return response.model_copy(update={"message": message})

    @vf.stop
    async def gave_up(self, response: vf.Response) -> bool:
        return "give up" in (response.message.content or "")

    @vf.reward(weight=2.0)
    async def found(self, trace: vf.Trace) -> float | dict[str, float]:
        if self.data.fails_in == "unscored":
            return {}
        if self.data.fails_in == "reward":
            raise ZeroDivisionError("no reward")
        return float(trace.state.is_found)

    @vf.reward(weight=-0.1)
    async def turns(self, trace: vf.Trace) -> float | dict[str, float]:
        return {} if self.data.fails_in == "unscored" else float(trace.num_turns)

    @vf.metric
    async def was_cut(self, trace: vf.Trace) -> float:
        return float(trace.is_truncated)


class GuessConfig(vf.TasksetConfig):
    secrets: tuple[int, ...] = (7, 2)
    fails_in: str = ""
    is_endless: bool = False


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    @property
    def INFINITE(self) -> bool:
        return self.config.is_endless

    def load(self) -> Iterator[GuessTask]:
        for secret in itertools.cycle(self.config.secrets) if self.config.is_endless else self.config.secrets:
            data = GuessData(
                prompt="Guess my number, from 1 to 9.",
                system_prompt="Answer with a number.",
                secret=secret,
                fails_in=self.config.fails_in,
            )
            yield GuessTask(data, self.config.task)


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task: GuessTask, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                numbers = re.findall(r"\d+", segment.last_reply)
                guess = int(numbers[-1]) if numbers else -1
                if guess == task.data.secret:
                    interaction.trace.state.is_found = True
                    return
                if task.data.fails_in == "hint":
                    raise LookupError("no hint")
                if task.data.fails_in == "again":
                    break
                segment = await interaction.turn("higher" if guess < task.data.secret else "lower")
        if task.data.fails_in == "again":
            await agents.player.run(task)


__all__ = ["GuessEnv", "GuessTaskset"]
