"""YAML files become configs, or one error with every complaint and its place."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config.load import dump_config, load_config
from megalite.config.schema import Config
from megalite.errors import ConfigError


@pytest.fixture
def write(tmp_path: Path):
    """Write text, or bytes, to a config file and return its path."""

    def write_file(content: str | bytes, name: str = "run.yaml") -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write_file


def complaints(path: Path, *overrides: str) -> list[str]:
    """Problems of loading a file, the file's own folder left out."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return [problem.replace(str(path), path.name) for problem in caught.value.problems]


class TestValues:
    @pytest.mark.parametrize("text", ["3e-4", "3E-4", "0.0003", "3.0e-04", ".0003", "+3e-4"])
    def test_floats_without_a_point_are_numbers(self, write, text: str):
        """YAML 1.1 takes `3e-4` for text; here every common spelling is the number."""
        assert load_config(write(f"optimizer: {{lr: {text}}}")).optimizer.lr == 3e-4

    @pytest.mark.parametrize("text", ["1e9", "1.0e9", "1_000_000_000", "1000000000", "0x3B9ACA00"])
    def test_whole_floats_fit_whole_numbers(self, write, text: str):
        """`tokens: 1e9` needs no zeros to be counted."""
        tokens = load_config(write(f"train: {{tokens: {text}}}")).train.tokens
        assert tokens == 10**9
        assert isinstance(tokens, int)

    @pytest.mark.parametrize("word", ["on", "off"])
    def test_on_and_off_are_text(self, write, word: str):
        """YAML 1.1 would make booleans of them and `compile: off` an error."""
        assert load_config(write(f"train: {{compile: {word}}}")).train.compile == word

    @pytest.mark.parametrize("text", ["12:30", "2024-01-01", "1.2.3", "0o17", "yes", "~/x", "="])
    def test_other_scalars_of_yaml_1_1_are_text(self, write, text: str):
        """No clock times, dates or octal numbers come out of a path."""
        assert load_config(write(f"run: {{dir: {text}}}")).run.dir == Path(text)

    @pytest.mark.parametrize("text", ["null", "~", "", "Null"])
    def test_null(self, write, text: str):
        assert load_config(write(f"optimizer:\n  clip_grad_norm: {text}\n")).optimizer.clip_grad_norm is None

    def test_lists_groups_and_anchors(self, write):
        """Sequences, nested groups and aliases arrive whole."""
        config = load_config(
            write(
                "data:\n  train: &sources\n    - path: data/a\n      weight: 3\n    - {path: data/b, name: b}\n"
                "  valid: *sources\nmodel: {rope: {scaling: {type: llama3, factor: 32}}}\n"
            )
        )
        assert [source.weight for source in config.data.train] == [3.0, 1.0]
        assert config.data.valid == config.data.train
        assert config.model.rope.scaling.factor == 32.0

    def test_empty_sections_keep_their_defaults(self, write):
        """A heading whose keys are all commented out is no mistake."""
        assert load_config(write("train:\n  # steps: 5\nbatch:\n  seq_len: 64\n")) == Config(batch={"seq_len": 64})

    def test_byte_order_mark(self, write):
        """Editors on Windows write one."""
        assert load_config(write(b"\xef\xbb\xbftrain: {steps: 5}\n")).train.steps == 5

    def test_relative_paths_stay_relative_to_the_working_directory(self, write):
        assert load_config(write("run: {dir: runs/a}")).run.dir == Path("runs/a")


