"""Test LiteLLM: chats, streams, tools and text completions. python with_litellm.py URL MODEL"""

import json
import sys

import litellm

url, model = sys.argv[1:]
where = {"api_base": url, "api_key": "none", "num_retries": 0}
messages = [{"role": "user", "content": "Who are you?"}]
chat = {"model": f"hosted_vllm/{model}", "messages": messages, "temperature": 0, "max_tokens": 16, **where}
whole = litellm.completion(**chat)
pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**chat, stream=True)]
assert whole.choices[0].message.content == "".join(pieces) and whole.usage.total_tokens > 16
function = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}}}
tools = [{"type": "function", "function": function}]
forced = {"type": "function", "function": {"name": "add"}}
called = litellm.completion(**{**chat, "max_tokens": 50}, tools=tools, tool_choice=forced)
assert set(json.loads(called.choices[0].message.tool_calls[0].function.arguments)) <= {"a"}
text = litellm.text_completion(model=f"text-completion-openai/{model}", prompt="def f(", max_tokens=8, **where)
assert text.choices[0].finish_reason == "length"
print("litellm: ok")
