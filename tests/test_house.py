"""The walls of the house: imports run downward, optional packages stay in their one file, modules stay small, and the
README's map is the tree."""

from __future__ import annotations

import ast
import graphlib
import importlib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megalite"

FLOORS = (
    ("errors", "files", "host", "kernel_cache", "phases", "step_lines"),
    ("arrays", "records", "kernel", "texts", "section", "slurm_commands", "slurm_quoting", "page", "spans", "starter"),
    ("progress", "plugins"),
    ("addition",),
    ("architecture", "parallel"),
    ("config",),
    ("stations",),
    ("tokenizer",),
    ("data",),
    ("layers",),
    ("model",),
    ("optim",),
    ("engine", "trial"),
    ("checkpoint",),
    ("corpus",),
    ("planner", "monitor", "profile", "report"),
    ("loop_checks",),
    ("train",),
    ("studies",),
    ("slurm",),
    ("sweeps",),
    ("ladder",),
    ("library", "extend"),
    ("cli",),
)
"""From the ground up. A module may import from its own room and from floors below it."""

FLOORS_INSIDE: dict[str, tuple[tuple[str, ...], ...]] = {
    "data": (
        ("settings", "index_checks", "sample", "order"),
        ("indexed",),
        ("gather", "best_fit", "pack_report"),
        ("layout",),
        ("ranking", "sources"),
        ("mix", "vocabulary"),
        ("mix_plan",),
        ("cursor", "samples", "pack"),
        ("audit", "loader", "run_config", "show", "verify"),
    ),
    "report": (
        ("json_lines", "shapes", "spikes"),
        ("columns",),
        ("run_data",),
        ("curves",),
        ("sections",),
        ("balance",),
        ("page",),
    ),
    "profile": (
        ("intervals",),
        ("breakdown",),
        ("trace",),
        ("summary",),
    ),
    "slurm": (
        ("affinity", "cluster", "control_channel", "controller", "link_check", "outcome", "stall", "storage"),
        ("detect", "folder", "network_partition", "peers", "placement", "wait_reason"),
        ("agent", "goodput", "node_check", "rank", "render"),  # what runs on each node, and what starts a job
        ("agents", "evaluate", "status", "watchdog"),
        ("health_check", "launch", "succession"),
        ("node_selection",),
        ("attempt",),
        ("supervise",),
    ),
    "cli": (
        ("failure_options", "paths", "plan_tables"),
        ("ask", "convert", "curves", "data", "embed", "generate", "launch", "mup", "profile", "setup", "train"),
        ("checkpoint", "config", "sweep"),
        ("ladder", "plan", "schedule"),
        ("main",),
    ),
    "corpus": (
        ("exact_json",),
        ("json_texts",),
        ("conversations", "documents", "source", "split"),
        ("reading",),
        ("shards",),
        ("corpus",),
        ("blanks", "language", "licenses", "near", "privacy", "repair", "rules", "scoring", "semantic", "spans"),
        ("recipe",),
        ("card", "stations"),
        ("compile_ahead", "effects", "inspection", "preload", "prepare"),
    ),
    "sweeps": (
        ("outcome", "space"),
        ("record", "settings", "suggest"),
        ("trials",),
        ("cluster", "halving", "local", "table"),
        ("page", "sweep"),
    ),
    "ladder": (
        ("law", "rule"),
        ("budget",),
        ("ladder",),
        ("page",),
    ),
    "tokenizer": (
        ("settings", "encoders"),
        ("fast", "tokenizer"),
        ("chat_template", "fill_in", "report", "training"),
        ("chat",),
    ),
    "stations": (
        ("facts", "hashes", "lease", "tasks"),
        ("dataset_card", "runners"),
        ("manifest",),
        ("station",),
    ),
}
"""The same inside a room, by file or folder. On one floor files may import each other, but never in a circle."""

CONFINED = {
    "deepspeed": ("engine",),
    "transformer_engine": ("layers/te.py",),
    "transformers": ("checkpoint/hf", "tokenizer"),
    "compressed_tensors": (),  # transformers alone
    "tensorboard": ("monitor",),
    "wandb": ("monitor/wandb.py",),
    "matplotlib": ("monitor",),
    "ftfy": ("corpus/repair/mojibake.py",),
    "py3langid": ("corpus/language.py",),
    "spacy": ("corpus/rules/english.py",),
    "resiliparse": ("corpus/reading/html.py",),
    "warcio": ("corpus/reading/warc.py",),
    "ray": ("stations/runners/ray.py",),
    "gigatoken": ("tokenizer/encoders/giga.py",),
    "datasets": ("corpus/reading/hub.py",),
    "lm_eval": ("train/evaluation/harness.py",),
    "fsspec": ("corpus/reading/remote.py",),
    "optuna": ("sweeps/suggest.py",),
    "faiss": ("corpus/semantic/nearest.py",),
}
"""Packages that only some places may import."""

