"""examples/kubernetes is valid by the API's schemas, and agrees with itself and with the program.

No cluster is needed; test_kubernetes_live.py starts what the manifests start.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from helpers import kubernetes
from helpers.kubernetes import FOLDER, Manifest, Manifests, container, find, parsed, pods, port_of, read

from fastdecode.api.settings import parse_bytes, parse_r_workers, split_address
from fastdecode.cli.main import build_parser
from fastdecode.cluster.wire.handshake import read_secret

S_WORKER, R_WORKER = "s-worker", "r-worker"
VERSIONS = ("1.29", "1.37")
CORE = sorted((FOLDER / "base").glob("fastdecode.yaml")) + sorted((FOLDER / "autoscaling").glob("autoscaler.yaml"))


def check(manifest: Manifest, version: str) -> None:
    """Raise ValidationError where the API would refuse the manifest; unknown fields are refused, too."""
    validate = pytest.importorskip("kubernetes_validate")
    validate.validate(manifest, version, strict=True)


@pytest.fixture(scope="module")
def base() -> Manifests:
    return kubernetes.base()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", CORE, ids=lambda path: path.name)
def test_manifests_are_valid(path: Path, version: str) -> None:
    for manifest in read(path):
        check(manifest, version)


def test_a_slip_would_be_found(base: Manifests) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for slip in ("terminationGracePeriod", "replica"):
        wrong = yaml.safe_load(yaml.safe_dump(find(base, "StatefulSet", "fastdecode-r-worker")))
        (wrong["spec"]["template"]["spec"] if "Period" in slip else wrong["spec"])[slip] = 3
        with pytest.raises(validate.ValidationError):
            check(wrong, VERSIONS[0])


def test_what_has_no_schema_here_names_what_is_there(base: Manifests) -> None:
    """Kinds of the Prometheus operator name services, ports and the Secret of the manifests."""
    for monitor in read(FOLDER / "autoscaling" / "monitors.yaml"):
        assert (monitor["apiVersion"], monitor["kind"]) == ("monitoring.coreos.com/v1", "ServiceMonitor")
        (endpoint,) = monitor["spec"]["endpoints"]
        labels = monitor["spec"]["selector"]["matchLabels"]
        services = [each for each in base if each["kind"] == "Service" and labels.items() <= _labels(each).items()]
        ports = [port["name"] for each in services for port in each["spec"]["ports"]]
        assert ports.count(endpoint["port"]) == 1, "a pod is read once"
        if "authorization" in endpoint:
            assert endpoint["authorization"]["credentials"] == _api_key(base)
    assert parsed(base, S_WORKER).api_key is None, "it comes from the Secret"


def _labels(manifest: Manifest) -> dict[str, str]:
    found: dict[str, str] = manifest["metadata"].get("labels", {})
    return found


def _api_key(base: Manifests) -> dict[str, str]:
    (variable,) = container(base, S_WORKER)["env"]
    assert variable["name"] == "FASTDECODE_API_KEY"
    found: dict[str, str] = variable["valueFrom"]["secretKeyRef"]
    return found


def test_command_lines_and_ports_agree(base: Manifests) -> None:
    """Flags, container ports, probes and Services agree."""
    server, r_worker = parsed(base, S_WORKER), parsed(base, R_WORKER)
    s_container, r_container = container(base, S_WORKER), container(base, R_WORKER)
    assert server.port == port_of(s_container, "http") and server.host == "0.0.0.0"
    assert split_address("", server.pool_listen) == ("0.0.0.0", port_of(s_container, "pool"))
    assert split_address("", r_worker.health_listen) == ("0.0.0.0", port_of(r_container, "health"))
    assert r_worker.listen == f"tcp://*:{port_of(r_container, 'r-worker')}"
    name, port = split_address("", r_worker.join)
    (service_port,) = find(base, "Service", name)["spec"]["ports"]
    assert (service_port["port"], service_port["targetPort"]) == (port, "pool")
    assert find(base, "Service", name)["spec"]["publishNotReadyAddresses"], "they join before it is ready"
    for one, health in ((s_container, "http"), (r_container, "health")):
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            # An R-worker may be alive and still wait to join.
            path = "/live" if health == "health" and probe != "readinessProbe" else "/health"
            assert one[probe]["httpGet"] == {"path": path, "port": health}


def test_every_selector_finds_its_pods_and_every_port_is_named(base: Manifests) -> None:
    for service in (each for each in base if each["kind"] == "Service"):
        (template,) = kubernetes.selected(base, service["spec"]["selector"])
        for port in service["spec"]["ports"]:
            port_of(template["spec"]["containers"][0], port["targetPort"])
    for policy in (each for each in base if each["kind"] == "NetworkPolicy"):
        (template,) = kubernetes.selected(base, policy["spec"]["podSelector"]["matchLabels"])
        named = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
        assert named == {port["name"] for port in template["spec"]["containers"][0]["ports"]}, "none is shut off"
        for rule in policy["spec"]["ingress"]:
            for peer in rule.get("from", ()):
                assert list(kubernetes.selected(base, peer["podSelector"]["matchLabels"]))
    for kind, name in (("Deployment", "fastdecode-s-worker"), ("StatefulSet", "fastdecode-r-worker")):
        spec = find(base, kind, name)["spec"]
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    stateful = find(base, "StatefulSet", "fastdecode-r-worker")
    assert find(base, "Service", stateful["spec"]["serviceName"])["spec"]["clusterIP"] == "None"
    budget = find(base, "PodDisruptionBudget", "fastdecode-r-worker")
    assert budget["spec"]["selector"] == stateful["spec"]["selector"]


def test_replicas_memory_and_periods_fit(base: Manifests) -> None:
    server, r_worker = parsed(base, S_WORKER), parsed(base, R_WORKER)
    stateful = find(base, "StatefulSet", "fastdecode-r-worker")
    asked = parse_r_workers(server.r_workers)
    assert (asked.kind, asked.count) == ("join", stateful["spec"]["replicas"]), "or it waits for ever"
    deployment = find(base, "Deployment", "fastdecode-s-worker")["spec"]
    assert (deployment["replicas"], deployment["strategy"]["type"]) == (1, "Recreate"), "R-workers serve one at a time"
    memory = container(base, R_WORKER)["resources"]["limits"]["memory"]
    assert parse_bytes("", r_worker.kv_cache_memory) + 2**30 <= parse_bytes("", memory.replace("Gi", "GiB"))
    pod = pods(base)[S_WORKER]["spec"]
    before = int(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= before + server.shutdown_timeout + 10
    for template in pods(base).values():
        for each in (*template["spec"]["initContainers"], *template["spec"]["containers"]):
            assert each["resources"]["requests"] == each["resources"]["limits"], "whole cores, of their own"


def test_the_key_is_where_each_side_looks_for_it(base: Manifests, tmp_path: Path) -> None:
    """The init container makes of the Secret's file a key file that FastDecode accepts."""
    for component in (S_WORKER, R_WORKER):
        pod = pods(base)[component]["spec"]
        (init,) = pod["initContainers"]
        *command, source, target = init["command"]
        mounts = {each["name"]: each["mountPath"] for each in init["volumeMounts"]}
        (secret,) = (each["secret"] for each in pod["volumes"] if each["name"] == "secret")
        assert source == f"{mounts['secret']}/{secret['items'][0]['path']}"
        assert target == parsed(base, component).key_file and target.startswith(mounts["key"])
        assert {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}["key"] == mounts[
            "key"
        ]
        assert secret["secretName"] == _api_key(base)["name"]
        assert secret["items"][0]["key"] != _api_key(base)["key"]
        mounted, copy = tmp_path / f"mounted-{component}", tmp_path / component
        mounted.write_text("k" * 64)
        mounted.chmod(secret["defaultMode"])
        for _ in range(2):  # The pod's containers may be started again.
            subprocess.run([*command, str(mounted), str(copy)], check=True)
        assert read_secret(str(copy)) == b"k" * 64
    readme = (FOLDER / "README.md").read_text()
    for key in (secret["items"][0]["key"], _api_key(base)["key"]):
        assert re.search(rf"kubectl create secret generic {secret['secretName']} .*--from-literal={key}=", readme)


