"""The server's configuration: frozen, and validated when the object is made."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdecode.api.settings import check_settings, parse_bytes, setting
from fastdecode.core.errors import ConfigError
from fastdecode.server.parser_table import check_parser_names

SERVER = "server"
"""The name of the group of server flags in ``--help``."""

MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class ServerSettings:
    """The settings of ``fastdecode serve``: one field per flag, with underscores. A ConfigError names a bad field."""

    host: str = setting("127.0.0.1", "address to listen at; 0.0.0.0 is every one of this machine", SERVER)
    port: int = setting(8000, "0: any free one, which is printed", SERVER, least=0, most=65535)
    api_key: list[str] | None = setting(
        None, "that requests must send, as `Authorization: Bearer KEY`; of every route but /health. Of several any one "
        "does", SERVER, metavar="KEY", unset="FASTDECODE_API_KEY, VLLM_API_KEY, or none",
    )  # fmt: skip
    served_model_name: list[str] = setting(
        list, "what clients call the model: one name or more, of which answers give the first", SERVER,
        metavar="NAME", unset="as in --model",
    )  # fmt: skip
    chat_template: str | None = setting(
        None, "file with a Jinja template, or the template itself", SERVER, metavar="FILE", unset="the tokenizer's"
    )
    chat_template_content_format: str = setting(
        "auto", "form of messages' content for the chat template: a string, a list of parts, or whichever the template "
            "takes", SERVER,
        choices=("auto", "string", "openai"),
    )  # fmt: skip
    default_chat_template_kwargs: dict[str, Any] = setting(
        dict, 'arguments of the chat template for requests that do not give them, such as {"enable_thinking": false}',
        SERVER, metavar="JSON", unset="none",
    )  # fmt: skip
    enable_auto_tool_choice: bool = setting(
        False, "let the model choose tools by itself: vLLM needs this flag; here the model always may", SERVER
    )
    tool_call_parser: str | None = setting(
        None, "form in which the model writes tool calls, by vLLM's name, such as hermes", SERVER, metavar="NAME",
        unset="by the chat template",
    )  # fmt: skip
    reasoning_parser: str | None = setting(
        None, "form in which the model writes its thoughts, by vLLM's name, such as qwen3", SERVER, metavar="NAME",
        unset="by the chat template",
    )  # fmt: skip
    max_num_queued_reqs: int = setting(
        4096, "that wait beyond --max-num-seqs; more are answered with 503", SERVER, metavar="N", least=0
    )
    shutdown_timeout: float = setting(
        30.0, "that accepted requests have to end after SIGTERM or Ctrl-C", SERVER, metavar="SECONDS"
    )
    request_timeout: float = setting(
        30.0, "that a client has to send the header of a request, and its body", SERVER, metavar="SECONDS"
    )
    max_request_bytes: int = setting(
        32 * MEBIBYTE, "longest body; longer ones are answered with 413", SERVER, metavar="BYTES", least=1
    )
    otlp_traces_endpoint: str | None = setting(
        None, "of an OpenTelemetry collector, such as http://127.0.0.1:4318/v1/traces: a span per request goes there, "
        "as OTLP over HTTP", SERVER, metavar="URL", unset="none",
    )  # fmt: skip
    standby: str | None = setting(
        None, "session that this server takes over when its server is gone: it loads the weights, answers 503, and "
        "continues the session with its --journal once no server has held it for 2 s", SERVER, metavar="SESSION",
        unset="none",
    )  # fmt: skip
    reconnect_seconds: float = setting(
        30.0, "with --journal, how long a request continues, or its answer is kept, after its client has left", SERVER,
        metavar="SECONDS",
    )  # fmt: skip
    stored_responses: int = setting(
        10_000, "with --journal, responses that are stored (store: true); the oldest go first", SERVER, metavar="N",
        least=0,
    )  # fmt: skip
    stored_bytes: str = setting("1GiB", "most that they take on disk", SERVER, metavar="BYTES")
    stored_hours: float = setting(720.0, "after which a stored response is deleted", SERVER, metavar="HOURS")
    allowed_origins: list[str] = setting(
        list, "of pages in browsers that may ask; * is all, [] none", SERVER, metavar="ORIGIN",
        unset="all, where only this machine is listened to and no key is asked for; else none",
    )  # fmt: skip
    allowed_methods: list[str] = setting(list, "of such requests", SERVER, metavar="METHOD", unset="all")
    allowed_headers: list[str] = setting(list, "that they may send", SERVER, metavar="NAME", unset="all")
    allow_credentials: bool = setting(False, "let such pages send cookies", SERVER)
    ssl_keyfile: str | None = setting(None, "TLS: private key", SERVER, metavar="FILE", unset="none")
    ssl_certfile: str | None = setting(None, "TLS: certificate", SERVER, metavar="FILE", unset="none")
    ssl_ca_certs: str | None = setting(
        None, "TLS: authorities that sign clients' certificates", SERVER, metavar="FILE", unset="none"
    )
    ssl_cert_reqs: int = setting(0, "TLS: clients' certificates: 0 not asked for, 1 checked, 2 needed", SERVER,
        choices=(0, 1, 2))  # fmt: skip
    ssl_ciphers: str | None = setting(None, "TLS 1.2: ciphers", SERVER, metavar="LIST", unset="OpenSSL's")
    root_path: str = setting("", "path under which a proxy has this server", SERVER, metavar="PATH", unset="none")
    uvicorn_log_level: str | None = setting(
        None, "of the HTTP server", SERVER, choices=("critical", "error", "warning", "info", "debug", "trace"),
        unset="--log-level's",
    )  # fmt: skip
    disable_fastapi_docs: bool = setting(False, "do not serve /docs and /openapi.json", SERVER)
    enable_request_id_headers: bool = setting(False, "every answer has an X-Request-Id; texts always have one", SERVER)

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
            raise ConfigError(f"default_chat_template_kwargs must not name {taken[0]}: requests and flags say it")
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
        except OSError as error:  # includes ssl.SSLError
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

    def template_arguments(self) -> dict[str, Any]:
        """Return the arguments for rendering every conversation, among them the chat template itself, if one is set.

        Raise ConfigError as ``read_chat_template`` does.
        """
        template = self.read_chat_template()
        return self.default_chat_template_kwargs | ({} if template is None else {"chat_template": template})

    def read_chat_template(self) -> str | None:
        """Return the text of ``--chat-template``; None if unset. Raise ConfigError if it is no file and no template."""
        given = self.chat_template
        if given is None or "{" in given:
            return given
        try:
            return Path(given).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"chat_template: cannot read {given!r}: {error}") from None
