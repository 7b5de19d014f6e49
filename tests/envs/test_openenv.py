"""Real OpenEnv servers on loopback, from their first observation to the row, with scripted completions."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from openenv_servers import BIN, ROOT, environment_server, require_openenv, sessions, shop_server, words_server

pytest.importorskip("websockets")

from trl_rollouts import EnvError, RolloutError, ServerError, SetupError, env_reward, env_rollout
from trl_rollouts.envs import openenv
from trl_rollouts.envs.openenv import environment, openenv_env, session
from trl_rollouts.rollout import Rollout
from trl_rollouts.testing import FakeServer, Reply, ScriptedClient, byte_tokenizer, check_env, fake_trainer

TOKENIZER = byte_tokenizer()

Roll = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Servers:
    words: str
    """Eight places."""
    pinging: str
    """The same, where who does not answer a ping within a second is hung up on."""
    shop: str
    echo: str
    """What `openenv init word_echo` writes, as it is: one place."""
    folder: Path
    """Where the package of the last lies."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    require_openenv()
    logs, folder = tmp_path_factory.mktemp("logs"), tmp_path_factory.mktemp("environments")
    with ExitStack() as stack, ThreadPoolExecutor() as pool:  # each takes seconds to import what it needs
        words = pool.submit(stack.enter_context, words_server(logs / "words", capacity=8))
        shop = pool.submit(stack.enter_context, shop_server(logs / "shop"))
        echo = pool.submit(stack.enter_context, environment_server(folder, "word_echo"))
        yield Servers(*words.result(), shop.result(), echo.result(), folder)


@pytest.fixture
def words(servers: Servers) -> Iterator[str]:
    sessions(servers.words, forget=True)
    yield servers.words
    assert wait_for_places(servers.words) == 0


@pytest.fixture
def echo(servers: Servers) -> str:
    return servers.echo


@pytest.fixture
def shop(servers: Servers) -> str:
    return servers.shop


def wait_for_places(base_url: str, timeout_s: float = 5.0) -> int:
    """Sessions that are still open after a while: a server that is in a step ends its session behind that."""
    deadline = time.monotonic() + timeout_s
    while (num_open := sessions(base_url)["open"]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return num_open


@pytest.fixture
def roll() -> Iterator[Roll]:
    rollouts: list[Rollout] = []

    def run(env_factory: Any, replies: Any, prompts: list[Any] | None = None, **options: Any) -> Any:
        client = ScriptedClient(replies, tokenizer=TOKENIZER, max_model_len=None)
        options = {"max_turns": 4, **options}
        rollouts.append(env_rollout(env_factory, client=client, **options))
        batch = rollouts[-1](prompts or [question()], fake_trainer(TOKENIZER, max_completion_length=4000))
        return {**batch, "client": client}

    yield run
    for rollout in rollouts:
        rollout.close()


def question(text: str = "Play.", **task: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text, "task": {"seed": 0, **task}}]


def contents(messages: list[Any]) -> list[str]:
    return [message["content"] for message in messages]


def by_turn(*lines: str) -> Callable[[list[int]], str]:
    """The same lines for every trajectory: a prompt that shows so many answers gets the next one."""
    return lambda prompt: lines[min(TOKENIZER.decode(prompt).count("assistant\n"), len(lines)) - 1]


def by_name(**lines: str) -> Callable[[list[int]], str]:
    """The line of the trajectory whose prompt has the name in it, then the word."""

    def reply(prompt: list[int]) -> str:
        text = TOKENIZER.decode(prompt)
        name = next(name for name in lines if f"I am {name}." in text)
        return lines[name] if text.count("assistant\n") == 1 else "apple"

    return reply


# What is played


def test_a_word_is_guessed(words: str, roll: Roll) -> None:
    batch = roll(openenv_env(words, max_concurrency=8), ["kiwi", " apple\n"])
    assert [(message["role"], message["content"]) for message in batch["transcript"][0]] == [
        ("user", "Play.\n\nA fruit with 5 letters, seed 0."),
        ("assistant", "kiwi"),
        ("user", "Not kiwi."),
        ("assistant", " apple\n"),
    ]
    assert (batch["stop_reason"], batch["step_rewards"], env_reward(**batch)) == (["terminated"], [[0.0, 1.0]], [1.0])


