"""A gateway's file: what is wrong with one, what differs between two, and those that were."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
import yaml
from click.testing import CliRunner

from octavo.cli.gateway import gateway
from octavo.database import open_database
from octavo.errors import UsageError
from octavo.gateway.config import (
    Address,
    GatewayConfig,
    Model,
    UpstreamPool,
    changes,
    parse_config,
    schema,
)
from octavo.gateway.config_history import KEPT, ConfigHistory, NoSuchConfig, hash_of
from octavo.gateway.kept import SECONDS, KeptResponses
from octavo.gateway.members import sources_of
from octavo.gateway.state import TABLES
from octavo.gateway.upstream import Place
from tests import postgres

TEXT = """
server: {port: 9000, admin_key: "${OCTAVO_ADMIN}"}
pools:
  default: {upstreams: [http://a:1/v1, {url: http://b:2, key: "${OCTAVO_B}"}]}
  next: {dns: [http://c:3], key: "${OCTAVO_NEXT}"}
models: {m: {pool: next, fallback: [default]}}
upstream_key: ${OCTAVO_ALL}
max_inflight: 4
"""
ENVIRON = {"OCTAVO_B": "b", "OCTAVO_NEXT": "n", "OCTAVO_ALL": "all"}


def test_a_file() -> None:
    found = parse_config(TEXT)
    assert found.server.port == 9000 and found.max_inflight == 4
    assert found.models == {"m": Model(pool="next", fallback=("default",))}
    assert found.places(ENVIRON) == [
        Place("http://a:1", "default", "all"), Place("http://b:2", "default", "b")
    ]  # fmt: skip
    assert found.key("next", ENVIRON) == "n"
    assert parse_config("").running == GatewayConfig()
    with pytest.raises(UsageError, match="^OCTAVO_B is not set"):
        found.places({"OCTAVO_ALL": "x"})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pools: [", "it is no YAML: expected the node content, but found '<stream end>', line 1"),
        ("pools: 2001-13-45", "it is no YAML: month must be in 1..12"),
        ("hedge: 1\npools: {}\nhedge: 2", "line 3 has the key 'hedge' once more"),
        ("pools: {a: {dns: []},\n  a: {}}", "line 2 has the key 'a' once more"),
        ("[]", "the configuration: Expected `object`, got `array`"),
        ("routng: cost", "routng is no field of the configuration"),
        ("pools: {a: {upstream: x}}", "pools.a.upstream is no field of the configuration"),
        ("routing: fast", "routing: 'fast' is none of cost, least-load, round-robin, prefix-hash, random"),
        ("hedge: p99", "hedge: 'p99' is none of a number, p95"),
        ("server: {log_level: loud}", "server.log_level: 'loud' is none of debug, info, warning, error"),
        ("pools: {a: {local: {model: m, kv_dtype: fp8}}}", "pools.a.local.kv_dtype: 'fp8' is none of auto, bf16, int8, f32"),
        ("max_inflight: 0", "max_inflight: Expected `int` >= 1"),
        ("queue_timeout: soon", "queue_timeout: Expected `float`, got `str`"),
        ("server: {port: 70000}", "server.port: Expected `int` <= 65535"),
        ("upstream_key: sk-secret", "upstream_key: Expected a variable like ${OCTAVO_UPSTREAM_KEY}, so that no key is in the file"),
        ("upstream_key: ${HOME}", "upstream_key: Expected a variable like ${OCTAVO_UPSTREAM_KEY}, so that no key is in the file"),
        ("pools: {a: {upstreams: [ftp://x]}}", "pools.a: 'ftp://x' is no address of a server"),
        ("pools: {a: {upstreams: [http://x]}, b: {upstreams: [http://x/v1]}}", "pools.b: x is in the pool a, too"),
        ("pools: {a: {local: {model: m, memory: lots}}}", "pools.a.local.memory: 'lots' is not an amount"),
        ("models: {m: {pool: b}}", "models.m: no pool is named 'b'; pools: none"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_a_line_that_names_the_field(text: str, says: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_config(text)
    assert str(raised.value) == says
    assert "secret" not in str(raised.value)


def test_where_upstreams_are_looked_for(tmp_path: Path) -> None:
    """Equal sources have equal names, so that those of another configuration go on."""
    text = "pools: {a: {upstreams: [k8s://llm/engines:http, http://x], dns: [http://y], file: z}}"
    environ = ENVIRON | {"OCTAVO_KUBERNETES": "http://127.0.0.1:1"}
    found = sources_of(parse_config(text), environ)
    assert list(found) == [
        ("file", "z", "a", None), ("dns", "http://y", "a", None),
        ("kubernetes", "k8s://llm/engines:http", "a", None),
    ]  # fmt: skip
    assert [place.id for place in parse_config(text).places(environ)] == ["x"]
    with pytest.raises(UsageError, match="k8s:// needs a pod of a cluster"):
        sources_of(parse_config(text), ENVIRON)
    with pytest.raises(UsageError, match="is not k8s://NAMESPACE/SERVICE:PORT"):
        parse_config("pools: {a: {upstreams: [k8s://engines]}}")


def test_the_schema_takes_what_is_read_and_refuses_what_is_not() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(yaml.SafeLoader(TEXT).get_single_data(), schema())
    for wrong in ({"routng": "cost"}, {"max_inflight": 0}, {"upstream_key": "sk-secret"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema())


def test_changes_are_those_of_fields_and_single_upstreams() -> None:
    old = GatewayConfig(
        pools={
            "a": UpstreamPool(upstreams=("http://x", "http://y")),
            "b": UpstreamPool(dns=("http://w",)),
        }
    )
    new = GatewayConfig(
        pools={"a": UpstreamPool(upstreams=("http://y", Address("http://z", "${OCTAVO_Z}")))},
        max_queue=5,
    )
    assert changes(old, new) == [
        "~ max_queue: 1024 -> 5",
        '- pools.a.upstreams[http://x]: "http://x"',
        '+ pools.a.upstreams[http://z]: {"url":"http://z","key":"${OCTAVO_Z}"}',
        '- pools.b.dns[http://w]: "http://w"',
    ]
    assert changes(new, new) == []


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "sqlite":
        yield str(tmp_path_factory.mktemp("state") / "state.sqlite3")
    else:
        with postgres.server() as found:
            yield found


def test_the_last_configurations_are_kept(url: str) -> None:
    first, second = open_database(url, TABLES), open_database(url, TABLES)
    history, other = ConfigHistory(first), ConfigHistory(second)
    configs = [GatewayConfig(max_queue=n) for n in range(KEPT + 3)]
    for at, config in enumerate(configs):
        (history if at % 2 else other).put(config, "me", float(at))
    assert history.put(configs[-1], "again", 1e9) == other.latest()[0]
    kept = history.latest()
    assert [one.version for one in kept] == list(range(KEPT + 3, 3, -1))
    assert kept[0].hash == hash_of(configs[-1]) != kept[1].hash
    assert history.get(4) == configs[3]
    with pytest.raises(NoSuchConfig, match="no configuration 3 is kept"):
        history.get(3)
    first.close(), second.close()


def test_who_keeps_a_response_is_known_to_all_gateways(url: str) -> None:
    first, second, now = open_database(url, TABLES), open_database(url, TABLES), [0.0]
    kept, other = KeptResponses(first, lambda: now[0]), KeptResponses(second, lambda: now[0])
    kept.put("a", "anna", "x:1"), kept.put("b", "anna", "x:1"), other.put("b", "anna", "x:2")
    assert [other.find(id, "anna") for id in "abc"] == ["x:1", "x:2", None]
    assert other.find("a", "other") is None
    other.forget("b")
    assert kept.find("b", "anna") is None
    now[0] = SECONDS + 1
    kept.put("c", "anna", "x:1")
    assert [other.find(id, "anna") for id in "ac"] == [None, "x:1"]
    first.close(), second.close()


def test_what_is_kept_has_no_key(tmp_path: Path) -> None:
    database = open_database(str(tmp_path / "state"), TABLES)
    config = parse_config(TEXT).running
    ConfigHistory(database).put(config, "me", 0)
    with database.transaction() as db:
        ((body,),) = db.execute("select body from gateway_configs")
    assert json.loads(body)["pools"]["default"]["upstreams"][1]["key"] == "${OCTAVO_B}"
    database.close()


def run(*arguments: str) -> str:
    """What the command says."""
    try:
        done = CliRunner().invoke(gateway, [*arguments, "--check"], catch_exceptions=False)
    except UsageError as e:
        return str(e)
    return done.output


def test_a_check_says_what_a_gateway_would_do(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("pools: {a: {upstreams: [http://x]}}\nmax_queue: 3")
    lines = ["~ max_queue: 1024 -> 3", '+ pools.a.upstreams[http://x]: "http://x"', ""]
    assert run("--config", str(file)) == "\n".join(lines)
    assert run("--upstream", "a=http://x", "--max-queue", "3") == "\n".join(lines)
    assert run("--config", str(file), "--port", "1") == "\n".join(lines)  # of the server
    refused = run("--config", str(file), "--max-queue", "3")
    assert refused == "--max-queue is a field of the file of --config; write it there"
    assert run("--upstream", "http://x", "--fallback", "http://x/v1") == "pools.fallback: x is in the pool default, too"  # fmt: skip


def test_a_gateway_without_servers_is_told_where_to_name_one(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.touch()
    with pytest.raises(UsageError, match="needs a server behind it") as e:
        CliRunner().invoke(gateway, ["--config", str(file)], catch_exceptions=False)
    file.write_text(e.value.suggestions[0])
    assert "upstreams" in run("--config", str(file))
    with pytest.raises(UsageError) as e:
        CliRunner().invoke(gateway, [], catch_exceptions=False)
    assert e.value.suggestions == ("--upstream http://127.0.0.1:8000",)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("server: {database: mysql://me:pw@x/db}", "mysql://x/db is neither SQLite nor PostgreSQL"),
        ("server: {keys: mysql://x/db}", "mysql://x/db is neither SQLite nor PostgreSQL"),
        ('server: {admin_key: "${OCTAVO_UNSET}"}', "OCTAVO_UNSET is not set in the gateway's environment"),
        ("server: {cors_origins: [localhost]}", "--cors-origin 'localhost' is no origin"),
        ("server: {limits_url: valkey://x}", "--limits-url shares the limits of keys; name their file"),
        ("pools: {b: {file: /nowhere}}", "--upstream-file '/nowhere' cannot be read: No such file or directory"),
        ('pools: {b: {dns: [http://y], key: "${OCTAVO_UNSET}"}}', "OCTAVO_UNSET is not set in the gateway's environment"),
    ],
)  # fmt: skip
def test_a_check_refuses_what_a_start_refuses(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(
        json.dumps({"pools": {"a": {"upstreams": ["http://x"]}}} | yaml.safe_load(text))
    )
    assert run("--config", str(file)) == says


def test_a_check_opens_nothing(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    state, keys = tmp_path / "state", "postgresql://nobody.invalid/keys"
    file.write_text(f"{{pools: {{a: {{}}}}, server: {{database: {state}, keys: '{keys}'}}}}")
    assert run("--config", str(file)) == "all is as it is by default\n"
    assert not state.exists()
