"""What users import, what importing costs, and which module may know which."""

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import trl_rollouts

PACKAGE = Path(trl_rollouts.__file__).parent
HEAVY = {
    "torch",
    "trl",
    "vllm",
    "transformers",
    "datasets",
    "accelerate",
    "aiohttp",
    "requests",
    "pydantic",
    "ray",
    "gymnasium",
    "reasoning_gym",
    "textarena",
    "openenv",
    "verifiers",
}

# From what all build on to what builds on all; a module imports only from groups before its own, or its own.
LAYERS = [
    {"errors", "trajectory", "engine", "worker"},
    {"env", "kinds", "hosting", "sampling", "transcripts", "metrics", "sandbox", "serving"},
    {"messages", "bridging", "tokens", "parsing"},
    {"clients"},
    {"tools", "weights", "episode", "trainer"},
    {"code"},
    {"options", "failures", "rollout"},
    {"ready_made", "doctor", "envs"},
    {"__init__", "cli", "testing"},
]


def test_every_public_name_exists_and_is_listed_once() -> None:
    assert all(getattr(trl_rollouts, name) is not None for name in trl_rollouts.__all__)
    assert sorted(trl_rollouts.__all__) == sorted(trl_rollouts._HOME)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'tool_rolout'"):
        _ = trl_rollouts.tool_rolout


@pytest.mark.parametrize("statement", ["import trl_rollouts", "from trl_rollouts import tool_rollout, env_reward"])
def test_importing_is_free(statement: str) -> None:
    script = f"import sys; {statement}; print(sorted({HEAVY!r} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


def test_imports_run_one_way() -> None:
    level = {name: number for number, names in enumerate(LAYERS) for name in names}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        for target in _imported(path, parts):
            assert level[target] <= level[parts[0]], f"{'/'.join(parts)} imports {target}"


def _imported(path: Path, parts: tuple[str, ...]) -> set[str]:
    """Top-level modules of this package that a file imports when it is loaded."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level == len(parts):
            found |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
    return found - {parts[0]}


@pytest.mark.skipif(os.environ.get("CI") != "true", reason="elsewhere the tests of an adapter are skipped without")
@pytest.mark.parametrize("library", ["gymnasium", "textarena", "verifiers.v1", "websockets"])
def test_what_the_adapters_are_tested_with_is_there(library: str) -> None:
    importlib.import_module(library)
