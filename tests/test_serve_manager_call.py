"""The refusal of an operator's order on its way back from the manager."""

from __future__ import annotations

import pickle
from typing import Any, cast

import pytest
from ray.serve.handle import DeploymentHandle

from registry.errors import NotFoundError
from serve_app.errors import ApiError, ConflictError
from serve_app.ray_calls import ask_manager, refusing


class Manager:
    @refusing
    async def order(self, error: Exception) -> str:
        raise error


class Method:
    """Replaces a method of the handle: its result or exception passes through a pickle."""

    def __init__(self) -> None:
        self.num_raised = 0  # each of them is a traceback in Serve's log

    async def remote(self, *arguments: Any) -> object:
        try:
            return pickle.loads(pickle.dumps(await Manager().order(*arguments)))
        except Exception:
            self.num_raised += 1
            raise


@pytest.mark.parametrize(
    "error", [NotFoundError("nobody"), ConflictError("it runs"), ApiError(400, "no", param="name")]
)
async def test_a_refused_order_comes_back_as_raised_and_leaves_no_traceback(
    error: Exception,
) -> None:
    method = Method()
    with pytest.raises(type(error), match=str(error)):
        await ask_manager(cast("DeploymentHandle[object]", method), error)
    assert method.num_raised == 0


async def test_a_failure_of_the_manager_stays_a_failure() -> None:
    method = Method()
    with pytest.raises(ZeroDivisionError):
        await ask_manager(cast("DeploymentHandle[object]", method), ZeroDivisionError())
    assert method.num_raised == 1
