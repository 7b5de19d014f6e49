"""A kernel that lacks one of the layers: LocalExecutor refuses it, or says what is missing."""

import asyncio
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import security_table
from attacks import ATTACKS
from harness import without
from security_table import KERNEL_DEPENDENT, MIN_LANDLOCK_ABI, harmful

from trl_rollouts import SandboxError
from trl_rollouts.sandbox.confinement import LAYERS
from trl_rollouts.sandbox.local import LocalExecutor


def executor_without(layer: str, **options: Any) -> LocalExecutor:
    executor = LocalExecutor(modules=[], **options)
    executor._wrapper = without(layer)
    return executor


@cache
def report_without(layer: str, python: Path) -> dict[str, Any]:
    return security_table.report_without(layer, python)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_missing_layer_is_refused_by_name(layer: str) -> None:
    async def open_twice() -> None:
        executor = executor_without(layer)
        for _ in range(2):  # the fork server runs by the second time
            with pytest.raises(SandboxError, match=f"lacks {layer} to confine .*allow_missing=\\['{layer}'\\]"):
                await executor.open()
        await executor.close()

    asyncio.run(open_twice())


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_that_may_be_missing_is_reported_and_the_others_hold(layer: str) -> None:
    async def run() -> None:
        executor = executor_without(layer, allow_missing=[layer])
        session = await executor.open()
        assert executor.isolation is not None
        assert set(executor.isolation.layers) == set(LAYERS) - {layer}
        assert list(executor.isolation.missing) == [layer]
        assert (await session.run("40 + 2", 10.0)).value == "42"
        await executor.close()

    asyncio.run(run())


def test_what_may_be_missing_does_not_let_another_layer_be_missing() -> None:
    async def run() -> None:
        executor = executor_without("seccomp", allow_missing=["landlock", "limits"])
        with pytest.raises(SandboxError, match="lacks seccomp to confine"):
            await executor.open()
        await executor.close()

    asyncio.run(run())


@pytest.mark.timeout(240)
@pytest.mark.parametrize("layer", LAYERS)
def test_the_attacks_that_do_harm_without_a_layer_are_the_documented_ones(layer: str, anyones_python: Path) -> None:
    report = report_without(layer, anyones_python)
    assert list(report["missing"]) == [layer]
    if layer != "landlock" and report["landlock_abi"] < MIN_LANDLOCK_ABI:
        pytest.skip(
            f"Landlock {report['landlock_abi']} holds less than the {MIN_LANDLOCK_ABI} of the documented kernel."
        )
    _, documented = security_table.documented()
    assert harmful(report) - KERNEL_DEPENDENT == documented[layer] - KERNEL_DEPENDENT


def test_each_layer_stops_attacks_that_no_other_one_stops() -> None:
    _, documented = security_table.documented()
    for layer in LAYERS:
        assert documented[layer] - set().union(*(documented[other] for other in LAYERS if other != layer))


def test_the_documented_table_speaks_of_the_attacks_as_they_are() -> None:
    block, documented = security_table.documented()
    named = set().union(*documented.values())
    assert f"All {len(ATTACKS)} attacks" in block
    assert all(f"| `{attack.name}` | {attack.must} |" in block for attack in ATTACKS if attack.name in named)
    assert named <= {attack.name for attack in ATTACKS}
