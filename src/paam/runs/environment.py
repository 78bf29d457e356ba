"""Hardware, versions and commit: what a result depends on besides recipe and data."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

GIT_SECONDS = 10
"""Longest wait for git, which may hang on a network file system."""


def environment(device: str) -> dict[str, str]:
    """Hardware and versions that a result depends on."""
    hardware = torch.cuda.get_device_name(device) if device.startswith("cuda") else _cpu_name()
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    return {"hardware": hardware, **versions, "commit": _commit()}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def _commit() -> str:
    """Commit of the source tree that paam runs from, with + if it is dirty; "unknown" if paam is not in a git tree.

    For a copy of the tree on a machine without git, set the commit in PAAM_COMMIT.
    """
    if given := os.environ.get("PAAM_COMMIT"):
        return given
    tracked = _git("ls-files", "--error-unmatch", "__init__.py")
    if not tracked:
        return "unknown"
    return _git("rev-parse", "--short=12", "HEAD") + ("+" if _git("status", "--porcelain", "--", ".") else "")


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
            check=True,
            timeout=GIT_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
