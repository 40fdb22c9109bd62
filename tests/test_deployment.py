"""compose.yaml, the Helm chart and the workflows agree with each other, the program and the Makefile.

Their own linters run in `make lint-deployment`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from helpers import go_templates, kubernetes

from fastdecode.api.settings import parse_r_workers, split_address
from fastdecode.cli.main import build_parser

ROOT = Path(__file__).parents[1]
CHART = ROOT / "examples" / "helm" / "fastdecode"


def read(path: Path | str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def test_compose_starts_what_the_program_takes() -> None:
    compose = read("compose.yaml")
    services = compose["services"]
    server, r_worker = (build_parser().parse_args(services[name]["command"]) for name in ("server", "r-worker"))
    asked = parse_r_workers(server.r_workers)
    assert (asked.kind, asked.count) == ("join", services["r-worker"]["deploy"]["replicas"]), "or it waits for ever"
    assert split_address("", r_worker.join) == ("server", split_address("", server.pool_listen)[1])
    (volume,) = {services[name]["volumes"][0].partition(":")[0] for name in ("key", "server", "r-worker")}
    assert volume in compose["volumes"] and server.key_file == r_worker.key_file
    assert f'"{server.key_file}"' in services["key"]["command"][0]
    assert services["r-worker"]["build"]["target"] == "r-worker"
    assert f"FROM base AS {services['r-worker']['build']['target']}\n" in (ROOT / "Dockerfile").read_text()


def test_prometheus_and_grafana_read_what_compose_starts() -> None:
    services = read("compose.yaml")["services"]
    mounted = [volume.split(":")[0] for name in ("prometheus", "grafana") for volume in services[name]["volumes"]]
    assert all((ROOT / path).exists() for path in mounted if path.startswith("."))
    server, r_worker = (build_parser().parse_args(services[name]["command"]) for name in ("server", "r-worker"))
    of_server, of_r_workers = read("examples/compose/prometheus.yml")["scrape_configs"]
    assert of_server["static_configs"] == [{"targets": [f"server:{server.port}"]}]
    (names,) = of_r_workers["dns_sd_configs"]
    assert names["names"] == ["r-worker"] and names["port"] == split_address("", r_worker.health_listen)[1]
    (source,) = read("examples/compose/grafana/datasources/prometheus.yml")["datasources"]
    assert source["type"] == "prometheus" and source["url"].startswith("http://prometheus:")
    (provider,) = read("examples/compose/grafana/dashboards/fastdecode.yml")["providers"]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(home).parent == Path(provider["options"]["path"])
    assert (ROOT / "examples" / "grafana" / Path(home).name).exists()


def test_the_chart_makes_the_manifests() -> None:
    """The chart's templates are rendered as far as they go; what `if` and `range` ask for is off by default."""
    values = read(CHART / "values.yaml")
    text = (CHART / "templates" / "fastdecode.yaml").read_text()
    for block in re.findall(r"{{-? (?:if|range) (\.Values\S+)", text):
        assert not value_of(values, block), f"{block} is on by default"
    text = re.sub(r"(\n *)?{{-? (?:if|range) .*?{{-? end }}", "", text, flags=re.DOTALL)
    text = re.sub(r"{{ (\.Values\S+) }}", lambda found: str(value_of(values, found[1])), text)
    assert "{{" not in text
    assert list(yaml.safe_load_all(text)) == kubernetes.base()


def chart(**changes: Any) -> list[Any]:
    """Return the chart's manifests with values that differ from the defaults."""
    values = read(CHART / "values.yaml")
    for name, found in changes.items():
        values[name] = values[name] | found if isinstance(found, dict) else found
    text = (CHART / "templates" / "fastdecode.yaml").read_text()
    return [each for each in yaml.safe_load_all(go_templates.rendered(text, values)) if each]


