"""Conversations: messages as OpenAI's clients send them, through a chat template, to answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fastdecode import LLM, SamplingParams
from fastdecode.cli.main import main
from fastdecode.core.errors import ConfigError, RequestError
from fastdecode.sworker.model.tokenizer import HFTokenizer, chat_messages

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{{ shout or '' }}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}({{ call.function.arguments.x }}){% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER = {"role": "user", "content": "hi"}
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Yield an LLM with the demo model, whose tokenizer has no chat template of its own."""
    with LLM(max_model_len=256, kv_cache_memory="16MiB", s_threads=1) as llm:
        yield llm


def written(llm: LLM, messages: Any, **options: Any) -> str:
    tokenizer = llm.engine.s_model.tokenizer
    assert isinstance(tokenizer, HFTokenizer)
    return str(llm.get_tokenizer().decode(tokenizer.encode_chat(messages, **{"chat_template": TEMPLATE, **options})))


def test_the_template_gets_messages_tools_and_more(llm: LLM) -> None:
    assert written(llm, [USER]) == "<user>hi<assistant>"
    assert written(llm, [USER], add_generation_prompt=False) == "<user>hi"
    tool = {"type": "function", "function": {"name": "add"}}
    assert written(llm, [USER], tools=[tool], shout="!") == "[add]!<user>hi<assistant>"
    begun = [USER, {"role": "assistant", "content": "So"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert written(llm, begun, **options) == "<user>hi<assistant>So"


def test_parts_are_joined_and_arguments_of_calls_are_read(llm: LLM) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 7}'}}
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert written(llm, messages) == "<user>a\nb<assistant>(7)<assistant>"
    assert call["function"]["arguments"] == '{"x": 7}'


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ("hi", "messages must be a list"),
        ([], "messages must be a list"),
        ([{"content": "hi"}], "messages must be a list"),
        ([{"role": 1, "content": "hi"}], "messages must be a list"),
        ([{"role": "user", "content": 3}], "must be text or a list of parts, not int"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "takes text only"),
        ([{"role": "assistant", "tool_calls": [{}]}], "tool_calls must be"),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}], "tool_calls must be"),
        ([{"role": "assistant", "tool_calls": 3}], "tool_calls must be"),
    ],
)
def test_what_is_no_conversation_is_refused(messages: Any, error: str) -> None:
    with pytest.raises(RequestError, match=error):
        chat_messages(messages)


def test_a_template_that_does_not_take_them_is_one_clear_error(llm: LLM) -> None:
    with pytest.raises(RequestError, match="the model's tokenizer has no chat template"):
        written(llm, [USER], chat_template=None)
    with pytest.raises(RequestError, match="the chat template does not take them: no users"):
        written(llm, [USER], chat_template="{{ raise_exception('no users') }}")
    with pytest.raises(RequestError, match="tools must be a list"):
        written(llm, [USER], tools=["add"])


def test_chat_generates_from_the_template_s_text(llm: LLM) -> None:
    """``chat`` takes one conversation or several."""
    one, other = [USER], [{"role": "user", "content": "import "}]
    (expected,) = llm.generate({"prompt_token_ids": list(b"<user>hi<assistant>")}, GREEDY, use_tqdm=False)
    (found,) = llm.chat(one, GREEDY, use_tqdm=False, chat_template=TEMPLATE)
    assert found.prompt_token_ids == expected.prompt_token_ids and found.outputs == expected.outputs
    several = llm.chat([one, other], GREEDY, use_tqdm=False, chat_template=TEMPLATE, chat_template_kwargs={"shout": ""})
    assert several[0].outputs == expected.outputs and several[1].prompt_token_ids == [*b"<user>import <assistant>"]


def test_without_a_tokenizer_there_is_no_chat() -> None:
    with LLM(max_model_len=256, kv_cache_memory="16MiB", s_threads=1, skip_tokenizer_init=True) as llm:
        for ask in (llm.get_tokenizer, lambda: llm.chat([USER])):
            with pytest.raises(ConfigError, match="tokenizer was not loaded"):
                ask()


def test_generate_refuses_a_chat_without_a_template(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--chat", "hi", "--max-model-len", "256", "--kv-cache-memory", "16MiB"]) == 1
    assert "no chat template" in capfd.readouterr().err