class TestFiles:
    def test_missing_file_suggests_a_neighbour(self, write):
        path = write("train: {steps: 1}", "llama.yaml")
        assert complaints(path.with_name("lama.yaml")) == ["lama.yaml: no such file (did you mean 'llama.yaml'?)"]

    def test_folder(self, tmp_path: Path):
        assert complaints(tmp_path) == [f"{tmp_path.name}: cannot be read: Is a directory"]

    def test_not_utf8(self, write):
        path = write("run:\n  dir: caf\xe9\n".encode("latin-1"))
        assert complaints(path) == ["run.yaml:2: byte 0xe9 is not UTF-8; save the file as UTF-8 text"]

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            ("", "run.yaml: is empty"),
            ("# nothing but a comment\n", "run.yaml: is empty"),
            ("- a\n- b\n", "run.yaml: holds a list"),
            ("just words", "run.yaml: holds only 'just words'"),
        ],
    )
    def test_not_a_mapping(self, write, text: str, complaint: str):
        expected = f"{complaint}; a config is a mapping of sections, such as `train:` with `steps: 100`"
        assert complaints(write(text)) == [expected]

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            ("train:\n  steps: [1\n", "run.yaml:3: not YAML: expected ',' or ']', but got '<stream end>'"),
            (
                "train:\n\tsteps: 1\n",
                "run.yaml:2: not YAML: found character '\\t' that cannot start any token; indent with spaces",
            ),
            ("a: 1\n--- \nb: 2\n", "run.yaml:2: not YAML: but found another document"),
            ("a: *nowhere\n", "run.yaml:1: not YAML: found undefined alias 'nowhere'"),
            ("a: \x07\n", "run.yaml: not YAML: character #x0007 is not allowed"),
        ],
    )
    def test_not_yaml(self, write, text: str, complaint: str):
        assert complaints(write(text)) == [complaint]

    def test_keys_given_twice(self, write):
        """YAML lets the last one win in silence."""
        path = write("train:\n  steps: 1\n  steps: 2\nmodel: {}\ntrain: {steps: 3}\n")
        assert complaints(path) == [
            "run.yaml:3: train.steps: given twice, first in line 2; remove one",
            "run.yaml:5: train: given twice, first in line 1; remove one",
        ]

    def test_odd_keys_tags_and_loops(self, write):
        path = write("train: {1: 2}\n? [a]\n: b\nrun: {seed: !!int abc}\nmodel: !thing {}\ndata: &d {train: [*d]}\n")
        assert complaints(path)[:5] == [
            "run.yaml:1: train: found a key that is not text; put it in quotes",
            "run.yaml:2: found a key that is not text; put it in quotes",
            "run.yaml:4: run.seed: the tag !!int is not supported here; leave it out",
            "run.yaml:5: model: the tag !thing is not supported here; leave it out",
            "run.yaml:6: data.train.0: an alias stands inside the value that it names",
        ]

    def test_no_python_objects(self, write):
        """A config cannot run code."""
        path = write("run: {dir: !!python/object/apply:os.system [echo]}")
        tag = "!!python/object/apply:os.system"
        assert complaints(path)[0] == f"run.yaml:1: run.dir: the tag {tag} is not supported here; leave it out"


