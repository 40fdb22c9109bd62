"""Chat templates of model families, reduced to users, assistants and tools in each family's form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_QWEN = """{%- if tools %}<|im_start|>system
For each function call, return a json object within <tool_call></tool_call> XML tags.<|im_end|>
{% endif %}{%- for m in messages %}
{%- if m.role == 'assistant' %}{{- '<|im_start|>assistant\\n' }}
{%- if m.reasoning_content %}{{- '<think>\\n' + m.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content }}
"""

_QWEN_END = """{{- '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"""

QWEN3 = (
    _QWEN
    + """{%- for call in m.tool_calls or [] %}
{%- if (loop.first and m.content) or not loop.first %}{{- '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson)
+ '}\\n</tool_call>' }}{% endfor %}"""
    + _QWEN_END
    + """{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
)

QWEN3_CODER = (
    _QWEN
    + """{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments | items %}{{- '<parameter=' + name + '>\\n' }}
{{- value if value is string else value | tojson }}{{- '\\n</parameter>\\n' }}{% endfor %}
{{- '</function>\\n</tool_call>' }}{% endfor %}"""
    + _QWEN_END
    + """{{- '<think>\\n' }}{% endif %}"""
)

LLAMA3 = """{{- '<|begin_of_text|>' }}{%- for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
{%- if m.tool_calls %}
{%- set call = m.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
{%- else %}{{- m.content | trim }}{% endif %}{{- '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

DEEPSEEK_V31 = """{{- '<｜begin▁of▁sentence｜>' }}{%- for m in messages %}
{%- if m.role == 'assistant' %}{{- '<｜Assistant｜>' }}
{{- ('<think>' + m.reasoning_content if m.reasoning_content else '') + '</think>' + m.content }}
{%- if m.tool_calls %}{{- '<｜tool▁calls▁begin｜>' }}{%- for call in m.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + (call.function.arguments | tojson)
+ '<｜tool▁call▁end｜>' }}{% endfor %}{{- '<｜tool▁calls▁end｜>' }}{% endif %}{{- '<｜end▁of▁sentence｜>' }}
{%- else %}{{- '<｜User｜>' + m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}{% endif %}"""

KIMI_K2 = """{%- for m in messages %}{%- if m.role == 'assistant' %}{{- '<|im_assistant|>assistant<|im_middle|>' }}
{{- '<think>' + (m.reasoning_content or '') + '</think>' + m.content }}
{%- if m.tool_calls %}{{- '<|tool_calls_section_begin|>' }}{%- for call in m.tool_calls %}
{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' + (call.function.arguments | tojson)
+ '<|tool_call_end|>' }}{% endfor %}{{- '<|tool_calls_section_end|>' }}{% endif %}
{%- else %}{{- '<|im_user|>' + m.role + '<|im_middle|>' + m.content }}{% endif %}{{- '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"""

GLM = """{{- '[gMASK]<sop>' }}{%- for m in messages %}{%- if m.role == 'assistant' %}{{- '<|assistant|>' }}
{{- '\\n<think>' + (m.reasoning_content or '') + '</think>' }}
{%- if m.content %}{{- '\\n' + m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}{{- '\\n<tool_call>' + call.function.name }}
{%- for name, value in call.function.arguments | items %}{{- '\\n<arg_key>' + name + '</arg_key>\\n<arg_value>' }}
{{- value if value is string else value | tojson }}{{- '</arg_value>' }}{% endfor %}{{- '\\n</tool_call>' }}{% endfor %}
{%- else %}{{- '<|' + m.role + '|>\\n' + m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '\\n<think></think>' }}{% endif %}{% endif %}"""

MINIMAX_M2 = """{%- for m in messages %}{%- if m.role == 'assistant' %}{{- ']~b]ai\\n' }}
{%- if m.reasoning_content %}{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}{{- m.content }}
{%- if m.tool_calls %}{{- '\\n<minimax:tool_call>\\n' }}{%- for call in m.tool_calls %}
{{- '<invoke name="' + call.function.name + '">\\n' }}{%- for name, value in call.function.arguments | items %}
{{- '<parameter name="' + name + '">' }}{{- value if value is string else value | tojson }}{{- '</parameter>\\n' }}
{%- endfor %}{{- '</invoke>\\n' }}{% endfor %}{{- '</minimax:tool_call>' }}{% endif %}
{%- else %}{{- ']~b]' + m.role + '\\n' + m.content }}{% endif %}{{- '[e~[\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- ']~b]ai\\n<think>\\n' }}{% endif %}"""

GPT_OSS = """{%- for m in messages %}{%- if m.role == 'assistant' %}
{%- if m.reasoning_content %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' }}
{%- endif %}{%- for call in m.tool_calls or [] %}
{{- '<|start|>assistant to=functions.' + call.function.name + '<|channel|>commentary json<|message|>'
+ (call.function.arguments | tojson) + '<|call|>' }}{% endfor %}
{%- if not m.tool_calls %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}{% endif %}
{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""

LFM2 = """{%- macro argument(value) %}{%- if value is string %}{{- "'" + value + "'" }}
{%- elif value is mapping %}{{- value | tojson }}{%- else %}{{- value | string }}{% endif %}{% endmacro %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content %}{{- '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{- m.content }}
{%- if m.tool_calls %}{{- '<|tool_call_start|>[' }}{%- for call in m.tool_calls %}
{{- call.function.name + '(' }}{%- for name, value in call.function.arguments | items %}
{{- name + '=' + argument(value) }}{{- '' if loop.last else ', ' }}{% endfor %}
{{- ')' }}{{- '' if loop.last else ', ' }}{% endfor %}{{- ']<|tool_call_end|>' }}{% endif %}
{{- '<|im_end|>\\n' }}{% endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

MISTRAL = """{{- '<s>' }}{%- for m in messages %}{%- if m.role == 'assistant' %}
{%- if m.reasoning_content %}{{- '[THINK]' + m.reasoning_content + '[/THINK]' }}{% endif %}{{- m.content }}
{%- for call in m.tool_calls or [] %}
{%- if call.id | length != 9 %}{{- raise_exception('ids have 9 letters') }}{% endif %}
{{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' + (call.function.arguments | tojson) }}
{%- endfor %}{{- '</s>' }}{%- else %}{{- '[INST]' + m.content + '[/INST]' }}{% endif %}{% endfor %}"""

MISTRAL_LISTED = """{{- '<s>' }}{%- for m in messages %}{%- if m.role == 'assistant' %}
{%- if m.tool_calls %}{{- '[TOOL_CALLS] [' }}{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('ids have 9 letters') }}{% endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + ', "id": "' + call.id
+ '"}' }}{{- ', ' if not loop.last else '' }}{% endfor %}{{- ']' }}{%- else %}{{- m.content }}{% endif %}{{- '</s>' }}
{%- else %}{{- '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"""


@dataclass(frozen=True)
class Family:
    """A template. ``ends``: end-of-text tokens that outputs omit. The rest: what one message may contain.

    ``parsers``: vLLM's names, for tool calls and reasoning. ``kwargs``: template arguments for messages with and
    without reasoning.
    """

    template: str
    ends: tuple[str, ...]
    parsers: tuple[str | None, str | None]
    thinks: bool = True
    most_calls: int = 2
    text_beside_calls: bool = True
    ids: str = "call_{index}"
    kwargs: tuple[dict[str, Any], dict[str, Any]] = ({}, {})


FAMILIES = {
    "qwen3": Family(QWEN3, ("<|im_end|>\n",), ("hermes", "qwen3"), kwargs=({}, {"enable_thinking": False})),
    "qwen3_coder": Family(QWEN3_CODER, ("<|im_end|>\n",), ("qwen3_coder", "qwen3")),
    "llama3": Family(LLAMA3, ("<|eot_id|>",), ("llama3_json", None), False, 1, False),
    "deepseek_v31": Family(
        DEEPSEEK_V31, ("<｜end▁of▁sentence｜>",), ("deepseek_v31", "deepseek_v3"), kwargs=({"thinking": True}, {})
    ),
    "kimi_k2": Family(KIMI_K2, ("<|im_end|>",), ("kimi_k2", "kimi_k2"), ids="functions.{name}:{index}"),
    "glm45": Family(GLM, ("",), ("glm45", "glm45"), kwargs=({}, {"enable_thinking": False})),
    "minimax_m2": Family(MINIMAX_M2, ("[e~[\n",), ("minimax_m2", "minimax_m2")),
    "gpt_oss": Family(GPT_OSS, ("<|call|>", "<|return|>"), ("openai", "openai_gptoss"), True, 1, False),
    "lfm2": Family(LFM2, ("<|im_end|>\n",), ("lfm2", "qwen3")),
    "mistral": Family(MISTRAL, ("</s>",), ("mistral", "mistral"), ids="abcdefgh{index}"),
    "mistral_listed": Family(MISTRAL_LISTED, ("</s>",), ("mistral", None), False, 2, False, "abcdefgh{index}"),
}
