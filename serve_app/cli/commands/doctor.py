"""`loraplex doctor`: the requirements that this machine does not meet, each with a remedy; with
`--base`, those of a base's folder."""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, requires, version
from pathlib import Path
from typing import Literal, cast, get_args

from packaging.requirements import Requirement
from rich.table import Table

from engine.checks.fit import Fit, estimate_fit
from engine.config import KVCacheDtype, LoraDtype, QuantizationSetting
from engine.devices import DeviceLink, describe_devices, describe_links
from engine.errors import UnsupportedModelError
from engine.host_memory import available_bytes, total_bytes
from registry.catalog import Catalog
from registry.errors import RegistryError
from registry.store import shown_uri
from serve_app import config
from serve_app.cli import launch
from serve_app.cli.addresses import describe_missing
from serve_app.cli.commands.common import Failure, console, print_json, print_table
from serve_app.cli.commands.gguf_file import as_outline, is_gguf, made_of
from serve_app.cli.commands.store import read_catalog
from serve_app.control.base_plan import SERVE, parse_setting
from serve_app.home import NAME, HomeError, is_open_to_others, prepare

_GIB = 1024**3
_DEMO_BASE = "smollm2-135m-instruct"
State = Literal["ok", "warn", "fail"]
_LINKS = {  # of `nvidia-smi topo -m`
    "PIX": "PCIe, one switch",
    "PXB": "PCIe, several switches",
    "PHB": "PCIe, the CPU's host bridge",
    "NODE": "PCIe, several host bridges of a NUMA node",
    "SYS": "PCIe across NUMA nodes",
}
_COLOURS: dict[State, str] = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    state: State
    words: str
    remedy: str = ""


def doctor(
    port: int,
    base: Path | None,
    memory_gib: float | None,
    quantization: str | None,
    kv_cache_dtype: str | None,
    lora_dtype: str | None,
    ranks: int,
    tracking_uri: str | None,
    json: bool,
) -> None:
    for option, value, known in (
        ("--memory", None if memory_gib is None else f"{memory_gib:g}", ()),
        ("--quantization", quantization, get_args(QuantizationSetting)),
        ("--kv-cache-dtype", kv_cache_dtype, get_args(KVCacheDtype)),
        ("--lora-dtype", lora_dtype, get_args(LoraDtype)),
        ("--ranks", None if ranks == 1 else str(ranks), ()),
    ):
        if value is not None and base is None:
            raise Failure(f"{option} is {value}: it is for --base FOLDER, which is missing")
        if value is not None and known and value not in known:
            match = config.close_match(value, known)
            raise Failure(f"{option} is {value}: known are {', '.join(known)}{match}")
    if base is not None and tracking_uri is not None:
        raise Failure("--base and --tracking-uri exclude each other: a folder needs no registry")
    if base is not None and not (base.is_dir() or is_gguf(base)):
        why = "is not a folder" if base.exists() else describe_missing(base, "base")
        raise Failure(f"--base {base} {why}")
    table = Table(box=None, padding=(0, 1), show_header=False)
    failed = 0
    findings = []
    with console.status("Looking"):
        for finding in (
            _findings(port, config.RegistryArgs(tracking_uri=tracking_uri))
            if base is None
            else _base(
                base,
                memory_gib,
                cast("QuantizationSetting", quantization or "none"),
                cast("KVCacheDtype", kv_cache_dtype or "auto"),
                cast("LoraDtype", lora_dtype or "auto"),
                ranks,
            )
        ):
            findings.append(finding)
            failed += finding.state == "fail"
            colour = _COLOURS[finding.state]
            remedy = f"\n[bold]->[/] {finding.remedy}" if finding.remedy else ""
            table.add_row(f"[{colour}]{finding.state}[/]", finding.what, f"{finding.words}{remedy}")
    if json:
        print_json({"findings": findings})
    else:
        print_table(table)
    if failed:
        what = "loraplex can serve here" if base is None else "loraplex can serve this base"
        raise Failure(f"{failed} of these must be put right before {what}")


def _base(
    path: Path,
    memory_gib: float | None,
    quantization: QuantizationSetting,
    kv_cache_dtype: KVCacheDtype,
    lora_dtype: LoraDtype,
    ranks: int,
) -> Iterator[Finding]:
    """Checks a base's folder by the headers of its files, or the base that would be made of a GGUF
    file."""
    memory = None if memory_gib is None else int(memory_gib * _GIB)
    with as_outline(path) as (folder, types):
        try:
            fit = estimate_fit(folder, memory, quantization, ranks, kv_cache_dtype, lora_dtype)
        except UnsupportedModelError as error:
            yield Finding("base", "fail", str(error))
            return
        for what, words in made_of(types, fit).facts().items():
            if what == "fits" and not fit.fits:
                remedy = "a larger device or a smaller base"
                if _is_smaller_in_fp8(fit, folder, memory, ranks):
                    remedy = "a larger device, a smaller base, or engine.quantization: fp8"
                yield Finding(what, "fail", words, remedy)
            else:
                yield Finding(what, "ok", words)