TORCH_FREE = (
    "megalite.cli.main",
    "megalite.monitor.schedule_curves",
    "megalite.config.validate",
    "megalite.architecture.weights",
    "megalite.parallel.mesh",
    "megalite.engine.deepspeed.config",
    "megalite.train.local",
    "megalite.data.samples",
    "megalite.report.page",
    "megalite.profile.summary",
)
"""Modules that a command needs before it knows that there is anything to compute."""

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_ARGUMENTS = 8


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> list[str]:
    """Every module that a file imports, also inside functions; names under TYPE_CHECKING included."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def is_package(path: Path) -> bool:
    return (path / "__init__.py").exists()


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def module_of(name: str, known: dict[str, Path]) -> str | None:
    """The module that an imported name comes from; None for other packages."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or None


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_imports_run_downward():
    """No module imports from a floor above its own, nor from another room of its floor."""
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    complaints = []
    for path in modules():
        here = room(path)
        if here in ("__init__", "__main__"):
            continue
        assert here in floor, f"{path}: the room {here} has no floor in FLOORS"
        for name in imports(path):
            if not name.startswith("megalite."):
                continue
            there = name.split(".")[1]
            if there in floor and there != here and floor[there] >= floor[here]:
                complaints.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("room_name", FLOORS_INSIDE)
def test_imports_run_downward_inside_a_room(room_name):
    """The same inside a room, whose every file has a floor."""
    floor = {name: number for number, names in enumerate(FLOORS_INSIDE[room_name]) for name in names}
    there = {path.stem for path in (PACKAGE / room_name).iterdir() if path.suffix == ".py" or is_package(path)}
    assert set(floor) == there - {"__init__"}
    complaints, needs = [], {name: set() for name in floor}
    for path in (PACKAGE / room_name).rglob("*.py"):
        here = Path(path.relative_to(PACKAGE).parts[1]).stem
        for name in imports(path):
            if not name.startswith(f"megalite.{room_name}.") or here == "__init__":
                continue
            other = name.split(".")[2]
            if floor[other] > floor[here]:
                complaints.append(f"{path.relative_to(ROOT)} imports {name}")
            elif other != here:
                needs[here].add(other)
    assert not complaints, "\n".join(complaints)
    graphlib.TopologicalSorter(needs).prepare()  # or it names the circle


def test_imports_make_no_circle():
    """No module imports itself by way of others, also not inside functions or for types alone."""
    of_module = {module_name(path): path for path in modules()}
    graph = {name: {module_of(each, of_module) for each in imports(path)} - {None} for name, path in of_module.items()}
    graph["megalite"] = set()  # its front door loads what it names when that is used
    done: set[str] = set()

    def walk(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way[way.index(name) :], name))
        if name not in done:
            for other in sorted(graph[name]):
                walk(other, (*way, name))
            done.add(name)

    for name in graph:
        walk(name, ())


def test_only_engines_know_how_zero_cuts():
    """Above the engines nobody asks for a ZeRO stage, nor for what DeepSpeed hangs on a parameter."""
    complaints = []
    for path in modules():
        if room(path) in ("config", "engine"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "arg", None) or ""
            if name == "zero_stage" or name.startswith("ds_"):
                complaints.append(f"{path.relative_to(ROOT)}:{node.lineno} {name}")
    assert not complaints, "\n".join(complaints)


def test_packages_stay_in_their_place():
    """DeepSpeed, Transformer Engine and the like are imported only where the architecture says."""
    complaints = []
    for path in modules():
        inside = path.relative_to(PACKAGE).as_posix()
        for name in imports(path):
            places = CONFINED.get(name.split(".")[0])
            if places is not None and not inside.startswith(places):
                complaints.append(f"megalite/{inside} imports {name}")
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("name", TORCH_FREE)
def test_light_modules_do_not_import_torch(name):
    """What runs before a process starts costs no torch import."""
    code = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0


