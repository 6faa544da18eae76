"""TOML maps strictly onto the dataclasses: what does not fit is named with its place, what fits comes back."""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal

import pytest

from blocktrain.errors import ConfigError
from blocktrain.train.toml_dataclasses import from_mapping, override, read_toml, to_mapping
from blocktrain.units import Duration


@dataclass(frozen=True, kw_only=True)
class Engine:
    power: float
    fuel: Literal["petrol", "diesel"] = "petrol"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.power <= 0:
            raise ConfigError(f"power must be positive, not {self.power:g}")


@dataclass(frozen=True, kw_only=True)
class Car:
    name: str = "car"
    seats: int = 4
    electric: bool = False
    engine: Engine
    spare: Engine | None = None
    service: Duration = Duration.steps(100)
    order: Literal["front", "back"] | tuple[int, ...] = "front"
    rows: tuple[tuple[str, ...], ...] | None = None
    price: float | None = None


def car(**values: Any) -> Car:
    return from_mapping(Car, {"engine": {"power": 1.0}} | values)


def test_values_arrive_with_their_types():
    made = car(seats=2, engine={"power": 3}, order=[1, 0], rows=[["a", "b"], ["c"]], service="2 epochs", price=7)
    assert made == Car(
        seats=2,
        engine=Engine(power=3.0),
        order=(1, 0),
        rows=(("a", "b"), ("c",)),
        service=Duration.epochs(2),
        price=7.0,
    )
    assert isinstance(made.engine.power, float)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seat": 4}, r"unknown key 'seat'; did you mean 'seats'\?"),
        ({"engine": {"power": 1.0, "fule": "diesel"}}, r"unknown key 'engine\.fule'; did you mean 'fuel'\?"),
        ({"zzz": 4}, "unknown key 'zzz'; known: electric, engine, name, order"),
        ({"engine": {}}, r"key 'engine\.power' is missing"),
        ({"engine": {"power": -2}}, r"\[engine\] power must be positive, not -2"),
        ({"engine": 3}, r"engine is a table: write \[engine\], not 3"),
        ({"spare": {"power": "much"}}, r"spare\.power must be a number, not 'much'"),
        ({"seats": "4"}, "seats must be a whole number, not '4'"),
        ({"seats": 4.0}, r"seats must be a whole number, not 4\.0"),
        ({"seats": True}, "seats must be a whole number, not true"),
        ({"electric": 1}, "electric must be true or false, not 1"),
        ({"engine": {"power": True}}, r"engine\.power must be a number, not true"),
        ({"seats": math.nan}, "seats must be a whole number, not nan"),
        ({"engine": math.nan}, r"engine is a table: write \[engine\], not nan"),
        ({"engine": "nul\0"}, r"engine is a table: write \[engine\], not 'nul"),
        ({"engine": {"power": math.nan}}, r"engine\.power is nan; give a number"),
        ({"name": {"a": 1}}, "name must be text, not a table"),
        ({"name": date(1979, 5, 27)}, "name must be text, not a date"),
        ({"name": 4}, "name must be text, not 4"),
        ({"price": "7"}, "price must be a number, not '7'"),
        ({"service": 100}, r"service: 100 is not a duration; write for example '100 steps' or '2M tokens'"),
        ({"service": "100"}, "service: '100' is not a duration"),
        ({"engine": {"power": 1, "fuel": "deisel"}}, r"engine\.fuel: 'deisel' is not an allowed value; did you mean"),
        ({"engine": {"power": 1, "options": 3}}, r"engine\.options is a table"),
        ({"order": "frnt"}, "order: 'frnt' is not an allowed value; did you mean 'front'"),
        ({"order": [0, "x"]}, r"order\[1\] must be a whole number, not 'x'"),
        ({"rows": ["a"]}, r"rows\[0\] must be a list, not 'a'"),
        ({"rows": [["a"], [1]]}, r"rows\[1\]\[0\] must be text, not 1"),
    ],
)
def test_what_does_not_fit_is_named_with_its_place(values: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=f"^{message}"):
        car(**values)


def test_a_missing_key_at_the_top():
    with pytest.raises(ConfigError, match="key 'engine' is missing"):
        from_mapping(Car, {})


@pytest.mark.parametrize(
    "made",
    [
        Car(engine=Engine(power=1.0)),
        Car(engine=Engine(power=0.1, fuel="diesel", options={"a": [1, 2], "b": {"c": None}}), spare=Engine(power=2.0)),
        Car(engine=Engine(power=1.0), order=(2, 0, 1), rows=(("a", "b"), ("c",)), price=1e-7),
        Car(engine=Engine(power=1.0), service=Duration.epochs(1 / 3)),
        Car(engine=Engine(power=1.0), service=Duration.epochs(5e-5)),
        Car(engine=Engine(power=1.0), service=Duration.tokens(1e15)),
        Car(engine=Engine(power=1.0), service=Duration.tokens(1.5e6)),
    ],
)
def test_to_mapping_is_the_inverse_also_through_json(made: Car):
    mapping = to_mapping(made)
    assert from_mapping(Car, mapping) == made
    assert from_mapping(Car, json.loads(json.dumps(mapping))) == made


def test_a_mapping_is_plain():
    mapping = to_mapping(Car(engine=Engine(power=1.0), rows=(("a",),)))
    assert mapping == {
        "name": "car",
        "seats": 4,
        "electric": False,
        "engine": {"power": 1.0, "fuel": "petrol", "options": {}},
        "service": "100 steps",
        "order": "front",
        "rows": [["a"]],
    }


