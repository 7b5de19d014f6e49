"""Recipes run as a user runs them, for two steps."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
from openenv_servers import environment_server, require_openenv

from trl_rollouts import read_transcripts
from trl_rollouts.testing import FakeServer, byte_tokenizer, tiny_model

ROOT = Path(__file__).parent.parent


RECIPES = ["tool_call", "code_execution"]
CONFIGS = sorted((ROOT / "recipes/configs").glob("*.yaml"))
NEEDS = {
    "gymnasium_frozenlake": "gymnasium",
    "reasoning_gym_problems": "reasoning_gym",
    "openenv_echo": "websockets",
    "textarena_guess_the_number": "textarena",
    "verifiers_environment": "verifiers.v1",
}


def load(recipe: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The recipe as a module, if what it needs is there."""
    pytest.importorskip(NEEDS.get(recipe, "trl"))
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    return importlib.import_module(recipe)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_every_field_of_a_config_file_is_known(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trl import GRPOConfig, ModelConfig, TrlParser

    recipe = load(config.stem.removesuffix("_cpu"), monkeypatch)
    parser = TrlParser((recipe.TaskConfig, GRPOConfig, ModelConfig))
    task, args, model = parser.parse_args_and_config(["--config", str(config), "--use_cpu", "true", "--bf16", "false"])
    assert task.transcript_dir == f"{args.output_dir}/transcripts"
    assert model.model_name_or_path


@pytest.mark.parametrize("recipe", sorted({path.stem.removesuffix("_cpu") for path in CONFIGS}))
def test_a_recipe_hides_no_library_from_itself(recipe: str) -> None:
    elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT / "recipes"]
    assert PathFinder.find_spec(recipe, elsewhere) is None  # a script's own folder comes first on its path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a one-layer model whose tokens are bytes."""
    folder, tokenizer = tmp_path_factory.mktemp("tiny"), byte_tokenizer()
    tiny_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def play(recipe: Any, tiny: str, output_dir: Path, reply: Callable[[str], str], *arguments: str) -> list[Any]:
    """Two steps of a recipe on a server whose model answers a prompt's text with `reply`: its transcripts."""
    from trl import GRPOConfig, ModelConfig, TrlParser

    tokenizer = byte_tokenizer()
    with FakeServer(lambda prompt: reply(tokenizer.decode(prompt)), tokenizer=tokenizer, model=tiny) as server:
        parser = TrlParser((recipe.TaskConfig, GRPOConfig, ModelConfig))
        command = ["--config", str(ROOT / f"recipes/configs/{recipe.__name__}_cpu.yaml"), "--max_steps", "2"]
        command += ["--model_name_or_path", tiny, "--vllm_server_base_url", server.base_url, "--num_generations", "2"]
        command += ["--output_dir", str(output_dir), "--transcript_dir", str(output_dir / "transcripts")]
        command += ["--per_device_train_batch_size", "4", "--max_completion_length", "1000", *arguments]
        recipe.main(*parser.parse_args_and_config(command))
    history = json.loads((output_dir / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history if "reward" in entry] == [1, 2]
    return list(read_transcripts(output_dir / "transcripts"))


def crossing(lake: str) -> list[str]:
    """The moves of a shortest way over a lake, from the place in brackets."""
    lines = [line.strip() for line in lake.splitlines() if "(" not in line]  # the last move
    rows = [line.replace("[", "").replace("]", "") for line in lines]
    marked = next((row, line.index("[")) for row, line in enumerate(lines) if "[" in line)
    ways, seen = [(marked, list[str]())], {marked}
    for (row, column), moves in ways:
        if rows[row][column] == "G":
            return moves
        for move, (down, right) in {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}.items():
            place = row + down, column + right
            if place not in seen and all(0 <= one < len(rows) for one in place) and rows[place[0]][place[1]] != "H":
                seen.add(place)
                ways.append((place, [*moves, move]))
    raise AssertionError(f"no way over {lake}")


def test_frozen_lake_is_played_for_two_steps(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load("gymnasium_frozenlake", monkeypatch)

    def cross(prompt: str) -> str:
        last = prompt.rpartition("user\n")[2].partition("<")[0]
        return f"I go {crossing(last.removeprefix('You are there. The next lake:').strip())[0]}."

    lines = play(recipe, tiny, tmp_path, cross, "--max_turns", "12")
    assert [line["env_reward"] for line in lines] == [1.0] * 8


def test_reasoning_gym_is_played_for_two_steps(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load("reasoning_gym_problems", monkeypatch)

    def solve(prompt: str) -> str:
        terms = prompt.rpartition("problem: ")[2].partition(" =")[0]
        return f"<answer>{eval(terms)}</answer>"

    lines = play(recipe, tiny, tmp_path, solve)
    assert [line["env_reward"] for line in lines] == [1.0] * 8


def test_a_textarena_game_is_played_for_two_steps(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load("textarena_guess_the_number", monkeypatch)
    lines = play(recipe, tiny, tmp_path, lambda prompt: f"[{prompt.count('assistant')}]")
    assert [line["stop_reason"] for line in lines] == ["terminated"] * 8


def test_an_environment_of_verifiers_is_played_for_two_steps(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load("verifiers_environment", monkeypatch)
    lines = play(recipe, tiny, tmp_path, lambda prompt: str(5 + prompt.count("higher") - prompt.count("lower")))
    ends = {(line["stop_reason"], round(line["env_reward"], 6)) for line in lines}
    assert ends == {("max_turns", 0.1), ("terminated", 1.1)}


def test_an_openenv_server_is_played_for_two_steps(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_openenv()
    recipe = load("openenv_echo", monkeypatch)
    with environment_server(tmp_path, "word_echo") as env_url:
        lines = play(recipe, tiny, tmp_path, lambda prompt: "Hello", "--env_url", env_url)
    assert [line["env_reward"] for line in lines] == [1.0] * 8
    shown = [message["content"] for message in lines[0]["messages"]]
    assert shown[3:] == ["Hello", 'The echo says "Hello". Another word.', "Hello"]


@pytest.mark.server
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_two_steps_on_the_real_server(
    vllm_server: str, smollm2: Path, tmp_path: Path, recipe: str
) -> None:
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--cpu"]
    command += [f"recipes/{recipe}.py", "--config", f"recipes/configs/{recipe}_cpu.yaml", "--max_steps", "2"]
    command += ["--model_name_or_path", str(smollm2), "--vllm_server_base_url", vllm_server, "--num_generations", "4"]
    command += ["--output_dir", str(tmp_path), "--transcript_dir", str(tmp_path / "transcripts")]
    command += ["--per_device_train_batch_size", "4"]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"}, timeout=400)

    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history if "reward" in entry] == [1, 2]
    for entry in history[:2]:  # TRL counts what the mask leaves
        assert entry["completions/mean_length"] == entry["rollout/sampled_tokens"]
    assert [line["step"] for line in read_transcripts(tmp_path / "transcripts")] == [0] * 4 + [1] * 4
