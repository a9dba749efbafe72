"""An ingress calls the manager for an operator: its refusals come out as they were raised."""

from __future__ import annotations

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from serve_app.errors import ServiceUnavailableError
from serve_app.ray_errors import root_cause


async def ask_manager(method: DeploymentHandle[object], *arguments: object) -> object:
    """Raises what the method raised, or ServiceUnavailableError where no manager answers."""
    try:
        answer: object = await method.remote(*arguments)
    except (RayError, RayServeException) as error:
        cause = root_cause(error)
        if isinstance(cause, RayError | RayServeException):
            raise ServiceUnavailableError("The manager does not answer.", 2) from error
        raise cause from None
    return answer
