"""A Python that has no other packages than the check script may need, whatever is installed. For tests."""

import importlib.metadata
import re
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

NEEDED = ("torch", "triton", "safetensors", "msgspec", "pydantic", "numpy", "pytest")
"""Distributions."""


def with_requirements(names: Iterable[str]) -> set[str]:
    """These distributions and all that they cannot be installed without."""
    found, left = set[str](), list(names)
    while left:
        name = normal(left.pop())
        if name in found:
            continue
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # not for this system
            continue
        found.add(name)
        left += [re.split(r"[^\w.-]", each, maxsplit=1)[0] for each in requires if "extra ==" not in each]
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


class FewPackages(PathFinder):
    """Finds what of site-packages belongs to a few distributions, and everything elsewhere."""

    modules: frozenset[str]
    """Of those distributions, by their first name."""
    folders = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = super().find_spec(fullname, path, target)
        if spec is None or path is not None or fullname in cls.modules:
            return spec
        places = [spec.origin or "", *(spec.submodule_search_locations or ())]
        return None if any(place.startswith(cls.folders) for place in places) else spec


def refuse_others(also: Iterable[str] = ()) -> None:
    """From now on. also: other distributions that are let through."""
    allowed = with_requirements([*NEEDED, *also])
    owners = importlib.metadata.packages_distributions()
    modules = {name for name, owned_by in owners.items() if allowed & {normal(each) for each in owned_by}}
    FewPackages.modules = frozenset(modules)
    sys.meta_path[:] = [FewPackages if finder is PathFinder else finder for finder in sys.meta_path]