def test_what_openenv_init_writes_is_played_as_it_is(echo: str, roll: Roll) -> None:
    env = openenv_env(echo, max_concurrency=1, to_text=lambda observation: observation["echoed_message"])
    batch = roll(env, ["Hey", "Hello, world"], max_turns=2)
    assert contents(batch["transcript"][0]) == ["Play.\n\nWord Echo environment ready!", "Hey", "Hey", "Hello, world"]
    assert (batch["step_rewards"], batch["stop_reason"]) == ([[pytest.approx(0.3), 1.0]], ["max_turns"])


def test_a_client_of_the_environments_own_gives_its_types(servers: Servers) -> None:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{servers.folder}"}
    command = [BIN / "python", Path(__file__).with_name("openenv_typed.py"), servers.echo]
    played = subprocess.run(command, env=env, capture_output=True, timeout=60, check=True)
    first = "Play.\n\nWord Echo environment ready! (0)"
    assert json.loads(played.stdout) == [first, ["Hey (3)", pytest.approx(0.3)], ["Hello, world (12)", 1.0]]


def test_the_package_openenv_is_not_needed() -> None:
    code = "import sys, trl_rollouts.envs.openenv; print([m for m in ('openenv', 'websockets') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"[]\n"


def test_it_is_an_environment_in_all_that_is_owed(words: str) -> None:
    passed = check_env(openenv_env(words, max_concurrency=8), prompt=question(), actions=["kiwi", "apple"])
    assert "episodes_at_the_same_time_do_not_touch_each_other" in passed
    assert "an_episode_that_has_ended_does_not_go_on" in passed


def test_the_row_and_its_seed_reach_reset_and_what_reset_does_not_know_is_left_out(words: str, roll: Roll) -> None:
    env = openenv_env(words, max_concurrency=8)
    prompts = [question(seed=1), question(seed=1), question(word="fig", unknown=[1, None])]
    assert contents([row[0] for row in roll(env, by_turn("end 0"), prompts)["transcript"]]) == [
        "Play.\n\nA fruit with 5 letters, seed 1.",
        "Play.\n\nA fruit with 5 letters, seed 1.",
        "Play.\n\nA fruit with 3 letters, seed 0.",
    ]


def test_an_opening_without_text_leaves_the_prompt_as_it_is(words: str, roll: Roll) -> None:
    batch = roll(openenv_env(words, max_concurrency=8), ["apple"], [question(opening="")])
    assert contents(batch["transcript"][0]) == ["Play.", "apple"]


def test_a_reset_that_does_not_begin_by_the_seed_is_said_once(
    words: str, roll: Roll, caplog: pytest.LogCaptureFixture
) -> None:
    environment._warn_differs.cache_clear()
    roll(openenv_env(words, max_concurrency=8), by_turn("apple"), [question(seed=seed) for seed in (0, 0, 3, 3)])
    assert "differently" not in caplog.text
    roll(openenv_env(words, max_concurrency=8), by_turn("apple"), [question(is_random=True)] * 4)
    assert caplog.text.count("began two episodes differently") == 1


def test_headers_are_sent_with_all_that_is_asked(words: str, roll: Roll) -> None:
    roll(openenv_env(words, max_concurrency=8, headers={"Authorization": "Bearer me"}), ["apple"])
    assert sessions(words)["authorized"] == 2  # its schema, and the session


# Rewards that are missing


@pytest.mark.parametrize(("end", "reward"), [("end", None), ("end nan", None), ("end 0", 0.0), ("end -1.5", -1.5)])
def test_an_end_without_any_reward_is_a_failure_and_not_a_zero(
    words: str, roll: Roll, end: str, reward: float | None
) -> None:
    replies = by_name(a=end, b="apple")
    batch = roll(openenv_env(words, max_concurrency=8), replies, [question("I am a."), question("I am b.")])
    assert batch["env_reward"] == [reward, 1.0]
    assert (batch["rollout_error"][0] is None) == (reward is not None)


