"""Plug-ins are found, loaded once, checked before anything starts, and leave nothing behind when they fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megalite import plugins
from megalite.architecture.activations import ACTIVATIONS
from megalite.cli.main import main
from megalite.config.load import dump_config, load_config
from megalite.config.optimizers import RULES
from megalite.config.schedules import SCHEDULES
from megalite.config.schema import Config
from megalite.errors import ConfigError
from megalite.library import build_model, plan_run
from megalite.plugins import PluginError, changed_plugins, load_plugins, loaded_plugins, named_plugins
from tests.kit.paths import ROOT
from tests.kit.plugins import SINE, complaints, loaded, write_config, write_plugin
from tests.kit.runs import clean_environment


@pytest.fixture(autouse=True)
def _forgotten():
    with loaded():
        yield


SCHEDULE = """
@extend.schedule("s")
def schedule(k, n, peak, min_lr, *, {}):
    return peak
"""


NORM = """
@extend.norm("n")
class N:
    def __init__(self, {}): pass
"""

RULE_HEAD, RULE_TAIL = "extend.optimizer('o'", "(type('O', (), {'update': 1}))"

COMPONENT = """
from megalite.train.components.component import Component
@extend.component("c")
class C(Component):
    def __init__(self, context): pass
    def {}: pass
"""

UPDATE = "def update(self, weights, gradients, states, *, lr, decay, step): pass"
RULE = """
@extend.optimizer("o")
class O:
    {}