def test_pods_are_confined(base: Manifests) -> None:
    for template in pods(base).values():
        context = template["spec"]["securityContext"]
        assert context["runAsNonRoot"] and context["fsGroup"] == context["runAsUser"] > 1000
        assert template["spec"]["automountServiceAccountToken"] is False
        for each in (*template["spec"]["initContainers"], *template["spec"]["containers"]):
            limits = each["securityContext"]
            assert limits["readOnlyRootFilesystem"] and not limits["allowPrivilegeEscalation"]
            assert limits["capabilities"] == {"drop": ["ALL"]}
            assert not each["image"].endswith(":latest") and ":" in each["image"]


def test_overlays_change_what_is_there(base: Manifests) -> None:
    for path in FOLDER.glob("*/kustomization.yaml"):
        (overlay,) = read(path)
        for each in (*overlay["resources"], *(patch["path"] for patch in overlay.get("patches", ()))):
            assert (path.parent / each).exists(), each
        for patch in overlay.get("patches", ()):
            (changes,) = read(path.parent / patch["path"])
            changed = find(base, changes["kind"], changes["metadata"]["name"])["spec"]["template"]["spec"]
            names = {each["name"] for each in changed["containers"]}
            assert {each["name"] for each in changes["spec"]["template"]["spec"]["containers"]} <= names