def test_an_episode_cut_short_before_any_reward_counts_0_and_says_so(
    words: str, roll: Roll, caplog: pytest.LogCaptureFixture
) -> None:
    environment._warn_unscored.cache_clear()
    batch = roll(openenv_env(words, max_concurrency=8), by_turn("kiwi"), [question()] * 2, max_turns=1)
    assert (batch["env_reward"], batch["rollout_error"]) == ([0.0, 0.0], [None, None])
    assert caplog.text.count("env_reward is 0") == 1


def test_an_episode_that_is_over_when_it_begins_is_a_failure(words: str, roll: Roll) -> None:
    with pytest.raises(RolloutError, match="began an episode that is over"):
        roll(openenv_env(words, max_concurrency=8), [], [question(is_over=True)])


# Actions


def test_an_action_that_the_server_finds_invalid_is_told_to_the_model(words: str, roll: Roll) -> None:
    batch = roll(openenv_env(words, max_concurrency=8), [" ", "apple"])
    told = "Error: no action was taken: guess: String should have at least 1 character"
    assert contents(batch["transcript"][0])[2] == told
    assert batch["step_rewards"] == [[0.0, 1.0]]


def test_an_action_that_cannot_be_read_is_told_to_the_model(words: str, roll: Roll) -> None:
    batch = roll(openenv_env(words, max_concurrency=8, to_action=json.loads), ["apple", '{"guess": "apple"}'])
    told = "Error: no action was taken: Expecting value: line 1 column 1 (char 0)"
    assert (contents(batch["transcript"][0])[2], batch["env_reward"]) == (told, [1.0])


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ("misbuilt", "failed to step: text: Field required"),
        ("raise", "failed to step: the level broke \\(EXECUTION_ERROR\\)"),
    ],
)
def test_an_environment_that_fails_is_not_the_models_fault(words: str, roll: Roll, reply: str, error: str) -> None:
    with pytest.raises(RolloutError, match=error):
        roll(openenv_env(words, max_concurrency=8), [reply])


def test_an_action_of_another_kind_is_refused_in_words(words: str, roll: Roll) -> None:
    with pytest.raises(
        RolloutError, match="to_action must return a dict, or an action of the environment's, not 'apple'"
    ):
        roll(openenv_env(words, max_concurrency=8, to_action=str.strip), ["apple"])


# Places


def test_256_trajectories_share_8_places(words: str, roll: Roll) -> None:
    batch = roll(openenv_env(words, max_concurrency=8), by_turn("kiwi", "apple"), [question()] * 256)
    assert batch["env_reward"] == [1.0] * 256
    assert sessions(words) == {"open": 0, "most": 8, "opened": 256, "refused": 0, "authorized": 0}


def test_places_that_other_processes_have_are_waited_for(words: str, roll: Roll) -> None:
    async def hold(seconds: float) -> None:
        held = [openenv_env(words, max_concurrency=8)() for _ in range(8)]
        await asyncio.gather(*(env.reset(question()) for env in held))
        is_held.set()
        await asyncio.sleep(seconds)
        await asyncio.gather(*(env.close() for env in held))

    is_held = threading.Event()
    other = threading.Thread(target=asyncio.run, args=(hold(1.0),))
    other.start()
    is_held.wait(10)
    batch = roll(openenv_env(words, max_concurrency=8), by_turn("kiwi", "apple"), [question()] * 16)
    other.join()
    assert (batch["env_reward"], batch["rollout_error"]) == ([1.0] * 16, [None] * 16)
    assert sessions(words)["most"] == 8


def test_more_trajectories_than_places_take_turns_and_say_what_to_do(
    words: str, roll: Roll, caplog: pytest.LogCaptureFixture
) -> None:
    session._warn_full.cache_clear()
    batch = roll(openenv_env(words, max_concurrency=24), by_turn("kiwi", "apple"), [question()] * 48)
    assert batch["env_reward"] == [1.0] * 48
    assert sessions(words)["most"] == 8
    assert caplog.text.count("takes 8 sessions at a time, and max_concurrency is 24") == 1


