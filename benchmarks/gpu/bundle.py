"""``make gpu-bundle``: the wheels a GPU machine without a network may lack, in one folder of at most 60 MiB.

    python benchmarks/gpu/bundle.py [--folder gpu-bundle] [--python 3.12] [--kit te_kit.tar.xz]

PyTorch, Triton, NumPy and the usual scientific stack are expected there. ``first.py`` and ``second.py`` install what is
in the folder, and unpack a Transformer Engine kit that lies there, into temporary folders.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

#: MLflow is left out: it is large, and searches on such a machine run with --no-mlflow.
PACKAGES = (
    "cloudpickle", "optuna", "sqlalchemy", "alembic", "mako", "greenlet", "colorlog", "tqdm",
    "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "typing-extensions",
    "click", "rich", "pygments", "markdown-it-py", "mdurl", "pyyaml", "torchao", "hypothesis", "sortedcontainers",
)  # fmt: skip
LIMIT = 60 * 2**20


def installed(folder: Path) -> list[str]:
    """Install a bundle once, offline; return what belongs on the Python path, nothing where there is no bundle."""
    wheels, scratch = sorted(map(str, folder.glob("*.whl"))), Path(tempfile.gettempdir())
    kit = next(iter(sorted(folder.glob("te_kit.tar.*"))), None)
    found: list[str] = []
    if wheels:
        into = scratch / "autoprec-bundle"
        if not into.is_dir():
            made = into.with_name(f"{into.name}.{os.getpid()}")  # installed in part must not be taken for whole
            words = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-index",
                "--no-deps",
                "--target",
                str(made),
            ]
            subprocess.run([*words, *wheels], check=True)
            made.rename(into)
        found.append(str(into))
    if kit is not None:
        into = scratch / "autoprec-te-kit"
        if not into.is_dir():
            made = into.with_name(f"{into.name}.{os.getpid()}")
            with tarfile.open(kit) as stream:
                stream.extractall(made, filter="data")
            made.rename(into)
        found.append(str(into / "site"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="wheels for a GPU machine without a network")
    parser.add_argument("--folder", type=Path, default=Path("gpu-bundle"))
    parser.add_argument("--python", default="3.12")
    parser.add_argument("--kit", type=Path, help="a Transformer Engine kit to put beside the wheels")
    parser.add_argument("--constraints", type=Path, default=Path("constraints.txt"))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    pinned = {
        line.split("==")[0].lower(): line.split(";")[0].strip()
        for line in arguments.constraints.read_text().splitlines()
        if "==" in line and not line.startswith("#")
    }
    platforms = ["manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64"]
    platforms += ["manylinux2014_x86_64", "manylinux1_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", arguments.python, "--implementation", "cp", "-d", str(arguments.folder)]
    for platform in platforms:
        command += ["--platform", platform]
    failed = [
        name
        for name in PACKAGES
        if subprocess.run([*command, pinned.get(name, name)], check=False, stderr=subprocess.DEVNULL).returncode
    ]
    if arguments.kit:
        shutil.copy2(arguments.kit, arguments.folder)
    size = sum(path.stat().st_size for path in arguments.folder.iterdir())
    print(f"{len(list(arguments.folder.iterdir()))} files, {size / 2**20:.1f} MiB of at most 60 in {arguments.folder}")
    for name in failed:
        print(f"not found: {name}")
    return 1 if failed or size > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