def test_the_standby_overlay_agrees_with_the_base(base: Manifests) -> None:
    """Two servers that may both be standby share the R-workers and one journal."""
    folder = FOLDER / "standby"
    (server,), (r_worker,), (claim,) = (
        read(folder / name) for name in ("s-worker.yaml", "r-worker.yaml", "journal.yaml")
    )
    check(claim, VERSIONS[0])
    pod = server["spec"]
    (own,) = pod["template"]["spec"]["containers"]
    asked = build_parser().parse_args(own["args"])
    listens = build_parser().parse_args(r_worker["spec"]["template"]["spec"]["containers"][0]["args"])
    stateful = find(base, "StatefulSet", "fastdecode-r-worker")
    name, service, port = stateful["metadata"]["name"], stateful["spec"]["serviceName"], 5580
    expected = tuple(f"{name}-{number}.{service}:{port}" for number in range(stateful["spec"]["replicas"]))
    assert parse_r_workers(asked.r_workers).addresses == expected
    assert listens.listen == f"tcp://*:{port}" and listens.join is None and listens.key_file == asked.key_file
    assert pod["replicas"] == 2 and pod["strategy"]["rollingUpdate"]["maxSurge"] == 0
    assert asked.standby and asked.keep_session and asked.journal == own["volumeMounts"][0]["mountPath"]
    for probe in ("startupProbe", "livenessProbe"):
        assert own[probe]["tcpSocket"] == {"port": "http"} and own[probe]["httpGet"] is None, "it says 503 for long"
    (volume,) = pod["template"]["spec"]["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.skipif(not shutil.which("kubectl"), reason="renders the overlays with kubectl")
@pytest.mark.parametrize("folder", ["base", "gpu"])
def test_overlays_render(folder: str) -> None:
    text = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER / folder)], capture_output=True, text=True, check=True
    ).stdout
    rendered = [each for each in yaml.safe_load_all(text) if each]
    assert len(rendered) == len(kubernetes.base())
    for manifest in rendered:
        check(manifest, VERSIONS[0])
    assert ("nvidia.com/gpu" in container(rendered, S_WORKER)["resources"]["limits"]) == (folder == "gpu")


def test_the_autoscaler_asks_for_what_the_adapter_makes(base: Manifests) -> None:
    (autoscaler,) = read(FOLDER / "autoscaling" / "autoscaler.yaml")
    target = autoscaler["spec"]["scaleTargetRef"]
    least = find(base, target["kind"], target["name"])["spec"]["replicas"]
    assert autoscaler["spec"]["minReplicas"] == least, "as many as the S-worker waits for"
    (values,) = read(FOLDER / "autoscaling" / "prometheus-adapter.yaml")
    made = {rule["name"]["as"] for rule in values["rules"]["custom"]}
    metrics = [each["object"] for each in autoscaler["spec"]["metrics"]]
    assert {each["metric"]["name"] for each in metrics} == made
    for each in metrics:
        service = find(base, "Service", each["describedObject"]["name"])
        assert _labels(service)["app.kubernetes.io/component"] == S_WORKER


def test_ray_runs_what_the_program_takes() -> None:
    """KubeRay's kind has no schema here, but the pods within it have."""
    job, service = read(FOLDER / "kuberay" / "rayjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    for template in (cluster["headGroupSpec"]["template"], group["template"]):
        check({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": template["spec"]}, VERSIONS[0])
    check(service, VERSIONS[0])
    program, *words = shlex.split(job["spec"]["entrypoint"])
    server = build_parser().parse_args(words)
    asked = parse_r_workers(server.r_workers)
    assert (program, asked.kind, asked.count) == ("fastdecode", "ray", group["replicas"])
    (head,), (worker,) = (each["template"]["spec"]["containers"] for each in (cluster["headGroupSpec"], group))
    assert server.r_threads == int(worker["resources"]["limits"]["cpu"]), "one fills a pod"
    memory = parse_bytes("", worker["resources"]["limits"]["memory"] + "B")
    assert parse_bytes("", server.kv_cache_memory) + 2**30 <= memory
    assert server.host == "0.0.0.0" and server.port == port_of(head, service["spec"]["ports"][0]["targetPort"])
    labels = cluster["headGroupSpec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    constraints = (FOLDER.parents[1] / "constraints-cpu.txt").read_text().splitlines()
    assert f"ray=={cluster['rayVersion']}" in constraints