def test_a_place_that_never_gets_free_is_a_failure_of_the_row_in_words(echo: str, roll: Roll) -> None:
    def tight(max_concurrency: int) -> Any:
        return openenv_env(
            echo, max_concurrency=max_concurrency, capacity_timeout_s=0.3, to_text=lambda seen: "Say something."
        )

    slow = Reply([*b"Hey", TOKENIZER.eos_token_id], delay_s=1.5)
    batch = roll(tight(2), [slow], [question()] * 2, max_turns=1)
    failed, done = sorted(batch["rollout_error"], key=lambda error: error is None)
    assert done is None
    assert "had no place for capacity_timeout_s=0.3 (Server at capacity: 1/1 sessions active." in failed


def test_a_refusal_is_read_also_where_the_server_has_hung_up_by_then(echo: str) -> None:
    class SlowlyConnected(session.Server):
        async def connect(self) -> Any:
            socket = await super().connect()
            await asyncio.sleep(0.1)
            return socket

    async def refused() -> None:
        server = openenv_env(echo, max_concurrency=1, to_text=str).server
        slow = SlowlyConnected(**{**vars(server), "capacity_timeout_s": 0.1})
        first, second = session.Session(server), session.Session(slow)
        await first.begin({})
        try:
            await second.begin({})
        finally:
            await first.close()
            await second.close()

    with pytest.raises(EnvError, match="had no place for capacity_timeout_s=0.1"):
        asyncio.run(refused())


# What breaks


def test_a_connection_that_is_cut_ends_its_own_row(words: str, roll: Roll) -> None:
    replies = by_name(a="cut", b="kiwi", c="apple")
    prompts = [question(f"I am {name}.") for name in "abc"]
    batch = roll(openenv_env(words, max_concurrency=8), replies, prompts)
    assert batch["env_reward"] == [None, 1.0, 1.0]
    assert "was lost after 0 steps" in batch["rollout_error"][0]
    assert "1011" in batch["rollout_error"][0]
    assert sessions(words)["opened"] == 3  # nothing was begun anew


def test_a_connection_that_is_cut_before_the_first_step_is_made_anew(words: str, roll: Roll) -> None:
    batch = roll(openenv_env(words, max_concurrency=8), ["apple"], [question(cuts=2)])
    assert (batch["env_reward"], sessions(words)["opened"]) == ([1.0], 3)


def test_a_reset_that_fails_is_not_tried_again_and_ends_its_own_row(words: str, roll: Roll) -> None:
    prompts = [question(fails=True), question()]
    batch = roll(openenv_env(words, max_concurrency=8), by_turn("apple"), prompts)
    assert batch["env_reward"] == [None, 1.0]
    assert "failed to reset: no such level (EXECUTION_ERROR)" in batch["rollout_error"][0]
    assert sessions(words)["opened"] == 2


def test_a_step_that_hangs_ends_its_own_row_and_its_reply_reaches_nobody(words: str, roll: Roll) -> None:
    prompts = [question(f"I am {name}.") for name in "abc"]
    replies = by_name(a="sleep 1.5", b="kiwi", c="sleep 0.2")
    batch = roll(openenv_env(words, max_concurrency=1), replies, prompts, step_timeout_s=0.7)
    assert batch["env_reward"] == [None, 1.0, 1.0]
    assert "step_timeout_s=0.7" in batch["rollout_error"][0]
    assert contents(batch["transcript"][1])[2] == "Not kiwi."
    assert contents(batch["transcript"][2])[2] == "Not sleep 0.2."


def test_a_session_whose_reply_was_given_up_is_not_asked_again(words: str) -> None:
    async def give_up() -> None:
        env = openenv_env(words, max_concurrency=8)()
        await env.reset(question())
        try:
            async with asyncio.timeout(0.1):
                await env.step({"role": "assistant", "content": "sleep 0.3"})
        except TimeoutError:
            await asyncio.sleep(0.4)
            await env.step({"role": "assistant", "content": "apple"})
        finally:
            await env.close()

    with pytest.raises(EnvError, match="was lost after 0 steps"):
        asyncio.run(give_up())