class TestSettings:
    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            ("modle: {}", "1: modle: unknown key (did you mean 'model'?)"),
            ("model:\n  hiden_size: 8", "2: model.hiden_size: unknown key (did you mean 'hidden_size'?)"),
            ("model: {rope: {thetta: 1}}", "1: model.rope.thetta: unknown key (did you mean 'theta'?)"),
            ("train: {lr: 1}", "1: train.lr: unknown key (did you mean optimizer.lr?)"),
            ("warmup: 5", "1: warmup: unknown key (did you mean schedule.warmup_steps or schedule.warmup_tokens?)"),
            ("health: {zzz: 1}", "1: health.zzz: unknown key; known here: stop_on_nonfinite"),
            ("slurm: {max_failure: 1}", "1: slurm.max_failure: unknown key (did you mean 'max_failures'?)"),
            (
                "train: {<<: {steps: 1}}",
                "1: train.<<: unknown key; known here: steps, tokens, epochs, init_from, ",
            ),
        ],
    )
    def test_unknown_keys(self, write, text: str, complaint: str):
        """A mistyped key names the nearest one, of its own section first."""
        (found,) = complaints(write(text))
        assert found.startswith(f"run.yaml:{complaint}")

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            (
                "parallel: {tp: 0}",
                "parallel.tp: found 0, expected a whole number above 0 and at most 100000 - Tensor-parallel ranks: ",
            ),
            ("batch: {seq_len: 1.5}", "batch.seq_len: found 1.5, expected a whole number above 0 - Tokens in a seq"),
            ("batch: {seq_len: many}", 'batch.seq_len: found "many", expected a whole number above 0 - Tokens in a'),
            (
                "parallel: {tp: true}",
                "parallel.tp: found true, expected a whole number above 0 and at most 100000 - Tensor-parallel",
            ),
            ("train: {steps: -1}", "train.steps: found -1, expected a whole number above 0, or null - Number of"),
            (
                "optimizer: {lr: .inf}",
                "optimizer.lr: found Infinity, expected a number above 0, and at most 9.2e+18 - Peak",
            ),
            ("run: {seed: 99999999999999999999}", "run.seed: found 99999999999999999999, expected a whole number of"),
            (
                "optimizer: {lr: .nan}",
                "optimizer.lr: found NaN, expected a number above 0, and at most 9.2e+18 - P",
            ),
            ("model: {dropout: 1}", "model.dropout: found 1, expected a number of at least 0 and below 1 - Dropout"),
            ("model: {rope: {fraction: 2}}", "model.rope.fraction: found 2, expected a number above 0 and at most 1 "),
            ("optimizer: {betas: [0.9, 1]}", "optimizer.betas.1: found 1, expected a number of at least 0 and below 1"),
            ("optimizer: {betas: 0.9}", "optimizer.betas: found 0.9, expected a list of 2 values - Decay of the first"),
            ("optimizer: {betas: [0.9]}", "optimizer.betas.1: missing; expected a number of at least 0 and below 1"),
            ("data: {train: a}", 'data.train: found "a", expected a list - Sources of the training mixture'),
            ("data: {train: [{}]}", "data.train.0.path: missing; expected a path (text; quote it if it looks like"),
            ("run: {dir: 2024}", "run.dir: found 2024, expected a path (text; quote it if it looks like something"),
            ("run: {deterministic: 3}", "run.deterministic: found 3, expected true or false, or null - Ask"),
            ("batch: 7", "batch: found 7, expected a group of settings (lines of `key: value`) - Sizes of a step's"),
            (
                "model: {rope: {scaling: {type: x}}}",
                'model.rope.scaling.type: found "x", expected linear, llama3, yarn or longrope - ',
            ),
            (
                "schedule: {name: cosin}",
                "schedule.name: found \"cosin\" (did you mean 'cosine'?), expected constant, linear, ",
            ),
            ("parallel: {zero_stage: 4}", "parallel.zero_stage: found 4, expected 0, 1, 2 or 3 - DeepSpeed ZeRO: "),
            (
                "model: {preset: llama-9b}",
                "model.preset: there is no preset 'llama-9b' (did you mean 'llama-8b'?); use",
            ),
            (
                "engine: {deepspeed_extra: {bf16: {}, wall_clock_breakdown: true}}",
                "engine.deepspeed_extra: megalite generates bf16, so it cannot be set here (bf16: set precision.dtype)",
            ),
        ],
    )
    def test_wrong_values(self, write, text: str, complaint: str):
        """Each says what was found and what was expected, and what the setting is for."""
        (found,) = complaints(write(text))
        assert found.startswith(f"run.yaml:1: {complaint}")

    def test_long_values_are_cut(self, write):
        (found,) = complaints(write(f"batch: {{seq_len: {'x' * 500}}}"))
        assert len(found) < 200

    def test_everything_at_once(self, write):
        """One error holds the complaints of the file, of the overrides and of the values."""
        path = write("train:\n  steps: 0\n  steps: x\nmodle: {}\nbatch: {seq_len: 0}\n")
        assert complaints(path, "nonsense", "parallel.tp=0", "run.seed=-1") == [
            "run.yaml:3: train.steps: given twice, first in line 2; remove one",
            "command line: 'nonsense' is not an override; write key=value or section.key=value: train.steps=100",
            "command line: run.seed: found -1, expected a whole number of at least 0 - "
            "Seed of the weights, of the data order and of dropout",
            "command line: parallel.tp: found 0, expected a whole number above 0 and at most 100000 - "
            "Tensor-parallel ranks: each matrix is cut into this many",
            "run.yaml:5: batch.seq_len: found 0, expected a whole number above 0 - Tokens in a sequence",
            'run.yaml:3: train.steps: found "x", expected a whole number above 0, or null - Number of optimizer steps',
            "run.yaml:4: modle: unknown key (did you mean 'model'?)",
        ]

    def test_message_counts_and_lists(self, write):
        with pytest.raises(ConfigError, match=r"^2 problems found:\n  - .*\n  - "):
            load_config(write("a: 1\nb: 2\n"))


