"""Two accidents of packaging, told in a sentence each before they become a traceback.

Imports nothing of ours: a wrong `configs` or `engine` may be the very thing that is found.
"""

import importlib.metadata
import importlib.util
from pathlib import Path

PACKAGES = ("configs", "engine", "kernels", "server")
HOME = Path(__file__).resolve().parent.parent
"""The folder that holds our four packages."""


def misplaced_package() -> str | None:
    """Why Octavo cannot run if one of its packages would be imported from elsewhere; None if all is well.

    `python -m server`, started in a folder with a `configs` package or an `engine.py` of the user's own, finds those.
    """
    for name in PACKAGES:
        found = _location(name)
        if found is None:
            return f"the package {name!r} is missing beside {HOME / 'server'}: install Octavo again."
        if found != HOME / name:
            return (
                f"{found} would be imported in place of Octavo's own package {name!r} in {HOME}: start Octavo from "
                f"another folder, rename that one or take it off PYTHONPATH."
            )
    return None


def foreign_kernels() -> str | None:
    """Why models could not be imported if Hugging Face's distribution `kernels` is installed too; None if it is not.

    It has the name of one of our packages, so files of the two are mixed, and transformers takes ours for it.
    """
    try:
        version = importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        return None
    return (
        f"the distribution 'kernels' {version} is installed beside Octavo, whose own package of that name it "
        f"displaces: uninstall it and install Octavo again, or give Octavo an environment of its own."
    )


def _location(name: str) -> Path | None:
    """Folder of a package, file of a plain module."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    return Path(spec.origin).resolve() if spec.origin else None
