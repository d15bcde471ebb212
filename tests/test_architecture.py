"""The house rules, checked: floors, budgets, lazy imports, the `kernels` name."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("configs", "engine", "kernels", "server")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
VALUES = {"engine.sampling_params", "engine.request", "engine.messages", "engine.ports", "engine.errors"}

# folder or file -> what it may import of ours (prefixes)
FLOORS: dict[str, set[str]] = {
    "configs": {"configs"},
    "engine/__init__.py": {"engine"},
    **{f"{name.replace('.', '/')}.py": {*VALUES, "configs"} for name in VALUES},
    "engine/logs.py": set(),
    "engine/throughput.py": set(),
    "engine/waiting_line.py": {"engine.throughput", *VALUES},
    "engine/admission.py": VALUES,
    "engine/request_stream.py": {"engine.text", *VALUES},
    "engine/client.py": {
        "engine.admission",
        "engine.request_stream",
        "engine.served_model",
        "engine.supervisor",
        "engine.text",
        "engine.waiting_line",
        *VALUES,
    },
    "engine/llm.py": {
        "engine.admission",
        "engine.build",
        "engine.core",
        "engine.device",
        "engine.served_model",
        "engine.source",
        "engine.text",
        *VALUES,
        "configs",
    },
    "engine/process.py": {"engine.build", "engine.core", "engine.logs", *VALUES},
    "engine/calibration.py": {
        "engine.device",
        "engine.kv_scales",
        "engine.model",
        "engine.runner",
        "engine.source",
        "engine.text",
        *VALUES,
        "configs",
        "kernels",
    },
    "engine/core": {"engine.core", "configs", *VALUES},
    "engine/child.py": set(),
    "engine/supervisor.py": {"engine.child", "engine.messages", "configs"},
    "engine/served_model.py": {"engine.text", "engine.source", *VALUES, "configs"},
    "engine/device.py": {"engine.errors", "configs", "kernels"},
    "engine/cache_setup.py": {"engine.device", "engine.model", "engine.runner", *VALUES, "configs"},
    "engine/attention_backends.py": {"engine.device", "engine.errors", "configs", "kernels"},
    "engine/invariance.py": {"engine.device", "engine.errors", "configs", "kernels"},
    "engine/kv_scales.py": {"configs"},
    "engine/build.py": {
        "engine.attention_backends",
        "engine.cache_setup",
        "engine.core",
        "engine.device",
        "engine.invariance",
        "engine.kv_scales",
        "engine.model",
        "engine.runner",
        *VALUES,
        "configs",
        "kernels",
    },
    "engine/diagnosis.py": {
        "engine.attention_backends",
        "engine.build",
        "engine.device",
        "engine.invariance",
        "engine.kv_scales",
        "engine.model",
        "engine.served_model",
        "engine.source",
        *VALUES,
        "configs",
        "kernels",
    },
    "engine/text": {"engine.text", "engine.source", "configs", *VALUES},
    "engine/source.py": {"engine.child", "engine.errors", "engine.hub", "configs"},
    "engine/hub.py": {"engine.errors", "configs"},
    "kernels": {"kernels", "configs.kv"},
    "engine/model": {"engine.model", "engine.errors", "configs", "kernels"},
    "engine/runner": {"engine.runner", "engine.kv_scales", "engine.model", "configs", "kernels", *VALUES},
    "server": {"server", "engine", "configs"},
}
THIRD_PARTY_FORBIDDEN: dict[str, set[str]] = {
    **{f"{name.replace('.', '/')}.py": {"torch", "numpy", "transformers", "fastapi", "zmq"} for name in VALUES},
    **{
        f"engine/{name}.py": {"torch", "transformers", "fastapi"}
        for name in (
            "admission",
            "client",
            "request_stream",
            "served_model",
            "supervisor",
            "throughput",
            "waiting_line",
        )
    },
    **{
        f"engine/{name}.py": {"transformers", "fastapi"}
        for name in (
            "attention_backends",
            "build",
            "cache_setup",
            "calibration",
            "device",
            "diagnosis",
            "llm",
            "process",
        )
    },
    "engine/core": {"torch", "numpy", "transformers", "fastapi", "zmq"},
    "engine/text": {"torch", "fastapi", "zmq"},
    "engine/source.py": {"torch", "transformers", "fastapi", "zmq"},
    "engine/kv_scales.py": {"torch", "transformers", "fastapi", "zmq"},
    "engine/hub.py": {"torch", "transformers", "fastapi", "zmq"},
    "configs": {"torch", "transformers", "fastapi", "zmq"},
    "server": {"torch", "transformers", "zmq"},
    "engine/model": {"fastapi", "zmq"},
    "engine/runner": {"fastapi", "zmq", "transformers"},
    "kernels": {"fastapi", "zmq", "transformers"},
}

LONG_FUNCTIONS: dict[str, str] = {}
"""'file:function' -> why it is over 60 lines"""


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def floor_of(path: Path) -> str | None:
    relative = path.relative_to(ROOT).as_posix()
    matches = [place for place in FLOORS if relative == place or relative.startswith(place + "/")]
    return max(matches, key=len, default=None)


def allowed(module: str, prefixes: set[str]) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_floors(path: Path) -> None:
    place = floor_of(path)
    assert place is not None, f"{path.relative_to(ROOT)} is on no floor: add a row"
    for module in imports(path):
        top = module.split(".")[0]
        if top in PACKAGES:
            assert allowed(module, FLOORS[place]), f"{path.relative_to(ROOT)} imports {module}"
        assert top not in THIRD_PARTY_FORBIDDEN.get(place, set()), f"{path.relative_to(ROOT)} imports {module}"


def test_server_uses_what_the_engine_exports() -> None:
    """Names come from `engine` itself; its submodules are not the server's business."""
    for path in (ROOT / "server").rglob("*.py"):
        for module in imports(path):
            assert not module.startswith("engine."), f"{path.relative_to(ROOT)} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_budgets(path: Path) -> None:
    relative = path.relative_to(ROOT).as_posix()
    text = path.read_text()
    lines = text.count("\n")
    assert lines <= 800, f"{relative} has {lines} lines"
    limits = {"engine/core/scheduler.py": 400, "engine/runner/model_runner.py": 400}
    assert lines <= limits.get(relative, 800)
    if relative.startswith("engine/model/archs/"):
        assert lines <= 120
    for node in ast.walk(ast.parse(text)):
        assert not isinstance(node, ast.Global), f"{relative}:{node.lineno}: global"  # type: ignore[attr-defined]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= 60 or f"{relative}:{node.name}" in LONG_FUNCTIONS, (
                f"{relative}:{node.name}: {length} lines"
            )
            if node.name == "__init__":
                parameters = len(node.args.args) + len(node.args.kwonlyargs) - 1
                assert parameters <= 8, f"{relative}:{node.lineno}: constructor with {parameters} parameters"
            annotated = [a for a in (*node.args.args, *node.args.kwonlyargs) if a.arg not in ("self", "cls")]
            assert node.returns is not None and all(a.annotation for a in annotated), f"{relative}:{node.name}"