class TestOverrides:
    @pytest.fixture
    def path(self, write) -> Path:
        return write("train: {steps: 5}\ndata: {train: [{path: data/a}, {path: data/b}]}\nbatch: {seq_len: 64}\n")

    def test_replace_add_and_unset(self, path: Path):
        """The last word wins; an empty value is null."""
        config = load_config(path, ["train.steps=", "train.tokens=1e6", "optimizer.lr=3e-4", "optimizer.lr=1e-3"])
        assert (config.train.steps, config.train.tokens, config.optimizer.lr) == (None, 10**6, 1e-3)

    def test_groups_and_lists(self, path: Path):
        """A value is YAML; an item of a list goes by its number."""
        config = load_config(
            path,
            [
                "data.valid=[{path: data/v, weight: 2}]",
                "data.train.1.weight=3",
                "optimizer.betas=[0.8, 0.9]",
                "model.rope.theta=5e5",
                "model.rope.scaling.type=linear",
                "run.dir='a=b'",
            ],
        )
        assert config.data.valid[0].path == Path("data/v")
        assert [source.weight for source in config.data.train] == [1.0, 3.0]
        assert config.optimizer.betas == (0.8, 0.9)
        assert (config.model.rope.theta, config.model.rope.scaling.type) == (5e5, "linear")
        assert config.run.dir == Path("a=b")

    def test_of_an_empty_section(self, write):
        assert load_config(write("train:\n"), ["train.steps=3"]).train.steps == 3

    @pytest.mark.parametrize(
        ("override", "complaint"),
        [
            ("train.steps", "'train.steps' is not an override; write key=value or section.key=value: train.steps=100"),
            ("train..x=1", "'train..x=1' is not an override; write key=value or section.key=value: train.steps=100"),
            ("=1", "'=1' is not an override; write key=value or section.key=value: train.steps=100"),
            ("train.stepz=1", "train.stepz: unknown key (did you mean 'steps'?)"),
            ("train.steps.x=1", "train.steps.x: train.steps is 5, which has no keys of its own"),
            ("data.train.2.weight=1", "data.train.2.weight: data.train has 2 items, numbered from 0"),
            ("data.train.x.weight=1", "data.train.x.weight: data.train has 2 items, numbered from 0"),
            ("run.dir=[", "run.dir: '[' is not YAML: expected the node content, but found '<stream end>'"),
            ("batch={seq_len: 1, seq_len: 2}", "batch.seq_len: given twice, first in line 1; remove one"),
            ("data.valid.0.path=a", 'data.valid: found {"0": {"path": "a"}}, expected a list - Validation sets, read'),
        ],
    )
    def test_wrong_ones(self, path: Path, override: str, complaint: str):
        (found,) = complaints(path, override)
        assert found.startswith(f"command line: {complaint}")


class TestPresets:
    def test_fills_in_below_the_given_keys(self, write):
        """A preset's groups are merged key by key; what stands beside it wins, null included."""
        path = write("model: {preset: mistral-7b, num_layers: 2, sliding_window: null, rope: {fraction: 0.5}}")
        model = load_config(path, ["model.norm_eps=1e-6"]).model
        assert (model.hidden_size, model.num_layers, model.norm_eps) == (4096, 2, 1e-6)
        assert model.sliding_window is None
        llama = load_config(path, ["model.preset=llama-8b"]).model
        assert (llama.rope.theta, llama.rope.fraction) == (500000.0, 0.5)

    def test_works_without_a_file_too(self):
        assert Config(model={"preset": "gpt2"}).model.positions == "learned"


class TestDump:
    @pytest.mark.parametrize(
        "text",
        [
            "train: {steps: 5}",
            "model: {preset: mistral-7b, sliding_window: null, rope: {scaling: {type: linear}}}\ntrain: {tokens: 1e9}",
            "train: {compile: off}\noptimizer: {betas: [0, 0.5]}\ndata: {train: [{path: 'on', name: '3e-4'}]}",
            "engine: {deepspeed_extra: {a: {b: [1, null, 'x', true]}}}\nprecision: {fp8: {backend: emulate}}",
        ],
    )
    def test_loads_back_equal(self, write, text: str):
        """A run's config.yaml is the run's config."""
        config = load_config(write(text))
        assert load_config(write(dump_config(config), "again.yaml")) == config

    def test_any_text_and_number_survive(self, write):
        """Text that looks like a number, a date or a boolean is quoted, and no digit of a number is lost."""

        @settings(max_examples=100, deadline=None, derandomize=True, database=None)
        @given(name=st.text(st.characters(codec="utf-8"), min_size=1), lr=st.floats(2.0**-126, 2.0**62))
        def survives(name: str, lr: float) -> None:
            config = Config(data={"train": [{"path": "a", "name": name}]}, optimizer={"lr": lr})
            assert load_config(write(dump_config(config))) == config

        survives()

    def test_is_complete(self, write):
        """Every section and key is written out, so a later default changes no old run."""
        text = dump_config(Config())
        assert all(f"\n{section}:" in f"\n{text}" for section in Config.model_fields)
        assert "  preset: null\n" in text


@pytest.mark.parametrize("value", ["fast", "[0, 1]", "[x]", "{a: 1}"])
def test_settings_of_several_kinds(tmp_path, value):
    """One complaint, at the setting, with all that it may be."""
    path = tmp_path / "run.yaml"
    path.write_text("train: {steps: 1}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(path, [f"batch.shares={value}"])
    (problem,) = caught.value.problems
    assert problem.startswith("command line: batch.shares: found ")
    assert "expected even or measured, or a list" in problem
