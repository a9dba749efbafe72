"""What an ingress says of bases that will not come."""

from __future__ import annotations

from typing import cast

import pytest
from ray.serve.handle import DeploymentHandle

from registry.catalog import Catalog
from serve_app.errors import ServiceUnavailableError
from serve_app.gateway import Gateway
from serve_app.topology import PlatformView


def test_a_base_that_is_not_registered_is_named_as_the_obstacle() -> None:
    gateway = Gateway(cast("DeploymentHandle[object]", None), "ingress")
    assert not gateway.is_ready
    assert gateway.obstacles == []
    gateway.view = PlatformView(
        revision="1",
        catalog=Catalog((), ()),
        bases=(),
        missing=("nobody",),
        is_one_node=True,
        registry_error=None,
    )
    assert not gateway.is_ready
    assert gateway.obstacles == ["not registered: nobody"]


def test_a_server_that_is_being_stopped_refuses_new_requests_and_says_so() -> None:
    gateway = Gateway(cast("DeploymentHandle[object]", None), "ingress")
    gateway.view = PlatformView("1", Catalog((), ()), (), (), True, None, is_draining=True)
    assert not gateway.is_ready
    assert gateway.obstacles == ["the server is being stopped"]
    with pytest.raises(ServiceUnavailableError, match="is being stopped"):
        gateway.route("base", None)
