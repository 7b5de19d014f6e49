"""The one loop: a trajectory from its prompt to its end.

    messages = reset(prompt); prompt_ids = render(messages, tools)
    repeat  completion = generate(context, room left)        appended with mask 1 and its logprobs
            action = parse(completion); step = env.step(action)
            ended? no turn or no room left?                  a row never ends on an observation
            append bridge(step.messages)                     mask 0, logprob 0.0
    final_reward(); close()

The loop knows no tool and no game, and environments know no token. Whatever fails in here is attributed (`errors`) and
ends this trajectory, unless it is the run's failure.
"""

import asyncio
import copy
import logging
import math
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .clients import Client, check_completion
from .env import EnvFactory, StepResult, checked_action
from .errors import EnvError, boundary, is_data
from .hosting import EnvLimits, HostedEnv
from .kinds import EnvKinds, capacity_of
from .messages import plain
from .parsing import Parser, find_parser
from .parsing.thoughts import opened_thoughts
from .sampling import Sampling
from .tokens import ChatTokenizer, check_room
from .trajectory import Completion, Message, StopReason, Trajectory
from .worker import exits_as_errors

logger = logging.getLogger(__name__)

MAX_CHARS_PER_TOKEN = 256
GRACE_S = 5.0
"""For a trajectory that is over to come to its end."""

Prompt = str | list[Message]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What the trajectories of one call share."""

    env_kinds: EnvKinds
    env_limits: EnvLimits
    client: Client
    tokenizer: ChatTokenizer
    parser: Parser | None
    """None: found from the chat template."""
    sampling: Sampling
    max_completion_length: int
    """Tokens of a whole trajectory, observations included."""
    vocab_size: int | None
    """Of the trainer's model; None if unknown."""
    max_turns: int
    max_result_tokens: int | None
    """An observation's text that has more is shown without its middle."""
    timeout_s: float

    @property
    def longest_s(self) -> float:
        """Of a trajectory whose environment keeps to its limits: its turns, its final reward, its close."""
        limits = self.env_limits
        reward_s = limits.step_timeout_s if math.isfinite(limits.step_timeout_s) else 0.0
        return self.timeout_s + reward_s + limits.close_timeout_s + GRACE_S

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
    factories = [setting.env_kinds.of(prompt) for prompt in prompts]  # every row, before one is sampled
    places = {id(factory): asyncio.Semaphore(capacity_of(factory) or max_concurrency) for factory in factories}
    slots = asyncio.Semaphore(max_concurrency)

    async def run(prompt: Prompt, factory: EnvFactory, seed: int) -> Trajectory:
        async with places[id(factory)], slots:  # in this order: who waits for a place keeps no slot from others
            env = HostedEnv(factory, setting.env_limits)
            return await _bounded(run_trajectory(prompt, env, seed, setting), env, setting)

    rows = zip(prompts, factories, seeds, strict=True)
    tasks = [asyncio.create_task(run(prompt, factory, seed)) for prompt, factory, seed in rows]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def _bounded(running: Coroutine[Any, Any, Trajectory], env: HostedEnv, setting: Setting) -> Trajectory:
    """Wait for a trajectory as long as one can take whose environment lets itself be cancelled, and no longer."""
    task = asyncio.ensure_future(running)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())  # if nobody waits any more
    try:
        done, _ = await asyncio.wait({task}, timeout=setting.longest_s)
    except asyncio.CancelledError:
        if not env.is_closing:
            task.cancel()
        await asyncio.wait({task}, timeout=setting.env_limits.close_timeout_s + GRACE_S)
        raise
    if done and not task.cancelled():
        return task.result()
    task.cancel()
    if done:
        reason = "the environment cancelled its own trajectory, as a task group does in which a task has failed"
    else:
        reason = (
            f"the environment did not end within {setting.longest_s:g} s: it catches its cancellation and goes on, so "
            "it was left behind. Let asyncio.CancelledError pass: `except Exception`, not `except:`"
        )
    left = Trajectory()
    left.fail(EnvError(reason))
    return left