def test_a_reset_that_hangs_ends_its_own_row(words: str, roll: Roll) -> None:
    prompts = [question(reset_s=1.5), question()]
    batch = roll(openenv_env(words, max_concurrency=8), by_turn("apple"), prompts, reset_timeout_s=0.7)
    assert batch["env_reward"] == [None, 1.0]
    assert "reset_timeout_s=0.7" in batch["rollout_error"][0]


def test_sessions_end_however_a_trajectory_is_cancelled(words: str) -> None:
    async def play(env: Any) -> None:
        try:
            await env.reset(question(reset_s=0.05))
            while True:
                await env.step({"role": "assistant", "content": "sleep 0.05"})
        finally:
            await env.close()

    async def cancel_at_any_moment() -> None:
        factory, moments = openenv_env(words, max_concurrency=8), random.Random(0)
        for _ in range(8):
            tasks = [asyncio.create_task(play(factory())) for _ in range(8)]
            for task in tasks:
                await asyncio.sleep(moments.uniform(0.0, 0.03))
                task.cancel()
                if moments.random() < 0.5:  # once more, while it closes
                    await asyncio.sleep(0.0)
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(cancel_at_any_moment())
    assert wait_for_places(words) == 0


def test_sessions_end_at_an_interrupt_from_the_keyboard(words: str, roll: Roll) -> None:
    slow = Reply([TOKENIZER.eos_token_id], delay_s=60.0)
    interrupt = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        roll(openenv_env(words, max_concurrency=8), lambda prompt: slow, [question()] * 8)
    assert wait_for_places(words) == 0
    assert sessions(words)["opened"] == 8


def test_a_connection_outlives_a_long_generation(servers: Servers, roll: Roll) -> None:
    slow = Reply([*b"apple", TOKENIZER.eos_token_id], delay_s=2.5)
    batch = roll(openenv_env(servers.pinging, max_concurrency=8, keepalive_s=None), [slow])
    assert batch["env_reward"] == [1.0]


def test_a_server_that_answers_pings_late_is_waited_for(words: str, roll: Roll) -> None:
    batch = roll(openenv_env(words, max_concurrency=8, keepalive_s=0.05), ["block", "apple"])
    assert batch["env_reward"] == [1.0]


# What cannot work


def test_a_server_that_is_not_there_is_an_error_before_anything_is_sampled() -> None:
    with pytest.raises(ServerError, match="No environment server answers at http://127.0.0.1:9 .* Start it first"):
        openenv_env("http://127.0.0.1:9", max_concurrency=8)


def test_the_models_server_is_not_taken_for_an_environments() -> None:
    with (
        FakeServer(["x"], tokenizer=TOKENIZER) as server,
        pytest.raises(ServerError, match="/schema answered 404 .* not the model's"),
    ):
        openenv_env(server.base_url, max_concurrency=8)


def test_a_server_that_is_gone_stops_the_run_in_words(words: str, roll: Roll) -> None:
    env = openenv_env(words, max_concurrency=8)
    gone = replace(env, server=replace(env.server, base_url="http://127.0.0.1:9"))
    with pytest.raises(RolloutError, match="no session could be begun, the last attempt ended with ConnectionRefused"):
        roll(gone, [])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_concurrency": 0}, "max_concurrency must be a number of sessions, 1 or more, not 0."),
        ({"max_concurrency": True}, "max_concurrency must be a number of sessions, 1 or more, not True."),
        ({"base_url": "127.0.0.1:8000"}, "base_url must begin with http:// or https://, not '127.0.0.1:8000'."),
        ({"capacity_timeout_s": 0.0}, "capacity_timeout_s must be"),
        ({"keepalive_s": -1.0}, "keepalive_s must be"),
        ({"to_text": "text"}, "to_text and to_action must be functions, not 'text' and None."),
        ({"client": dict}, "client must be the environment's EnvClient class, not <class 'dict'>."),
    ],
)
def test_an_argument_that_cannot_work_is_refused_before_the_server_is_asked(options: Any, sentence: str) -> None:
    arguments = {"base_url": "http://127.0.0.1:9", "max_concurrency": 8, **options}
    with pytest.raises(SetupError) as error:
        openenv_env(**arguments)
    assert str(error.value).startswith(sentence)


