"""The one loop: a trajectory from its prompt to its end.

    messages = reset(prompt); prompt_ids = render(messages, tools)
    repeat  completion = generate(context, room left)        appended with mask 1 and its logprobs
            action = parse(completion); step = env.step(action)
            ended? no turn or no room left?                  a row never ends on an observation
            append bridge(step.messages)                     mask 0, logprob 0.0

The loop knows no tool and no game, and environments know no token. Whatever fails in here is attributed (`errors`) and
ends this trajectory, unless it is the run's failure.
"""

import asyncio
import copy
import inspect
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .clients import Client
from .env import Env, EnvFactory, StepResult, Worker, checked_action, checked_opening, checked_step, exits_as_errors
from .errors import EnvError, SetupError, boundary, is_data
from .messages import plain
from .parsing import Parser, find_parser
from .parsing.thoughts import opened_thoughts
from .sampling import Sampling
from .tokens import ChatTokenizer, check_room
from .trajectory import Completion, Message, StopReason, Trajectory

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
MAX_CHARS_PER_TOKEN = 256

Prompt = str | list[Message]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What the trajectories of one call share."""

    env_factory: EnvFactory
    client: Client
    tokenizer: ChatTokenizer
    parser: Parser | None
    """None: found from the chat template."""
    sampling: Sampling
    max_completion_length: int
    """Tokens of a whole trajectory, observations included."""
    max_turns: int
    max_result_tokens: int | None
    """An observation's text that has more is shown without its middle."""
    timeout_s: float

    def room(self, trajectory: Trajectory) -> int:
        """Tokens that may still be appended."""
        room = self.max_completion_length - len(trajectory.completion_ids)
        if self.client.max_model_len is None:
            return room
        return min(room, self.client.max_model_len - len(trajectory.prompt_ids) - len(trajectory.completion_ids))


async def run_trajectories(
    prompts: Sequence[Prompt], seeds: Sequence[int], setting: Setting, max_concurrency: int
) -> list[Trajectory]:
    """All trajectories, in the prompts' order. One that must stop the run stops the others first."""
    slots = asyncio.Semaphore(max_concurrency)

    async def run(prompt: Prompt, seed: int) -> Trajectory:
        async with slots:
            return await run_trajectory(prompt, seed, setting)

    tasks = [asyncio.create_task(run(prompt, seed)) for prompt, seed in zip(prompts, seeds, strict=True)]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def run_trajectory(prompt: Prompt, seed_index: int, setting: Setting) -> Trajectory:
    """One trajectory, ended in every case but one: an infra failure is raised.

    Args:
        prompt: as the dataset has it, messages or a string.
        seed_index: distinguishes this trajectory from all others of the run, for a user's `seed`.
        setting: what it shares with the other trajectories of its call.
    """
    trajectory = Trajectory()
    limit = asyncio.timeout(setting.timeout_s)
    worker = Worker()
    env: Env | None = None
    try:
        async with limit:
            with boundary(EnvError, "the environment could not be made"):
                env = await worker.call(setting.env_factory)
            if missing := [name for name in ("reset", "step", "close") if not callable(getattr(env, name, None))]:
                raise SetupError(f"The environment {type(env).__name__} has no method {', '.join(missing)}; see Env.")
            tools = await _begin(trajectory, env, worker, prompt, setting)
            parser = setting.parser or find_parser(setting.tokenizer, tools)
            while trajectory.stop_reason is None:
                if asyncio.get_running_loop().time() >= (limit.when() or 0.0):  # a step caught its cancellation
                    raise TimeoutError
                await _turn(trajectory, env, worker, parser, seed_index, setting)
    except Exception as error:
        if limit.expired() and trajectory.num_turns:
            trajectory.end_at_finished_turn(StopReason.TIMEOUT)
        elif limit.expired():
            trajectory.fail(EnvError(f"no turn was finished within trajectory_timeout_s={setting.timeout_s:g}"))
        elif is_data(error):
            trajectory.fail(error)
        else:
            raise
    finally:
        if env is not None:
            await _close(env, worker)
        worker.end()
    return trajectory