"""


def test_a_file_and_a_module(tmp_path, monkeypatch):
    """Both are loaded when a config names them, each once; a file's name is absolute from then on, and a module may lie
    in the working directory, behind what is installed."""
    monkeypatch.chdir(tmp_path)
    write_plugin(tmp_path, SINE)
    write_plugin(tmp_path, "extend.activation('mine_too')(lambda x: x)", "my_module.py")
    write_plugin(tmp_path, "extend.activation('json_of_mine')(lambda x: x)", "json.py")
    text = "{plugins: [mine.py, my_module], schedule: {name: sine, options: {waves: 2}}, model: {activation: mine_too}}"
    config = load_config(write_config(tmp_path, text))
    assert config.plugins == (str(tmp_path / "mine.py"), "my_module")
    assert {"sine", "mine_too"} <= {*SCHEDULES, *ACTIVATIONS}
    again = load_config(write_config(tmp_path, dump_config(config)))
    assert again == config
    assert named_plugins() == [str(tmp_path / "mine.py"), "my_module"]
    import json

    assert "json_of_mine" not in ACTIVATIONS
    assert Path(json.__file__).parent != tmp_path


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        (
            "import nothing_of_this_name",
            "cannot be imported: ModuleNotFoundError: No module named 'nothing_of_this_name'",
        ),
        ("x = (", "cannot be imported: SyntaxError: "),
        ("raise SystemExit(3)", "cannot be imported: SystemExit: 3"),
        ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
        ("x = 1", "adds nothing; a plug-in calls what megalite.extend offers"),
        (
            "extend.schedule('cosine')(lambda k, n, peak, min_lr: 1.0)",
            "two plug-ins bring the schedule 'cosine': megalite itself",
        ),
        ("extend.schedule('A b')(lambda k, n, peak, min_lr: 1.0)", "schedule 'A b': found in plug-in"),
        ("extend.schedule('s')(lambda k: 1.0)", "schedule s: found s(k) in plug-in"),
        ("extend.schedule('s')(lambda k, n, peak, min_lr, more: 1.0)", "it is called as s(k, n, peak, min_lr)"),
        ("extend.schedule('s')(lambda k, n, peak, min_lr, **all: 1.0)", "takes any options (**)"),
        ("extend.schedule('s')(3)", "schedule s: 3 in plug-in"),
        (SCHEDULE.format("p=1"), "schedule s: option p has no type"),
        (SCHEDULE.format("problems: int = 1"), "schedule s: no option can be called problems"),
        (SCHEDULE.format("_p: int = 1"), "schedule s: no option can be called _p"),
        (SCHEDULE.format("p: type(extend)"), "schedule s: the type of an option is none that YAML can give"),
        (SCHEDULE.format("p: type(print) = print"), "schedule s: the type of an option is none that YAML can give"),
        ("extend.component('c')(int)", "expected a class derived from Component"),
        (
            "extend.metric('lr')(lambda step, result, context: 1.0)",
            "metric lr: every line of metrics.jsonl has a number of this name; give it another",
        ),
        (
            "extend.metric('hours')(lambda step, result, context: 1.0)",
            "metric hours: reports and sweeps have a number of this name; give it another",
        ),
        (
            "extend.metric('validation')(lambda step, result, context: 1.0)",
            "metric validation: reports and sweeps have",
        ),
        ("extend.norm('n')(len)", "expected a class of torch modules"),
        ("extend.optimizer('o')(int)", "has no method `update`"),
        ("extend.optimizer('o', state='m')(type('O', (), {'update': 1}))", "state='m' is no tuple of names"),
        ("extend.optimizer('o', state=('a/b',))(type('O', (), {'update': 1}))", "state 'a/b': a name has"),
        ("extend.optimizer('o', state=('gradient',))(type('O', (), {'update': 1}))", "state 'gradient': that name"),
        ("extend.optimizer('o', state=('m', 'm'))(type('O', (), {'update': 1}))", "state 'm': that name is taken"),
        ("extend.data_source('d', num_shards=0)(print)", "num_shards=0"),
        (
            "@extend.activation('a')\ndef a(x, *, p: int): return x",
            "activation a: option p has no default, and no setting gives an activation options; give it one",
        ),
        (
            "@extend.attention('a')\ndef a(q, k, v, documents, window, *, p: int): return q",
            "attention a: option p has no default, and no setting gives an attention options",
        ),
        (
            NORM.format("size, eps"),
            "norm n: it is called with (size, eps, *, tp, sequence_parallel), and takes (size, eps)",
        ),
        (NORM.format("size, *, eps, tp, sequence_parallel"), "norm n: it is called with (size, eps, *, tp,"),
        (NORM.format("size, eps, *, tp, sequence_parallel, gain"), "norm n: it is called with (size, eps, *, tp,"),
        (
            "extend.norm('n', of_heads='layernorm')(int)",
            "norm n: found of_heads='layernorm', expected rmsnorm or zero_",
        ),
        ("extend.norm('n', init=1)(int)", "norm n: found init=1, expected ones or zeros"),
        (
            RULE.format("def update(self, weights, gradients, lr): pass"),
            "o: update: it is called with (self, weights, gradients, states, *, lr, decay, step), and takes (self,",
        ),
        (RULE.format("update = 3"), "optimizer o: update: it is called with ("),
        (RULE.format("def direction(self): pass"), "has no method `update`, and is no WholeRule"),
        (
            "from megalite.optim.whole import WholeRule\n@extend.optimizer('o')\nclass O(WholeRule):\n"
            "    def state(self, unit): pass",
            "optimizer o: it has no direction, load, start, which a WholeRule must have",
        ),
        (
            RULE.format(f"{UPDATE}\n    def __init__(self, *, beta: float): pass")
            + "\nextend.optimizer('p', tables='o')(type('P', (O,), {}))",
            "optimizer p: o must be told beta, and options are for p alone; give it a default",
        ),
        (
            "from torch import nn\nextend.activation('a')(nn.PReLU())",
            "activation a: it has weights or buffers (weight), which nothing trains and no checkpoint keeps; give",
        ),
        (
            "import torch\nextend.loss('l')(torch.nn.NLLLoss(torch.ones(3)))",
            "loss l: it has weights or buffers (weight)",
        ),
        (
            COMPONENT.format("before_step(self)"),
            "component c: before_step: it is called with (self, step), and takes (self",
        ),
        (COMPONENT.format("measure(self, step)"), "component c: measure: it is called with (self, step, result), and"),
        (
            COMPONENT.format("before_stpe(self, step)"),
            "the loop never calls a method before_stpe; call it before_step, or",
        ),
        (COMPONENT.format("finish(self, step): yield\n    def _x(self)"), "component c: finish: it has a `yield`"),
        (
            COMPONENT.format("close(self): pass\n    async def state(self)"),
            "component c: state: it is async, and nothing here awaits it; write `def` for `async def`",
        ),
        (
            COMPONENT.replace('"c"', '"validation"').format("close(self)"),
            "component validation: megalite has a component of this name; give it another",
        ),
        ("@extend.activation('a')\nasync def a(x): return x", "activation a: it is async"),
        ("@extend.activation\ndef a(x): return x", "activation: found name=<function a at"),
        ("extend.activation('a', kept='many')(abs)", "activation a: found kept='many', expected a whole number of"),
        ("extend.activation('a', kept=0)(abs)", "activation a: found kept=0, expected a whole number of at least 1"),
        ("extend.activation('a', is_gated=1)(abs)", "activation a: found is_gated=1, expected True or False"),
        ("extend.norm('n', has_bias='no')(int)", "norm n: found has_bias='no', expected True or False"),
        ("extend.norm('n', init=[])(int)", "norm n: found init=[], expected ones or zeros"),
        ("extend.data_source('d', num_shards=2.5)(print)", "data source d: found num_shards=2.5, expected a whole"),
        (f"{RULE_HEAD}, rate_exponent='x'){RULE_TAIL}", "optimizer o: found rate_exponent='x', expected a number, or"),
        (
            f"{RULE_HEAD}, rate_exponent=1e999){RULE_TAIL}",
            "optimizer o: found rate_exponent=inf, expected a number, or",
        ),
        (
            f"{RULE_HEAD}, whole_state=3){RULE_TAIL}",
            "optimizer o: found whole_state=3, expected a function of a weight",
        ),
        (f"{RULE_HEAD}, tables=['adamw']){RULE_TAIL}", "optimizer o: found tables=['adamw'], expected an optimizer's"),
        ("extend.family('llama')", "family: found description='llama', expected a Family(...)"),
        ("extend.optimizer('o', tables='nobody')(type('O', (), {'update': 1}))", 'found "nobody"'),
    ],
)
def test_what_cannot_be_loaded(tmp_path, code, complaint):
    """It is named, with the line in its file where there is one, and what it had added before is taken out again."""
    before = "extend.activation('came_before')(lambda x: x)\n" if code != "x = 1" else ""
    path = write_plugin(tmp_path, before + code)
    (found,) = complaints(tmp_path, f"plugins: [{path}]")
    assert found.startswith(f"{tmp_path}/run.yaml:1: plugins.0: ")
    assert complaint in found
    assert path in found
    if "cannot be imported" in found:
        assert f"{path}:{2 + bool(before)}" in found
    assert "came_before" not in ACTIVATIONS
    assert path not in named_plugins()


def test_an_option_of_any_type_may_be_missing(tmp_path):
    """No word for what is expected, and still a line."""
    path = write_plugin(tmp_path, SCHEDULE.format("p: object"))
    (found,) = complaints(
        tmp_path, f"plugins: [{path}]\ntrain: {{steps: 10}}\nmodel: {{vocab_size: 64}}\nschedule: {{name: s}}"
    )
    assert "run.yaml:4: schedule.options.p: missing; expected a value" in found


def test_what_is_not_there(tmp_path):
    """Files and modules that do not exist, and names that are neither."""
    for name, complaint in (
        ("away.py", "away.py: no such file"),
        ("no_such_module_anywhere", "there is no module no_such_module_anywhere, neither in"),
        ("tests.plugins.no_such", "there is no module tests.plugins.no_such"),
        ("a-b", "found 'a-b', expected a module's name"),
        ("''", "found '', expected a module's name"),
        ("json", "json: adds nothing"),  # which is imported already
    ):
        (found,) = complaints(tmp_path, f"plugins: [{name}]")
        assert complaint in found
    assert "plugins: found" in complaints(tmp_path, "plugins: 3")[0]
    assert "plugins.0: found 3, expected text" in complaints(tmp_path, "plugins: [3]")[0]


def test_two_of_one_name(tmp_path):
    """Both files are named, and the second leaves nothing."""
    first, second = write_plugin(tmp_path, SINE), write_plugin(tmp_path, SINE, "other.py")
    (found,) = complaints(tmp_path, f"plugins: [{first}, {second}]")
    assert f"plugins.1: plug-in {second}: two plug-ins bring the schedule 'sine': plug-in {first}, and plug-in" in found
    assert named_plugins() == [first]


def test_a_rule_may_be_a_static_method(tmp_path):
    """What matters is how it is called."""
    with loaded(write_plugin(tmp_path, RULE.format(f"@staticmethod\n    {UPDATE.replace('self, ', '')}"))):
        assert "o" in RULES


def test_installed_packages(tmp_path):
    """A package with an entry point is loaded with every config, and named with its version; one that is broken ends
    every command, and says which package it is."""
    write_plugin(tmp_path, SINE, "brought_by_package.py")
    info = tmp_path / "brought-2.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brought\nVersion: 2.5\n")
    (info / "entry_points.txt").write_text("[megalite.plugins]\nwaves = brought_by_package\n")
    config = write_config(tmp_path, "{train: {steps: 9}, schedule: {name: sine, options: {waves: 2}}}")
    code = (
        "from megalite.config.load import load_config; from megalite.plugins import loaded_plugins, named_plugins;"
        f"load_config({str(config)!r}); print(loaded_plugins(), named_plugins())"
    )
    environment = clean_environment() | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    options = {"capture_output": True, "text": True, "timeout": 100, "env": environment, "check": False}
    done = subprocess.run([sys.executable, "-c", code], **options)
    origin = f"{tmp_path}/brought_by_package.py, brought 2.5"
    assert done.stdout.strip() == f"(Plugin(name='megalite.plugins:brought:waves', origin='{origin}'),) []", done.stderr
    write_plugin(tmp_path, "1 / 0", "brought_by_package.py")
    done = subprocess.run([sys.executable, "-m", "megalite", "config", "presets"], **options)
    assert done.returncode == 2
    assert "ZeroDivisionError" in done.stderr
    assert "repair or uninstall brought 2.5, which brings it" in done.stderr
    assert "Traceback" not in done.stderr


def test_two_packages_with_an_entry_point_of_one_name(tmp_path):
    """Both are loaded, and both stand in a run's record."""
    for number in (1, 2):
        write_plugin(tmp_path, f"extend.activation('mine_{number}')(lambda x: x)", f"package_{number}.py")
        info = tmp_path / f"package_{number}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: package_{number}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[megalite.plugins]\nrules = package_{number}\n")
    code = "from megalite import plugins; plugins.load_plugins(()); print([p.origin for p in plugins.loaded_plugins()])"
    environment = clean_environment() | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=100, env=environment)
    assert done.strip() == str([f"{tmp_path}/package_{number}.py, package_{number} 1.0" for number in (1, 2)])