def test_without_websockets_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "websockets", None)
    with pytest.raises(SetupError, match="pip install 'trl-rollouts.openenv.'"):
        openenv_env("http://127.0.0.1:9", max_concurrency=8)


def test_an_observation_of_several_fields_needs_a_view(echo: str) -> None:
    with pytest.raises(SetupError, match="has the fields echoed_message, message_length. Pass to_text"):
        openenv_env(echo, max_concurrency=1)


@pytest.mark.parametrize(
    ("properties", "required", "field"),
    [
        ({"message": {"type": "string"}}, ["message"], "message"),
        ({"message": {"type": "string"}, "timeout": {"type": "integer"}}, ["message"], "message"),
        ({"message": {"type": "string"}, "timeout": {"type": "integer"}}, ["message", "timeout"], None),
        ({"tool_name": {"type": "string"}, "type": {"type": "string", "const": "call_tool"}}, ["tool_name"], None),
        ({"move": {"type": "string", "enum": ["left", "right"]}}, ["move"], None),
        ({"move": {"type": "integer"}}, ["move"], None),
        ({}, [], None),
    ],
)
def test_a_text_makes_an_action_where_there_is_one_way(properties: Any, required: Any, field: str | None) -> None:
    schema = {"action": {"properties": {**properties, "metadata": {"type": "object"}}, "required": required}}
    if field is None:
        with pytest.raises(SetupError, match="Pass to_action"):
            openenv._default_to_action(schema, "http://server")
    else:
        assert openenv._default_to_action(schema, "http://server")(" go\n") == {field: "go"}


def test_a_prompt_that_is_a_string_is_refused(words: str, roll: Roll) -> None:
    with pytest.raises(SetupError, match="use prompts that are lists of messages"):
        roll(openenv_env(words, max_concurrency=8), [], ["Play."])


def test_a_view_that_fails_is_named(words: str, roll: Roll) -> None:
    with pytest.raises(RolloutError, match="to_text failed: KeyError: 'board'"):
        roll(openenv_env(words, max_concurrency=8, to_text=lambda observation: observation["board"]), [])
    with pytest.raises(RolloutError, match="to_text returned 5, not a text"):
        roll(openenv_env(words, max_concurrency=8, to_text=lambda observation: 5), [])


# The tools of an MCP environment


def calls(*pairs: tuple[str, Any]) -> str:
    texts = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in pairs]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


def test_the_tools_of_an_environment_are_shown_and_called(shop: str, roll: Roll) -> None:
    asked = calls(("price", {"fruit": "pear"}), ("price", {"fruit": "plum"}))
    batch = roll(openenv_env(shop, max_concurrency=8), [asked, calls(("buy", {"fruit": "pear"}))])
    shown = TOKENIZER.decode(batch["prompt_ids"][0])
    assert '"name": "price", "description": "The price of a kilo."' in shown
    assert '{"fruit": {"type": "string"}, "kilos": {"default": 1, "type": "integer"}}' in shown
    assert [(message["role"], message["content"]) for message in batch["transcript"][0]] == [
        ("user", "Play."),
        ("assistant", ""),
        ("tool", "4"),
        ("tool", "7"),
        ("assistant", ""),
    ]
    assert (batch["stop_reason"], batch["env_reward"]) == (["terminated"], [1.0])
    made = [(call["name"], call["arguments"], call["result"], call["error"]) for call in batch["tool_calls"][0]]
    assert made == [
        ("price", {"fruit": "pear"}, 4, None),
        ("price", {"fruit": "plum"}, 7, None),
        ("buy", {"fruit": "pear"}, "1 kilos of pear", None),
    ]


def test_what_is_wrong_with_a_call_is_told_in_the_servers_words(shop: str, roll: Roll) -> None:
    wrong = [("price", {"fruit": "fig"}), ("price", {"fuit": "pear"}), ("steal", {}), ("price", "pear")]
    batch = roll(openenv_env(shop, max_concurrency=8), [calls(*wrong), calls(("buy", {"fruit": "plum"}))])
    assert [(call["error"], call["content"].splitlines()[0]) for call in batch["tool_calls"][0]] == [
        ("exception", "Error: Error calling tool 'price': 'fig'"),
        ("invalid_arguments", "Error: 2 validation errors for call[price]"),
        ("unknown_tool", "Error: Unknown tool: 'steal'"),
        ("parse_error", 'Error: The arguments of price must be a JSON object, not "pear".'),
        (None, "1 kilos of plum"),
    ]
    assert "Missing required argument" in batch["tool_calls"][0][1]["content"]
    assert "https" not in batch["tool_calls"][0][1]["content"]
    assert batch["env_reward"] == [0.0]


