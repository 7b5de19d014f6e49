"""Environments of verifiers, with the real library: its tools, its turns and its rewards, and scripted completions."""

import asyncio
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from trl_rollouts import SetupError, StepResult, env_rollout
from trl_rollouts.envs.verifiers import VerifiersEnv, _loop, verifiers_dataset, verifiers_env
from trl_rollouts.testing import Reply, ScriptedClient, byte_tokenizer, check_env, fake_trainer

psutil = pytest.importorskip("psutil")
vf = pytest.importorskip("verifiers.v1")

pytestmark = pytest.mark.filterwarnings("ignore:The 'initial' parameter is deprecated:DeprecationWarning")

TOKENIZER = byte_tokenizer()
GUESS, SHOP = "verifiers_guess", "verifiers_shop"


@pytest.fixture(autouse=True)
def _tools_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tool servers are processes, which import their module as well."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _nothing_stays_behind() -> Iterator[None]:
    def held() -> tuple[int, int, int]:
        me = psutil.Process()
        return len(asyncio.all_tasks(_loop())), len(me.net_connections()), len(me.children(recursive=True))

    before = held()
    yield
    limit = time.monotonic() + 5.0
    while held() > before and time.monotonic() < limit:
        time.sleep(0.05)
    assert held() <= before


def guess(**settings: Any) -> dict[str, Any]:
    return {"taskset": {"id": GUESS, **settings}}


def roll(
    environment: Any,
    replies: Any,
    *,
    rows: Callable[[Any], list[Any]] = lambda prompts: prompts[:1],
    max_completion_length: int = 8000,
    **options: Any,
) -> dict[str, list[Any]]:
    client = ScriptedClient(replies, tokenizer=TOKENIZER, max_model_len=None)
    rollout = env_rollout(verifiers_env(environment), client=client, **options)
    prompts = rows(verifiers_dataset(environment)["prompt"][:])
    batch = rollout(prompts, fake_trainer(TOKENIZER, max_completion_length=max_completion_length))
    rollout.close()
    return batch


def call(name: str, arguments: Any) -> str:
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {written}}}\n</tool_call>'


def said(batch: dict[str, list[Any]], role: str, row: int = 0) -> list[str]:
    return [message["content"] for message in batch["transcript"][row] if message["role"] == role]


def episode(environment: Any, play: Callable[[VerifiersEnv], Any], row: int = 0) -> Any:
    """What an episode gives that is played without a rollout."""

    async def run() -> Any:
        env: Any = verifiers_env(environment)()
        try:
            await env.reset(verifiers_dataset(environment)[row]["prompt"])
            return await play(env)
        finally:
            await env.close()

    return asyncio.run(run())


# Turns and rewards


def test_the_environments_own_turns_are_what_the_model_sees_next() -> None:
    batch = roll(GUESS, ["5", "I say 8", "7"])
    assert said(batch, "system") == ["Answer with a number."]
    assert said(batch, "user") == ["Guess my number, from 1 to 9.", "higher", "lower"]
    assert (batch["stop_reason"], batch["num_turns"]) == (["terminated"], [3])


def test_the_weighted_rewards_of_the_finished_trace_are_the_trajectorys() -> None:
    assert roll(GUESS, ["5", "I say 8", "7"])["step_rewards"] == [[0.0, 0.0, pytest.approx(2.0 - 0.3)]]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_turns": 2}, "max_turns"),
        ({"max_completion_length": 100}, "length"),
        ({"trajectory_timeout_s": 0.8}, "timeout"),
    ],
)
def test_a_trajectory_that_a_limit_cuts_is_scored_as_far_as_it_came(options: dict[str, Any], reason: str) -> None:
    batch = roll(GUESS, [Reply(TOKENIZER.encode("5"), delay_s=0.2)] * 40, **options)
    assert batch["stop_reason"] == [reason]
    assert batch["num_turns"][0] > 1
    assert batch["env_reward"] == [pytest.approx(-0.1 * batch["num_turns"][0])]


def test_verifiers_sees_such_a_trajectory_as_one_that_its_own_limit_has_cut() -> None:
    async def play(env: Any) -> Any:
        await env.step({"role": "assistant", "content": "5"})
        reward = await env.final_reward()
        return reward, await env.final_reward(), env._episode._traces[0]

    reward, again, trace = episode(GUESS, play)
    assert (reward, again) == (-0.1, 0.0)
    assert (trace.stop_condition, trace.is_truncated, trace.ok) == ("max_turns", True, True)
    assert trace.metrics == {"was_cut": 1.0}


def test_a_limit_of_the_configuration_truncates_the_episode() -> None:
    batch = roll(guess() | {"player": {"max_turns": 2}}, ["5", "3", "never"])
    assert (batch["stop_reason"], batch["num_turns"]) == (["truncated"], [2])
    assert batch["env_reward"] == [pytest.approx(-0.2)]