async def _begin(trajectory: Trajectory, env: Env, worker: Worker, prompt: Prompt, setting: Setting) -> Sequence[Any]:
    """Reset the environment and render what it opens with; the schemas of its tools."""
    opening = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else copy.deepcopy(prompt)
    with boundary(EnvError, "env.reset failed"), _timed(trajectory, "env_s"):
        given = [{**opening[0], "is_rendered": True}] if isinstance(prompt, str) else opening
        messages = checked_opening(await worker.call(env.reset, copy.deepcopy(given)))
    if isinstance(prompt, str):
        if messages not in (given, opening):
            raise EnvError("env.reset changed a prompt that is a string; such a prompt must be a list of messages.")
        messages = opening
    tools: Sequence[Any] = getattr(env, "tools", None) or ()  # optional in the protocol
    trajectory.prompt_ids = setting.tokenizer.prompt(prompt if isinstance(prompt, str) else messages, tools)
    trajectory.messages = [plain(message) for message in messages]
    check_room(trajectory.prompt_ids, setting.client.max_model_len)
    role = getattr(env, "answer_role", "tool" if tools else None)  # optional, too
    if role is not None and setting.max_turns > 1:
        setting.tokenizer.prove_answers(role)
    return tools


async def _turn(
    trajectory: Trajectory, env: Env, worker: Worker, parser: Parser, seed_index: int, setting: Setting
) -> None:
    """One completion and what follows it."""
    sampling = setting.sampling.limited(setting.room(trajectory)).seeded(seed_index, trajectory.num_turns)
    with _timed(trajectory, "generate_s"):
        context = trajectory.prompt_ids + trajectory.completion_ids
        completion = await setting.client.generate(context, sampling)
    trajectory.append_completion(completion)
    with boundary(EnvError, "the parser failed"), exits_as_errors():
        opened = opened_thoughts(setting.tokenizer.decode_end(context))
        action = checked_action(parser(opened + setting.tokenizer.decode(completion.token_ids)))
    trajectory.append_action(action)
    with boundary(EnvError, "env.step failed"), _timed(trajectory, "env_s"):
        step = checked_step(await worker.call(env.step, copy.deepcopy(action)))
    trajectory.append_step(step.reward, step.info)

    cut = completion.finish_reason == "length"
    if cut and (step.terminated or setting.room(trajectory) <= 0):
        trajectory.end(StopReason.LENGTH)
    elif step.terminated or step.truncated:
        trajectory.end(StopReason.TERMINATED if step.terminated else StopReason.TRUNCATED)
    elif trajectory.num_turns >= setting.max_turns:
        trajectory.end(StopReason.MAX_TURNS)
    else:
        _observe(trajectory, step, completion, setting)


def _observe(trajectory: Trajectory, step: StepResult, completion: Completion, setting: Setting) -> None:
    """Append the observation whole, with room for a next token, or end here: a part of it would mislead."""
    last_id, tokenizer = completion.token_ids[-1], setting.tokenizer
    is_inline = step.inline is not None
    messages = [{"role": "tool", "content": step.inline}] if is_inline else step.messages
    if not messages:
        raise EnvError("env.step returned no message and did not end the episode, so the model has nothing to answer.")
    if is_inline and last_id in tokenizer.eos_token_ids:
        trajectory.end(StopReason.TERMINATED)
        return
    if setting.max_result_tokens is not None:
        messages = [_cut(message, tokenizer, setting.max_result_tokens) for message in messages]
    num_chars = sum(len(str(message.get("content"))) for message in messages)
    if num_chars > MAX_CHARS_PER_TOKEN * setting.room(trajectory):  # hopeless, and slow to encode
        trajectory.end(StopReason.LENGTH)
        return
    if is_inline:
        bridge = tokenizer.encode_inline(str(messages[0]["content"]))
    else:
        bridge = tokenizer.bridge(messages, last_id=last_id)
    if setting.room(trajectory) <= len(bridge):
        trajectory.end(StopReason.LENGTH)
        return
    trajectory.append_observation(bridge)
    if step.inline != "":
        trajectory.messages += copy.deepcopy(messages)  # an environment may use its own again


def _cut(message: Message, tokenizer: ChatTokenizer, max_tokens: int) -> Message:
    if not isinstance(message.get("content"), str):
        return message
    return {**message, "content": tokenizer.cut(message["content"], max_tokens)}


async def _close(env: Env, worker: Worker) -> None:
    """Close the environment; a failure to close is worth a line, not a row. One that hangs is not waited for."""
    queues = worker.num_unfinished > 0 and not inspect.iscoroutinefunction(env.close)
    timeout_s = 0.0 if queues else CLOSE_TIMEOUT_S
    try:
        async with asyncio.timeout(timeout_s):
            await worker.call(env.close)
    except Exception as error:
        logger.warning("env.close failed: %s: %s", type(error).__name__, error)


@contextmanager
def _timed(trajectory: Trajectory, name: str) -> Iterator[None]:
    started = time.monotonic()
    try:
        yield
    finally:
        trajectory.timings[name] = trajectory.timings.get(name, 0.0) + time.monotonic() - started