def test_calls_behind_the_end_are_not_made(shop: str, roll: Roll) -> None:
    turn = calls(("buy", {"fruit": "pear"}), ("buy", {"fruit": "plum"}))
    batch = roll(openenv_env(shop, max_concurrency=8), [turn])
    assert ([call["result"] for call in batch["tool_calls"][0]], batch["env_reward"]) == (["1 kilos of pear"], [1.0])


def test_an_answer_without_a_call_ends_the_episode(shop: str, roll: Roll) -> None:
    batch = roll(openenv_env(shop, max_concurrency=8), [calls(("price", {"fruit": "pear"})), "It costs 4."])
    assert (batch["stop_reason"], batch["env_reward"]) == (["terminated"], [0.0])


def test_a_call_that_hangs_ends_its_own_row(shop: str, roll: Roll) -> None:
    prompts = [question("I am a."), question("I am b.")]
    replies = by_name(a=calls(("wait", {"seconds": 1.5})), b=calls(("buy", {"fruit": "pear"})))
    batch = roll(openenv_env(shop, max_concurrency=8), replies, prompts, step_timeout_s=0.7)
    assert batch["env_reward"] == [None, 1.0]


def test_an_environment_with_tools_is_one_in_all_that_is_owed(shop: str) -> None:
    call = {"type": "function", "function": {"name": "buy", "arguments": {"fruit": "pear"}}}
    actions = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    passed = check_env(openenv_env(shop, max_concurrency=8), prompt=question(), actions=actions)
    assert "tools_are_schemas" in passed


# Beside OpenEnv's own rollout function

PROMPT = [257, *b"user\nG", 258, *b"\n", 257, *b"assistant\n"]
GUESSES = [[*b"a", 258], [*b"b", 258]]
OBSERVATION = [*b"\n", 257, *b"user\nNot a.", 258, *b"\n", 257, *b"assistant\n"]


def test_the_tokens_are_those_that_the_model_saw_and_wrote(words: str, roll: Roll) -> None:
    prompts = [question("G", word="b", opening="")] * 3
    batch = roll(openenv_env(words, max_concurrency=8), by_turn("a", "b"), prompts)
    assert batch["prompt_ids"] == [PROMPT] * 3
    assert batch["completion_ids"] == [GUESSES[0] + OBSERVATION + GUESSES[1]] * 3
    assert batch["env_mask"] == [[1] * 2 + [0] * len(OBSERVATION) + [1] * 2] * 3
    assert batch["client"].calls[0][0] == PROMPT
    assert batch["client"].calls[-1][0] == PROMPT + GUESSES[0] + OBSERVATION
    assert sessions(words)["most"] == 3


def test_openenvs_own_rollout_function_makes_another_sequence_of_the_same_episode(words: str) -> None:
    seen = [PROMPT, PROMPT + GUESSES[0] + OBSERVATION]
    turns = [
        {"prompt_ids": prompt, "completion_ids": ids, "guess": guess}
        for prompt, ids, guess in zip(seen, GUESSES, "ab", strict=True)
    ]
    command = [BIN / "python", Path(__file__).with_name("openenv_harness.py"), words, "3"]
    ran = subprocess.run(command, input=json.dumps(turns).encode(), capture_output=True, timeout=60, check=True)
    theirs = json.loads(ran.stdout)
    assert theirs["env_reward"] == [1.0] * 3
    assert theirs["prompt_ids"] == [seen[0] + seen[1]] * 3  # the prompts of all turns, one behind the other
    assert theirs["completion_ids"] == [GUESSES[0] + GUESSES[1]] * 3  # without what the model read between
    assert "env_mask" not in theirs
    assert theirs["open"] == [1] * 6  # one prompt after the other