def test_what_verifiers_says_of_an_episode_is_kept() -> None:
    async def play(env: Any) -> Any:
        return (await env.step({"role": "assistant", "content": "7"})).info

    assert episode(GUESS, play) == {
        "verifiers": {
            "rewards": {"found": 2.0, "turns": -0.1},
            "metrics": {"was_cut": 0.0},
            "stop_condition": "user_closed",
        }
    }


def test_a_stop_of_the_task_ends_the_episode_at_the_turn_that_calls_for_it() -> None:
    batch = roll(GUESS, ["5", "I give up", "never"])
    assert (batch["stop_reason"], batch["num_turns"]) == (["terminated"], [2])
    assert batch["env_reward"] == [pytest.approx(-0.2)]


def test_the_models_thoughts_come_back_as_its_own() -> None:
    async def play(env: Any) -> Any:
        return await env.step({"role": "assistant", "content": "5", "reasoning_content": "In the middle."})

    assert episode(GUESS, play).messages == [{"role": "user", "content": "higher"}]


# Tools


def test_tools_are_shown_to_the_model_and_run_by_verifiers_and_their_state_reaches_the_rewards() -> None:
    function = {"name": "shop_price", "arguments": {"item": "tea"}}

    async def play(env: Any) -> Any:
        calls = [{"id": "1", "type": "function", "function": function}]
        step = await env.step({"role": "assistant", "content": "", "tool_calls": calls})
        return env.tools, env.answer_role, step, await env.step({"role": "assistant", "content": "It costs 5."})

    tools, role, step, end = episode(SHOP, play)
    assert [tool["function"]["name"] for tool in tools] == ["shop_price", "shop_steal", "shop_wait"]
    assert tools[0]["function"]["parameters"]["required"] == ["item"]
    assert role == "tool"
    assert step.messages == [{"role": "tool", "tool_call_id": "1", "content": "5 euros", "name": "shop_price"}]
    assert (end.reward, end.terminated) == (1.25, True)


def test_each_call_of_a_turn_is_answered_in_order_also_what_cannot_or_must_not_be_called() -> None:
    calls = [
        call("shop_price", {"item": "tea"}),
        call("shop_steal", {"item": "tea"}),
        call("shop_prize", {}),
        call("shop_price", {"item": "gold"}),
        call("shop_price", '{"item": }'),
    ]
    batch = roll(SHOP, ["\n".join(calls), "5"])
    answers = said(batch, "tool")
    assert answers[:3] == ["5 euros", "Forbidden.", "error: unknown tool 'shop_prize'"]
    assert "gold" in answers[3]
    assert answers[4].startswith("error: invalid JSON in tool arguments")
    asked = next(message for message in batch["transcript"][0] if message["role"] == "assistant")
    ids = [message["tool_call_id"] for message in batch["transcript"][0] if message["role"] == "tool"]
    assert ids == [item["id"] for item in asked["tool_calls"]]
    assert len(set(ids)) == 5
    assert batch["env_reward"] == [1.0 + 0.25]


def test_an_episode_can_be_closed_while_a_tool_hangs_and_its_server_ends() -> None:
    function = {"name": "shop_wait", "arguments": {"seconds": 60}}
    asks = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}

    async def play(env: Any) -> None:
        assert len(psutil.Process().children()) == 1
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await env.step(asks)

    episode(SHOP, play)
    assert psutil.Process().children() == []


# Several trajectories


