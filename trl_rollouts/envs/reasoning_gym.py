"""Reasoning Gym: problems made by a program, and a score of the model's answer by the data set's own scorer.

    dataset = reasoning_gym_dataset("chain_sum", size=1000)
    rollout_func = env_rollout(reasoning_gym_env())
    trainer = GRPOTrainer(..., train_dataset=dataset, reward_funcs=env_reward, rollout_func=rollout_func)

Each row carries its problem, as the library made it, and its data set's name and settings, so rows of several data
sets may be mixed (`datasets.concatenate_datasets`), and an evaluation may have other settings than the training.
Problems are not made a second time: for some data sets, another process would make other ones.

Some scorers hand the model's answer to Python's `eval`, or to SymPy's `parse_expr`, which does so: it could do
anything, and "9**9**9" would stop all threads for good. Those run in a sandbox, the others in a thread.
"""

import ast
import difflib
import functools
import importlib
import inspect
import json
import re
import threading
from collections.abc import Callable
from typing import Any

from ..env import EnvFactory, StepResult
from ..errors import SandboxError, SetupError
from ..sandbox import ExecStatus, Executor
from ..trajectory import Message
from ..worker import call

WRONG = "That is not the right answer. Try again."
NO_ANSWER = "There is no answer between <answer> and </answer>. Try again."

PREPARE_TIMEOUT_S = 60.0

_ONE_AT_A_TIME = threading.Lock()
_MODULES = ("reasoning_gym", "reasoning_gym.utils", "trl_rollouts.envs.reasoning_gym")
_EVALUATES = re.compile(r"\b(?:eval|exec|parse_expr)\(\s*answer\b")


def reasoning_gym_dataset(
    name: str, *, size: int, seed: int = 0, system_prompt: str | None = "default", **config: Any
) -> Any:
    """Problems of one data set, each with what `reasoning_gym_env` needs to score it.

    Args:
        name: the data set's, such as "leg_counting".
        size: number of problems.
        seed: problem number `i` is mostly made from `seed + i`, so data sets that should share no problem need seeds
            at least `size` apart, such as 0 for training and 1_000_000 for evaluation.
        system_prompt: the name of one of the library's, a text that asks for the answer between `<answer>` and
            `</answer>`, or None for no system message.
        **config: the data set's own settings, plain data.

    Returns:
        `datasets.Dataset`: with the columns `prompt` (messages) and `answer` (a text, or None where the data set has
        no single right one).

    Raises:
        SetupError: no such data set, or one that cannot be made like this.
    """
    system = _system_messages(system_prompt)
    if type(size) is not int or size < 1 or type(seed) is not int:
        raise SetupError(f"size must be a number of problems and seed a whole number, not {size!r} and {seed!r}.")
    settings = _as_text({**config, "size": size, "seed": seed}, f"a setting of {name!r}")
    source = _source(name, settings)
    rows = []
    for index in range(size):
        entry = source[index]
        task = {"dataset": name, "settings": settings, "entry": _as_text(entry, f"problem {index} of {name!r}")}
        rows.append(
            {
                "prompt": [*system, {"role": "user", "content": entry["question"], "task": task}],
                "answer": entry["answer"],
            }
        )
    from datasets import Dataset

    return Dataset.from_list(rows)


def reasoning_gym_env(
    *, max_attempts: int = 1, executor: Executor | None = None, timeout_s: float = 10.0
) -> EnvFactory:
    """What `env_rollout` takes, for the prompts of `reasoning_gym_dataset`, whichever data sets they are of.

    The score is of what stands between `<answer>` and `</answer>`, the last pair; without one it is the data set's
    for no answer. The rewards of an episode add up to the score of its last turn. An answer that makes the scorer fail
    is worth 0.

    Args:
        max_attempts: turns that the model has to answer right. One that scores less than 1 is told so.
        executor: where scorers run that evaluate the answer, with this package and Reasoning Gym at hand; its owner
            closes it. A `LocalExecutor` by default, started when it is needed.
        timeout_s: time limit of such a scorer, in seconds. An answer that overruns is worth 0.

    Raises:
        SetupError: Reasoning Gym is missing, or an argument cannot work.
    """
    if type(max_attempts) is not int or max_attempts < 1:
        raise SetupError(f"max_attempts must be a number of turns, not {max_attempts!r}.")
    if executor is not None and (isinstance(executor, type) or not callable(getattr(executor, "open", None))):
        raise SetupError(f"executor must be an Executor, such as LocalExecutor(...), not {executor!r}.")
    if not timeout_s > 0:
        raise SetupError(f"timeout_s must be a positive number of seconds, not {timeout_s!r}.")
    _library("factory")
    own = functools.lru_cache(_local)  # one for all trajectories
    return lambda: ReasoningGymEnv(max_attempts, own if executor is None else lambda: executor, timeout_s)


