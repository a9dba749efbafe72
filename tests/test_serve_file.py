"""The keys of a Serve config file that are Ray Serve's own."""

from pathlib import Path

import pytest

from serve_app.serve_file import ServeFileError, read_serve_file

FILE = """
http_options: {host: 127.0.0.1}
grpc_options: {port: 9000}
applications:
  - name: api
    import_path: serve_app.app:build
    args:
      models: [{name: tiny}]
    runtime_env:
      env_vars: {ANYTHING: "1"}
      config: {setup_timeout_seconds: 5}
    deployments:
      - name: ingress
        user_config: {anything: 1}
        autoscaling_config: {min_replicas: 1, policy: {policy_kwargs: {anything: 1}}}
        ray_actor_options: {resources: {anything: 1}, runtime_env: {pip: [numpy]}}
"""
IN_APPLICATION = "applications.0."
IN_DEPLOYMENT = "applications.0.deployments.0."


def write_file(folder: Path, old: str = "", new: str = "") -> Path:
    path = folder / "serve.yaml"
    path.write_text(FILE.replace(old, new) if old else FILE)
    return path


def test_a_file_may_have_whatever_ray_serve_reads(tmp_path: Path) -> None:
    assert read_serve_file(write_file(tmp_path)).args.models[0].name == "tiny"


@pytest.mark.parametrize(
    ("place", "key", "old", "meant"),
    [
        ("", "grpc_option", "grpc_options", "grpc_options"),
        ("grpc_options.", "prot", "port", "port"),
        (IN_APPLICATION, "deploymnets", "deployments", "deployments"),
        (f"{IN_APPLICATION}runtime_env.", "env_var", "env_vars", "env_vars"),
        (f"{IN_APPLICATION}runtime_env.", "zzz", "env_vars", None),
        (
            f"{IN_APPLICATION}runtime_env.config.",
            "setup_timeout",
            "setup_timeout_seconds",
            "setup_timeout_seconds",
        ),
        (IN_DEPLOYMENT, "user_confg", "user_config", "user_config"),
        (f"{IN_DEPLOYMENT}autoscaling_config.", "min_replica", "min_replicas", "min_replicas"),
        (f"{IN_DEPLOYMENT}autoscaling_config.policy.", "kwargs", "policy_kwargs", "policy_kwargs"),
        (f"{IN_DEPLOYMENT}ray_actor_options.", "resource", "resources", "resources"),
        (f"{IN_DEPLOYMENT}ray_actor_options.runtime_env.", "pipp", "pip:", "pip"),
    ],
)
def test_a_key_that_ray_serve_leaves_unread_is_refused(
    tmp_path: Path, place: str, key: str, old: str, meant: str | None
) -> None:
    path = write_file(tmp_path, old, key + ":" * old.endswith(":"))
    with pytest.raises(ServeFileError) as refused:
        read_serve_file(path)
    words = str(refused.value)
    assert words.startswith(f"{path}: {place}{key} is no key of Ray Serve's; known are ")
    assert words.partition("; did you mean ")[2] == (f"{meant}?" if meant else "")


def test_a_misspelt_name_of_a_deployment_is_named_before_the_missing_one(tmp_path: Path) -> None:
    path = write_file(tmp_path, "- name: ingress", "- nmae: ingress")
    with pytest.raises(ServeFileError, match=r"deployments\.0\.nmae is no key.*mean name\?"):
        read_serve_file(path)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("http_options: {host: 127.0.0.1}", "http_options:", "http_options: is empty and must be"),
        ("      models: [{name: tiny}]\n", "", "applications.0.args: is empty and must be"),
        ("models: [{name: tiny}]", "models:", "args.models: is empty and must be a list"),
    ],
)
def test_an_empty_section_of_the_file_is_named(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    path = write_file(tmp_path, old, new)
    with pytest.raises(ServeFileError) as refused:
        read_serve_file(path)
    assert str(refused.value).startswith(f"{path}: {words}")


def test_a_file_that_is_missing_is_named_once(tmp_path: Path) -> None:
    path = tmp_path / "missing.yaml"
    with pytest.raises(ServeFileError) as refused:
        read_serve_file(path)
    assert str(refused.value) == f"{path} cannot be read: No such file or directory"