def test_episodes_at_the_same_time_each_play_their_own_task() -> None:
    secrets = list(range(1, 10)) * 4

    def reply(ids: list[int]) -> str:
        hints = re.findall("higher|lower", TOKENIZER.decode(ids))
        low, high = 1, 9
        for hint in hints:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if hint == "higher" else (low, middle - 1)
        return str((low + high) // 2)

    batch = roll(guess(secrets=secrets), reply, rows=lambda prompts: prompts)
    needed = [batch["num_turns"][secrets.index(secret)] for secret in range(1, 10)]
    assert needed == [3, 2, 3, 4, 1, 3, 2, 3, 4]
    assert batch["env_reward"] == [pytest.approx(2.0 - 0.1 * needed[secret - 1]) for secret in secrets]


@pytest.mark.parametrize(
    ("fails_in", "words"),
    [
        ("setup", "no box"),
        ("hint", "no hint"),
        ("reward", "no reward"),
        ("exit", "SystemExit"),
        ("rewrite", "rewrites what the model wrote"),
        ("again", "does not go on from its 3 messages"),
        ("unscored", "has no reward"),
    ],
)
def test_an_episode_that_fails_concerns_its_own_row(fails_in: str, words: str) -> None:
    broken = verifiers_dataset(guess(fails_in=fails_in))[0]["prompt"]
    batch = roll(
        GUESS,
        lambda ids: "7" if "?" in TOKENIZER.decode(ids) else "3",
        rows=lambda prompts: [broken, prompts[0]],
        max_turns=3,
    )
    assert batch["env_reward"][0] is None
    assert words in batch["rollout_error"][0]
    assert batch["env_reward"][1] == pytest.approx(-0.3)


class Plain:
    """An environment of another kind."""

    def reset(self, prompt: list[Any]) -> list[Any]:
        return prompt

    def step(self, action: Any) -> StepResult:
        return StepResult(reward=1.0, terminated=True)

    def close(self) -> None:
        pass


def test_what_blocks_there_holds_up_neither_other_environments_nor_the_time_limits() -> None:
    blocked = verifiers_dataset(guess(fails_in="block"))[0]["prompt"]
    blocked[-1]["task"]["environment"] = "guess"
    plain = [{"role": "user", "content": "?", "task": {"environment": "plain"}}]
    rollout = env_rollout(
        {"guess": verifiers_env(GUESS), "plain": Plain},
        client=ScriptedClient(["7"] * 2, tokenizer=TOKENIZER, max_model_len=None),
        reset_timeout_s=0.3,
        close_timeout_s=0.1,
    )
    started = time.monotonic()
    batch = rollout([blocked, plain], fake_trainer(TOKENIZER))
    assert time.monotonic() - started < 1.2
    rollout.close()
    assert batch["env_reward"] == [None, 1.0]
    assert "reset_timeout_s=0.3" in batch["rollout_error"][0]


# Other agents


@pytest.fixture
def user_model() -> Iterator[tuple[str, list[Any]]]:
    """An endpoint for chat completions, and what it was asked."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            text = ["What does tea cost?", "###DONE###"][len(asked) - 1]
            message = {"role": "assistant", "content": text}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            body = json.dumps(
                {"id": "1", "object": "chat.completion", "created": 0, "model": "user", "choices": [choice]}
            ).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1", asked
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_user_that_another_model_plays_talks_to_the_policy(user_model: tuple[str, list[Any]]) -> None:
    url, asked = user_model
    user = {"model": "user", "client": {"type": "eval", "base_url": url, "api_key_var": "NONE"}}
    batch = roll({"id": "user-sim", "taskset": {"id": GUESS}, "user": user}, ["It costs 5."])
    assert [message["content"] for message in batch["transcript"][0]] == [
        "Answer with a number.",
        "What does tea cost?",
        "It costs 5.",
    ]
    assert batch["env_reward"] == [-0.1]
    assert [request["model"] for request in asked] == ["user", "user"]
    assert asked[1]["messages"][-1]["content"] == "It costs 5."


# The contract, and what is refused


def test_an_environment_with_turns_of_its_own_keeps_to_the_contract() -> None:
    prompt = verifiers_dataset(GUESS)[0]["prompt"]
    passed = check_env(verifiers_env(GUESS), prompt=prompt, actions=["5", "?", "7"])
    assert {"episodes_at_the_same_time_do_not_touch_each_other", "an_episode_that_has_ended_does_not_go_on"} <= {
        *passed
    }


def test_a_row_is_its_task_and_carries_it() -> None:
    rows = verifiers_dataset(guess(secrets=[4, 5, 6]))
    assert [json.loads(row["prompt"][-1]["task"]["data"])["secret"] for row in rows] == [4, 5, 6]
    assert [message["content"] for message in rows[0]["prompt"]] == [
        "Answer with a number.",
        "Guess my number, from 1 to 9.",
    ]


def test_of_tasks_without_end_the_first_ones_are_taken() -> None:
    assert len(verifiers_dataset(guess(is_endless=True), size=5)) == 5
    with pytest.raises(SetupError, match="has tasks without end. Pass size="):
        verifiers_dataset(guess(is_endless=True))


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ("texarena", "taskset 'texarena' not found.* Ids near it: textarena"),
        ("no-such", "taskset 'no-such' not found.* Ids at hand: .*textarena"),
        ("json", "exports no Taskset subclass"),
        ({"taskset": {"id": GUESS}, "player": {"max_turn": 1}}, "player.max_turn"),
        ({"taskset": {"id": GUESS}, "player": {"max_total_tokens": 9}}, "sets max_total_tokens. Set max_completion"),
        ({"id": "user-sim", "taskset": {"id": SHOP}}, "agents assistant, user.* Without a client: assistant, user"),
        (5, "is an id, a dict, an EnvConfig or an Env, not 5"),
    ],
)
def test_an_environment_that_cannot_work_is_refused_before_anything_is_sampled(environment: Any, words: str) -> None:
    with pytest.raises(SetupError, match=words):
        verifiers_env(environment)


def test_prompts_of_another_data_set_stop_the_run() -> None:
    for prompt in ([{"role": "user", "content": "?"}], verifiers_dataset(SHOP)[0]["prompt"], "?"):
        with pytest.raises(SetupError, match="needs the prompts of verifiers_dataset.'verifiers_guess'"):
            roll(GUESS, ["7"], rows=lambda prompts, prompt=prompt: [prompt])  # type: ignore[misc]


def test_without_the_library_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    for function in (verifiers_env, verifiers_dataset):
        with pytest.raises(SetupError, match="pip install 'trl-rollouts.verifiers.'"):
            function(GUESS)
