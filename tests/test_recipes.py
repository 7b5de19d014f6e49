"""Recipes run as a user runs them, for two steps."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trl_rollouts import read_transcripts

ROOT = Path(__file__).parent.parent


RECIPES = ["tool_call", "code_execution"]


@pytest.mark.parametrize("config", sorted((ROOT / "recipes/configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_field_of_a_config_file_is_known(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trl import GRPOConfig, ModelConfig, TrlParser

    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    recipe = importlib.import_module(config.stem.removesuffix("_cpu"))
    parser = TrlParser((recipe.TaskConfig, GRPOConfig, ModelConfig))
    task, args, model = parser.parse_args_and_config(["--config", str(config), "--use_cpu", "true", "--bf16", "false"])
    assert task.transcript_dir == f"{args.output_dir}/transcripts"
    assert model.model_name_or_path


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
