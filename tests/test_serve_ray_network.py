"""The warnings about the reach of Ray's ports."""

from serve_app.ray_network import open_nodes


def test_a_ray_that_other_machines_reach_without_authentication_is_warned_of() -> None:
    words = open_nodes(["192.0.2.9", "127.0.0.1", "192.0.2.8"], is_authenticated=False)
    assert words is not None
    assert "192.0.2.8, 192.0.2.9" in words
    assert "RAY_AUTH_MODE=token" in words


def test_a_ray_on_loopback_or_behind_a_token_is_fine() -> None:
    assert open_nodes(["127.0.0.1"], is_authenticated=False) is None
    assert open_nodes(["192.0.2.9"], is_authenticated=True) is None