def test_the_chart_puts_pods_where_it_is_told() -> None:
    gpu = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    place = {"nodeSelector": {"a": "b"}, "tolerations": [{"key": "spot"}], "affinity": {"nodeAffinity": {}}}
    manifests = chart(imagePullSecrets=[{"name": "r"}], sWorker=place, rWorkers=place)
    for pod in kubernetes.pods(manifests).values():
        assert pod["spec"]["imagePullSecrets"] == [{"name": "r"}]
        assert {name: pod["spec"][name] for name in place} == place
    assert kubernetes.pods(chart(sWorker={"gpus": 1}))["s-worker"]["spec"]["tolerations"] == [gpu]
    spec = kubernetes.pods(chart(sWorker={**place, "gpus": 1}))["s-worker"]["spec"]
    assert spec["tolerations"] == [{"key": "spot"}, gpu]


def test_the_chart_has_room_for_a_model_of_the_hub() -> None:
    for hub, volume in (
        ({"model": "Qwen/Qwen3-8B"}, {"emptyDir": {"sizeLimit": "50Gi"}}),
        ({"model": "Qwen/Qwen3-8B", "claim": "c"}, {"persistentVolumeClaim": {"claimName": "c"}}),
    ):
        manifests = chart(hub={**hub, "tokenSecret": "t"})
        assert kubernetes.parsed(manifests, "s-worker").model == "Qwen/Qwen3-8B"
        server = kubernetes.container(manifests, "s-worker")
        variables = {each["name"]: each for each in server["env"]}
        assert variables["HF_HOME"]["value"] in [each["mountPath"] for each in server["volumeMounts"]]
        assert variables["HF_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == "t"
        volumes = {each["name"]: each for each in kubernetes.pods(manifests)["s-worker"]["spec"]["volumes"]}
        assert volumes["hub"] == {"name": "hub", **volume}


def test_the_chart_has_two_servers_of_one_session() -> None:
    """The two servers are as in examples/kubernetes/standby."""
    manifests = chart(**read(CHART / "values-standby.yaml"))
    server, r_worker = (kubernetes.parsed(manifests, each) for each in ("s-worker", "r-worker"))
    assert (server.standby, server.journal, server.keep_session) == ("fastdecode", "/journal", 600)
    workers = kubernetes.find(manifests, "StatefulSet", "fastdecode-r-worker")["spec"]["replicas"]
    assert parse_r_workers(server.r_workers).count == workers and not r_worker.join
    deployment = kubernetes.find(manifests, "Deployment", "fastdecode-s-worker")["spec"]
    assert (deployment["replicas"], deployment["strategy"]["type"]) == (2, "RollingUpdate")
    container = kubernetes.container(manifests, "s-worker")
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["tcpSocket"] == {"port": "http"} and "httpGet" not in container[probe]
    assert container["readinessProbe"]["httpGet"]["path"] == "/health"
    assert "/journal" in [each["mountPath"] for each in container["volumeMounts"]]
    volumes = {each["name"] for each in kubernetes.pods(manifests)["s-worker"]["spec"]["volumes"]}
    assert {each["name"] for each in container["volumeMounts"]} <= volumes


def test_compose_takes_a_model_and_looks_after_its_services() -> None:
    services = read("compose.yaml")["services"]
    server = build_parser().parse_args(services["server"]["command"])
    assert server.model_tag == "${FASTDECODE_MODEL:-}", "an empty one is the demo model"
    for name, port in (("server", server.port), ("r-worker", 8080)):
        assert f":{port}/" in services[name]["healthcheck"]["test"][-1]
        compile(services[name]["healthcheck"]["test"][-1], name, "exec")
    home = services["server"]["environment"]["HF_HOME"]
    assert f"hub:{home}" in services["server"]["volumes"] and f" {home}" in (ROOT / "Dockerfile").read_text()


def value_of(values: Any, path: str) -> Any:
    for key in path.removeprefix(".Values.").split("."):
        values = values[key]
    return values


def test_workflows_call_what_the_makefile_has() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = {
        words
        for path in (ROOT / ".github" / "workflows").glob("*.yml")
        for job in read(path)["jobs"].values()
        for step in job["steps"]
        for words in re.findall(r"\bmake ([a-z-]+)", step.get("run", ""))
    }
    assert {"test", "lint-deployment", "wheels", "try-wheels"} <= called <= targets
