"""Checks what `make` needs before it installs, and names what is missing with its remedy.

It runs on the user's own Python, of any 3.x, and so keeps to Python 3.6.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile

OLDEST = (3, 11)
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
DRIVER = "/proc/driver/nvidia/version"
GB = 10**9
# Measured with torch 2.13.0 and the test extra: 3.2 and 6.3 GB in the end. pip unpacks into the
# environment while the wheels that it has downloaded are still in the temporary folder.
PEAK_BYTES = {"cpu": 3.6 * GB, "cuda": 7.3 * GB}
WHEEL_BYTES = {"cpu": 0.6 * GB, "cuda": 2.6 * GB}
PIP_SETTINGS = ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONFIG_FILE")
PIP_FILES = ("/etc/pip.conf", "~/.pip/pip.conf", "~/.config/pip/pip.conf")


def problems(venv, torch_index, goal):
    """Yields sentences. The first may be the cause of the rest, so the caller stops after it."""
    name = os.path.basename(sys.executable)
    if not sys.platform.startswith("linux"):
        yield f"loraplex runs on Linux; this is {sys.platform}"
    if sys.version_info < OLDEST:
        yield (
            "loraplex needs Python 3.11 or newer, and {} is {}.{}.{}; name another one: "
            "make PYTHON=python3.12 {}"
        ).format(name, *sys.version_info[:3], goal)
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            version = "{}.{}".format(*sys.version_info[:2])
            yield (
                f"{name} has no module {module}; on Debian and Ubuntu: "
                f"apt install python{version}-venv, elsewhere: make PYTHON=python3.12 {goal}"
            )
    for problem in folder_problems(venv, goal) or environment_problems(venv):
        yield problem
    for problem in disk_problems(venv, torch_index, goal):
        yield problem


def folder_problems(venv, goal):
    """Returns the folders that pip cannot write: it writes the environment, and the metadata of the
    project next to its source."""
    found = []
    for folder in sorted({existing(venv), os.getcwd()}):
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            found.append(
                f"{folder} cannot be written ({error.strerror}); use a checkout of your own, "
                f"and for the environment: make VENV=FOLDER {goal}"
            )
    return found


def environment_problems(venv):
    """Returns the faults of an existing environment, which is used as it is."""
    python = os.path.join(venv, "bin", "python")
    if not os.path.exists(python):
        return []
    asked = "import sys, pip; print('%d.%d' % sys.version_info[:2], sys.version_info >= (3, 11))"
    try:
        answer = subprocess.check_output([python, "-c", asked], stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return [f"{python} does not run or has no pip; remove it: rm -r {venv}"]
    version, is_new = answer.decode().split()
    if is_new == "True":
        return []
    return [f"{venv} has Python {version}, 3.11 or newer is needed: rm -r {venv}"]


def disk_problems(venv, torch_index, goal):
    """Returns the disks with too little space. If pip's settings may offer another build of torch,
    only the size that every build needs counts."""
    build = "cpu" if torch_index or is_pip_configured() else "cuda"
    wanted = {}
    if not os.path.exists(os.path.join(venv, "bin", "pip")):  # otherwise most is installed
        folder, scratch = existing(venv), tempfile.gettempdir()
        wanted[os.stat(scratch).st_dev] = (scratch, WHEEL_BYTES[build])
        wanted[os.stat(folder).st_dev] = (folder, PEAK_BYTES[build])
    found = []
    for folder, size in wanted.values():
        free = shutil.disk_usage(folder).free
        if free < size:
            less = "; the CPU build of torch needs {:.0f} GB less: make {} TORCH_INDEX={}".format(
                (PEAK_BYTES["cuda"] - PEAK_BYTES["cpu"]) / GB, goal, CPU_INDEX
            )
            found.append(
                "{} has {:.1f} GB free and the installation needs {:.1f} GB{}".format(
                    folder, free / GB, size / GB, less if build == "cuda" else ""
                )
            )
    return found


def advice(torch_index, goal):
    """Returns a line for a machine that has no use for CUDA, or None."""
    if torch_index or os.path.exists(DRIVER) or is_pip_configured():
        return None
    return (
        "No NVIDIA driver here, and PyPI's torch brings 2 GB of CUDA. Its CPU build instead: "
        f"make {goal} TORCH_INDEX={CPU_INDEX}"
    )


def is_pip_configured():
    """Returns whether pip may get torch from elsewhere than PyPI."""
    files = any(os.path.exists(os.path.expanduser(path)) for path in PIP_FILES)
    return files or any(os.environ.get(name) for name in PIP_SETTINGS)


def existing(path):
    """Returns the path, or the nearest of its parents that exists."""
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def main(venv, torch_index, goal):
    for problem in problems(venv, torch_index, goal):
        sys.stderr.write(f"error: {problem}\n")
        return 1
    line = advice(torch_index, goal)
    if line is not None:
        sys.stdout.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
