"""An incident: its JSON, its kind, and what of a call is its batch."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from typing import Any

import pytest
import torch

from stabilizer.localize.classify import SpikeFacts, classify, part_of, spiking_layers
from stabilizer.localize.entries import batch_of, nested, tensor_entries
from stabilizer.localize.incident import Incident, Origin
from tests.incidents import make_incident, make_layers, make_token

NAN, INF = math.nan, math.inf


# JSON.


def _strict(text: str) -> Any:
    """As a parser reads it that knows JSON alone."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_everything_comes_back() -> None:
    incident = make_incident()
    defaults = {field.name: field.default for field in dataclasses.fields(Incident)}
    # Nothing of it is at its default: a field that is lost would come back as just that.
    assert [name for name, value in defaults.items() if getattr(incident, name) == value] == ["schema"]
    assert Incident.from_json(incident.to_json()) == incident
    assert Incident.from_json(incident.to_json(indent=None)) == incident
    sparse = Incident(step=0, type="T", observed_norm=1.0, threshold=2.0)
    assert Incident.from_json(sparse.to_json()) == sparse


def test_keys_that_readers_rely_on() -> None:
    found = _strict(make_incident().to_json())
    assert next(iter(found)) == "schema"
    assert found["schema"] == 1
    wanted = {"schema", "step", "type", "observed_norm", "threshold", "counterfactual_norm", "num_passes", "seconds"}
    assert wanted | {"reproducible", "layers", "tokens"} <= set(found)
    token = {
        "rank",
        "micro_batch",
        "row",
        "position",
        "token_id",
        "text",
        "grad_norm",
        "share",
        "log_ratio",
        "advantage",
    }
    assert token <= set(found["tokens"][0])
    assert found["tokens"][1]["position"] is None


@pytest.mark.parametrize(("value", "written"), [(NAN, "nan"), (INF, "inf"), (-INF, "-inf")])
def test_numbers_that_are_not_finite(value: float, written: str) -> None:
    incident = make_incident(
        observed_norm=value,
        tokens=(make_token(log_ratio=value, text=written),),
        origin=Origin(layer="a", value=value),
        counterfactual_norm=value,
    )
    found = _strict(incident.to_json())
    assert found["observed_norm"] == found["counterfactual_norm"] == found["origin"]["value"] == written
    again = Incident.from_json(incident.to_json())
    for number in (again.observed_norm, again.counterfactual_norm, again.tokens[0].log_ratio):
        assert isinstance(number, float)
        assert repr(number) == repr(value)
    # A token may be called so too.
    assert again.tokens[0].text == written


def test_another_schema_is_one_clear_error() -> None:
    for schema in (2, "1", None, True):
        text = json.dumps({**_strict(make_incident().to_json()), "schema": schema, "step": []})
        with pytest.raises(ValueError, match=r"schema=.*, and this version reads 1"):
            Incident.from_json(text)
    for text in ("[]", "7", "null", '"text"', "{}"):
        with pytest.raises(ValueError, match="schema=None"):
            Incident.from_json(text)
    with pytest.raises(ValueError, match="no JSON"):
        Incident.from_json('{"schema": 1')


def test_keys_that_are_not_known_are_left_out() -> None:
    found = _strict(make_incident().to_json())
    found["later"] = found["tokens"][0]["later"] = found["layers"][0]["later"] = {"a": 1}
    assert Incident.from_json(json.dumps(found)) == make_incident()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": "7"}, r"incident.step='7': expected int"),
        ({"step": 7.5}, "step=7.5"),
        ({"step": True}, "step=True"),
        ({"type": "Z"}, "type='Z'"),
        ({"observed_norm": "big"}, "observed_norm='big'"),
        ({"observed_norm": None}, "observed_norm=None"),
        ({"threshold": True}, "threshold=True"),
        ({"reproducible": 1}, "reproducible=1"),
        ({"tokens": {}}, "tokens={}"),
        ({"tokens": [7]}, r"tokens\[0\]=7: expected an object"),
        ({"tokens": [{"rank": 0, "micro_batch": 0}]}, r"tokens\[0\].row: missing"),
        ({"candidates": [{"rank": 0, "micro_batch": 0, "num_units": 1, "units": [[1, 2, 3]]}]}, r"units\[0\]"),
        ({"notes": "text"}, "notes='text'"),
    ],
)
def test_a_wrong_value_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Incident.from_json(json.dumps({**_strict(make_incident().to_json()), **change}))


def test_whole_numbers_where_others_write_them() -> None:
    found = {**_strict(make_incident().to_json()), "observed_norm": 812, "seconds": 1}
    again = Incident.from_json(json.dumps(found))
    assert (again.observed_norm, type(again.seconds)) == (812.0, float)


def test_loading_an_incident_needs_no_rich() -> None:
    program = (
        "import sys; from stabilizer.localize import incident, classify, writing, tokens, pictures, replay_command;"
    )
    program += "print([name for name in sys.modules if name.split('.')[0] in ('rich', 'matplotlib', 'safetensors')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