def test_a_plugin_that_has_failed_can_be_mended(tmp_path):
    """In the same process: modules that it had imported of its own are imported anew, all others are what they were."""
    write_plugin(tmp_path, "extend.activation('helped')(lambda x: x)\nREST = 0", "its_helper.py")
    code = "import colorsys, its_helper\nextend.activation('mine')(lambda x: x)\n1 / its_helper.REST"
    path = write_plugin(tmp_path, code, "mended.py")
    with pytest.raises(PluginError, match="ZeroDivisionError"):
        load_plugins([path])
    assert not {"helped", "mine"} & {*ACTIVATIONS}
    assert not [name for name in sys.modules if name.startswith(("its_helper", "mended"))]
    import colorsys

    assert sys.modules["colorsys"] is colorsys
    write_plugin(tmp_path, "extend.activation('helped')(lambda x: x)\nREST = 1  # it is", "its_helper.py")
    load_plugins([path])
    assert {"helped", "mine"} <= {*ACTIVATIONS}


@pytest.mark.parametrize("order", [("brings", "builds"), ("builds", "brings")])
@pytest.mark.parametrize("line", ["import {}", "import {} as other", "from {} import mine"])
@pytest.mark.parametrize("is_file", [True, False])
def test_a_plugin_that_only_imports_another(tmp_path, monkeypatch, order, line, is_file):
    """It brings what that one brings, whichever is named first, and nothing twice."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("brings", "builds"):  # of another case
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    code = "@extend.activation('mine')\ndef mine(x): return x"
    names = {
        "brings": write_plugin(tmp_path, code, "brings.py"),
        "builds": write_plugin(tmp_path, line.format("brings"), "builds.py"),
    }
    if not is_file:
        names["brings"] = "brings"
    load_plugins([names[each] for each in order])
    assert named_plugins() == [names[each] for each in order]
    assert "mine" in ACTIVATIONS


def test_code_that_has_changed(tmp_path):
    """It is told by what stands in the file, wherever that lies; runs of before have left no hashes to compare with."""
    first, second = (
        write_plugin(tmp_path, SINE),
        write_plugin(tmp_path, "extend.activation('mine')(lambda x: x)", "other.py"),
    )
    with loaded(first, second):
        former = {each.origin: each.digest for each in loaded_plugins()}
        assert changed_plugins(former) == []
    moved = write_plugin(tmp_path, SINE, "moved.py")
    write_plugin(tmp_path, "extend.activation('mine')(lambda x: 2 * x)", "other.py")
    with loaded(moved, second):
        assert changed_plugins(former) == [second]
        assert changed_plugins({}) == [moved, second]
        assert changed_plugins([first]) == []
        assert changed_plugins({moved: ["damaged"], second: {}}) == [moved, second]


def test_the_environment_names_some(tmp_path, monkeypatch):
    """What `megalite --plugin` names is named for every process that the command starts."""
    path = write_plugin(tmp_path, SINE)
    monkeypatch.setenv(plugins.VARIABLE, "")
    plugins.name_for_all([path])
    load_plugins(())
    assert [each.name for each in loaded_plugins()] == [path]
    plugins.name_for_all(["not_my_module"])
    with pytest.raises(PluginError, match="there is no module not_my_module"):
        load_plugins(())


def test_a_path_that_cannot_stand_in_the_environment(tmp_path, monkeypatch, capsys):
    """It is refused by its whole name, also where only the working directory has the colon; a config can name it."""
    folder = tmp_path / "a:b"
    folder.mkdir()
    path = write_plugin(folder, SINE)
    monkeypatch.chdir(folder)
    monkeypatch.setenv(plugins.VARIABLE, "")
    for name in (path, "mine.py"):
        with pytest.raises(SystemExit) as ended:
            main(["--plugin", name, "config", "presets"])
        assert ended.value.code == 2
        assert f"megalite: {path}: found ':' in it, which stands between two plug-ins" in capsys.readouterr().err
    assert load_config(write_config(tmp_path, f"plugins: ['{path}']")).plugins == (path,)


BY_HAND = {"model": {"vocab_size": 64, "hidden_size": 16, "num_layers": 1, "num_heads": 2}, "train": {"steps": 2}}


def test_a_config_made_by_hand(tmp_path):
    """It loads its plug-ins, which may make configs while they come; what is wrong is told as of a file."""
    path = write_plugin(tmp_path, SINE + "\nfrom megalite import Config\nConfig(plugins=[__file__])")
    schedule = {"name": "sine", "options": {"waves": 2}}
    config = Config(**BY_HAND, plugins=[path], schedule={**schedule, "warmup_steps": 0})
    assert named_plugins() == [path]
    for wrong, complaint in (
        ({"plugins": ["away.py"]}, f"  - {Path.cwd()}/away.py: no such file"),
        ({"plugins": 3}, "  - plugins: found 3, expected a list"),
        ({"train": {"steps": "x"}}, '  - train.steps: found "x", expected a whole number'),
        ({"trian": {}}, "  - trian: unknown key (did you mean 'train'?)"),
        ({"schedule": {"name": "sinus"}}, "  - schedule.name: found \"sinus\" (did you mean 'sine'?)"),
        ({"model": {"activation": "none"}, "batch": {"seq_len": 0}}, "2 problems found:"),
    ):
        with pytest.raises(ConfigError) as error:
            Config(**wrong)
        assert complaint in str(error.value)
    plan_run(config)
    with loaded():  # as in another process
        assert "sine" not in SCHEDULES
        plan_run(config)
        assert "sine" in SCHEDULES
        with pytest.raises(PluginError, match="no such file"):
            build_model(config.model_copy(update={"plugins": ("away.py",)}))