def test_environment_is_read_in_one_place() -> None:
    for path in FILES:
        if path.relative_to(ROOT).as_posix() == "configs/load.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            reads = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
            assert not reads, f"{path.relative_to(ROOT)}:{node.lineno} reads the environment"  # type: ignore[attr-defined]


def test_the_server_waits_for_events_and_never_polls() -> None:
    for path in (ROOT / "server").rglob("*.py"):
        loops = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.While)]
        for node in (node for loop in loops for node in ast.walk(loop)):
            sleeps = isinstance(node, ast.Attribute) and node.attr == "sleep"
            assert not sleeps, f"{path.relative_to(ROOT)}:{node.lineno} sleeps in a loop"  # type: ignore[attr-defined]


def test_no_utils() -> None:
    assert not [path for path in FILES if "utils" in path.stem or "utils" in path.parts]


def test_kernels_package_is_a_docstring() -> None:
    """transformers probes `find_spec("kernels")` for another package of that name."""
    body = ast.parse((ROOT / "kernels/__init__.py").read_text()).body
    assert len(body) == 1 and isinstance(body[0], ast.Expr)


def run_python(code: str, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    "module",
    [
        "engine.core.loop",
        "engine.client",
        "engine.kv_scales",
        "engine.text.tokenizer",
        "server.app",
        "server.cli",
        "server.bench.command",
    ],
)
def test_loads_no_torch(module: str) -> None:
    run_python(f"import sys, {module}; assert 'torch' not in sys.modules, 'torch'")


def test_transformers_imports_beside_our_kernels() -> None:
    run_python(
        "from transformers import AutoModelForCausalLM, LlamaForCausalLM; import kernels; print(kernels.__doc__)"
    )


def test_exports_resolve() -> None:
    import engine

    for name in engine.__all__:
        assert getattr(engine, name) is not None
    with pytest.raises(AttributeError):
        engine.nothing  # noqa: B018