# Its kind.


SOME = make_layers(1.0, 30.0, 25.0, 0.9, 1.2)
ALL = make_layers(30.0, 28.0, 25.0, 40.0, 31.0)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, "D"),
        ({"verdict": "tokens", "tokens": [make_token()], "layers": ALL}, "D"),
        # What did not repeat, whatever else it looked like.
        ({"reproducible": False}, "T"),
        ({"reproducible": False, "observed_norm": NAN}, "T"),
        ({"reproducible": False, "tokens": [make_token(log_ratio=99.0)]}, "T"),
        ({"observed_norm": NAN}, "N"),
        ({"observed_norm": INF, "tokens": [make_token(log_ratio=99.0)], "reproducible": True}, "N"),
        ({"is_loss_finite": False}, "N"),
        ({"tokens": [make_token(log_ratio=11.52)]}, "A.1"),
        ({"tokens": [make_token(log_ratio=11.51)]}, "D"),
        ({"tokens": [make_token(), make_token(log_ratio=-69.09)]}, "A.1"),
        ({"tokens": [make_token(log_ratio=-69.0)]}, "D"),
        ({"tokens": [make_token(log_ratio=INF)]}, "A.1"),
        ({"tokens": [make_token(log_ratio=12.0)], "layers": SOME}, "A.1"),
        ({"tokens": [make_token(sequence_log_ratio=12.0)]}, "A.2"),
        ({"tokens": [make_token(sequence_log_ratio=-70.0)], "layers": SOME}, "A.2"),
        ({"tokens": [make_token(log_ratio=NAN, sequence_log_ratio=NAN)]}, "D"),
        ({"tokens": [make_token(log_ratio=None, sequence_log_ratio=None)]}, "D"),
        ({"verdict": "no_token"}, "X"),
        ({"verdict": "no_token", "layers": SOME}, "X"),
        ({"verdict": "tokens", "tokens": [make_token()], "layers": SOME}, "B"),
        ({"verdict": "tokens", "tokens": [make_token(log_ratio=None)], "layers": SOME}, "B"),
        ({"verdict": "unexplained", "layers": SOME}, "B"),
        # Not near 1, and not extreme.
        ({"verdict": "tokens", "tokens": [make_token(log_ratio=5.0)], "layers": SOME}, "D"),
    ],
)
def test_kinds(facts: dict[str, Any], expected: str) -> None:
    assert classify(SpikeFacts(**{"observed_norm": 80.0, **facts})) == expected


def test_layers_that_spike_while_the_others_are_normal() -> None:
    assert [layer.name for layer in spiking_layers(SOME)] == ["1", "2"]
    assert spiking_layers(ALL) == []
    assert spiking_layers(make_layers(1.0, 1.1, 0.9)) == []
    assert spiking_layers(make_layers(30.0, None, None)) == []
    assert spiking_layers([]) == []
    # The whole model is about three times its usual norm: some are over the limit, others a little under it.
    assert spiking_layers(make_layers(3.4, 2.7, 3.1, 2.9, 2.2, 1.9)) == []
    bad = dataclasses.replace(make_layers(1.0)[0], name="bad", nonfinite=True, norm=NAN, ratio=NAN)
    assert [layer.name for layer in spiking_layers([*make_layers(1.0, 5.0, 1.0, 1.0), bad])] == ["bad", "1"]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        *[
            (f"model.layers.1.{name}.weight", "attention")
            for name in ("self_attn.q_proj", "attn.c_attn", "attention.wq")
        ],
        *[
            (f"model.layers.1.{name}.weight", "mlp")
            for name in ("mlp.up_proj", "feed_forward.w1", "ffn.0", "experts.3.w2")
        ],
        ("h.0.cross_attention.to_q.weight", "attention"),
        *[
            (name, None)
            for name in ("h.0.ln_1.bias", "lm_head.weight", "embed_tokens.weight", "model.attribute.weight")
        ],
        ("model.layers.0.input_layernorm.weight", None),
    ],
)
def test_parts_of_a_block(name: str, part: str | None) -> None:
    assert part_of(name) == part


# What of a call is its batch.


def test_batches_and_back() -> None:
    one, two = torch.ones(1), torch.zeros(2)
    assert batch_of((one, 3), {}) is one
    assert batch_of(({"a": one}, 3), {"flag": True}) == {"a": one}
    assert batch_of((), {"a": one, "b": 3}) == {"a": one, "b": 3}
    assert list(tensor_entries(batch_of((one,), {"b": two}))) == ["args.0", "kwargs.b"]
    for batch in (one, (one, two), {"a": {"b": (one, two)}, "c": one}, {"a": one, "a.b": two}):
        again = nested(tensor_entries(batch))
        assert repr(again) == repr(batch)
    assert tensor_entries(torch.nn.Linear(2, 2)) == {}