# -- overrides --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seats=5", {"seats": 5}),
        ("engine.power = 1e-3", {"engine": {"power": 1e-3}}),
        ("name=fast", {"name": "fast"}),
        ('name="5"', {"name": "5"}),
        ("service=2M tokens", {"service": "2M tokens"}),
        ("electric=true", {"electric": True}),
        ('rows=[["a"], ["b"]]', {"rows": [["a"], ["b"]]}),
        ("name=a=b", {"name": "a=b"}),
        ("name=", {"name": ""}),
    ],
)
def test_an_override_is_read_as_toml_else_as_text(text: str, expected: dict[str, Any]):
    assert override({}, [text]) == expected


def test_overrides_apply_in_order_and_leave_the_rest():
    values = {"engine": {"power": 1.0, "fuel": "petrol"}, "seats": 4}
    assert override(values, ["engine.power=2", "engine.power=3", "spare.power=1"]) == {
        "engine": {"power": 3, "fuel": "petrol"},
        "seats": 4,
        "spare": {"power": 1},
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seats", r"--set 'seats' is not of the form a\.b=c"),
        ("=4", r"--set '=4' is not of the form a\.b=c"),
        ("engine..power=4", r"--set 'engine\.\.power=4' is not of the form"),
        ("seats.front=1", r"--set 'seats\.front=1': 'seats' is a value, not a table"),
    ],
)
def test_an_override_that_cannot_be(text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        override({"seats": 4}, [text])


def test_reads_a_file_with_overrides(tmp_path: Path):
    path = tmp_path / "car.toml"
    path.write_text('name = "é"\n[engine]\npower = 1\n', encoding="utf-8")
    assert read_toml(path, ["engine.power=2"]) == {"name": "é", "engine": {"power": 2}}


def test_a_number_that_is_too_long_is_no_text():
    with pytest.raises(ConfigError, match="a number of thousands of digits"):
        override({}, ["name=" + "9" * 6000])


def test_files_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"configuration '.*none\.toml' does not exist"):
        read_toml(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="is not a file: it is a folder, a pipe or a device"):
        read_toml(tmp_path)
    (tmp_path / "bad.toml").write_text("seats = = 4")
    with pytest.raises(ConfigError, match=r"bad\.toml' is not TOML: .*line 1"):
        read_toml(tmp_path / "bad.toml")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(ConfigError, match=r"latin\.toml' is not UTF-8 \(byte 8\)"):
        read_toml(tmp_path / "latin.toml")


# -- the real thing ---------------------------------------------------------------------------------------------------

RUN = """
seed = 3
precision = "bf16-exact"
[model]
architecture = "gpt2"
config = { n_layer = 2, n_embd = 32 }
[text]
source = "corpus"
[blocks]
patterns = [["embedding", "transformer.h.0"], ["*"]]
[blocks.layers]
embedding = ["transformer.wte", "transformer.wpe"]
"transformer.h.0" = ["transformer.h.0"]
top = ["transformer.h.1", "transformer.ln_f"]
[schedule]
visit = "50 steps"
order = [0, 1, 0]
[schedule.plateau]
watch = "validation"
patience = "2k tokens"
[stop]
duration = "1.5M tokens"
[optimizer]
name = "Muon"
lr = 1
weight_decay = 0
options = { momentum = 0.9 }
"""


def test_a_run_configuration_comes_back_from_run_json():
    from blocktrain.train.config import RunConfig

    config = RunConfig.from_mapping(tomllib.loads(RUN))
    assert config.schedule.order == (0, 1, 0)
    assert config.blocks.patterns == (("embedding", "transformer.h.0"), ("*",))
    assert config.blocks.layers is not None
    assert list(config.blocks.layers.items()) == [  # in the order of the file, which is that of the forward pass
        ("embedding", ("transformer.wte", "transformer.wpe")),
        ("transformer.h.0", ("transformer.h.0",)),
        ("top", ("transformer.h.1", "transformer.ln_f")),
    ]
    assert config.optimizer.weight_decay == 0.0
    assert RunConfig.from_mapping(config.to_mapping()) == config
    assert RunConfig.from_mapping(json.loads(json.dumps(config.to_mapping()))) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("optimizer.learning_rat=1", r"unknown key 'optimizer\.learning_rat'; known: .*lr"),
        ("optimiser.lr=1", r"unknown key 'optimiser'; did you mean 'optimizer'\?"),
        ("schedule.order=ascendin", r"schedule\.order: 'ascendin' is not an allowed value; did you mean 'ascending'"),
        ("schedule.plateau.patience=5", r"schedule\.plateau\.patience: 5 is not a duration"),
        ('blocks.layers={ embedding = "wte" }', r"blocks\.layers\.embedding must be a list, not 'wte'"),
        ("blocks.layers=[]", r"blocks\.layers is a table: write \[blocks\.layers\]"),
        ("optimizer.lr=-1", r"\[optimizer\] lr must be positive, not -1"),
        ("precision=bf17", "precision 'bf17' is unknown"),
        ("schedule.plateau.threshold=1.5", r"\[schedule\.plateau\] plateau threshold must be in"),
    ],
)
def test_a_run_configuration_that_does_not_fit(change: str, message: str):
    from blocktrain.train.config import RunConfig

    with pytest.raises(ConfigError, match=f"^{message}"):
        RunConfig.from_mapping(override(tomllib.loads(RUN), [change]))
