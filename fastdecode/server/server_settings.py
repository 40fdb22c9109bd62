"""The server's configuration: frozen, and validated when the object is made."""

from __future__ import annotations

import json
import re
import socket
import ssl
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastdecode.api.settings import check_settings, parse_bytes, setting
from fastdecode.core.errors import ConfigError

OF_TOKENIZER = "hf"
"""vLLM's name of the parser that follows the tokenizer's response template."""


@lru_cache(1)
def _table() -> dict[str, list[dict[str, Any]]]:
    table = Path(__file__).with_name("response_templates.json")
    found: dict[str, list[dict[str, Any]]] = json.loads(table.read_text(encoding="utf-8"))
    return found


def parser_names(kind: str) -> list[str]:
    """Return the accepted parser names of ``kind``, "tools" or "reasoning"."""
    return sorted([OF_TOKENIZER, *(name for entry in _table()[kind] for name in entry["names"])])


def check_parser_names(tool_call_parser: str | None, reasoning_parser: str | None) -> None:
    """Raise ConfigError for a name that ``parser_names`` does not list."""
    for kind, name in (("tools", tool_call_parser), ("reasoning", reasoning_parser)):
        if name and name not in parser_names(kind):
            flag = "tool_call_parser" if kind == "tools" else "reasoning_parser"
            raise ConfigError(
                f"{flag} must be one of {', '.join(parser_names(kind))}, got {name!r:.80}; without it the chat "
                "template chooses"
            )


def entry_of(kind: str, name: str | None, chat_template: str) -> dict[str, Any]:
    """Return the entry of parser ``name``; without a name, the first entry that recognizes ``chat_template``, or {}."""
    for entry in _table()[kind]:
        suits = any(all(text in chat_template for text in texts) for texts in entry["recognized_by"])
        if (name in entry["names"]) if name else suits:
            return entry
    return {}


SERVER = "server"
"""The name of the group of server flags in ``--help``."""


