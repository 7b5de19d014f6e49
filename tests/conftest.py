"""The real model and the real servers, started once a session. Tests that need none of them run first."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import HealthCheck, settings
from servers import OLD_TRL, SMOLLM2, old_trl_server
from servers import vllm_server as start_vllm_server

# On a busy machine an example may take any time; what is slow belongs in benchmarks.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

SLOW = {
    "test_cli",
    "test_executors",
    "test_interruption",
    "test_pool",
    "test_recipes",
    "test_soak",
    "test_trl_contract",
}
"""What starts processes, or waits for what it has broken."""
SERVER_TEST_TIMEOUT_S = 600  # the first one waits for its server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = ("server", "families", "environments")
    for item in items:
        if item.path.parent.name == "envs":
            item.add_marker("environments")
        if item.path.parent.name == "sandbox" or item.path.stem in SLOW:
            item.add_marker("slow")
    items.sort(key=lambda item: [item.get_closest_marker(name) is not None for name in slow])
    for item in items:
        if item.get_closest_marker("server") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SERVER_TEST_TIMEOUT_S))
        if "launched" in getattr(item, "fixturenames", ()):  # the first one waits for six processes
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct."""
    if not (SMOLLM2 / "model.safetensors").exists():
        _missing(f"{SMOLLM2} holds no model: `make setup` puts it there.")
    return SMOLLM2


@pytest.fixture(scope="session")
def vllm_server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of a real vLLM server."""
    with start_vllm_server(smollm2, tmp_path_factory.mktemp("vllm") / "server.log") as base_url:
        yield base_url


@pytest.fixture(scope="session")
def trl_server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of a real `/generate/` server, that of TRL 1.10.0."""
    if not OLD_TRL.exists():
        _missing(f"{OLD_TRL} does not exist: `make setup` puts TRL 1.10.0 there.")
    with old_trl_server(smollm2, tmp_path_factory.mktemp("trl") / "server.log") as base_url:
        yield base_url


def _missing(what: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what} In CI nothing is skipped.")
    pytest.skip(what)