def _is_smaller_in_fp8(fit: Fit, folder: Path, memory: int | None, ranks: int) -> bool:
    try:
        in_fp8 = estimate_fit(folder, memory, "fp8", ranks)
    except UnsupportedModelError:
        return False
    return in_fp8.weight_bytes < fit.weight_bytes


def _findings(port: int, registry: config.RegistryArgs) -> Iterator[Finding]:
    yield _python()
    yield from _packages()
    yield _kernels_package()
    yield _cores()
    yield _memory()
    yield _device()
    yield from _links(describe_links())
    yield _home(config.default_home())
    yield _disk(config.default_home())
    yield _port(port)
    yield _network()
    yield from _registry(registry)


def _python() -> Finding:
    """Checks the system. Python below 3.11 needs no check: the packages do not install there."""
    words = ".".join(str(part) for part in sys.version_info[:3])
    if sys.platform != "linux":
        return Finding("Python", "fail", f"{words} on {sys.platform}", "use Linux")
    return Finding("Python", "ok", words)


def _packages() -> Iterator[Finding]:
    """Checks the packages that the metadata of loraplex requires."""
    try:
        wanted = [Requirement(line) for line in requires("loraplex") or ()]
    except PackageNotFoundError:
        yield Finding("packages", "fail", "loraplex is not installed", "pip install -e '.[demo]'")
        return
    missing = 0
    for requirement in wanted:
        is_demo = requirement.marker is not None and requirement.marker.evaluate({"extra": "demo"})
        if requirement.marker is not None and not is_demo:
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            words = "is not installed (the demo needs it)" if is_demo else "is not installed"
            wanted_package = "loraplex[demo]" if is_demo else "loraplex"
        else:
            if requirement.specifier.contains(found, prereleases=True):
                continue
            words = f"{found} is installed, {requirement.specifier} is needed"
            wanted_package = f"{requirement.name}{requirement.specifier}"
        missing += 1
        state: State = "warn" if is_demo else "fail"
        yield Finding(requirement.name, state, words, f"pip install '{wanted_package}'")
    if not missing:
        names = ("ray", "torch", "mlflow", "fastapi")
        shown = ", ".join(f"{name} {version(name)}" for name in names)
        yield Finding("packages", "ok", f"loraplex {version('loraplex')}, {shown}")


def _kernels_package() -> Finding:
    """Hugging Face publishes a package `kernels`; with it installed ours could be shadowed."""
    try:
        path = str(distribution("kernels").locate_file("kernels"))
    except PackageNotFoundError:
        return Finding("kernels", "ok", "no other package of this name")
    if importlib.util.find_spec("kernels.paged_attention") is not None:
        return Finding("kernels", "warn", f"Hugging Face's package is installed too, in {path}")
    return Finding(
        "kernels", "fail", f"{path} hides loraplex's own folder", "pip uninstall kernels"
    )


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        return Finding("cores", "warn", f"{cores}", "2 or more keep HTTP and engine apart")
    return Finding("cores", "ok", str(cores))


def _memory() -> Finding:
    total, free = total_bytes() / _GIB, available_bytes() / _GIB
    words = f"{total:.1f} GiB, {free:.1f} GiB available"
    # Ray with the demo needs about 4 GiB: 2.5 for Ray's processes, the rest for the engine.
    if free < 4:
        return Finding("memory", "warn", words, "the demo wants 4 GiB")
    return Finding("memory", "ok", words)


def _device() -> Finding:
    found = describe_devices()
    words = f"torch {found.torch_version}"
    if found.cuda:
        names = ", ".join(
            f"{one.name} ({one.memory_bytes / _GIB:.0f} GiB, {'' if one.has_fp8 else 'no '}FP8)"
            for one in found.cuda
        )
        words += f", CUDA {found.cuda_build}, driver {found.driver or 'unknown'}: {names}"
        if not found.has_triton:
            return Finding("device", "warn", words, "pip install 'loraplex[gpu]' for Triton")
        return Finding("device", "ok", words)
    if found.driver is not None:
        why = found.cuda_error or "torch is a CPU build"
        return Finding(
            "device",
            "warn",
            f"{words}; NVIDIA driver {found.driver} is loaded, but torch cannot use it: {why}",
            "install the torch build for your driver's CUDA, see pytorch.org",
        )
    return Finding("device", "ok", f"{words}, CPU with {found.num_threads} threads; no NVIDIA GPU")


def _links(links: Sequence[DeviceLink]) -> Iterator[Finding]:
    """Yields the links over which the ranks of `tensor_parallel_size` would exchange sums."""
    groups: dict[tuple[bool, str | None], list[str]] = {}
    for link in links:
        groups.setdefault((link.is_direct, link.kind), []).append(f"{link.first}-{link.second}")
    for (is_direct, kind), pairs in groups.items():
        words = f"GPUs {', '.join(pairs)}: {_link_words(kind)}"
        if is_direct:
            yield Finding("GPU links", "ok", f"{words}, they read each other's memory")
        else:
            remedy = "several ranks exchange sums over NCCL there, more slowly"
            yield Finding("GPU links", "warn", f"{words}, they are no peers", remedy)