class ReasoningGymEnv:
    """One problem; see `reasoning_gym_env`."""

    def __init__(self, max_attempts: int, executor: Callable[[], Executor], timeout_s: float) -> None:
        self.answer_role: str | None = "user" if max_attempts > 1 else None
        self._num_left, self._score = max_attempts, 0.0
        self._executor, self._timeout_s = executor, timeout_s

    def reset(self, prompt: list[Message]) -> list[Message]:
        task = prompt[-1].get("task")
        if not isinstance(task, dict) or not {"dataset", "settings", "entry"} <= task.keys():
            raise SetupError(
                "reasoning_gym_env needs the prompts of reasoning_gym_dataset, which carry their problem."
            )
        with _ONE_AT_A_TIME:
            self._is_confined = _evaluates(type(_source(task["dataset"], task["settings"])))
        self._task = task
        return prompt

    async def step(self, action: Message) -> StepResult:
        answer = _library("utils").extract_answer(action["content"])
        if self._is_confined:
            score, problem = await self._confined_score(answer)
        else:
            score, problem = await call(scored, self._task, answer)
        info = {"answer": answer} | ({"score_error": problem} if problem else {})
        reward, self._score = score - self._score, score
        self._num_left -= 1
        if score >= 1.0 or self._num_left <= 0:
            return StepResult(reward=reward, terminated=True, info=info)
        reply = {"role": "user", "content": NO_ANSWER if answer is None else WRONG}
        return StepResult([reply], reward=reward, info=info)

    def close(self) -> None:
        pass

    async def _confined_score(self, answer: str | None) -> tuple[float, str | None]:
        """The score by a session of its own, in which only the second snippet knows the answer: what fails before is
        the sandbox's fault, and what fails then the answer's.
        """
        session = await self._executor().open()
        try:
            code = f"import json\nfrom {__name__} import scored\ntask = {self._task!r}\nscored(task, None)"
            result = await session.run(code, PREPARE_TIMEOUT_S)
            if result.status is not ExecStatus.OK:
                name = self._task["dataset"]
                raise SandboxError(f"The scorer of {name!r} cannot run in the sandbox: {result.error}")
            result = await session.run(f"json.dumps(scored(task, {answer!r}))", self._timeout_s)
        finally:
            await session.close()
        try:
            score, problem = json.loads(ast.literal_eval(result.value or ""))
            return float(score), problem
        except (ValueError, SyntaxError, TypeError):
            return 0.0, f"{result.status}: {result.error}"


def scored(task: dict[str, str], answer: str | None) -> tuple[float, str | None]:
    """The score of an answer, and how the scorer failed, if it did: not every one bears every answer."""
    source, entry = _source(task["dataset"], task["settings"]), ast.literal_eval(task["entry"])
    try:
        return float(source.score_answer(answer, entry)), None
    except Exception as error:
        return 0.0, f"{type(error).__name__}: {error}"


def _local() -> Executor:
    from ..sandbox.local import LocalExecutor  # which needs Linux; most scorers do not

    return LocalExecutor(modules=_MODULES)


def _library(module: str) -> Any:
    try:
        importlib.import_module("reasoning_gym")  # which registers the data sets
        return importlib.import_module(f"reasoning_gym.{module}")
    except ImportError as cause:
        raise SetupError(
            f"Reasoning Gym cannot be imported ({cause}): pip install 'trl-rollouts[reasoning-gym]'"
        ) from cause


@functools.lru_cache(maxsize=64)
def _source(name: str, settings: str) -> Any:
    """The data set that makes and scores problems. Trajectories share it: making one can take half a second."""
    known = _library("factory").DATASETS
    if name not in known:
        nearest = ", ".join(difflib.get_close_matches(str(name), known, n=3)) or "none is near"
        raise SetupError(f"Reasoning Gym has no data set {name!r}. Of its {len(known)}, the nearest: {nearest}.")
    try:
        return _library("factory").create_dataset(name, **ast.literal_eval(settings))
    except Exception as cause:
        fields = ", ".join(inspect.signature(known[name][1]).parameters)
        raise SetupError(f"The data set {name!r} refuses its settings: {cause}. It has: {fields}.") from cause


def _evaluates(kind: type[Any]) -> bool:
    try:
        return _EVALUATES.search(inspect.getsource(kind.score_answer)) is not None
    except OSError:  # it was defined in an interactive session, by the user
        return False


def _system_messages(system_prompt: str | None) -> list[Message]:
    shipped = _library("utils").SYSTEM_PROMPTS
    if system_prompt is None:
        return []
    text = shipped.get(system_prompt, system_prompt) if isinstance(system_prompt, str) else None
    if text is None or "<answer>" not in text:
        raise SetupError(
            "system_prompt must be the name of one of the library's prompts "
            f"({', '.join(shipped)}), or a text that asks for <answer> and </answer>, or None; not {system_prompt!r}."
        )
    return [{"role": "system", "content": text}]


def _as_text(value: Any, what: str) -> str:
    """Python literals rather than JSON, in which tuples would be lists, and whole numbers as keys texts: some scorers
    then give a right answer next to nothing.
    """
    plain = _plain(value)
    text = repr(plain)
    try:
        is_exact = ast.literal_eval(text) == plain
    except (ValueError, SyntaxError):
        is_exact = False
    if not is_exact:
        raise SetupError(f"This is {what}, and no plain data (numbers, texts, lists, tuples, dicts): {text:.300}")
    return text


def _plain(value: Any) -> Any:
    """The value without NumPy's numbers and texts."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        kind = next(kind for kind in (list, tuple, set) if isinstance(value, kind))
        return kind(_plain(item) for item in value)
    return value.item() if type(value).__module__ == "numpy" and hasattr(value, "item") else value