def test_modules_and_functions_stay_small():
    """A module over 400 lines, or a function over 60, holds two ideas."""
    complaints = []
    for path in modules():
        text = path.read_text(encoding="utf-8")
        if (lines := text.count("\n")) > MAX_MODULE_LINES:
            complaints.append(f"{path.relative_to(ROOT)}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = node.end_lineno - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    complaints.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {length} lines")
    assert not complaints, "\n".join(complaints)


def test_functions_take_few_arguments():
    """Beyond eight arguments some of them are a type that has no name yet. A command's are its options, and a Triton
    kernel's the addresses and strides of what it reads."""
    complaints = []
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and room(path) != "cli":
                if any(ast.unparse(each) == "triton.jit" for each in node.decorator_list):
                    continue
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                number = sum(argument.arg not in ("self", "cls") for argument in given)
                if number > MAX_ARGUMENTS:
                    complaints.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {number} arguments")
    assert not complaints, "\n".join(complaints)


def test_no_two_classes_have_one_name():
    """Who reads a name, or looks for it, finds one class."""
    where: dict[str, list[str]] = {}
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: places for name, places in where.items() if len(places) > 1} == {}


def test_every_module_says_what_it_is():
    """Every module opens with a docstring, and so does every public class and function of the package."""
    complaints = []
    for path in modules():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if not ast.get_docstring(tree):
            complaints.append(f"{path.relative_to(ROOT)}: no module docstring")
        for node in tree.body:
            public = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
            if public and not ast.get_docstring(node):
                complaints.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: no docstring")
    assert not complaints, "\n".join(complaints)


def _is_there(module: ModuleType, name: str) -> bool:
    """Whether it is a name in a module, or a module in a package."""
    is_package = hasattr(module, "__path__")
    return hasattr(module, name) or (is_package and find_spec(f"{module.__name__}.{name}") is not None)


def test_tools_import_what_is_there():
    """Also inside functions, and in those that only a GPU machine runs."""
    for path in sorted((ROOT / "tools").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "megalite":
                found = importlib.import_module(str(node.module))
                missing = [name.name for name in node.names if not _is_there(found, name.name)]
                assert not missing, f"{path.relative_to(ROOT)}:{node.lineno}: {node.module} has no {missing}"


def test_readme_map_is_the_tree():
    """Every room of the package and every top-level folder stands in the README's map, and nothing else does."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = text.split("<!-- map -->")[1].split("```")[1]
    named = {line.split()[0].rstrip("/") for line in block.splitlines() if line.strip()}
    rooms = {f"megalite/{path.name}" for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()
    folders = {name.split("/")[0] for name in tracked if "/" in name} - {"megalite", ".ci"}
    assert named == rooms | folders


def _unsafe(call: ast.Call) -> str | None:
    """What a call would let a file of somebody else's do; None for nothing."""
    if not isinstance(call.func, ast.Attribute):
        return None
    owner, said = ast.unparse(call.func.value), {each.arg: ast.unparse(each.value) for each in call.keywords}
    if (call.func.attr in ("load", "loads") and owner in ("torch", "pickle")) or said.get("allow_pickle") == "True":
        return "unpickles"
    if call.func.attr != "from_pretrained":
        return None
    if said.get("trust_remote_code") != "False":
        return "may run a folder's code: say trust_remote_code=False"
    is_model = "Model" in owner
    return "reads pickles: say use_safetensors=True" if is_model and said.get("use_safetensors") != "True" else None


def test_what_is_read_runs_no_code():
    """What docs/security.md promises, at every call: no code of a Hugging Face folder, and no pickle."""
    complaints, calls = [], 0
    for path in [*modules(), *(ROOT / "tools").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                calls += ast.unparse(node.func).endswith(".from_pretrained")
                complaints += [f"{path.relative_to(ROOT)}:{node.lineno} {why}" for why in [_unsafe(node)] if why]
    assert not complaints, "\n".join(complaints)
    assert calls >= 6  # or they are spelled otherwise now, and this looks at nothing


def test_doors_are_small():
    """A script in tools/ or launch/ is a door onto a verb, not a room."""
    for path in [*(ROOT / "tools").glob("*.py"), *(ROOT / "launch").glob("*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert sum(not isinstance(node, ast.Expr) or node is not tree.body[0] for node in tree.body) <= 6, path