def _link_words(kind: str | None) -> str:
    if kind and kind.startswith("NV") and kind[2:].isdigit():
        return f"{kind[2:]} NVLinks" if kind != "NV1" else "1 NVLink"
    return _LINKS.get(kind or "", kind or "nvidia-smi does not say how they are connected")


def _home(home: Path) -> Finding:
    try:
        prepare(home)
    except HomeError as error:
        return Finding("home", "fail", str(error), f"set {NAME} to a folder of yours")
    if is_open_to_others(home):
        return Finding("home", "warn", f"{home} is open to other users", f"chmod 700 {home}")
    return Finding("home", "ok", f"{home} is writable")


def _disk(home: Path) -> Finding:
    folder = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(folder).free / _GIB
    words = f"{free:.1f} GiB free for {home}"
    if free < 2:
        return Finding("disk", "warn", words, "the demo needs 1 GiB, a base model twice its size")
    return Finding("disk", "ok", words)


def _port(port: int) -> Finding:
    try:
        launch.check_port("127.0.0.1", port)
    except launch.LaunchError as error:
        reason = error.__cause__
        if isinstance(reason, OSError) and reason.errno != errno.EADDRINUSE:
            words = f"{port} cannot be used: {reason.strerror}"
            return Finding("port", "warn", words, "change http_options.port")
        remedy = "stop that server or change http_options.port"
        return Finding("port", "warn", f"{port} is taken", remedy)
    return Finding("port", "ok", f"{port} is free")


def _network() -> Finding:
    """The finding for `serve run`; `loraplex serve` keeps Ray to 127.0.0.1, with its own token."""
    from serve_app.ray_network import warning_of_machine  # a second, that of Ray

    words = warning_of_machine()
    if words is None:
        return Finding("network", "ok", "Ray listens on this machine only, or asks for a token")
    return Finding("network", "warn", f"with serve run, {words}", "or use loraplex serve")


def _registry(args: config.RegistryArgs) -> Iterator[Finding]:
    uri = shown_uri(config.tracking_uri(args))
    try:
        catalog = read_catalog(args)
    except (RegistryError, HomeError) as error:
        remedy = "start it, or name another: --tracking-uri, MLFLOW_TRACKING_URI"
        yield Finding("registry", "fail", f"{uri}: {error}", remedy)
        return
    words = f"{uri}: {len(catalog.bases)} base and {len(catalog.adapters)} adapter versions"
    yield Finding("registry", "ok", words)
    for one in catalog.rejected:
        yield Finding(
            "version", "warn", f"{one.name} version {one.version} cannot be served: {one.reason}"
        )
    for alias in catalog.dangling:
        yield Finding("alias", "warn", str(alias), "move the alias to a version that can be served")
    for adapter in catalog.adapters:
        if adapter.refused:
            name = f"{adapter.name} version {adapter.version}"
            yield Finding("version", "warn", f"{name} cannot be served: {adapter.refused}")
    yield from _kinds(catalog)
    yield from _settings(catalog)
    yield _demo(catalog)


def _kinds(catalog: Catalog) -> Iterator[Finding]:
    """Counts the adapters that can be served by their kinds, with the device memory of each."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for adapter in catalog.adapters:
        if not adapter.refused:
            kind = adapter.variant or "not checked yet"
            counts[kind] += 1
            sizes[kind] += int(dict(adapter.effect_figures).get("device_bytes", 0))
    if not counts:
        return
    parts = [
        f"{count} {kind} ({sizes[kind] / 1024**2:.1f} MiB)" if sizes[kind] else f"{count} {kind}"
        for kind, count in sorted(counts.items())
    ]
    note = ""
    if any(kind.startswith("aLoRA") for kind in counts):
        note = "; aLoRA is charged from its invocation on"
    yield Finding("adapters", "ok", f"{', '.join(parts)}{note}")


def _settings(catalog: Catalog) -> Iterator[Finding]:
    """Finds the settings of bases that a server does not follow."""
    for setting in catalog.settings:
        if setting.key == SERVE:
            try:
                parse_setting(setting.name, setting.value)
            except ValueError as error:
                words = f"the tag loraplex.{SERVE} of {setting.name} is not followed: {error}"
                yield Finding("setting", "warn", words, "loraplex bases remove or add it again")


def _demo(catalog: Catalog) -> Finding:
    if any(base.name == _DEMO_BASE for base in catalog.bases):
        own = {one.name for one in catalog.adapters if one.base_name == _DEMO_BASE}
        return Finding("demo", "ok", f"{_DEMO_BASE} with {', '.join(sorted(own)) or 'no adapter'}")
    return Finding("demo", "warn", "the demo model is not registered", "loraplex demo")