async def run_trajectory(prompt: Prompt, env: HostedEnv, seed_index: int, setting: Setting) -> Trajectory:
    """One trajectory, ended in every case but one: an infra failure is raised.

    Args:
        prompt: as the dataset has it, messages or a string.
        env: its environment, not made yet; it is closed in every case.
        seed_index: distinguishes this trajectory from all others of the run, for a user's `seed`.
        setting: what it shares with the other trajectories of its call.
    """
    trajectory = Trajectory()
    try:
        await _play(trajectory, env, prompt, seed_index, setting)
        with _timed(trajectory, "env_s"):
            trajectory.add_reward(await env.final_reward())
    except Exception as error:
        if not is_data(error):
            raise
        trajectory.fail(error)
    finally:
        await env.close()
    return trajectory


async def _play(trajectory: Trajectory, env: HostedEnv, prompt: Prompt, seed_index: int, setting: Setting) -> None:
    """From the making of the environment to the end of the episode, within the trajectory's time limit."""
    limit, is_over = asyncio.timeout(setting.timeout_s), False
    try:
        async with limit:
            await env.make()
            await _begin(trajectory, env, prompt, setting)
            parser = setting.parser or find_parser(setting.tokenizer, env.tools)
            while trajectory.stop_reason is None:
                if asyncio.get_running_loop().time() >= (limit.when() or 0.0):
                    is_over = True  # a step caught its cancellation, or the loop was busy
                    raise TimeoutError
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise asyncio.CancelledError  # the run's, which a step caught
                await _turn(trajectory, env, parser, seed_index, setting)
    except Exception as error:
        if not (limit.expired() or is_over) or not is_data(error):
            raise
        if not trajectory.num_turns:
            raise EnvError(f"no turn was finished within trajectory_timeout_s={setting.timeout_s:g}") from error
        trajectory.end_at_finished_turn(StopReason.TIMEOUT)


async def _begin(trajectory: Trajectory, env: HostedEnv, prompt: Prompt, setting: Setting) -> None:
    """Reset the environment and render what it opens with."""
    opening = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else copy.deepcopy(prompt)
    given = [{**opening[0], "is_rendered": True}] if isinstance(prompt, str) else opening
    with _timed(trajectory, "env_s"):
        messages = await env.reset(copy.deepcopy(given))
    if isinstance(prompt, str):
        if messages not in (given, opening):
            raise EnvError("env.reset changed a prompt that is a string; such a prompt must be a list of messages.")
        messages = opening
    trajectory.prompt_ids = setting.tokenizer.prompt(prompt if isinstance(prompt, str) else messages, env.tools)
    trajectory.messages = [plain(message) for message in messages]
    check_room(trajectory.prompt_ids, setting.client.max_model_len)
    if env.answer_role is not None and setting.max_turns > 1:
        setting.tokenizer.prove_answers(env.answer_role)


async def _turn(trajectory: Trajectory, env: HostedEnv, parser: Parser, seed_index: int, setting: Setting) -> None:
    """One completion and what follows it."""
    sampling = setting.sampling.limited(setting.room(trajectory)).seeded(seed_index, trajectory.num_turns)
    with _timed(trajectory, "generate_s"):
        context = trajectory.prompt_ids + trajectory.completion_ids
        completion = await setting.client.generate(context, sampling)
        check_completion(completion, setting.vocab_size)
    trajectory.append_completion(completion)
    with boundary(EnvError, "the parser failed"), exits_as_errors():
        opened = opened_thoughts(setting.tokenizer.decode_end(context))
        action = checked_action(parser(opened + setting.tokenizer.decode(completion.token_ids)))
    trajectory.append_action(action)
    with _timed(trajectory, "env_s"):
        step = await env.step(copy.deepcopy(action))
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


@contextmanager
def _timed(trajectory: Trajectory, name: str) -> Iterator[None]:
    started = time.monotonic()
    try:
        yield
    finally:
        trajectory.timings[name] = trajectory.timings.get(name, 0.0) + time.monotonic() - started