@dataclass(frozen=True)
class ServerSettings:
    """The settings of ``fastdecode serve``: one field per flag, with underscores. A ConfigError names a bad field."""

    host: str = setting("127.0.0.1", "address to listen at; 0.0.0.0 means every address of this machine", SERVER)
    port: int = setting(8000, "port to listen at; 0: any free port, which is printed", SERVER, least=0, most=65535)
    api_key: list[str] | None = setting(
        None, "keys; each request but those to /health must send one of them, as `Authorization: "
            "Bearer KEY`", SERVER, metavar="KEY", unset="FASTDECODE_API_KEY, VLLM_API_KEY, or none",
    )  # fmt: skip
    served_model_name: list[str] = setting(
        list, "names by which clients may request the model; answers give the first", SERVER,
        metavar="NAME", unset="the value of --model",
    )  # fmt: skip
    chat_template: str | None = setting(
        None, "file with a Jinja chat template, or the text of one", SERVER, metavar="FILE", unset="the tokenizer's"
    )
    chat_template_content_format: str = setting(
        "auto", "form in which the chat template gets the content of messages: string, openai (a list of "
            "parts), or auto (the form that the template reads)", SERVER,
        choices=("auto", "string", "openai"),
    )  # fmt: skip
    default_chat_template_kwargs: dict[str, Any] = setting(
        dict, "arguments of the chat template, unless a request gives its own, such as "
            '{"enable_thinking": false}',
        SERVER, metavar="JSON", unset="none",
    )  # fmt: skip
    enable_auto_tool_choice: bool = setting(
        False, "accepted for vLLM's sake: the model may always choose tools", SERVER
    )
    tool_call_parser: str | None = setting(
        None, "vLLM's name of the syntax in which the model writes tool calls, such as hermes", SERVER, metavar="NAME",
        unset="by the chat template",
    )  # fmt: skip
    reasoning_parser: str | None = setting(
        None, "vLLM's name of the syntax in which the model writes its reasoning, such as qwen3", SERVER,
        metavar="NAME",
        unset="by the chat template",
    )  # fmt: skip
    max_num_queued_reqs: int = setting(
        4096, "most requests that wait while --max-num-seqs run; further requests are answered with 503", SERVER,
        metavar="N", least=0,
    )  # fmt: skip
    shutdown_timeout: float = setting(
        30.0, "seconds that accepted requests may still take after SIGTERM or Ctrl-C", SERVER, metavar="SECONDS"
    )
    request_timeout: float = setting(
        30.0, "seconds within which a client must send a request's header, and then its body", SERVER, metavar="SECONDS"
    )
    max_request_bytes: int = setting(
        32 << 20, "most bytes of a request's body; longer bodies are answered with 413", SERVER, metavar="BYTES",
        least=1,
    )  # fmt: skip
    otlp_traces_endpoint: str | None = setting(
        None, "URL of an OpenTelemetry collector, such as http://127.0.0.1:4318/v1/traces; the server "
            "sends one span per request, as OTLP over HTTP", SERVER, metavar="URL", unset="none",
    )  # fmt: skip
    standby: str | None = setting(
        None, "session of another server that this server takes over: it loads the weights and answers "
            "503; 2 s after the other server ended, it continues the session from --journal", SERVER, metavar="SESSION",
        unset="none",
    )  # fmt: skip
    reconnect_seconds: float = setting(
        30.0, "with --journal: seconds for which a request continues, or its answer is kept, after its "
            "client has disconnected", SERVER,
        metavar="SECONDS",
    )  # fmt: skip
    stored_responses: int = setting(
        10_000, "with --journal: most responses that are kept for requests with store: true; the oldest "
            "are deleted first", SERVER, metavar="N",
        least=0,
    )  # fmt: skip
    stored_bytes: str = setting("1GiB", "most bytes of stored responses on disk", SERVER, metavar="BYTES")
    stored_hours: float = setting(720.0, "hours after which a stored response is deleted", SERVER, metavar="HOURS")
    allowed_origins: list[str] = setting(
        list, "CORS: origins whose pages may send requests; * allows all, [] none", SERVER, metavar="ORIGIN",
        unset="all, if the server listens only to this machine and needs no key; else none",
    )  # fmt: skip
    allowed_methods: list[str] = setting(
        list, "CORS: methods that pages of allowed origins may use", SERVER, metavar="METHOD", unset="all"
    )
    allowed_headers: list[str] = setting(
        list, "CORS: headers that pages of allowed origins may send", SERVER, metavar="NAME", unset="all"
    )
    allow_credentials: bool = setting(False, "CORS: let pages of allowed origins send cookies", SERVER)
    ssl_keyfile: str | None = setting(None, "TLS: file with the private key", SERVER, metavar="FILE", unset="none")
    ssl_certfile: str | None = setting(None, "TLS: file with the certificate", SERVER, metavar="FILE", unset="none")
    ssl_ca_certs: str | None = setting(
        None, "TLS: file with the authorities that sign clients' certificates", SERVER, metavar="FILE", unset="none"
    )
    ssl_cert_reqs: int = setting(0, "TLS: whether clients need a certificate: 0 no, 1 one is checked if sent, 2 yes",
        SERVER,
        choices=(0, 1, 2))  # fmt: skip
    ssl_ciphers: str | None = setting(None, "TLS 1.2: list of ciphers", SERVER, metavar="LIST", unset="OpenSSL's")
    root_path: str = setting("", "path under which a proxy publishes this server", SERVER, metavar="PATH", unset="none")
    uvicorn_log_level: str | None = setting(
        None, "log level of the HTTP server", SERVER, choices=("critical", "error", "warning", "info", "debug",
        "trace"),
        unset="as --log-level",
    )  # fmt: skip
    disable_fastapi_docs: bool = setting(False, "do not serve /docs and /openapi.json", SERVER)
    enable_request_id_headers: bool = setting(
        False, "add an X-Request-Id header to every answer; without it only text answers have one", SERVER
    )

    def __post_init__(self) -> None:
        check_settings(self)
        parse_bytes("stored_bytes", self.stored_bytes)
        check_parser_names(self.tool_call_parser, self.reasoning_parser)
        for name in ("shutdown_timeout", "request_timeout", "reconnect_seconds", "stored_hours"):
            if not 0 <= getattr(self, name) < float("inf"):
                unit = "hours" if name == "stored_hours" else "seconds"
                raise ConfigError(f"{name} must be a number of {unit} of at least 0, not {getattr(self, name)!r}")
        where = self.otlp_traces_endpoint
        if where is not None and not re.match(r"https?://[^/]", where):
            raise ConfigError(f"otlp_traces_endpoint must begin with http:// or https://, not {where!r:.80}")
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ConfigError("ssl_keyfile and ssl_certfile belong together: give both, or none")
        if any(not key or not key.isascii() for key in self.api_keys):
            raise ConfigError("api_key (or FASTDECODE_API_KEY) must be ASCII text that is not empty")
        if (self.ssl_ca_certs or self.ssl_cert_reqs or self.ssl_ciphers) and not self.ssl_certfile:
            raise ConfigError("ssl_ca_certs, ssl_cert_reqs, ssl_ciphers: give ssl_keyfile and ssl_certfile as well")
        if self.ssl_cert_reqs and not self.ssl_ca_certs:
            raise ConfigError("ssl_cert_reqs: clients' certificates are checked by ssl_ca_certs: give it as well")
        # Chat template arguments that --default-chat-template-kwargs may not set
        reserved = frozenset({"chat_template", "tokenize", "conversation", "messages", "tools", "add_generation_prompt",
                              "add_special_tokens", "continue_final_message"})  # fmt: skip
        if taken := sorted(reserved & self.default_chat_template_kwargs.keys()):
            raise ConfigError(f"default_chat_template_kwargs must not name {taken[0]}: requests or flags set it")
        if self.root_path and not re.fullmatch(r"(/[^/?#\s]+)+", self.root_path):
            raise ConfigError(f"root_path must be a path such as /llm, not {self.root_path!r:.80}")

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The API keys; a request must send one of them. Empty if the server needs no key."""
        return (self.api_key,) if isinstance(self.api_key, str) else tuple(self.api_key or ())

    def model_names(self, model: str) -> tuple[str, ...]:
        """Return the names under which clients may request the served model, which was loaded as ``model``."""
        given = [self.served_model_name] if isinstance(self.served_model_name, str) else self.served_model_name
        names = (name.strip() for each in given for name in each.split(","))
        return tuple(dict.fromkeys(filter(None, names))) or (model,)

    def check_certificate(self) -> None:
        """Raise ConfigError if TLS is on and its files are no matching private key and certificate."""
        if self.ssl_certfile is None or self.ssl_keyfile is None:
            return
        for name, path in (("ssl_certfile", self.ssl_certfile), ("ssl_keyfile", self.ssl_keyfile)):
            try:
                Path(path).read_bytes()
            except OSError as error:
                raise ConfigError(f"{name}: cannot read {path!r} ({error.strerror})") from None

        def refuse_password() -> str:
            raise ConfigError(f"ssl_keyfile: {self.ssl_keyfile!r} is locked by a password: give one that is not")

        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, refuse_password)
            self._check_clients_certificates(context)
        except OSError as error:  # ssl.SSLError is an OSError too
            raise ConfigError(
                f"ssl_certfile, ssl_keyfile: {self.ssl_certfile!r} and {self.ssl_keyfile!r} are no certificate and key "
                f"in PEM that belong together ({error.strerror or error})"
            ) from None

    def _check_clients_certificates(self, context: ssl.SSLContext) -> None:
        """Raise ConfigError for invalid files of certificate authorities, or invalid ciphers."""
        for name, load in (("ssl_ca_certs", context.load_verify_locations), ("ssl_ciphers", context.set_ciphers)):
            if value := getattr(self, name):
                try:
                    load(value)
                except OSError as error:
                    raise ConfigError(f"{name}: {value!r} is not usable ({error.strerror or error})") from None

    def url_at(self, listener: socket.socket) -> str:
        """Return the URL at which clients reach the socket ``listener``."""
        host, port = listener.getsockname()[:2]
        scheme = "https" if self.ssl_certfile else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def template_arguments(self) -> dict[str, Any]:
        """Return the arguments for rendering every conversation, among them the chat template itself, if one is set.

        Raise ConfigError as ``read_chat_template`` does.
        """
        template = self.read_chat_template()
        return self.default_chat_template_kwargs | ({} if template is None else {"chat_template": template})

    def read_chat_template(self) -> str | None:
        """Return the text of ``--chat-template``; None if unset. Raise ConfigError for an unreadable file."""
        given = self.chat_template
        if given is None or "{" in given:
            return given
        try:
            return Path(given).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"chat_template: cannot read {given!r}: {error}") from None
