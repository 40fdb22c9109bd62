"""A server that is started with vLLM's flags, as clients and proxies see it."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.servers import RunningServer, serving

pytestmark = pytest.mark.slow

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ suffix }}"
KEY = {"authorization": "Bearer b"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Yield a server that no test changes."""
    folder = tmp_path_factory.mktemp("vllm")
    config = folder / "c.yaml"
    config.write_text(
        "max-num-seqs: 8\nserved-model-name: [gpt, other]\ndefault-chat-template-kwargs: {suffix: '123'}\n"
    )
    flags = ["--config", str(config), "--api-key", "a", "b", "--root-path", "/llm", "--enable-request-id-headers"]
    flags += ["--disable-fastapi-docs", "--chat-template", TEMPLATE, "--enable-auto-tool-choice", "--dtype", "float"]
    flags += ["--tool-call-parser", "hermes", "--gpu_memory_utilization", "0.9", "-O3", "--disable-log-requests"]
    flags += ["--uvicorn-log-level", "warning", "-tp", "1", "--generation-config", "vllm"]
    with serving(folder, *flags) as running:
        yield running
        log = running.log.read_text()
        assert "Traceback" not in log
        assert log.count("are ignored: disable_log_requests, gpu_memory_utilization, optimization_level; ") == 1


def test_any_of_several_keys_opens_it(server: RunningServer) -> None:
    for key, status in (("a", 200), ("b", 200), ("c", 401), ("", 401), ("ab", 401)):
        assert server.request("/v1/models", headers={"authorization": f"Bearer {key}"})[0] == status
    assert server.request("/health")[0] == 200


def test_all_its_names_are_models(server: RunningServer) -> None:
    _, found = server.request("/v1/models", headers=KEY)
    assert [each["id"] for each in found["data"]] == ["gpt", "other"]
    for name, status in (("other", 200), ("gpt", 200), ("third", 404)):
        body = {"model": name, "prompt": "x", "max_tokens": 1}
        assert server.request("/v1/completions", body, KEY)[0] == status


def test_a_proxy_s_path_is_taken_with_and_without(server: RunningServer) -> None:
    """Proxies may strip the path, or not."""
    assert server.request("/llm/v1/models", headers=KEY) == server.request("/v1/models", headers=KEY)
    assert server.request("/llm/health")[0] == 200 and server.request("/llm/v1/models")[0] == 401


def test_there_are_no_docs(server: RunningServer) -> None:
    assert [server.request(path, headers=KEY)[0] for path in ("/docs", "/openapi.json")] == [404, 404]


def test_every_answer_has_an_id(server: RunningServer) -> None:
    for path, given in (("/health", "mine"), ("/health", None), ("/v1/models", "other")):
        headers = KEY | ({"X-Request-Id": given} if given else {})
        with urllib.request.urlopen(urllib.request.Request(server.url + path, headers=headers)) as answer:
            found = answer.headers.get_all("x-request-id")
        assert len(found) == 1 and found[0] and (given is None or found == [given])


def test_the_template_has_defaults_that_requests_override(server: RunningServer) -> None:
    counts = []
    for kwargs in (None, {"suffix": "1"}, {"suffix": ""}):
        body = {"messages": [{"role": "user", "content": "x = "}], "max_tokens": 1}
        body |= {} if kwargs is None else {"chat_template_kwargs": kwargs}
        status, found = server.request("/v1/chat/completions", body, KEY)
        assert status == 200, found
        counts.append(found["usage"]["prompt_tokens"])
    assert counts == [counts[2] + 3, counts[2] + 1, counts[2]]


def test_clients_certificates_may_be_needed(tmp_path: Path) -> None:
    """With ssl_cert_reqs 2 a client without a certificate of that authority is refused."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate,
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "1"],
        check=True, capture_output=True,
    )  # fmt: skip
    flags = ["--ssl-keyfile", str(key), "--ssl-certfile", str(certificate), "--ssl-ca-certs", str(certificate)]
    with serving(tmp_path, *flags, "--ssl-cert-reqs", "2") as server:
        asked = ["curl", "-sS", "--cacert", str(certificate), f"{server.url}/v1/models"]
        assert subprocess.run(asked, capture_output=True, check=False).returncode != 0
        known = subprocess.run([*asked, "--cert", certificate, "--key", key], capture_output=True, check=True)
        assert json.loads(known.stdout)["object"] == "list"
